"""What `distflow plan --from` does: reads runs, lets the cost model learn from them, and says how well it has."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.config.load import Spec, load, reload
from distflow.errors import Diagnostic, InvalidInput
from distflow.plan import Layout
from distflow.telemetry import timings
from distflow.telemetry.run_folder import read_plan

if TYPE_CHECKING:
    from distflow.plan_file import PlacedPlan
    from planners.heterogeneous.calibration import MeasuredRun
    from planners.heterogeneous.problem import Problem

THRESHOLD = 0.1
_LEAST = 3
"""Steps, beside the first ones, of which a median is one."""


def add_arguments(mixed: argparse._ArgumentGroup) -> None:
    mixed.add_argument("--from", metavar="RUN", nargs="+", dest="runs", default=[],
                       help="calibrate the cost model by what these runs have measured, finished or going on: folders, "
                       "as runs/grpo-1; without DAG, the last one's is planned. Runs of two batch sizes show what "
                       "does not shrink with the rows")
    mixed.add_argument("--replan", action="store_true",
                       help="with --from: say how long an iteration of the last run takes as it is placed, and propose "
                       "a plan that runs (and write it to --out) if a better one is found")
    mixed.add_argument("--threshold", type=float, metavar="SHARE",
                       help=f"by how much of an iteration a plan must be better to be proposed (default: {THRESHOLD})")


def spec_of(options: argparse.Namespace) -> Spec:
    """What is to be planned: the DAG that is named, else the last run's; on the cluster that is named, else on that of
    the last run.

    Raises:
        InvalidInput: there is no such run, or it does not say its cluster.
    """
    folder = _folder(options.runs[-1])
    kept = folder / "cluster.yaml"
    if not options.cluster and not kept.is_file():
        raise InvalidInput(f"{folder} was started without --cluster, so where its ranks are is not known. Describe the "
                           "machines, as by  distflow probe --out machines.yaml , and add  --cluster machines.yaml")
    options.cluster = options.cluster or str(kept)
    dag = options.dag_file or options.dag
    return load(dag, options.run, options.overrides, options.cluster) if dag else \
        reload(folder, options.overrides, options.cluster)


@dataclass(frozen=True)
class Calibration:
    """The problem as it is planned, calibrated; the runs that it was calibrated by; seconds of an iteration that no
    work takes."""

    problem: Problem
    runs: Sequence[MeasuredRun]
    rest: float

    def against(self, plan: PlacedPlan, folder: str, threshold: float) -> tuple[bool, str]:
        """Whether a plan is so much better than the last run's placement as to be worth a restart, and what to say."""
        from planners.heterogeneous.layouts import CostedProblem

        run = self.runs[-1]
        present = run.placement(CostedProblem(self.problem)).seconds + self.rest
        found = plan.seconds + plan.rest_seconds
        gain = 1 - found / present
        said = (f"{folder}: an iteration takes {run.seconds:.2f} s (measured); as it is placed {present:.2f} s, by the "
                f"best plan found {found:.2f} s (both predicted)\n")
        if gain <= threshold:
            return False, said + (f"The present placement is good enough: {max(gain, 0.0):.0%} could be gained; "
                                  f"the threshold is {threshold:.0%}.")
        return True, said + f"A better plan takes {gain:.0%} less; the threshold is {threshold:.0%}:\n"

    def report(self, folders: Sequence[str]) -> Iterator[str]:
        """Each run's works and iteration: measured, and predicted before and after."""
        for folder, run in zip(folders, self.runs):
            yield from ("", f"{folder}: seconds measured, and predicted before and after calibration")
            before, after = self._predictions(run)
            for work, measured, one, other in zip(run.problem.works, run.durations, before, after):
                yield f"  {work.name:14} {measured:9.3f}  {_against(one, measured)}  {_against(other, measured)}"
            yield (f"  {'an iteration':14} {run.seconds:9.3f}  {_against(before[-1], run.seconds)}  "
                   f"{_against(after[-1], run.seconds)}")

    def _predictions(self, run: MeasuredRun) -> list[list[float]]:
        """Of each work, and of an iteration; before and after."""
        from planners.heterogeneous.calibration import again, unmeasured
        from planners.heterogeneous.layouts import CostedProblem

        found = []
        for problem, rest in ((unmeasured(run.problem), 0.0), (again(run, self.problem), self.rest)):
            placement = run.placement(CostedProblem(problem))
            found.append([*(layout.seconds for layout in placement.layouts), placement.seconds + rest])
        return found


def calibration(spec: Spec, folders: Sequence[str]) -> Calibration:
    """
    Raises:
        InvalidInput: a run has measured nothing that the model of `spec` could learn from; all that is wrong with all
            of them.
    """
    from planners.heterogeneous.calibration import calibrated
    from planners.heterogeneous.layouts import CostedProblem
    from planners.heterogeneous.workload import problem_of

    problem = problem_of(spec)
    mistakes = [mistake for folder in folders for mistake in _mistakes(spec, _folder(folder))]
    if mistakes:
        raise InvalidInput(mistakes)
    runs = [_ran(spec, Path(folder)) for folder in folders]
    found = calibrated(problem, runs)
    for folder, run in zip(folders, runs):
        if run.placement(CostedProblem(found)) is None:
            raise InvalidInput(Diagnostic(f"{folder} has run, but by the cost model it does not fit the machines", None,
                                          "Does `memory_gib` of the cluster file say too little?"))
    return Calibration(found, runs, runs[-1].rest(CostedProblem(found)))


def _folder(name: str) -> Path:
    if not Path(name, "plan.json").is_file():
        raise InvalidInput(f"{name} has no plan.json, so it is not the folder of a run")
    return Path(name)


def _mistakes(spec: Spec, folder: Path) -> Iterator[Diagnostic]:
    said = read_plan(folder)
    own = reload(folder).dag.model_dump(mode="json")
    wanted = spec.dag.model_dump(mode="json")
    if own != wanted:
        other = ", ".join(f"`{name}`" for name in {**own["nodes"], **wanted["nodes"]}
                          if own["nodes"].get(name) != wanted["nodes"].get(name))
        yield Diagnostic(f"{folder} is a run of another DAG, `{own['name']}`"
                         + (f": these nodes differ: {other}" if other else ""), spec.dag_source.spot(()),
                         f"Plan that one:  distflow plan {folder / 'dag.yaml'}  , or name a run of this one.")
    elif said["mode"] != "sync":
        yield Diagnostic(f"{folder} is a run in mode {said['mode']}: its groups compute at the same time, so no node's "
                         "seconds are its own", None, "Calibrate by a short run with  --set mode=sync")
    elif said["ranks"] != spec.cluster.size:
        where = spec.cluster_source.spot(("machines",)) if spec.cluster_source else None
        yield Diagnostic(f"{folder} has {said['ranks']} ranks, and the cluster has {spec.cluster.size} devices", where,
                         "Describe the machines that it runs on, in the order of its ranks.")
    elif (steps := _usual(folder, said).steps) < _LEAST:
        yield Diagnostic(f"{folder} has measured {steps} whole steps after the first ones by the settings in force, "
                         f"and at least {_LEAST} are needed", None,
                         "Let it run on, or make a run of more steps:  --set steps=10")


def _usual(folder: Path, plan: dict[str, Any]) -> timings.MedianTimings:
    """By the plan that is in force; what the run did by others, before its settings changed, does not count."""
    file = folder / timings.NAME
    return timings.usual(timings.read(file) if file.is_file() else (), plan["ranks"], plan["digest"])


def _ran(spec: Spec, folder: Path) -> MeasuredRun:
    from planners.heterogeneous.calibration import ran
    from planners.heterogeneous.workload import problem_of

    said = read_plan(folder)
    own = reload(folder)
    own.cluster, own.cluster_source = spec.cluster, spec.cluster_source
    sizes = ("dp", "first", "tp", "pp", "cp", "ep")
    layouts = {task["node"]: Layout(**{size: task["layout"][size] for size in sizes}) for task in said["tasks"]}
    found = _usual(folder, said)
    return ran(problem_of(own), layouts, found.nodes, found.seconds)


def _against(predicted: float, measured: float) -> str:
    return f"{predicted:9.3f} ({predicted / measured - 1:+7.1%})"
