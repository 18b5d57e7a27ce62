"""`distflow validate`, `run`, `resume` and `export`: check a DAG, run it, go on with it, write its models."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from distflow.cli import slurm
from distflow.cli.common import Verb, add_dag_arguments, add_ranks
from distflow.cli.launcher import torchrun
from distflow.config.shipped import MODELINE, SHIPPED
from distflow.config.spec import Spec
from distflow.errors import InvalidInput, quoted
from distflow.options import (
    check,
    gpu_count,
    load_newest,
    load_spec,
    rank_count,
    require_no_fewer_steps,
)
from distflow.plan import Plan
from distflow.telemetry.run_folder import read_plan, unwritable
from distflow.telemetry.run_lock import in_use, refusal
from distflow.telemetry.run_reader import SUMMARY
from planners import plan

if TYPE_CHECKING:
    from workers.preflight.proofs import Preflight


def _add_validate_arguments(parser: argparse.ArgumentParser) -> None:
    add_dag_arguments(parser)
    parser.add_argument("--prove", action="store_true",
                        help="prove data, rewards, tokens and models too, as a run does at its start; loads the models")


def validate(options: argparse.Namespace) -> int:
    spec, checked = check(options)
    if options.prove:
        _prove(spec, checked)
    print(f"{spec.dag_source.file} with {spec.run_source.file} on {checked.ranks} "
          f"rank{'s' * (checked.ranks > 1)}: no mistakes")
    for note in (*checked.notes, *_lost_schemas(spec)):
        print(f"note: {note}")
    return 0


def _lost_schemas(spec: Spec) -> Iterator[str]:
    """Yield a note for each file that names a schema for editors, relative to where the file was copied from."""
    for kind, source in (("dag", spec.dag_source), ("run", spec.run_source), ("cluster", spec.cluster_source)):
        line = next((line for line in source.lines if line.startswith(MODELINE)), None) if source else None
        named = line.removeprefix(MODELINE).strip() if line else ""
        if source and named and "://" not in named and not Path(source.file).parent.joinpath(named).is_file():
            yield (f"{source.file} names the schema {named} for editors, which is not there. Instead:  "
                   f"{MODELINE}{SHIPPED / 'schema' / f'{kind}.json'}")


def _prove(spec: Spec, checked: Plan) -> None:
    """Run the proofs of a run's start. Raises InvalidInput: one has failed."""
    from planners.check import prompted_role
    from workers.preflight import prove_before_torch, prove_with_tokenizer
    from workers.preflight.proofs import Preflight

    account = Preflight()
    prove_before_torch(account, spec)
    from workers.engines.loading import known_ends, load_tokenizer  # seconds

    role = prompted_role(spec, checked.chain(0))
    model, shape = spec.model_of(role), spec.shape_of(role)
    assert model, "the planner refuses roles without a model"
    prove_with_tokenizer(account, spec, load_tokenizer(spec, model), shape and shape.vocabulary,
                         known_ends(spec, model))
    account.require()
    _prove_models(account, spec)
    print(f"proved: {account.describe()}")


def _prove_models(account: Preflight, spec: Spec) -> None:
    """Prove the models in this process, where a plan for one rank has them all."""
    from workers.preflight.model import prove_alone

    try:
        alone = plan(spec, 1)
    except InvalidInput as error:
        reason = error.mistakes[0].what
        print(f"note: the models are proved when the run starts, as one rank alone cannot have them: {reason}")
    else:
        prove_alone(account, spec, alone)


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    add_dag_arguments(parser)
    slurm.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    job = None if options.slurm is None else slurm.SlurmJob(options.slurm)
    if job:
        options.ranks = job.ranks(options.ranks)
    spec, checked = check(options)
    given = [("--dag", options.dag), ("--run-file", options.run), ("--name", None if job else options.name),
             ("--cluster", options.cluster)]
    arguments = [part for flag, value in given if value for part in (flag, value)]
    arguments += _set_arguments(options.overrides)
    if job:
        for note in (*checked.notes, *job.notes):
            print(f"note: {note}", file=sys.stderr)
        print(job.script(spec, checked, options.name, arguments), end="")
        return 0
    return torchrun(checked.ranks, arguments, shutdown_timeout=spec.run.robust.shutdown_timeout)


def _set_arguments(overrides: list[str]) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]


_RUN_HELP = "the run's folder, as runs/grpo-1, or its place in an object store, as s3://BUCKET/FOLDER/grpo-1"


def _add_resume_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("resume", metavar="RUN", help=_RUN_HELP)
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides",
                        help="override one value, as steps=200 to go on for longer")
    parser.add_argument("--cluster", metavar="FILE", help="where it goes on, if not where it was")
    parser.add_argument("--ranks", type=int, metavar="N", help="processes, one per GPU; default: as many as it had")


def resume(options: argparse.Namespace) -> int:
    if held := in_use(Path(options.resume)):
        raise refusal(Path(options.resume), held)
    spec = load_newest(options)
    done = require_no_fewer_steps(spec, options.resume)
    if done == spec.run.steps and Path(options.resume, SUMMARY).is_file():
        print(f"{options.resume} has finished: its {done} steps are done. To train for longer:  "
              f"distflow resume {shlex.quote(options.resume)} --set steps={2 * done}")
        return 0
    ranks = _resumed_rank_count(options, spec)
    plan(spec, ranks)
    more = _set_arguments(options.overrides)
    more += ["--cluster", options.cluster] if options.cluster else []
    return torchrun(ranks, ["--resume", options.resume, *more], shutdown_timeout=spec.run.robust.shutdown_timeout)


def _resumed_rank_count(options: argparse.Namespace, spec: Spec) -> int:
    """Return the number of ranks that the run had, unless options name another. Raises InvalidInput: too few GPUs."""
    if options.ranks is not None or options.cluster or any(each.startswith("ranks=") for each in options.overrides):
        return rank_count(options, spec)
    ranks = read_plan(Path(options.resume))["ranks"]
    gpus = gpu_count()
    if 0 < gpus < ranks:
        raise InvalidInput(f"{options.resume} had {ranks} ranks, and this machine has {gpus} GPUs. Go on with fewer:  "
                           f"--ranks {gpus}   or start torchrun with  distflow/launch.py --resume "
                           f"{quoted(options.resume)}  on all its machines.")
    return ranks


def _add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("resume", metavar="RUN", help=_RUN_HELP)
    parser.add_argument("folder", nargs="?", metavar="FOLDER",
                        help="folder to make, with the model in its folder model/; default: the run's own folder")
    add_ranks(parser)
    parser.set_defaults(overrides=[])


def export(options: argparse.Namespace) -> int:
    ranks = options.ranks or 1
    options.overrides = ["mode=sync", "groups={}"]  # a rollout has no training state to write
    spec = load_newest(options) if "://" in options.resume else load_spec(options)
    folder, run = Path(options.folder or options.resume), Path(options.resume)
    plan(spec, ranks)
    names = ["model", *(f"model-{name}" for name, role in spec.dag.roles.items() if role.trained)]
    _check_export_folder(folder, run, names)
    code = torchrun(ranks, ["--resume", options.resume, "--export", str(folder), *_set_arguments(options.overrides)])
    models = [] if code else [folder / name for name in names if (folder / name).is_dir()]
    print("\n".join(f"wrote {path}" for path in models), flush=True)
    return code


def _check_export_folder(folder: Path, run: Path, names: list[str]) -> None:
    """Raise InvalidInput: models of these names cannot be written there, or would take the place of others."""
    within = folder.resolve().is_relative_to(run.resolve())
    place = folder.resolve().relative_to(run.resolve()).parts if within else None
    if place and place[0] in (*names, *_OF_RUNS):
        raise InvalidInput(f"{folder} is in a folder that the run itself writes. Without FOLDER the model becomes "
                           f"{run / 'model'}:  distflow export {quoted(run)}   or name a folder elsewhere")
    if place != () and (there := next((folder / name for name in names if (folder / name).exists()), None)):
        raise InvalidInput(f"{there} exists, and would be written over. Name another folder, or delete it:  "
                           f"rm -r {quoted(there)}")
    if why := unwritable(folder):
        raise InvalidInput(f"{folder} cannot be written, {why}. Name another folder:  distflow export {quoted(run)} "
                           "FOLDER")


_OF_RUNS = ("best", "candidates", "checkpoints")
"""Folders that a run writes next to its models."""
VERBS = {
    "validate": Verb("check a DAG, a run and its data, and report every mistake", _add_validate_arguments, validate),
    "run": Verb("run a DAG on the GPUs (or cores) of this machine, or print the job for Slurm", _add_run_arguments,
                run),
    "resume": Verb("go on with an interrupted run from its newest checkpoint, on any number of ranks",
                   _add_resume_arguments, resume),
    "export": Verb("write the models of a run's newest checkpoint as Hugging Face folders", _add_export_arguments,
                   export),
}
