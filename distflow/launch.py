"""Program of every rank: `torchrun --nproc-per-node 2 distflow/launch.py --dag grpo.yaml`.

    load_spec         DAG, run and cluster files, the same on every rank
    run_elastic       with --store: join a round of machines, run_ranks, join the next one
    run_ranks         compute the plan, choose the run's folder, then one of
      run_supervised    a supervisor in this process, which forks workers and restarts them
      run_in_process    the worker in this process, for debuggers and --export

Nothing heavy is imported before the files are known to be right.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import os
import signal
import socket
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Run as a file, Python puts distflow/ itself on the path; its modules must be found as distflow.NAME only.
    sys.path[:] = [str(ROOT), *(folder for folder in sys.path if Path(folder or ".").resolve() != ROOT / "distflow")]
    if "--in-process" not in sys.argv:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of an import; a supervisor hears it later
os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads than cores cost up to 20 times the speed
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a store that ends is our own message

from distflow.config.overrides import joined  # noqa: E402
from distflow.config.spec import Spec  # noqa: E402
from distflow.contracts.decorators import load_module  # noqa: E402
from distflow.errors import DistflowError, InvalidInput  # noqa: E402
from distflow.options import (  # noqa: E402
    load_spec,
    require_no_fewer_steps,
)
from distflow.plan import Plan  # noqa: E402
from distflow.recovery import object_store  # noqa: E402
from distflow.recovery.checkpoint_files import complete_checkpoints  # noqa: E402
from distflow.telemetry import startup  # noqa: E402
from distflow.telemetry.events import leave, show  # noqa: E402
from distflow.telemetry.processes import SIGNALS, die_with_torchrun  # noqa: E402
from distflow.telemetry.run_folder import choose, of_torchrun  # noqa: E402 - needs the path above
from distflow.telemetry.run_lock import in_use, refusal  # noqa: E402
from distflow.telemetry.screen import prepare  # noqa: E402
from distflow.telemetry.tracebacks import report_to_torchrun  # noqa: E402

if TYPE_CHECKING:
    from workers.elastic import ElasticAgent
    from workers.preflight.proofs import Preflight

INVALID = 2
_RANK_0_TIMEOUT = 30.0  # seconds that other ranks leave to rank 0 to report a mistake, before they report it themselves


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="distflow/launch.py", description="Run a DAG under torchrun.")
    add_run_arguments(result)
    result.add_argument("--resume", metavar="FOLDER", help="go on with the run in this folder")
    result.add_argument("--resume-if-exists", action="store_true",
                        help="with --name: go on with the run of that name if it has a checkpoint, else start it; for "
                        "schedulers, which start the same command again")
    result.add_argument("--export", metavar="FOLDER", help="with --resume: write the models there, and do not go on")
    result.add_argument("--in-process", action="store_true",
                        help="work in the process that torchrun starts, for debuggers; what dies is not started again")
    result.add_argument("--store", metavar="etcd://…",
                        help="etcd at which machines meet that each start by a torchrun of their own, and a name for "
                        "the run: etcd://HOST:PORT,HOST:PORT/RUN")
    result.add_argument("--machines", metavar="N | MIN:MAX",
                        help="with --store: how many there are, or how many are enough and how many there may be")
    result.add_argument("--debug", action="store_true", help="show tracebacks of mistakes in the input too")
    return result


def add_spec_arguments(target: argparse.ArgumentParser) -> None:
    target.add_argument("--dag", metavar="FILE", help="a path, or the name of a shipped DAG, as grpo.yaml")
    target.add_argument("--run-file", "--run", metavar="FILE", dest="run",
                        help="models, data, steps; default: embedded_DAG.yaml if that is shipped, else embedded.yaml. "
                        "Short: --run, but not under torchrun, which "
                        "may take that for its own --run-path")
    target.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides",
                        help="override one value of the DAG or the run, as roles.actor.learning_rate=1e-6")
    target.add_argument("--cluster", metavar="FILE", help="a description of the machines to plan for")


def add_run_arguments(target: argparse.ArgumentParser) -> None:
    """Add the options of a run that `launch.py` and `distflow run` both take."""
    add_spec_arguments(target)
    target.add_argument("--name", help="of the run; its folder is OUTPUT/NAME")
    target.add_argument("--profile", metavar="FIRST:LAST", dest="overrides", action="append",
                        type=lambda text: f"profile={[*step_range(text)]}",
                        help="record these steps with the PyTorch profiler, as 10:12; for `distflow report --trace`")


def step_range(text: str) -> range:
    """Return the steps that an option names, counted from 1: `10:14`, or `10` alone. For argparse."""
    first, colon, last = text.partition(":")
    try:
        found = range(int(first), int(last if colon else first) + 1)
    except ValueError:
        found = range(0)
    if not found or found[0] < 1:
        raise argparse.ArgumentTypeError(f"`{text}` names no steps. Give the first and the last, as 10:14")
    return found


def main(arguments: list[str] | None = None) -> int:
    prepare()
    options = parser().parse_args(joined(sys.argv[1:] if arguments is None else arguments))
    try:
        refuse_foreign_packages()
        if __name__ == "__main__":
            die_with_torchrun()
        spec = load_spec(options)
        if options.resume_if_exists:
            spec = resume_if_exists(spec, options)
        if options.resume and not options.export:
            require_no_fewer_steps(spec, options.resume)
        if options.store or options.machines:
            return run_elastic(spec, options)
        stay_on_loopback()
        return run_ranks(spec, options)
    except DistflowError as error:
        if options.debug:
            raise
        report(error, _torchrun_number("RANK", 0))
        return INVALID if isinstance(error, InvalidInput) else 1


def run_ranks(spec: Spec, options: argparse.Namespace, elastic: ElasticAgent | None = None) -> int:
    """Plan and run this rank's part of a run, whose ranks torchrun or `elastic` has assigned. Return the exit code."""
    from planners import plan as make_plan  # a foreign package of that name is refused first

    plan = make_plan(spec, _torchrun_number("WORLD_SIZE", 1))
    spec.download_models()
    before = elastic.folder() if elastic else folder_before_restart(spec)
    if not options.resume and before:
        options.resume = str(before)
    proved = prove_inputs(spec, not (options.resume or options.export)) if not _torchrun_number("RANK", 0) else None
    folder = choose_folder(spec, plan.name, options, _torchrun_number("RANK", 0))
    if options.export or options.in_process:
        return run_in_process(spec, plan, folder, options, proved)
    return run_supervised(spec, plan, folder, options, elastic, proved)


def run_elastic(spec: Spec, options: argparse.Namespace) -> int:
    """Run this machine's part of a run whose machines come and go, round after round. Return the exit code."""
    from distflow.recovery.membership import MembershipChanged
    from planners import plan as make_plan
    from workers.elastic import ElasticAgent

    if not (options.store and options.machines):
        raise InvalidInput("--store and --machines go together:  --store etcd://HOST:PORT/RUN --machines 4")
    if options.in_process or options.export:
        raise InvalidInput("--in-process and --export are for one machine. Leave them or --store out.")
    elastic = ElasticAgent(options.store, options.machines, partial(make_plan, spec), spec.run.robust,
                           spec.hub_commits)
    spec.download_models()  # before others wait for this machine
    while elastic.join():
        try:
            status = run_ranks(spec, options, elastic)
        except MembershipChanged:
            for number in SIGNALS:  # which the supervisor has ignored since its end
                signal.signal(number, signal.SIG_DFL)
            continue
        except DistflowError as error:
            elastic.conclude(str(error))
            raise
        elastic.conclude("" if status == 0 else f"a machine that trains has failed: {socket.gethostname()}, whose "
                         "output says why")
        return status
    return 0


def run_supervised(spec: Spec, plan: Plan, folder: Path | None, options: argparse.Namespace,
                   elastic: ElasticAgent | None = None, proved: Preflight | None = None) -> int:
    """Supervise this rank: fork a worker, and another one when it dies. Return the exit code."""
    if _torchrun_number("RANK", 0) == 0:
        startup.current().begin(plan.name)
    ranks = f"{plan.ranks} rank{'s' * (plan.ranks > 1)}"
    startup.current().enter(f"loading torch, transformers and the engines on {ranks}")
    from distflow.recovery import scale
    from distflow.recovery.supervisor import Supervisor  # imports torch
    from workers.context import join_run
    from workers.worker import work

    if spec.run.robust.detectors:  # perhaps the user's own, which run in the supervisor
        for module in spec.dag.imports:
            load_module(module)
    if folder and not _torchrun_number("TORCHELASTIC_RESTART_COUNT", 0) and not (elastic and elastic.replaces):
        scale.forget(folder)  # what another job was told
    context = replace(join_run(spec, plan, folder, bool(options.resume), elastic=elastic), preflight=proved)
    with context.serving():
        supervisor = Supervisor(context.store, context.restart_group, partial(work, context), context.view(), elastic)
        startup.current().enter("building the models")
        status = supervisor.run()
        if status == 0 and not elastic:
            context.store.complete()
        if status == 0 or supervisor.stopped:
            context.leave()
    return status


def run_in_process(spec: Spec, plan: Plan, folder: Path | None, options: argparse.Namespace,
                   proved: Preflight | None = None) -> int:
    """Run the worker in this process, without restarts: a debugger sees everything. Return the exit code."""
    from distflow.recovery.worker_process import WorkerContext
    from workers.context import join_run
    from workers.worker import work

    context = replace(join_run(spec, plan, folder, bool(options.resume), alone=bool(options.export)), preflight=proved)
    with context.serving():
        work(context, WorkerContext(), Path(options.export) if options.export else None)
        context.leave()
    return 0


def stay_on_loopback() -> None:
    """Bind gloo to loopback, since its connections are not authenticated, if the run has one machine and the user has
    not set GLOO_SOCKET_IFNAME; by default gloo takes the interface of the machine's name."""
    one_machine = int(os.environ.get("GROUP_WORLD_SIZE", 1)) == 1
    if one_machine and "lo" in [name for _, name in socket.if_nameindex()]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def resume_if_exists(spec: Spec, options: argparse.Namespace) -> Spec:
    """Return the spec of the run that has the given name and a checkpoint, as for --resume, else the given spec. Rank 0
    renames a folder that was left without a checkpoint."""
    if options.resume or options.store or not options.name:
        raise InvalidInput("--resume-if-exists needs a --name, and neither --resume nor --store:  --name grpo-1 "
                           "--resume-if-exists")
    folder = Path(spec.run.output, options.name)
    if spec.run.checkpoint.to:
        object_store.fetch_once(folder, spec.run.checkpoint.to)
    if complete_checkpoints(folder / "checkpoints"):
        options.resume = str(folder)
        return load_spec(options)
    first = _torchrun_number("RANK", 0) == 0 and not _torchrun_number("TORCHELASTIC_RESTART_COUNT", 0)
    if first and folder.exists():
        if held := in_use(folder):
            raise refusal(folder, held)
        folder.rename(next(path for path in (folder.with_name(f"{folder.name}.{number}") for number in
                                             itertools.count(1)) if not path.exists()))
    return spec


def choose_folder(spec: Spec, name: str, options: argparse.Namespace, rank: int) -> Path | None:
    """Return the run's folder on rank 0; None on other ranks, which learn it from the store."""
    if rank > 0:
        return None
    if options.resume:
        return Path(options.resume)
    folder = choose(spec.run.output, name, options.name)
    if spec.run.checkpoint.to:
        object_store.require_free(folder, spec.run.checkpoint.to)
    return folder


def prove_inputs(spec: Spec, starts: bool) -> Preflight | None:
    """Check the data. If a run starts, prove data and rewards on its first records too, unless its run file leaves that
    out, and return the account. Raises InvalidInput."""
    from distflow.data.checks import check_data
    from workers.preflight import prove_before_torch
    from workers.preflight.proofs import Preflight

    account = Preflight()
    account.note(check_data(spec))
    if starts and spec.run.preflight:
        prove_before_torch(account, spec)
        account.require()
    return account if starts else None


def folder_before_restart(spec: Spec) -> Path | None:
    """Return the folder that this run made before torchrun restarted all its processes; None on ranks other than 0."""
    on_rank_0 = _torchrun_number("RANK", 0) == 0
    return of_torchrun(spec.run.output) if on_rank_0 and _torchrun_number("TORCHELASTIC_RESTART_COUNT", 0) else None


def _torchrun_number(name: str, otherwise: int) -> int:
    return int(os.environ.get(name, otherwise))


def refuse_foreign_packages() -> None:
    """Import `planners` and `workers`, whose names are generic, and raise InvalidInput unless they are distflow's own.
    """
    for name in ("planners", "workers"):
        found = importlib.util.find_spec(name)
        folders = list(found.submodule_search_locations or ()) if found else []  # of a namespace package too
        path = Path(folders[0] if folders else found.origin or "").resolve() if found else None
        if path != ROOT / name:
            raise InvalidInput(f"`{name}` is found at {path or 'no place'}, but distflow's own lies at {ROOT / name}. "
                               "Another package of that name shadows it: rename that one, take its folder off "
                               "PYTHONPATH, or run from another folder.")
        importlib.import_module(name)  # from here on it is found, whatever folders of the user's are searched later


def report(error: DistflowError, rank: int) -> None:
    """Print the error once for all ranks, which find the same mistakes: on rank 0, and on the others, which wait first,
    only if torchrun has not ended them by then."""
    if rank > 0 and isinstance(error, InvalidInput):
        threading.Event().wait(_RANK_0_TIMEOUT)  # torchrun ends this process as soon as rank 0 has spoken and left
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    report_to_torchrun("distflow refuses the configuration: what is wrong with it stands above torchrun's traceback"
                       if isinstance(error, InvalidInput) else text)
    show(f"{'' if rank == 0 else f'[rank {rank}] '}{text}", sys.stderr)


if __name__ == "__main__":
    leave(main())
