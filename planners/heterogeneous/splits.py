"""How the devices of each site are divided among groups: the genetic search's individuals and its operators.

A split is the pools of a grouping. Crossover keeps what is near each other together: a child has all the sites of a
zone from the same parent (after the graph partitioning of Soper et al. 2004, which HetRL §4 takes up).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import permutations

import numpy as np

from planners.heterogeneous.problem import Hardware, Pool, Site

Split = tuple[Pool, ...]


def proportional(hardware: Hardware, shares: Sequence[float]) -> Split:
    """Every site divided in proportion to the groups' shares, rounded to counts that it allows."""
    return _pools(rounded(site, shares) for site in hardware.sites)


def whole_sites(hardware: Hardware, shares: Sequence[float], random: np.random.Generator) -> Split:
    """Each site for one group, drawn by the groups' shares."""
    owners = random.choice(len(shares), size=len(hardware.sites), p=np.asarray(shares) / sum(shares)).tolist()
    return _pools([site.devices * (group == owner) for group in range(len(shares))]
                  for site, owner in zip(hardware.sites, owners))


def rounded(site: Site, shares: Sequence[float]) -> list[int]:
    """A site's devices divided by shares; what rounding leaves goes to whoever lacks most."""
    total = sum(shares)
    wanted = [site.devices * share / total for share in shares]
    counts = [_most(site, want) for want in wanted]
    while True:
        free = site.devices - sum(counts)
        for group in sorted(range(len(counts)), key=lambda group: counts[group] - wanted[group]):
            grown = _next(site, counts[group])
            if grown is not None and grown - counts[group] <= free:
                counts[group] = grown
                break
        else:
            return counts


def crossed(hardware: Hardware, one: Split, other: Split, random: np.random.Generator) -> Split:
    """A child: the sites of each zone from one of two parents."""
    zones = sorted({site.zone for site in hardware.sites})
    from_one = dict(zip(zones, random.integers(0, 2, len(zones)).astype(bool).tolist()))
    columns = [[pool[index] for pool in (one if from_one[site.zone] else other)]
               for index, site in enumerate(hardware.sites)]
    return _pools(columns)


def mutated(hardware: Hardware, split: Split, random: np.random.Generator) -> Split:
    """One site divided anew, at random."""
    index = int(random.integers(len(hardware.sites)))
    columns = [list(column) for column in zip(*split)]
    columns[index] = rounded(hardware.sites[index], random.dirichlet(np.ones(len(split))) + 1e-9)
    return _pools(columns)


def neighbours(hardware: Hardware, split: Split) -> Iterator[Split]:
    """Splits in which one group gives devices of one site to another: as few as can be, or all."""
    columns = [list(column) for column in zip(*split)]
    for index, site in enumerate(hardware.sites):
        for giver, taker in permutations(range(len(split)), 2):
            have = columns[index][giver]
            for less in {_most(site, have - 1), 0} if have else ():
                changed = list(columns[index])
                changed[giver] = less
                changed[taker] = _most(site, changed[taker] + site.devices - sum(changed))
                yield _pools([*columns[:index], changed, *columns[index + 1:]])
        for taker in range(len(split)):
            idle = site.devices - sum(columns[index])
            grown = _most(site, columns[index][taker] + idle)
            if grown > columns[index][taker]:
                changed = list(columns[index])
                changed[taker] = grown
                yield _pools([*columns[:index], changed, *columns[index + 1:]])


def _pools(columns) -> Split:
    return tuple(zip(*(tuple(column) for column in columns)))


def _most(site: Site, limit: float) -> int:
    """The largest number that a pool may take within a limit."""
    return site.counts[max(0, bisect_right(site.counts, limit) - 1)]


def _next(site: Site, count: int) -> int | None:
    position = bisect_right(site.counts, count)
    return site.counts[position] if position < len(site.counts) else None
