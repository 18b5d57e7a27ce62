"""`distflow plan --solver` and `--plan`: finds or reads a plan for mixed hardware, explains and writes it."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from distflow.cli import calibration
from distflow.cli.common import load_and_plan
from distflow.cli.plan_text import describe
from distflow.config.load import Spec
from distflow.config.yaml_source import read
from distflow.errors import Diagnostic, InvalidInput, shown
from distflow.plan_file import Digests, PlacedPlan, read_plan_file

if TYPE_CHECKING:
    from planners.heterogeneous.layouts import CostedProblem
    from planners.heterogeneous.problem import Placement

HEAD = "# A prediction of the cost model, not a measurement; written by  distflow plan --out\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    mixed = parser.add_argument_group("mixed hardware", "a plan for a --cluster with `machines`, by a cost model")
    mixed.add_argument("--solver", choices=("hybrid", "ilp"),
                       help="search fast, or search and then prove the best of the layouts that are considered")
    mixed.add_argument("--runnable", action="store_true",
                       help="of what the solvers may choose, only what  launch.py --plan  can run")
    mixed.add_argument("--out", metavar="FILE", help="write the plan")
    mixed.add_argument("--explain", action="store_true", help="what bounds each task, what would help, and a chart")
    mixed.add_argument("--svg", metavar="FILE", help="draw the placement")
    mixed.add_argument("--seed", type=int, default=0, help="of the search")
    mixed.add_argument("--seconds", type=float, metavar="N", help="search so long, not for the usual number of layouts")
    mixed.add_argument("--within", type=float, default=0.0, metavar="SHARE",
                       help="stop when the plan is proven to be this near to the best, as 0.03")
    calibration.add_arguments(mixed)


def asked(options: argparse.Namespace) -> bool:
    """Return whether the options ask for a plan for mixed hardware; `--from` does so too.

    Raises:
        InvalidInput: options exclude each other, or need another one.
    """
    if options.solver and options.plan:
        raise InvalidInput("a plan is either found (--solver) or read (--plan). Leave one of them out.")
    if options.runs and options.plan:
        raise InvalidInput("a plan that is read is not calibrated. Leave --from or --plan out.")
    if options.replan and not options.runs:
        raise InvalidInput("--replan asks for a better plan of a run. Name it:  --from RUN")
    if options.threshold is not None and not options.replan:
        raise InvalidInput("--threshold says what --replan proposes. Add  --replan  or leave it out.")
    options.threshold = calibration.THRESHOLD if options.threshold is None else options.threshold
    if not 0 <= options.threshold < 1:
        raise InvalidInput(f"--threshold {options.threshold:g} is no share of an iteration; give one, as 0.1")
    if options.runs and not options.solver:
        options.solver = "hybrid"
    options.runnable |= options.replan
    if options.runnable:
        _check_runnable(options)
    wanted = options.solver or options.plan
    for name in ("runnable", "out", "explain", "svg"):
        if getattr(options, name) and not wanted:
            other = "" if name == "runnable" else "  or  --plan FILE"
            raise InvalidInput(f"--{name} is for plans on mixed hardware. Add  --solver hybrid{other}")
    return bool(wanted)


def _check_runnable(options: argparse.Namespace) -> None:
    """
    Raises:
        InvalidInput: options of the search are given, but plans that can be run are few and all enumerated.
    """
    if options.plan:
        raise InvalidInput("--runnable is for a plan that is found; one that is read says whether it can be run. Leave "
                           "--runnable or --plan out.")
    others = {"--solver ilp": options.solver == "ilp", "--seconds": options.seconds is not None,
              "--within": options.within > 0}
    if any(others.values()):
        asked_too = " and ".join(name for name, asked_for in others.items() if asked_for)
        raise InvalidInput(f"{asked_too} with --runnable (or --replan): plans that can be run are few and all gone "
                           f"through. Leave {asked_too} out.")


def main(options: argparse.Namespace) -> int:
    from planners.heterogeneous.layouts import CostedProblem
    from planners.heterogeneous.plan_file import digests_of, placement_of
    from planners.heterogeneous.workload import problem_of

    spec = calibration.spec_of(options) if options.runs else load_and_plan(options, obey=False)[0]
    known = calibration.calibration(spec, options.runs) if options.runs else None
    costed = CostedProblem(known.problem if known else problem_of(spec))
    made_for = digests_of(spec, costed.problem)
    plan = _read(options.plan, made_for) if options.plan else \
        _solved(options, spec, costed, made_for, known.rest if known else 0.0)
    better, summary = known.against(plan, options.runs[-1], options.threshold) if options.replan else (True, "")
    placement = placement_of(costed.problem, plan)
    if options.out and better:
        text = yaml.safe_dump(plan.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=110)
        _write(options.out, HEAD + text)
    if options.svg and better:
        from planners.heterogeneous.explain import svg

        _write(options.svg, svg(costed.problem, placement))
    lines = [summary] if summary else []
    lines += _described(spec, plan) if better else ()
    lines += _explained(costed, placement) if options.explain and better else ()
    lines += known.report(options.runs) if options.explain and known else ()
    lines += _running(spec, options.plan) if options.plan else ()
    lines += _resuming(options) if options.replan and options.out and better else ()
    print("\n".join(lines))
    return 0


def _resuming(options: argparse.Namespace) -> Iterator[str]:
    run = options.runs[-1]
    elsewhere = ["--cluster", options.cluster] if Path(options.cluster) != Path(run, "cluster.yaml") else []
    yield from ("", "Stop the run, and let it go on by this plan:",
                "  " + shlex.join(["distflow", "resume", run, *elsewhere, "--plan", options.out]))


def _running(spec: Spec, path: str) -> Iterator[str]:
    """Yield the chain that ranks would run by a plan, or why they cannot."""
    from planners import apply_plan_file, plan

    yield ""
    try:
        own = apply_plan_file(spec, read(Path(path), shown(path)), spec.cluster.size)
        yield from describe(plan(own, own.run.ranks), own)
    except InvalidInput as error:
        yield from ("No run can obey it:", str(error))


def _read(path: str, made_for: Digests) -> PlacedPlan:
    return read_plan_file(read(Path(path), shown(path)), made_for)


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be written: {error.strerror}. Name a file in a folder that is there.") \
            from None


def _solved(options: argparse.Namespace, spec: Spec, costed: CostedProblem, made_for: Digests,
            rest: float) -> PlacedPlan:
    from planners.heterogeneous.plan_file import written
    from planners.heterogeneous.runnable import ranks_of

    ranks, solver = None, options.solver
    if options.runnable:
        solver = "runnable"
        best, bound = _runnable(spec, costed)
        ranks = ranks_of(costed.problem, best)
    else:
        best, bound = _searched(options, costed)
    plan = written(costed.problem, best, made_for, solver, min(bound, best.seconds), ranks)
    return plan.model_copy(update={"rest_seconds": rest})


def _runnable(spec: Spec, costed: CostedProblem) -> tuple[Placement, float]:
    from planners.heterogeneous.explain import impossible
    from planners.heterogeneous.runnable import runnable

    best = runnable(spec, costed)
    if best is None:
        raise InvalidInput(impossible(costed) or Diagnostic("no placement that ranks can run fits into memory", None,
                                                            "See what else there is:  without --runnable"))
    return best, costed.bound()


def _searched(options: argparse.Namespace, costed: CostedProblem) -> tuple[Placement, float]:
    from planners.heterogeneous.explain import impossible
    from planners.heterogeneous.search import search

    end = time.monotonic() + options.seconds if options.seconds else float("inf")

    def stop() -> bool:  # planners have no clock
        return time.monotonic() >= end

    found = None
    budget = None if options.seconds is None else sys.maxsize
    for found in search(costed.problem, options.seed, budget, stop, options.within, costed):
        _progress("search", found.placement and found.placement.seconds, found.bound, f"{found.evaluations} layouts")
    if found is None or found.placement is None:
        raise InvalidInput(impossible(costed) or Diagnostic("no placement was found", None, "Give it more  --seconds"))
    best, bound = found.placement, found.bound
    if options.solver == "ilp":
        best, bound = _proven(costed, best, stop, options.within)
    _progress()
    return best, bound


def _proven(costed: CostedProblem, best: Placement, stop: Callable[[], bool], within: float) -> tuple[Placement, float]:
    from planners.heterogeneous.exact import prove

    bound = 0.0
    for proof in prove(costed.problem, best, stop, costed=costed):
        best, bound = proof.placement, proof.bound
        _progress("proof", best.seconds, bound, f"{proof.open} groupings open")
        if proof.gap <= within:
            break
    return best, bound


def _progress(what: str = "", seconds: float | None = None, bound: float = 0.0, more: str = "") -> None:
    """Overwrite the progress line on a terminal; without arguments, clear it."""
    if sys.stderr.isatty():
        share = bound / seconds if seconds else 0.0
        bar = "█" * round(20 * share)
        line = f"{what} |{bar:20}| best {seconds or 0:.2f} s, bound {bound:.2f} s, {more}" if what else ""
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def _described(spec: Spec, plan: PlacedPlan) -> Iterator[str]:
    yield (f"{spec.dag.name} on {spec.cluster.name}, mode {spec.run.mode}, solver {plan.solver} "
           "(a prediction of the cost model, not a measurement)")
    seconds, bound = (part + plan.rest_seconds for part in (plan.seconds, plan.bound))
    yield (f"an iteration: {seconds:.2f} s; no plan takes less than {bound:.2f} s "
           f"(gap {1 - plan.bound / plan.seconds:.1%})")
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
    """Yield stages with their layers, equal neighbours in one: `hopper 9 9`."""
    previous = None
    runs: list[str] = []
    for stage, count in zip(stages, layers):
        if stage == previous:
            runs[-1] += f" {count}"
        else:
            runs.append(f"{stage} {'layers ' if not runs else ''}{count}")
        previous = stage
    yield from runs


def _explained(costed: CostedProblem, placement: Placement) -> Iterator[str]:
    from planners.heterogeneous.explain import bounds, gantt, helps, picture

    yield from ("", "what bounds each task")
    found = bounds(costed.problem, placement)
    width = max(len(bound.task) for bound in found)
    yield from (f"  {bound.task:{width}}  {bound.seconds:9.2f} s  {bound}" for bound in found)
    yield from ("", "what would help most (this placement, with twice as much)")
    yield from (f"  {name}: {times:.2f}x" for name, times in helps(costed.problem, placement) if times > 1.005)
    yield from ("", f"an iteration, {placement.seconds:.2f} s", *gantt(costed, placement))
    yield from ("", "devices by group (. idles)", *picture(costed.problem, placement))
