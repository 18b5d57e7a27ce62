"""Runs as options ask for them: loads and checks their files, counts their ranks, and plans them. Imports no worker."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

from distflow.config.load import load_for_planning
from distflow.config.spec import Spec
from distflow.errors import Diagnostic, InvalidInput
from distflow.plan import Plan
from distflow.recovery import object_store
from distflow.recovery.checkpoint_files import complete_checkpoints, step_of
from distflow.telemetry.run_folder import choose, reload_run, unwritable

_DRIVER_SECONDS = 20.0
"""Time limit of `nvidia-smi`: a driver that is being loaded has answered by then."""


def load_and_plan(options: argparse.Namespace, elsewhere: bool = False) -> tuple[Spec, Plan]:
    """Return the spec and the plan that the options ask for; raise every mistake at once.
    `elsewhere`: the run is of other machines, and what this one lacks for it is a note of the plan."""
    from planners import plan

    if options.dag and options.dag_file:
        raise InvalidInput(f"which DAG, `{options.dag_file}` or `{options.dag}`? Name one.")
    options.dag = options.dag or options.dag_file
    options.resume = getattr(options, "resume", None)
    spec = load_spec(options)
    spec = replace(spec, on_cpus=spec.cluster_source is None and not gpu_count())
    ranks = rank_count(options, spec)
    lacks = without_lacks(spec) if elsewhere else []
    if elsewhere and (why := unwritable(Path(spec.run.output))):
        lacks.append(f"the run folder cannot be written, {why}: a run on this machine would need  --set output=FOLDER")
    found = plan(spec, ranks)
    return spec, replace(found, notes=(*found.notes, *lacks))


def without_lacks(spec: Spec) -> list[str]:
    """Take out of the spec's mistakes what this machine alone lacks, as of a run of others; return it as notes."""
    lacks = [mistake for mistake in spec.mistakes if mistake.of_machine]
    spec.mistakes[:] = [mistake for mistake in spec.mistakes if not mistake.of_machine]
    return [f"{mistake.what}: a run on this machine would be refused" for mistake in lacks]


def check(options: argparse.Namespace) -> tuple[Spec, Plan]:
    """Return the spec and the plan, with notes about the data; check the data and the name of the run too."""
    from distflow.data.checks import check_data

    spec, plan = load_and_plan(options)
    notes = check_data(spec, getattr(options, "prove", False))
    choose(spec.run.output, plan.name, options.name)
    return spec, replace(plan, notes=(*plan.notes, *notes))


def rank_count(options: argparse.Namespace, spec: Spec) -> int:
    """Return how many ranks the options, the cluster or the run file ask for; else one for each GPU of this machine."""
    asked = [count for count in (options.ranks, spec.cluster.size, spec.run.ranks) if count is not None]
    return asked[0] if asked else max(gpu_count(), 1)


def gpu_count(driver: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """Return the number of NVIDIA GPUs that processes started here may use, as torch would, without its import of
    seconds: CUDA_VISIBLE_DEVICES counts up to an entry that names no GPU."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        named = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        unusable = [index for index, each in enumerate(named) if not re.match(r"\s*(\d+|GPU-|MIG-)", each)]
        return min([len(named), *unusable])
    program = shutil.which("nvidia-smi")
    if program:
        try:  # unlike the driver's folder, it shows only what a container may use
            listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_DRIVER_SECONDS,
                                    check=False)
        except subprocess.TimeoutExpired:
            return 0
        return len(re.findall("^GPU ", listed.stdout, re.MULTILINE))
    return len(list(driver.iterdir())) if driver.is_dir() else 0


def load_spec(options: argparse.Namespace) -> Spec:
    if options.resume:
        spec = reload_run(Path(options.resume), options.overrides, getattr(options, "cluster", None))
        if not complete_checkpoints(Path(options.resume, "checkpoints")):
            raise InvalidInput(f"{options.resume} has no whole checkpoint to go on from. Start it again under another "
                               "--name; `--set checkpoint.every=N` decides how often a run saves.")
        return spec
    if not options.dag:
        raise InvalidInput(Diagnostic("which DAG?", None, "Give one:  --dag grpo"))
    return load_for_planning(options.dag, options.run, options.overrides, options.cluster)


def load_newest(options: argparse.Namespace) -> Spec:
    """Load the spec of a run to continue, named by its folder or its address in an object store, after fetching the
    newest checkpoint from there."""
    if "://" in options.resume:
        options.resume = str(object_store.fetch(options.resume))
    elif to := reload_run(folder := Path(options.resume), options.overrides).run.checkpoint.to:
        object_store.fetch(object_store.url_of(folder, to), folder)
    return load_spec(options)


def require_no_fewer_steps(spec: Spec, folder: str) -> int:
    """Return how many steps a run has done by its newest checkpoint. Raises InvalidInput: `steps` is fewer."""
    done = step_of(complete_checkpoints(Path(folder, "checkpoints"))[-1])
    if spec.run.steps < done:
        raise InvalidInput(Diagnostic(f"{folder} has done {done} steps, and `steps: {spec.run.steps}` is fewer",
                                      spec.run_source.location(("steps",)),
                                      f"`steps` counts from the beginning of the run:  --set steps={2 * done}"))
    return done
