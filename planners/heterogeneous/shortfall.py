"""Why a work fits nowhere: its tenant, what a device would need at least, and how much is missing."""

from __future__ import annotations

from collections.abc import Iterator

from distflow.schema.errors import Mistake
from planners.heterogeneous.arrangements import blocks_of
from planners.heterogeneous.costed import Costed
from planners.heterogeneous.layouts import slices_of, strategies
from planners.heterogeneous.problem import TRAIN, Strategy

_GIB = 2**30


def impossible(costed: Costed) -> list[Mistake]:
    """A mistake for each tenant that no layout on the whole cluster has room for."""
    everything, found = costed.problem.hardware.all, {}
    for number, work in enumerate(costed.problem.works):
        if work.tenant not in found and costed.layouts.best(number, everything, False) is None:
            found[work.tenant] = _shortfall(costed, number)
    return list(found.values())


def _shortfall(costed: Costed, number: int) -> Mistake:
    """For the device and the strategy that come nearest to having room."""
    work, sites = costed.problem.works[number], costed.problem.hardware.sites
    missing, needed, site, strategy = min(_needs(costed, number), key=lambda need: need[0])
    state = "weights, gradients and optimizer" if work.kind == TRAIN else "weights"
    what = (f"`{work.tenant}` ({work.name}) fits no device: cut as far as can be (dp {strategy.dp}, tp {strategy.tp}, "
            f"pp {strategy.pp}), {state} and activations need {needed / _GIB:.2f} GiB, and of a {sites[site].kind} "
            f"{(needed - missing) / _GIB:.2f} GiB may be filled: {missing / _GIB:.2f} GiB too little")
    return Mistake(what, None, "Take more or larger devices, a smaller model, shorter rows, or set  recompute: true  "
                               "and a lower  micro_batch_tokens  for its role.")


def _needs(costed: Costed, number: int) -> Iterator[tuple[float, float, int, Strategy]]:
    """Missing bytes, needed bytes, and where: of the fullest stage, for each strategy and site."""
    work, cost, hardware = costed.problem.works[number], costed.costs.works[number], costed.problem.hardware
    for tp in slices_of(work, [max(site.each for site in hardware.sites)]):
        blocks = sum(blocks_of(hardware.all, tp, hardware))
        for pp in range(1, min(blocks, work.layers) + 1):
            for strategy in strategies(work, blocks // pp, tp, pp):
                layers = -(-work.layers // pp)
                for index, site in enumerate(hardware.sites):
                    needed = cost.fills(strategy, 0, layers)
                    yield needed - cost.room(site), needed, index, strategy
