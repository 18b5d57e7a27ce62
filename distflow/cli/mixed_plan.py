"""`distflow plan mixed`, `explain` and `replan`: find, read, explain and write placements on mixed hardware."""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from distflow import launch
from distflow.cli.calibration import Calibration, calibration, spec_of
from distflow.cli.common import add_dag_arguments, noted, table
from distflow.cli.plan_text import describe
from distflow.config.shipped import START_MODEL
from distflow.config.spec import Spec
from distflow.config.yaml_source import dump, read
from distflow.errors import Diagnostic, InvalidInput, shown
from distflow.options import load_and_plan
from distflow.plan_file import PlacedPlan, read_plan_file

if TYPE_CHECKING:
    from planners.heterogeneous.layouts import CostedProblem
    from planners.heterogeneous.problem import Placement

HEAD = "# A prediction of the cost model, not a measurement; written by  distflow plan --out\n"
_THRESHOLD = 0.1
_ROUNDED = 1 + 1e-6  # predictions that differ less are equal
_DATA_CENTRE = 50.0  # TFLOP/s


def _add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", help="write the plan")
    parser.add_argument("--explain", action="store_true", help="what bounds each task, what would help, and a chart; "
                        "of runs, what was measured and predicted")


def add_mixed_arguments(parser: argparse.ArgumentParser) -> None:
    add_dag_arguments(parser, of_run=False)
    _add_output_arguments(parser)
    parser.add_argument("--from", metavar="RUN", nargs="+", dest="runs", default=[],
                        help="calibrate the cost model by what these runs have measured, finished or going on: "
                        "folders, as runs/grpo-1; without DAG, the last one's is planned. Runs of two batch sizes show "
                        "what does not shrink with the rows")
    parser.add_argument("--runnable", action="store_true",
                        help="only what  launch.py --plan  can run: the best of the kinds of plans that runs have, and "
                        "of those that the search finds")
    parser.add_argument("--solver", choices=("hybrid", "ilp"), default="hybrid",
                        help="search fast (default), or search and then prove how far from the best of the layouts "
                        "considered the plan is")
    parser.add_argument("--seed", type=int, default=0, help="of the search")
    parser.add_argument("--seconds", type=float, metavar="N",
                        help="search so long, not for the usual number of layouts")
    parser.add_argument("--within", type=float, default=0.0, metavar="SHARE",
                        help="stop when the plan is proven to be this near to the best (with  --solver ilp  , of the "
                        "layouts considered), as 0.03")
    parser.set_defaults(plan=None)


def add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    add_dag_arguments(parser, of_run=False)
    parser.add_argument("--plan", metavar="FILE", required=True, help="as  distflow plan mixed --out  writes it")


def add_replan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help="calibrate the cost model by what these runs have "
                        "measured, finished or going on; the last one may be placed again")
    launch.add_spec_arguments(parser)
    _add_output_arguments(parser)
    parser.add_argument("--threshold", type=float, metavar="SHARE", default=_THRESHOLD,
                        help="by how much of an iteration a plan must be better to be proposed (default: "
                        f"{_THRESHOLD})")
    parser.set_defaults(dag_file=None, runnable=True, solver=None)  # no search: a run keeps its mode


def mixed(options: argparse.Namespace) -> int:
    if options.seconds is not None and not options.seconds > 0:
        raise InvalidInput(f"--seconds {options.seconds:g} is no time to search; give more than 0, as  --seconds 10  , "
                           "or leave it out for the usual number of layouts")
    known = None
    if options.runs:
        spec, notes = spec_of(options)
        known = calibration(spec, options.runs)
    else:
        spec, present = load_and_plan(options, elsewhere=True)
        notes = present.notes
    costed = _costed(spec, known)
    plan = _solved(options, spec, costed, known)
    print("\n".join([*_found(options, spec, costed, plan, known), *noted(notes)]))
    return 0


def explain(options: argparse.Namespace) -> int:
    from planners.heterogeneous.plan_file import digests_of, placement_of

    spec, present = load_and_plan(options, obey=False, elsewhere=True)
    costed = _costed(spec)
    plan = read_plan_file(read(Path(options.plan), shown(options.plan)), digests_of(spec, costed.problem))
    placement = placement_of(costed.problem, plan)
    print("\n".join([*_described(spec, plan), *_explained(costed, placement), *_answers(spec, costed, placement, plan),
                     *_running(spec, options.plan, len(plan.ranks), present.notes)]))
    return 0


def replan(options: argparse.Namespace) -> int:
    if not 0 <= options.threshold < 1:
        raise InvalidInput(f"--threshold {options.threshold:g} is no share of an iteration; give one, as 0.1")
    spec, notes = spec_of(options)
    known = calibration(spec, options.runs)
    costed = _costed(spec, known)
    plan = _solved(options, spec, costed, known)
    better, summary = known.against(plan, options.runs[-1], options.threshold)
    lines = [summary]
    if better:
        lines += [*_found(options, spec, costed, plan, known), *(_resuming(options) if options.out else ())]
    elif options.explain:
        lines += known.report(options.runs)
    print("\n".join([*lines, *noted(notes)]))
    return 0


def _costed(spec: Spec, known: Calibration | None = None) -> CostedProblem:
    from planners.heterogeneous.layouts import CostedProblem
    from planners.heterogeneous.workload import problem_of

    return CostedProblem(known.problem if known else problem_of(spec))


def _found(options: argparse.Namespace, spec: Spec, costed: CostedProblem, plan: PlacedPlan,
           known: Calibration | None) -> Iterator[str]:
    """Write a plan to the file of `--out`; yield what it is, and what else was asked of it."""
    from planners.heterogeneous.plan_file import placement_of

    if options.out:
        text = dump(plan.model_dump(mode="json"), default_flow_style=None, width=110)
        _write(options.out, HEAD + text)
    yield from _described(spec, plan)
    if options.explain:
        placement = placement_of(costed.problem, plan)
        yield from (*_explained(costed, placement), *_answers(spec, costed, placement, plan),
                    *(known.report(options.runs) if known else ()))


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be written: {error.strerror}. Name a file in a folder that is there.") \
            from None


def _resuming(options: argparse.Namespace) -> Iterator[str]:
    run = options.runs[-1]
    elsewhere = ["--cluster", options.cluster] if Path(options.cluster) != Path(run, "cluster.yaml") else []
    yield from ("", "Stop the run, and let it go on by this plan:",
                "  " + shlex.join(["distflow", "resume", run, *elsewhere, "--plan", options.out]))


def _running(spec: Spec, path: str, ranks: int, notes: Iterable[str]) -> Iterator[str]:
    """Yield the chain that ranks would run by a plan, or why they cannot; then notes, of the run and of the plan."""
    from planners import apply_plan_file, plan

    yield ""
    try:
        own = apply_plan_file(spec, read(Path(path), shown(path)), ranks)
        applied = plan(own, ranks)
        yield from describe(replace(applied, notes=tuple(dict.fromkeys([*applied.notes, *notes]))), own)
    except InvalidInput as error:
        yield from ("No run can obey it:", str(error), *noted(notes))


def _solved(options: argparse.Namespace, spec: Spec, costed: CostedProblem, known: Calibration | None) -> PlacedPlan:
    from planners.heterogeneous.explain import impossible
    from planners.heterogeneous.plan_file import digests_of, written
    from planners.heterogeneous.runnable import ByRanks, runnable

    found, considered = _searched(options, spec, costed) if options.solver else ([], None)
    if not options.solver:
        best = runnable(spec, costed)
    elif options.runnable:  # a proof goes on to plans that ranks may be unable to run
        best = ByRanks(spec, costed).fastest(found)
    else:
        best = found[-1] if found else None
    if best is None:
        what = f"no placement {'that ranks can run fits into memory' if options.runnable else 'was found'}"
        hint = "See what else there is:  without --runnable" if options.runnable else "Give it more  --seconds"
        if options.runnable and options.solver and options.seconds is not None:
            what, hint = "no placement that ranks can run was found in that time", "Give it more  --seconds"
        raise InvalidInput(impossible(costed) or Diagnostic(what, None, hint))
    proven = found and best.seconds * _ROUNDED >= found[-1].seconds  # what is enumerated may be faster than these
    plan = written(costed.problem, best, digests_of(spec, costed.problem),
                   "runnable" if options.runnable else options.solver, min(costed.bound(), best.seconds))
    return plan.model_copy(update={"rest_seconds": known.rest if known else 0.0,
                                   "bound_considered": considered if proven else None})


def _searched(options: argparse.Namespace, spec: Spec,
              costed: CostedProblem) -> tuple[list[Placement], float | None]:
    """Search, and prove which answer is the best of the layouts considered if the solver is to; show how far that is on
    a terminal. With --runnable only groups and splits that runs have are considered. Return the answers, each better
    than the one before, and what is proven."""
    from rich.console import Console

    from planners.heterogeneous.exact import prove
    from planners.heterogeneous.layouts import CostedProblem
    from planners.heterogeneous.runnable import run_freedom, search_runnable
    from planners.heterogeneous.search import BUDGET, search

    limited = CostedProblem(replace(costed.problem, freedom=run_freedom(spec, costed.problem))) \
        if options.runnable else costed
    end = float("inf") if options.seconds is None else time.monotonic() + options.seconds

    def stop() -> bool:  # planners have no clock
        return time.monotonic() >= end

    answers: list[Placement] = []
    considered = None
    with Console(stderr=True).status("searching") as status:
        given = options.seed, BUDGET if options.seconds is None else sys.maxsize, stop, options.within
        for found in search_runnable(spec, costed, limited, *given) if options.runnable else \
                search(costed.problem, *given, costed):
            answers += [found.placement] if found.placement and found.placement not in answers[-1:] else []
            status.update(_progress("search", answers, found.bound, f"{found.evaluations} layouts and placements"))
        for proof in prove(limited.problem, answers[-1], stop, costed=limited) \
                if answers and options.solver == "ilp" else ():
            answers += [proof.placement] if proof.placement and proof.placement not in answers[-1:] else []
            considered = proof.bound
            status.update(_progress("proof", answers, considered, f"{proof.open} groupings open"))
            if proof.gap <= options.within:
                break
    return answers, considered


def _progress(what: str, answers: Sequence[Placement], bound: float, more: str) -> str:
    from planners.heterogeneous.explain import duration

    return f"{what}: best {duration(answers[-1].seconds if answers else 0.0)}, bound {duration(bound)}, {more}"


def _toys(spec: Spec) -> Iterator[str]:
    """Yield a note if models that are meant for a processor are planned on data-centre devices."""
    from planners.memory import SMALL

    fast = max((rate for device in spec.cluster.devices.values() for rate in device.tflops.values()), default=0.0)
    embedded = [role for role, settings in spec.run.roles.items()
                if role in spec.shapes and spec.shapes[role].parameters <= SMALL
                and settings.model is not None and settings.model.path in (None, START_MODEL)]
    if embedded and fast >= _DATA_CENTRE:
        yield (f"This plan is a toy: `{embedded[0]}` is a tiny model of {spec.shapes[embedded[0]].parameters:,} "
               f"parameters, not one for such devices. Name yours:  --set roles.{embedded[0]}.model=FOLDER")


def _described(spec: Spec, plan: PlacedPlan) -> Iterator[str]:
    from planners.heterogeneous.explain import duration

    yield (f"{spec.dag.name} on {spec.cluster.name}, mode {spec.run.mode}, solver {plan.solver} "
           "(a prediction of the cost model, not a measurement)")
    yield (f"an iteration: {duration(plan.seconds + plan.rest_seconds)}; no plan takes less than "
           f"{duration(plan.bound + plan.rest_seconds)} (gap {1 - plan.bound / plan.seconds:.1%})")
    if plan.bound_considered is not None:
        least = duration(plan.bound_considered + plan.rest_seconds)
        yield "it is the best of the layouts considered" if plan.bound_considered >= plan.seconds * (1 - 1e-6) \
            else f"the best of the layouts considered takes at least {least}"
    if len(plan.groups) == 1 and spec.run.mode != "sync":
        yield f"in its one group all tasks take turns: it runs in mode sync, not {spec.run.mode}"
    yield from _toys(spec)
    for number, group in enumerate(plan.groups, 1):
        devices = " + ".join(f"{count} {name}" for name, count in group.devices.items())
        yield from ("", f"group {number}: {devices}")
        for name in group.tasks:
            task = plan.tasks[name]
            yield f"  {name}  dp {task.dp}, tp {task.tp}, pp {task.pp}" \
                + (f", ep {task.ep}" if task.ep > 1 else "") + f", {task.micro_rows} rows a micro-batch"
            for shares in task.shares:
                yield f"    {shares.count} × {shares.rows} rows on {' → '.join(_runs(shares.stages, task.layers))}"


def _runs(stages: list[str], layers: list[int]) -> Iterator[str]:
    """Yield stages with their layers, equal neighbours in one: `hopper layers 9 9`."""
    word = "layers "
    for stage, run in itertools.groupby(zip(stages, layers), key=lambda pair: pair[0]):
        yield f"{stage} {word}{' '.join(str(count) for _, count in run)}"
        word = ""


def _explained(costed: CostedProblem, placement: Placement) -> Iterator[str]:
    from planners.heterogeneous.explain import bounds, duration, gantt, helps, picture

    yield from ("", "what bounds each task")
    found = bounds(costed.problem, placement)
    yield from table([(bound.task, duration(bound.seconds), str(bound)) for bound in found], right=(1,))
    yield from ("", "what would help most (this placement, with twice as much)")
    yield from table([(name, f"{times:.2f}x") for name, times in helps(costed.problem, placement) if times > 1.005])
    yield from ("", f"an iteration, {duration(placement.seconds)}", *gantt(costed, placement))
    yield from ("", "devices by group (. idles)", *picture(costed.problem, placement))


def _answers(spec: Spec, costed: CostedProblem, placement: Placement, plan: PlacedPlan) -> Iterator[str]:
    """Yield alternatives, whether the plan can be run, weights that are sent, and memory."""
    from planners.heterogeneous.explain import alternatives, duration, memory_of, weight_syncs

    yield from ("", "simple alternatives")
    yield from table([(name, duration(seconds) if seconds < float("inf") else "does not fit",
                       f"{seconds / placement.seconds:.2f}x" if seconds < float("inf") else "")
                      for name, seconds in alternatives(costed, placement)])
    yield from _can_run(spec, costed, placement, plan)
    yield from ("", "weights that are sent in an iteration")
    rows = [(f"{sync.source} → {sync.target}", f"{sync.nbytes / 1e9:.2f} GB", duration(sync.seconds))
            for sync in weight_syncs(costed, placement)]
    yield from table(rows) or ["  none: what trains and what uses the weights is one engine"]
    yield from ("", "memory of the fullest device while a task computes (one that samples: with the cache of one row)")
    yield from table([(task, machine, f"{fills / 2**30:.1f} of {room / 2**30:.1f} GiB")
                      for task, machine, fills, room in memory_of(costed, placement)])


def _can_run(spec: Spec, costed: CostedProblem, placement: Placement, plan: PlacedPlan) -> Iterator[str]:
    """Yield whether ranks can run a plan, and if not, why, and what the best one that they can run takes."""
    from planners.apply_plan_file import machines_in_order
    from planners.heterogeneous.explain import duration
    from planners.heterogeneous.runnable import as_ranks_run, refusal, runnable

    yield ""
    if (why := refusal(spec, plan)) is None:
        yield f"can be run: yes, by {len(plan.ranks)} ranks on these machines in this order: " \
            + machines_in_order(costed.problem, plan)
        ran = as_ranks_run(spec, costed, placement)
        if ran is None or ran.seconds > placement.seconds * _ROUNDED:
            yield "  as ranks run it, with shares of 0 rows where a task leaves devices that have its model, whole " \
                "frozen models behind rollouts, and ranks that sample and train in step with others, it " + (
                    f"takes {duration(ran.seconds)}" if ran else "does not fit into memory")
        return
    yield f"can be run: no; {why.what}"
    try:
        best = runnable(spec, costed)
    except InvalidInput as error:
        yield f"  {error.mistakes[0].what}"
        return
    yield "  no plan that can be run fits" if best is None else (
        f"  a plan that can be run takes {duration(best.seconds)}, {best.seconds / placement.seconds:.2f} times "
        "as long:  --runnable")
