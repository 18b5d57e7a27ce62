"""`distflow faults`, `inject`, `scale` and `set`: inspect a running job, break a worker of it, change its settings.

    faults   list failures, recoveries and the effective share of the run's time (events.jsonl)
    inject   send a signal to a worker, or take its room on the disk
    scale    change the number of rollouts that work
    set      change settings; only the groups that they concern restart
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distflow.cli.common import Verb, table
from distflow.config.live_changes import groups_of, refusal
from distflow.config.spec import Spec
from distflow.errors import Diagnostic, InvalidInput, Location, did_you_mean, listing, quoted
from distflow.plan import ROLLOUT, TRAINER
from distflow.recovery import live_config
from distflow.recovery import scale as rollout_scale
from distflow.recovery.fault_injection import lift_file_size_limit, limit_file_size
from distflow.telemetry.ettr import FailureCosts, Recovery, account, read
from distflow.telemetry.files import locked
from distflow.telemetry.processes import began
from distflow.telemetry.run_folder import RunFolder, read_plan, reload_run
from distflow.telemetry.run_reader import SUMMARY, no_run
from planners import plan

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}
LIMITS = {"fill": limit_file_size, "free": lift_file_size_limit}
_SHOWN = 60
"""Characters of a failure's description that its row of the table has room for."""
_WINDOWS = 100
"""Most windows whose effective share is shown: those of a longer run are longer."""


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run's folder, as runs/grpo-1")


def _add_faults_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("--window", type=float, default=300.0, metavar="SECONDS",
                        help="for the effective share in each window of the run (default: 300)")


def faults(options: argparse.Namespace) -> int:
    _require_events(Path(options.run))
    if not options.window > 0:
        raise InvalidInput(f"--window {options.window:g} is no time; give seconds, as --window 60")
    costs = account(read(Path(options.run)))
    print("\n".join([*_recoveries(costs.recoveries), *_summary(costs, options.window)]))
    return 0


def _require_events(folder: Path) -> None:
    if not folder.exists():
        raise no_run(folder)
    if not (folder / "events.jsonl").is_file():
        raise InvalidInput(f"{folder} has no events.jsonl, so it is not the folder of a run")


_PARTS = ("detect", "start", "connect", "load", "first")


def _recoveries(recoveries: list[Recovery]) -> list[str]:
    if not recoveries:
        return ["nothing has failed"]
    return table([(f"{each.began:.1f}", each.group, str(each.rank), str(each.step), each.phase,
                   *(_seconds(getattr(each, part)) for part in _PARTS), f"{_shortened(each.what)} → {each.verdict}")
                  for each in recoveries],
                 head=("at", "group", "rank", "step", "phase", *_PARTS, "what"), right=(0, 2, 3, 5, 6, 7, 8, 9))


def _shortened(what: str) -> str:
    what = " ".join(what.split())
    return what if len(what) <= _SHOWN else f"{what[: _SHOWN - 1]}…"


def _seconds(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def _summary(costs: FailureCosts, window: float) -> list[str]:
    if math.isnan(costs.ettr):
        return ["no worker has been ready"]
    lines = [f"effective training time: {costs.ettr:.1%} of {costs.total:.1f} s on {len(costs.intervals)} ranks"]
    window = max(window, costs.total / _WINDOWS)
    shares = costs.sliding(window)
    if len(shares) > 1:
        lines.append(f"in windows of {window:g} s: " + " ".join(f"{share:.0%}" for share in shares))
    return lines


def _add_inject_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("kind", choices=[*SIGNALS, *LIMITS],
                        help="kill: SIGKILL. stop: it hangs, until `continue`. fill: none of its files grows beyond "
                        "64 KiB, until `free`")
    parser.add_argument("--rank", type=int, default=0, help="whose worker; default: 0")


def inject(options: argparse.Namespace) -> int:
    folder = Path(options.run)
    _require_events(folder)
    pid = _worker_pid(folder, options.rank)
    if options.kind in LIMITS:
        LIMITS[options.kind](pid)
    else:
        os.kill(pid, SIGNALS[options.kind])
    print(f"{options.kind}: the worker of rank {options.rank}, process {pid}")
    return 0


def _worker_pid(folder: Path, rank: int) -> int:
    """Return the process id of a rank's worker. Raises InvalidInput: there is none on this machine."""
    events = [event for event in read(folder) if event["event"] in ("worker_ready", "worker_ended")]
    last = {event["rank"]: event for event in events}
    if rank not in last:
        raise InvalidInput(f"rank {rank} has had no worker. {did_you_mean(str(rank), map(str, sorted(last)), 'Ranks')}")
    if last[rank]["event"] == "worker_ended":
        raise InvalidInput(f"the worker of rank {rank} has ended, and no other is ready yet")
    if last[rank]["host"] != socket.gethostname():
        raise InvalidInput(f"the worker of rank {rank} is on machine {last[rank]['host']}: run this there")
    with contextlib.suppress(OSError):
        if began(last[rank]["pid"]) == last[rank]["began"]:  # and not another process that has its number now
            return last[rank]["pid"]
    raise InvalidInput(f"the worker of rank {rank}, process {last[rank]['pid']}, does not live any more")


def _add_scale_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("wanted", metavar="rollout=N", help="how many rollouts are to work")


def scale(options: argparse.Namespace) -> int:
    folder = Path(options.run)
    group, _, number = options.wanted.partition("=")
    if group != "rollout" or not number.isdecimal():
        raise InvalidInput(f"`{options.wanted}` does not say how many rollouts are wanted. Write  rollout=2")
    replicas, run = _rollout_replicas(folder), reload_run(folder).run
    if not int(number) and run.trainer_samples and run.least_rollouts:
        raise InvalidInput(f"without a rollout no rank would validate this run: give 1 to {replicas}. To have the "
                           f"ranks that train validate, stop the job, and  distflow resume {quoted(folder)} --set "
                           "groups.rollout=0")
    if not (least := run.least_rollouts) <= int(number) <= replicas:
        raise InvalidInput(f"this run has supervisors for {replicas} rollouts, so give {least} to {replicas}. "
                           "torchrun's --nproc-per-node and groups.rollout of the run file say how many there are")
    before = rollout_scale.read(folder, replicas)
    rollout_scale.write(folder, int(number))
    print(f"{before} → {int(number)} of {replicas} rollouts; `distflow faults {quoted(folder)}` shows when they change")
    return 0


def _rollout_replicas(folder: Path) -> int:
    """Return the rollouts at the start. Raises InvalidInput: there are none."""
    planned = read_plan(folder)
    replicas = [group["replicas"] for group in planned["groups"] if group["name"] == "rollout" and group["replicas"]]
    if not replicas:
        raise InvalidInput(f"{folder} has no ranks that only sample: in mode sync, and with  groups: {{rollout: 0}} , "
                           "all sample and train. Start it with  --set mode=async --set groups.rollout=N")
    return replicas[0]


def _add_set_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("settings", metavar="KEY=VALUE", nargs="+", help="as roles.actor.micro_batch_tokens=512")


def change_settings(options: argparse.Namespace) -> int:
    folder = Path(options.run)
    if not folder.is_dir():
        raise no_run(folder)
    with contextlib.ExitStack() as stack:
        with _writing(folder):  # or of two commands at once one would take back what the other has set
            stack.enter_context(locked(folder / "run.yaml"))
        return _change_settings(folder, options.settings)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raise InvalidInput if the block fails to write to a run's folder."""
    try:
        yield
    except OSError as error:
        raise InvalidInput(f"{folder} cannot be written: {error.strerror}. The job goes on as it was.") from None


def _change_settings(folder: Path, texts: list[str]) -> int:
    before, after = reload_run(folder), reload_run(folder, texts)
    _require_unfinished(folder, texts)
    planned = plan(after, read_plan(folder)["ranks"])
    paths = {text: tuple(part.strip() for part in text.partition("=")[0].split(".")) for text in texts}
    _require_own_settings(before, paths)
    on_rollouts = {name for role in after.run.groups.on_rollouts for name in after.lineage(role)
                   if after.run.has_samplers}
    affected = {text: groups_of(path, after.run, on_rollouts) for text, path in paths.items()}
    if refused := [refusal(paths[text], text) for text, groups in affected.items() if not groups]:
        raise InvalidInput(refused)
    settings = {".".join(path): [_value(before, path), _value(after, path)] for path in paths.values()}
    settings = {key: values for key, values in settings.items() if values[0] != values[1]}
    if not settings:
        print("these are the settings in force already")
        return 0
    with _writing(folder):
        RunFolder.describe(folder, after, planned)
    groups = sorted({TRAINER if group == ROLLOUT and after.run.trainer_samples_alone else group
                     for text, each in affected.items() for group in each if ".".join(paths[text]) in settings})
    with _writing(folder):
        live_config.write(folder, groups, settings)
    for key, (old, new) in settings.items():
        print(f"{key}: {old} → {new}")
    print(f"from the next step on; what starts again: {', '.join(groups)}. events.jsonl says when")
    return 0


def _require_unfinished(folder: Path, settings: list[str]) -> None:
    """Raise InvalidInput if the run has finished: no process is left to read its settings."""
    if (folder / SUMMARY).is_file():
        longer = [] if any(text.partition("=")[0].strip() == "steps" for text in settings) else ["steps=N"]
        wanted = " ".join(f"--set {quoted(text)}" for text in (*longer, *settings))
        raise InvalidInput(f"{folder} has finished ({SUMMARY} is there), so that nothing would read these "
                           f"settings. To go on with it under them:  distflow resume {quoted(folder)} {wanted}")


def _require_own_settings(spec: Spec, paths: dict[str, tuple[str, ...]]) -> None:
    """Raise InvalidInput if a role has no settings in the run file: the new one would replace those it copies."""
    without = {text: path[1] for text, path in paths.items()
               if path[0] == "roles" and len(path) > 1 and path[1] not in spec.run.roles}
    if without:
        hint = listing(spec.run.roles, "Roles with settings")
        raise InvalidInput([Diagnostic(f"role `{role}` has no settings of its own, but those of the role it copies",
                                       Location(f"--set {text}"), hint) for text, role in without.items()])


def _value(spec: Spec, path: tuple[str, ...]) -> Any:
    value: Any = spec.run.model_dump(mode="json")
    for part in path:
        value = value[part]
    return value


VERBS = {
    "faults": Verb("list a run's failures, what was done about each, and the share of its time that was effective",
                   _add_faults_arguments, faults),
    "inject": Verb("break a worker of a running job: kill it, stop it so that it hangs, or let it have no room on the "
                   "disk", _add_inject_arguments, inject),
    "scale": Verb("let a running job sample with fewer of its rollouts, or with more again", _add_scale_arguments,
                  scale),
    "set": Verb("change settings of a running job, as the size of micro-batches; only the group that they concern "
                "starts again", _add_set_arguments, change_settings),
}
