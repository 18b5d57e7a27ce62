"""Faults to order that could never happen are mistakes of the run file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from distflow.schema.errors import Mistake
from distflow.schema.plan import TRAINER
from distflow.schema.robust import Fault
from distflow.schema.spec import Spec


def check_faults(spec: Spec, groups: Mapping[str, range]) -> list[Mistake]:
    """What is wrong with each fault, where the run file has it. `groups`: the ranks of each."""
    return [Mistake(f"fault {number}: {what}", spec.run_source.spot(("faults", number, key)), hint)
            for number, fault in enumerate(spec.run.faults) for key, what, hint in _wrong(spec, fault, groups)]


def _wrong(spec: Spec, fault: Fault, groups: Mapping[str, range]) -> Iterator[tuple[str, str, str]]:
    """The key that is wrong, what is wrong with it, and what to write instead."""
    if fault.group not in groups:
        yield "group", f"mode {spec.run.mode} has no group `{fault.group}`: all ranks are the trainer's", \
            "Take `group` out, or write  mode: async"
        return
    ranks = groups[fault.group]
    if fault.rank is not None and ranks and fault.rank not in ranks:
        yield "rank", f"rank {fault.rank} is not one of the {fault.group}'s", \
            f"It has {ranks.start} to {ranks.stop - 1}; without `rank` the seed draws one of them."
    if fault.phase == "starting":
        yield "phase", "a worker that starts has no step yet", "Name another phase."
    if fault.kind == "corrupt" and (fault.group != TRAINER or not spec.run.robust.snapshots):
        yield "kind", "only a trainer's copies in memory can be changed, where `robust.snapshots` is on", ""
    if fault.step is not None and fault.step > spec.run.steps:
        yield "step", f"there is no step {fault.step} in a run of {spec.run.steps}", ""
