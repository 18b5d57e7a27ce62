"""A run as the joint problem sees it: which devices each work had, in which shares, and what was measured of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from distflow.schema.measured import Taken
from distflow.schema.plan import Layout as Ranks
from planners.heterogeneous.costed import Costed
from planners.heterogeneous.problem import (
    GENERATE,
    Grouping,
    Hardware,
    Layout,
    Measured,
    Placement,
    Pool,
    Problem,
    Replicas,
    Strategy,
    Work,
    shared,
)


class Share(NamedTuple):
    """A data-parallel share of a work: the sites of its stages, and what it took in an iteration."""

    stages: tuple[int, ...]
    taken: Taken


@dataclass(frozen=True)
class Ran:
    """A run. `problem` is what it was, with the lengths that its rows had; the rest is by work. `seconds` are those of
    an iteration."""

    problem: Problem
    strategies: tuple[Strategy, ...]
    shares: tuple[tuple[Share, ...], ...]
    grouping: Grouping
    pools: tuple[Pool, ...]
    seconds: float

    @property
    def durations(self) -> list[float]:
        """Of each work, as measured: until the last share is done."""
        return [max(share.taken.seconds for share in shares) for shares in self.shares]

    def layout(self, costed: Costed, number: int, shares: tuple[Share, ...] | None = None) -> Layout | None:
        """A work as this run has placed it, by a cost model; of the shares `shares` only, if they are given. As many
        rows as the model's problem has are divided as they were. None if it does not fit, though it ran."""
        of = self.shares[number] if shares is None else shares
        scale = costed.problem.works[number].rows / self.problem.works[number].rows
        return costed.costs.layout(number, self.strategies[number], tuple(Replicas(share.stages, 1) for share in of),
                                   tuple(round(share.taken.rows * scale) for share in of))

    def placement(self, costed: Costed) -> Placement | None:
        """The placement that it has, by a cost model."""
        layouts = [self.layout(costed, number) for number in range(len(self.shares))]
        if None in layouts:
            return None
        home = {work: shared(self.problem, group) for group in self.grouping for work in group}
        durations = [layout.takes(home[work]) for work, layout in enumerate(layouts)]
        return Placement(self.grouping, self.pools, tuple(layouts),
                         costed.objective.seconds(self.grouping, self.pools, durations))

    def rest(self, costed: Costed) -> float:
        """Seconds of an iteration that no work takes: rewards, what the host computes, and the step's end."""
        return max(0.0, self.seconds - costed.objective.seconds(self.grouping, self.pools, self.durations))


def ran(problem: Problem, layouts: Mapping[str, Ranks], taken: Mapping[tuple[str, int], Taken], seconds: float) -> Ran:
    """A run in mode sync.

    Args:
        problem: what it was, on this hardware.
        layouts: which ranks had each work, by name.
        taken: of each work and rank, medians over the steps.
        seconds: of a step, too.
    """
    homes = [site for site, devices in enumerate(problem.hardware.all) for _ in range(devices)]
    shares = tuple(_shares(work, layouts[work.name], taken, homes) for work in problem.works)
    problem = replace(problem, works=tuple(map(lengthened, problem.works, problem.works, shares)))
    ranks = [range(layouts[work.name].first, layouts[work.name].last + 1) for work in problem.works]
    grouping = _grouping(ranks)
    pools = tuple(_pool(problem.hardware, homes, {rank for work in group for rank in ranks[work]})
                  for group in grouping)
    strategies = tuple(_strategy(work, layouts[work.name]) for work in problem.works)
    return Ran(problem, strategies, shares, grouping, pools, seconds)


def lengthened(work: Work, before: Work, shares: tuple[Share, ...]) -> Work:
    """A work with the lengths of a run in which it was `before`. Prompts are as long as they were; of responses it is
    taken over how long they were beside the longest allowed. Of what showed no tokens nothing is known."""
    rows = sum(share.taken.rows for share in shares)
    if not rows:
        return work
    prompt, read, response = (sum(getattr(share.taken, name) for share in shares) / rows
                              for name in ("prompt", "read", "response"))
    longest, scale = max(share.taken.longest for share in shares), work.response / before.response
    known = {"prompt": min(prompt, work.prompt), "read": min(read, work.prompt)} if prompt else {}
    if response:
        known |= {"response": min(response * scale, work.response),
                  "longest": max(1.0, min(longest * scale, work.response))}
    return replace(work, measured=work.measured._replace(**known))


def _shares(work: Work, layout: Ranks, taken: Mapping[tuple[str, int], Taken], homes: list[int]) -> tuple[Share, ...]:
    found = []
    for share in range(layout.dp):
        first, each = layout.first + share * layout.width, layout.tp * layout.cp
        ranks = range(first, first + layout.width)
        seen = [taken[work.name, rank] for rank in ranks]
        found.append(Share(tuple(homes[rank] for rank in ranks[::each]),
                           replace(seen[0], seconds=max(one.seconds for one in seen))))
    return _whole(work, found)


def _whole(work: Work, shares: list[Share]) -> tuple[Share, ...]:
    """The same seconds for as many rows as the batch has: filters drop some and draw others in their place, and a plan
    is for a batch."""
    rows = sum(share.taken.rows for share in shares)
    factor = work.rows / rows if rows else 1.0
    return tuple(share._replace(taken=replace(share.taken, **{
        name: round(factor * getattr(share.taken, name)) for name in ("rows", "prompt", "read", "response")}))
                 for share in shares)


def _grouping(ranks: list[range]) -> Grouping:
    """Works that have a rank in common take turns."""
    groups: list[tuple[set[int], list[int]]] = []
    for work, mine in enumerate(ranks):
        together = [group for group in groups if group[0] & set(mine)]
        groups = [group for group in groups if group not in together]
        groups.append((set(mine).union(*(group[0] for group in together)),
                       sorted([work, *(other for group in together for other in group[1])])))
    return tuple(sorted(tuple(works) for _, works in groups))


def _pool(hardware: Hardware, homes: list[int], ranks: set[int]) -> Pool:
    return tuple(sum(homes[rank] == site for rank in ranks) for site in range(len(hardware.sites)))


def _strategy(work: Work, layout: Ranks) -> Strategy:
    """Micro-batches as engines cut them: by tokens, as long as the rows really are."""
    tokens = work.read if work.kind == GENERATE else work.whole
    micro = min(max(1, int(work.micro_tokens // max(tokens, 1.0))), work.rows)
    return Strategy(layout.dp, layout.tp, layout.pp, layout.ep, micro)


def unmeasured(problem: Problem) -> Problem:
    """The problem as it is without runs."""
    return replace(problem, works=tuple(replace(work, measured=Measured()) for work in problem.works))
