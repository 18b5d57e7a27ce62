"""Calibrates the cost model by the timings of runs, for `distflow plan`, and reports its errors before and after."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.config.load import load_for_planning, reload
from distflow.config.spec import Spec
from distflow.errors import Diagnostic, InvalidInput, quoted
from distflow.options import without_lacks
from distflow.plan import Layout
from distflow.telemetry import timings
from distflow.telemetry.run_folder import read_plan

if TYPE_CHECKING:
    from planners.heterogeneous.calibration import MeasuredRun
    from planners.heterogeneous.problem import Problem

_LEAST = 3
"""Fewest whole steps after the first ones for a median."""


def spec_of(options: argparse.Namespace) -> tuple[Spec, list[str]]:
    """Return the named DAG and cluster, else the last run's, and as notes what this machine lacks for it. Raises
    InvalidInput if the run has no cluster."""
    folder = _folder(options.runs[-1])
    kept = folder / "cluster.yaml"
    if not options.cluster and not kept.is_file():
        raise InvalidInput(f"{folder} was started without --cluster, so where its ranks are is not known. Describe the "
                           "machines, as by  distflow probe --out machines.yaml , and add  --cluster machines.yaml")
    options.cluster = options.cluster or str(kept)
    dag = options.dag_file or options.dag
    spec = load_for_planning(dag, options.run, options.overrides, options.cluster) if dag else \
        reload(folder, options.overrides, options.cluster)
    return spec, without_lacks(spec)


@dataclass(frozen=True)
class Calibration:
    """Calibrated problem, the runs that calibrated it, and the `rest`: seconds of an iteration outside all tasks."""

    problem: Problem
    runs: Sequence[MeasuredRun]
    rest: float

    def against(self, seconds: float, folder: str) -> str:
        """Return how the best plan's seconds in its tasks compare with the last run's placement."""
        from planners.heterogeneous.layouts import CostedProblem

        run = self.runs[-1]
        present, best = run.placement(CostedProblem(self.problem)).seconds + self.rest, seconds + self.rest
        return (f"{folder}: an iteration takes {run.seconds:.2f} s (measured); as it is placed {present:.2f} s, by the "
                f"best plan found {best:.2f} s (both predicted): {max(1 - best / present, 0.0):.0%} less")

    def report(self, folders: Sequence[str]) -> Iterator[str]:
        for folder, run in zip(folders, self.runs):
            yield from ("", f"{folder}: seconds measured, and predicted before and after calibration")
            before, after = self._predictions(run)
            for task, measured, one, other in zip(run.problem.tasks, run.durations, before, after):
                yield f"  {task.name:14} {measured:9.3f}  {_against(one, measured)}  {_against(other, measured)}"
            yield (f"  {'an iteration':14} {run.seconds:9.3f}  {_against(before[-1], run.seconds)}  "
                   f"{_against(after[-1], run.seconds)}")

    def _predictions(self, run: MeasuredRun) -> list[list[float]]:
        """Return the predicted seconds of each task, then of an iteration; before and after calibration."""
        from planners.heterogeneous.calibration import at_run_sizes, unmeasured
        from planners.heterogeneous.layouts import CostedProblem

        predictions = []
        for problem, rest in ((unmeasured(run.problem), 0.0), (at_run_sizes(run, self.problem), self.rest)):
            placement = run.placement(CostedProblem(problem))
            predictions.append([*(layout.seconds for layout in placement.layouts), placement.seconds + rest])
        return predictions


def calibration(spec: Spec, folders: Sequence[str]) -> Calibration:
    """Calibrate the cost model by runs. Raises InvalidInput with the mistakes of all: another DAG, too few steps, …."""
    from planners.heterogeneous.calibration import calibrated
    from planners.heterogeneous.layouts import CostedProblem
    from planners.heterogeneous.workload import problem_of

    problem = problem_of(spec)
    mistakes = [mistake for folder in folders for mistake in _mistakes(spec, _folder(folder))]
    if mistakes:
        raise InvalidInput(mistakes)
    runs = [_ran(spec, Path(folder)) for folder in folders]
    found = calibrated(problem, runs)
    for run in runs:
        run.placement(CostedProblem(found))  # which says where the model is wrong
    return Calibration(found, runs, runs[-1].rest(CostedProblem(found)))


def _folder(name: str) -> Path:
    if not Path(name, "plan.json").is_file():
        raise InvalidInput(f"{name} has no plan.json, so it is not the folder of a run")
    return Path(name)


def _mistakes(spec: Spec, folder: Path) -> Iterator[Diagnostic]:
    planned = read_plan(folder)
    own = reload(folder).dag.model_dump(mode="json")
    wanted = spec.dag.model_dump(mode="json")
    if own != wanted:
        other = ", ".join(f"`{name}`" for name in {**own["nodes"], **wanted["nodes"]}
                          if own["nodes"].get(name) != wanted["nodes"].get(name))
        yield Diagnostic(f"{folder} is a run of another DAG, `{own['name']}`"
                         + (f": these nodes differ: {other}" if other else ""), spec.dag_source.location(()),
                         f"Plan that one:  distflow plan {quoted(folder / 'dag.yaml')}  , or name a run of this one.")
    elif planned["mode"] != "sync":
        yield Diagnostic(f"{folder} is a run in mode {planned['mode']}: its groups compute at the same time, so no "
                         "node's seconds are its own", None, "Calibrate by a short run with  --set mode=sync")
    elif planned["ranks"] != spec.cluster.size:
        where = spec.cluster_source.location(("machines",)) if spec.cluster_source else None
        yield Diagnostic(f"{folder} has {planned['ranks']} ranks, and the cluster has {spec.cluster.size} devices",
                         where,
                         "Describe the machines that it runs on, in the order of its ranks.")
    elif (steps := _median_timings(folder, planned).steps) < _LEAST:
        yield Diagnostic(f"{folder} has measured {steps} whole steps after the first ones by the settings in force, "
                         f"and at least {_LEAST} are needed", None,
                         "Let it run on, or make a run of more steps:  --set steps=10")


def _median_timings(folder: Path, plan: dict[str, Any]) -> timings.MedianTimings:
    """Return median timings under the plan in force; steps before the run's settings changed do not count."""
    file = folder / timings.NAME
    return timings.usual(timings.read(file) if file.is_file() else (), plan["ranks"], plan["digest"])


def _ran(spec: Spec, folder: Path) -> MeasuredRun:
    from planners.heterogeneous.calibration import measured_run
    from planners.heterogeneous.workload import problem_of

    planned = read_plan(folder)
    own = reload(folder)
    without_lacks(own)
    own.cluster, own.cluster_source = spec.cluster, spec.cluster_source
    sizes = ("dp", "first", "tp", "pp", "cp", "ep")
    layouts = {task["node"]: Layout(**{size: task["layout"][size] for size in sizes}) for task in planned["tasks"]}
    found = _median_timings(folder, planned)
    return measured_run(problem_of(own), layouts, found.nodes, found.seconds, str(folder))


def _against(predicted: float, measured: float) -> str:
    return f"{predicted:9.3f} ({predicted / measured - 1:+7.1%})"
