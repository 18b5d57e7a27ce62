"""`distflow plan --place`: finds, explains and writes placements on mixed hardware, each as a run file."""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from distflow.cli.calibration import Calibration, calibration, spec_of
from distflow.cli.common import noted, table
from distflow.config.shipped import START_MODEL
from distflow.config.spec import Spec
from distflow.config.yaml_source import dump
from distflow.errors import Diagnostic, InvalidInput
from distflow.options import load_and_plan

if TYPE_CHECKING:
    from planners.heterogeneous.layouts import CostedProblem
    from planners.heterogeneous.problem import Placement, Problem

HEAD = "# Its layouts and groups are by the cost model, not measured; written by  distflow plan --place --out\n"
_ROUNDED = 1 + 1e-6  # predictions that differ less are equal
_DATA_CENTRE = 50.0  # TFLOP/s


def add_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--out", metavar="FILE", help="write the run file with its `layouts`, `groups` and `ranks`")
    group.add_argument("--explain", action="store_true", help="what bounds each task, what would help, weights that "
                       "are sent and memory; of runs, what was measured and predicted")
    group.add_argument("--solver", choices=("hybrid", "ilp"),
                       help="search fast (default), or search and then prove how far from the best of the layouts "
                       "considered the plan is")
    group.add_argument("--seed", type=int, help="of the search (default: 0)")
    group.add_argument("--seconds", type=float, metavar="N", help="search so long, not for the usual number of layouts")
    group.add_argument("--within", type=float, metavar="SHARE",
                       help="stop when the plan is proven to be this near to the best (with  --solver ilp  , of the "
                       "layouts considered), as 0.03")


def main(options: argparse.Namespace) -> int:
    if options.seconds is not None and not options.seconds > 0:
        raise InvalidInput(f"--seconds {options.seconds:g} is no time to search; give more than 0, as  --seconds 10  , "
                           "or leave it out for the usual number of layouts")
    from planners.heterogeneous.planned_run import machines_in_order, planned_run

    known = None
    if options.runs:
        spec, notes = spec_of(options)
        known = calibration(spec, options.runs)
    else:
        spec, present = load_and_plan(options, elsewhere=True)
        notes = present.notes
    costed = _costed(spec, known)
    best, considered = _solved(options, spec, costed)
    own = planned_run(spec, costed.problem, best)
    assert own
    rest = known.rest if known else 0.0
    heading = _heading(spec, options.solver or "hybrid", best, min(costed.bound(), best.seconds), considered, rest)
    lines = [*heading, *_placed(costed.problem, best), "",
             "machines, in the order of ranks: " + machines_in_order(costed.problem, best)]
    if options.explain:
        lines += [*_explained(costed, best), *(known.report(options.runs) if known else ())]
    if known:
        lines += ["", known.against(best.seconds, options.runs[-1])]
    if options.out:
        _write(options.out, f"{HEAD}{dump(own.resolved()['run'], default_flow_style=None, width=110)}")
        lines += ["", *_next(options, spec, own)]
    print("\n".join([*lines, *noted(notes)]))
    return 0


def _next(options: argparse.Namespace, spec: Spec, own: Spec) -> Iterator[str]:
    """Yield the commands that run by a plan, and that continue the run from which it was made."""
    yield "Run it:  " + shlex.join(["distflow", "run", options.dag_file or options.dag or str(spec.dag_source.file),
                                    "--run", options.out])
    if options.runs:
        settings = own.resolved()["run"]
        given = [f"{key}={json.dumps(settings[key])}" for key in ("mode", "groups", "layouts")]
        given += [f"roles.{name}.micro_batch_tokens={role.micro_batch_tokens}" for name, role in own.run.roles.items()
                  if role.micro_batch_tokens != spec.run.roles[name].micro_batch_tokens]
        yield "Or stop the run, and continue it by this plan:"
        yield "  " + shlex.join(["distflow", "resume", options.runs[-1], "--ranks", str(own.run.ranks),
                                 *(word for each in given for word in ("--set", each))])


def _costed(spec: Spec, known: Calibration | None = None) -> CostedProblem:
    from planners.heterogeneous.layouts import CostedProblem
    from planners.heterogeneous.workload import problem_of

    return CostedProblem(known.problem if known else problem_of(spec))


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be written: {error.strerror}. Name a file in a folder that is there.") \
            from None


def _solved(options: argparse.Namespace, spec: Spec, costed: CostedProblem) -> tuple[Placement, float | None]:
    """Return the best placement found, and a lower bound over the layouts that the exact solver considered."""
    from planners.heterogeneous.explain import impossible
    from planners.heterogeneous.runnable import ByRanks

    found, considered = _searched(options, spec, costed)
    best = ByRanks(spec, costed).fastest(found)  # a proof goes on to plans that ranks may be unable to run
    if best is None:
        what, hint = "no placement that ranks can run fits into memory", "Take more or larger devices."
        if options.seconds is not None:
            what, hint = "no placement that ranks can run was found in that time", "Give it more  --seconds"
        raise InvalidInput(impossible(costed) or Diagnostic(what, None, hint))
    proven = found and best.seconds * _ROUNDED >= found[-1].seconds  # what is enumerated may be faster than these
    return best, considered if proven else None


def _searched(options: argparse.Namespace, spec: Spec,
              costed: CostedProblem) -> tuple[list[Placement], float | None]:
    """Search, and prove which answer is the best of the layouts considered if the solver is to; show how far that is on
    a terminal. Only groups and splits that runs have are considered. Return the answers, each better than the one
    before, and what is proven."""
    from rich.console import Console

    from planners.heterogeneous.exact import prove
    from planners.heterogeneous.layouts import CostedProblem
    from planners.heterogeneous.runnable import run_freedom, search_runnable
    from planners.heterogeneous.search import BUDGET

    limited = CostedProblem(replace(costed.problem, freedom=run_freedom(spec, costed.problem)))
    end = float("inf") if options.seconds is None else time.monotonic() + options.seconds

    def stop() -> bool:  # planners have no clock
        return time.monotonic() >= end

    answers: list[Placement] = []
    considered = None
    with Console(stderr=True).status("searching") as status:
        budget, within = BUDGET if options.seconds is None else sys.maxsize, options.within or 0.0
        for found in search_runnable(spec, costed, limited, options.seed or 0, budget, stop, within):
            answers += [found.placement] if found.placement and found.placement not in answers[-1:] else []
            status.update(_progress("search", answers, found.bound, f"{found.evaluations} layouts and placements"))
        for proof in prove(limited.problem, answers[-1], stop, costed=limited) \
                if answers and options.solver == "ilp" else ():
            answers += [proof.placement] if proof.placement and proof.placement not in answers[-1:] else []
            considered = proof.bound
            status.update(_progress("proof", answers, considered, f"{proof.open} groupings open"))
            if proof.gap <= within:
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


def _heading(spec: Spec, solver: str, best: Placement, bound: float, considered: float | None,
             rest: float) -> Iterator[str]:
    """Yield what a placement promises. `rest`: seconds of an iteration beside its tasks."""
    from planners.heterogeneous.explain import duration

    yield (f"{spec.dag.name} on {spec.cluster_name}, mode {spec.run.mode}, solver {solver} "
           "(a prediction of the cost model, not a measurement)")
    yield (f"an iteration: {duration(best.seconds + rest)}; no plan takes less than {duration(bound + rest)} "
           f"(gap {1 - bound / best.seconds:.1%})")
    if considered is not None:
        yield "it is the best of the layouts considered" if considered >= best.seconds * (1 - 1e-6) \
            else f"the best of the layouts considered takes at least {duration(considered + rest)}"
    if len(best.grouping) == 1 and spec.run.has_samplers:
        yield f"in its one group all tasks take turns: it runs in mode sync, not {spec.run.mode}"
    yield from _toys(spec)


def _placed(problem: Problem, best: Placement) -> Iterator[str]:
    """Yield the groups of a placement, with the devices and layouts of their tasks."""
    names = [device_group.name for device_group in problem.hardware.device_groups]
    for number, (group, subset) in enumerate(zip(best.grouping, best.subsets), 1):
        devices = " + ".join(f"{count} {name}" for count, name in zip(subset, names) if count)
        yield from ("", f"group {number}: {devices}")
        for task in group:
            layout = best.layouts[task]
            dp, tp, pp, ep, micro = layout.strategy
            yield f"  {problem.tasks[task].name}  dp {dp}, tp {tp}, pp {pp}" \
                + (f", ep {ep}" if ep > 1 else "") + f", {micro} rows a micro-batch"
            for kind, rows in zip(layout.arrangement, layout.rows):
                stages = [names[stage] for stage in kind.stages]
                yield f"    {kind.count} × {rows} rows on {' → '.join(_runs(stages, layout.layers))}"


def _runs(stages: Sequence[str], layers: Sequence[int]) -> Iterator[str]:
    """Yield stages with their layers, equal neighbours in one: `hopper layers 9 9`."""
    word = "layers "
    for stage, run in itertools.groupby(zip(stages, layers), key=lambda pair: pair[0]):
        yield f"{stage} {word}{' '.join(str(count) for _, count in run)}"
        word = ""


def _explained(costed: CostedProblem, placement: Placement) -> Iterator[str]:
    from planners.heterogeneous.explain import bounds, duration, helps, memory_of, weight_syncs

    yield from ("", "what bounds each task")
    found = bounds(costed.problem, placement)
    yield from table([(bound.task, duration(bound.seconds), str(bound)) for bound in found], right=(1,))
    yield from ("", "what would help most (this placement, with twice as much)")
    yield from table([(name, f"{times:.2f}x") for name, times in helps(costed.problem, placement) if times > 1.005])
    yield from ("", "weights that are sent in an iteration")
    rows = [(f"{sync.source} → {sync.target}", f"{sync.nbytes / 1e9:.2f} GB", duration(sync.seconds))
            for sync in weight_syncs(costed, placement)]
    yield from table(rows) or ["  none: what trains and what uses the weights is one engine"]
    yield from ("", "memory of the fullest device while a task computes (one that samples: with the cache of one row)")
    yield from table([(task, machine, f"{fills / 2**30:.1f} of {room / 2**30:.1f} GiB")
                      for task, machine, fills, room in memory_of(costed, placement)])
