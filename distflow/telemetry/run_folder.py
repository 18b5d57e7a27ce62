"""Writes and reads a run's folder, `runs/NAME/`.

    launch.json, *.yaml, plan.json      what another process needs to repeat or resume the run
    metrics.jsonl, samples.jsonl, samples/, validation.jsonl, tensorboard/    appended to while the run goes on
    summary.json                        the run has finished: results, command, host, versions, commit

A full disk does not end a run: lines that cannot be written are left out.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from distflow.config.extras import DISTRIBUTION
from distflow.config.load import reload
from distflow.config.spec import Spec
from distflow.config.yaml_source import dump
from distflow.errors import Diagnostic, InvalidInput, quoted
from distflow.plan import Plan
from distflow.telemetry import events, files
from distflow.telemetry.loggers import Loggers
from distflow.telemetry.processes import began
from distflow.telemetry.run_lock import in_use
from distflow.telemetry.run_reader import SUMMARY, Tail, no_run, numbers, parsed

_PACKAGES = (DISTRIBUTION, "torch", "transformers", "tokenizers", "peft", "mpmath", "vllm", "sglang",
             "megatron-core")


def provenance() -> dict[str, Any]:
    return {"command": shlex.join(sys.argv), "host": socket.gethostname(), "versions": _versions(),
            "git_commit": _git_commit()}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _git_commit() -> str | None:
    """Return the commit of the working directory, with `-dirty` where files differ from it; None outside of git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


_TOTALS = ("tokens_total", "samples_total", "wall_seconds")


def choose(output: str, dag: str, name: str | None) -> Path:
    """Return the folder of a new run; without a name, the first free one of `DAG-1`, `DAG-2`, … Raises InvalidInput:
    the name is taken, or the folder could not be written."""
    root = Path(output)
    if why := unwritable(root):
        raise InvalidInput(Diagnostic(f"the run folder cannot be written: {why}", None,
                                      "Name another one:  --set output=FOLDER"))
    if name is None:
        folders = (root / f"{dag}-{number}" for number in itertools.count(1))
        return next(folder for folder in folders if not folder.exists())
    if (root / name).exists():
        raise _exists(root / name)
    return root / name


def unwritable(folder: Path) -> str:
    """Return why no folder could be made in `folder`, or in the nearest one above it that exists; "" if one can."""
    parent = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not parent.is_dir():
        return f"{parent} is not a folder"
    try:  # a folder is made for it: permissions do not tell of full or foreign file systems, nor root what it may
        os.rmdir(tempfile.mkdtemp(prefix=".distflow-", dir=parent))
    except OSError as error:
        return f"{parent} is not writable ({error.strerror})"
    return ""


def of_torchrun(output: str) -> Path | None:
    """Return the folder that the torchrun above this process has made before; None if it has made none."""
    mine = agent()
    found = (folder.parent for folder in Path(output).glob("*/launch.json")
             if (read_launch(folder.parent) or {}).get("torchrun") == mine)
    return next(found, None)


def read_launch(folder: Path) -> dict[str, Any] | None:
    """Return the content of launch.json, or None if the file is missing, cut short or of another form."""
    try:
        content = parsed((folder / "launch.json").read_bytes()) or {}
    except OSError:
        return None
    search = content.get("search")
    return content if isinstance(search, list) and all(isinstance(folder, str) for folder in search) else None


def reload_run(folder: Path, overrides: list[str] | None = None, cluster: str | None = None) -> Spec:
    """Load the spec of a run that has begun, and search the user's modules where it did. `cluster`: description of
    other machines than it ran on. Raises InvalidInput: `folder` is no run's folder."""
    sys.path += search_paths(folder)
    kept = folder / "cluster.yaml"
    return reload(folder, overrides, cluster or (str(kept) if kept.is_file() else None))


def search_paths(folder: Path) -> list[str]:
    """Return where a run found the user's modules. Raises InvalidInput: no run's folder, or a damaged launch.json."""
    if not folder.exists():
        raise no_run(folder)
    if not (folder / "launch.json").is_file():
        raise InvalidInput(f"{folder} is not the folder of a run: it has no launch.json")
    launch = read_launch(folder)
    if launch is None:
        raise InvalidInput(f"{folder / 'launch.json'} is damaged: it should be  "
                           '{"search": [FOLDER, …], "torchrun": ""}  with the folders of your own modules. Write it '
                           "again, or start the run again under another --name.")
    return launch["search"]


def read_plan(folder: Path) -> dict[str, Any]:
    """Return the content of plan.json. Raises InvalidInput: the file is missing, cut short or of another form."""
    file = folder / "plan.json"
    if not folder.exists():
        raise no_run(folder)
    if not file.is_file() and not (folder / "launch.json").is_file():
        raise InvalidInput(f"{folder} has no plan.json, so it is not the folder of a run")
    try:
        content = parsed(file.read_bytes()) or {}
    except OSError:
        content = {}
    if not isinstance(content.get("ranks"), int):
        raise InvalidInput(Diagnostic(f"{file} is missing or damaged, so that the run's ranks are not known", None,
                                      f"Stop the run, if it goes on, and say them, which writes the file again:  "
                                      f"distflow resume {quoted(folder)} --ranks N"))
    return content


def agent() -> str:
    """Return a unique name of the torchrun above this process: run ids are not unique."""
    parent = os.getppid()
    return f"{os.environ.get('TORCHELASTIC_RUN_ID')} {socket.gethostname()} {parent} {began(parent)}"


def _remove(made: list[Path]) -> None:
    """Remove a run's folder, and those above it that were made for it if they are empty."""
    shutil.rmtree(made[0], ignore_errors=True)
    with contextlib.suppress(OSError):
        for folder in made[1:]:
            folder.rmdir()


def _exists(path: Path) -> InvalidInput:
    hint = f"Choose another --name, go on with it:  distflow resume {quoted(path)}   or delete it."
    if held := in_use(path):
        hint = f"Process {held.pid} on {held.host} trains it since {held.since}. Choose another --name."
    return InvalidInput(Diagnostic(f"a run named `{path.name}` exists in {path.parent}", None, hint))


class RunFolder:
    """Writes a run's files; only rank 0 has one."""

    def __init__(self, path: Path, resumed_at: int | None = None, again: bool = False,
                 loggers: Mapping[str, Mapping[str, Any]] = MappingProxyType({"tensorboard": {}})):
        """
        Args:
            resumed_at: steps done when a resumed run goes on; later lines are dropped.
            again: validate step `resumed_at` once more.
            loggers: settings of those that the run writes to, by name.
        """
        self.path = path
        if resumed_at is not None:
            (path / SUMMARY).unlink(missing_ok=True)  # the run goes on
            for file in (*(path / name for name in ("metrics.jsonl", "samples.jsonl", "validation.jsonl")),
                         *path.glob("samples/*.jsonl")):
                forget_after(file, resumed_at, again)
        self.opened, self.made_by = time.monotonic(), provenance()  # while the code is what this process has loaded
        self.metrics, self.samples = path / "metrics.jsonl", path / "samples.jsonl"
        for each in (self.metrics, self.samples):
            with contextlib.suppress(OSError):  # its lines are dropped then, which is reported
                each.touch()
        self.tokens, self.samples_drawn, self.seconds = (0.0,) * 3 if resumed_at is None else self._totals()
        self.loggers = Loggers(path, loggers, None if resumed_at is None else resumed_at + 1)

    @staticmethod
    def is_made(path: Path) -> bool:
        """Return whether a run's folder was made to its end."""
        return (path / "plan.json").is_file()  # which is written last

    @staticmethod
    def remove_unfinished(path: Path, torchrun: str) -> None:
        """Remove a folder that an earlier worker of this torchrun has left unfinished. Only the worker that makes the
        folder may do so: to any other one, a folder that is being made looks alike."""
        started = path / "launch.json"
        if not started.is_file() or torchrun in started.read_text():
            shutil.rmtree(path, ignore_errors=True)

    @staticmethod
    @contextlib.contextmanager
    def created(path: Path, spec: Spec, plan: Plan, search: list[str],
                torchrun: str = "") -> Iterator[Callable[[], None]]:
        """Make the folder, with everything that another process needs to repeat or resume this run.

        The folder is removed again if the block fails; the block gets the function that does so. `search`: folders with
        the modules of the user's functions. `torchrun`: the `agent` that has started this run. Raises InvalidInput:
        another run took the name since it was chosen, or the folder cannot be made.
        """
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            raise _exists(path) from None
        except OSError as error:
            raise InvalidInput(Diagnostic(f"the run folder {path} cannot be made: {error.strerror}", None,
                                          "Name another one:  --set output=FOLDER")) from None
        with contextlib.ExitStack() as failed:
            failed.callback(_remove, missing)
            files.write_atomically(path / "launch.json", json.dumps({"search": search, "torchrun": torchrun}))
            RunFolder.describe(path, spec, plan)
            yield lambda: _remove(missing)
            failed.pop_all()

    @staticmethod
    def describe(path: Path, spec: Spec, plan: Plan) -> None:
        """Write the configuration and plan in force, at the start and on a resume; each file is replaced atomically."""
        texts = {f"{kind}.yaml": dump(content) for kind, content in spec.resolved().items()}
        for name, text in {**texts, "plan.json": plan.to_json()}.items():
            files.write_atomically(path / name, text)

    def _totals(self) -> tuple[float, ...]:
        """Read the totals of the newest step that is written, from which a resumed run goes on."""
        lines = map(numbers, reversed(list(Tail(self.metrics).new())))
        last = next((line for line in lines if _TOTALS[0] in line), {})
        return tuple(last.get(name, 0.0) for name in _TOTALS)

    def write_step(self, step: int, values: dict[str, float]) -> None:
        """Write the metrics of a step, with totals since the run began."""
        self.tokens += values.get("tokens", 0.0)
        self.samples_drawn += values.get("samples", 0.0)
        totals = (self.tokens, self.samples_drawn, self._wall_seconds())
        self.write_metrics(step, {**values, **dict(zip(_TOTALS, totals))})

    def _wall_seconds(self) -> float:
        return round(self.seconds + time.monotonic() - self.opened, 3)

    def write_metrics(self, step: int, values: dict[str, float]) -> None:
        """Write one line of metrics. Values that are not finite are null in JSON, and as they are in TensorBoard."""
        events.add_or_drop(self.metrics, [json.dumps({**finite(values), "step": step})])
        self.loggers.metrics(step, values)

    def write_samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Write one line a row; in TensorBoard the rows of a step are one text."""
        write_samples(self.samples, step, rows)
        self.loggers.samples(step, rows)

    def write_answers(self, step: int, sets: dict[str, list[dict[str, Any]]]) -> None:
        events.add_or_drop(self.path / "validation.jsonl", [
            json.dumps({"step": step, "set": f"validation/{name}", **finite(row)}, ensure_ascii=False)
            for name, rows in sets.items() for row in rows])

    def close(self, facts: dict[str, Any]) -> None:
        """Write the summary of all steps, with `facts`."""
        self.loggers.close()
        found = summarize(list(Tail(self.metrics).new()))
        summary = {**found, "wall_seconds": self._wall_seconds(), **facts, **self.made_by}
        if events.dropped():
            summary["dropped_lines"] = events.dropped()
        path = self.path / SUMMARY
        try:
            files.write_atomically(path, json.dumps(finite(summary), indent=1))  # half of one would end a resume
        except OSError as error:
            events.show(f"warning: {path} cannot be written: {error.strerror}", sys.stderr)


def summarize(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the summary of all metrics lines. `accuracy` has the steps at which each validation set was answered;
    before and after are of the first set."""
    steps = [values for values in map(numbers, lines) if "seconds" in values]
    tokens, seconds = (sum(values.get(name, 0.0) for values in steps) for name in ("tokens", "seconds"))
    curves: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        for name, value in line.items():
            if name.startswith("validation/"):
                curves.setdefault(name.removeprefix("validation/"), []).append(
                    {"step": line["step"], "accuracy": value})
    first = next(iter(curves.values()), [{"accuracy": None}])
    return {"steps": steps[-1]["step"] if steps else 0, "accuracy_before": first[0]["accuracy"],
            "accuracy_after": first[-1]["accuracy"], "accuracy": curves, "seconds_in_steps": round(seconds, 3),
            "tokens_per_second": round(tokens / seconds, 1) if seconds else None}


def finite(value: Any) -> Any:
    """Return `value` with None for each NaN and infinity in it."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_samples(path: Path, step: int, rows: list[dict[str, Any]]) -> None:
    events.add_or_drop(path, [json.dumps({"step": step, **finite(row)}, ensure_ascii=False) for row in rows])


def forget_after(path: Path, step: int, validation: bool = False) -> None:
    """Drop the lines of steps after `step`, which a resumed run repeats, with `validation` also the validation of
    `step`, and a torn last line. The file is changed in place: a full disk has no room for a second one."""
    if not path.exists():
        return
    with path.open("r+b") as file:  # as bytes: text has more line ends than JSON Lines
        end, dropped, later = 0, False, []
        for line in file:
            if _step_of(line) > step - (validation and b'"validation' in line):
                dropped = True
            elif dropped:
                later.append(line)
            else:
                end += len(line)
        file.seek(end)
        file.writelines(later)
        file.truncate()


def _step_of(line: bytes) -> float:
    step = (parsed(line) or {}).get("step") if line.endswith(b"\n") else None
    return step if isinstance(step, int) else math.inf
