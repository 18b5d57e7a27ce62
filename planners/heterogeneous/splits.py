"""How the devices of each site are divided among groups: the genetic search's individuals and its operators.

A split is the pools of a grouping. Crossover keeps what is near each other together: a child has all the sites of a
zone from the same parent (after the graph partitioning of Soper et al. 2004, which HetRL §4 takes up).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations, product

import numpy as np

from planners.heterogeneous.problem import Hardware, Pool, Site

Split = tuple[Pool, ...]


def proportional(hardware: Hardware, shares: Sequence[float]) -> Split:
    """Every site divided in proportion to the groups' shares, rounded to counts that it allows."""
    return _pools(rounded(site, shares) for site in hardware.sites)


def whole_sites(hardware: Hardware, groups: int, random: np.random.Generator, most: int) -> list[Split]:
    """Each site for one group, or for none: every such split if they are few, else some, drawn, without idle sites."""
    sites = hardware.sites
    if (groups + 1) ** len(sites) <= most:
        owners = list(product(range(groups + 1), repeat=len(sites)))
    else:
        owners = random.integers(0, groups, (most, len(sites))).tolist()
    return [_pools([site.devices * (group == owner) for group in range(groups)] for site, owner in zip(sites, drawn))
            for drawn in owners if set(range(groups)) <= set(drawn)]


def is_whole(hardware: Hardware, split: Split) -> bool:
    """Whether no site is divided."""
    return all(sum(count > 0 for count in column) <= 1 for column in zip(*split))


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


def scattered(hardware: Hardware, groups: int, random: np.random.Generator) -> Split:
    """Every site divided at random."""
    return _pools(rounded(site, random.dirichlet(np.ones(groups)) + 1e-9) for site in hardware.sites)


def neighbours(hardware: Hardware, split: Split) -> Iterator[Split]:
    """Splits in which one group gives devices of a site to another, as few as can be or all; takes idle ones, or leaves
    its own idle; in which all groups leave a site; or in which two change what they have of two sites."""
    columns = [list(column) for column in zip(*split)]
    for index, site in enumerate(hardware.sites):
        for changed in _given(site, columns[index]):
            yield _pools([*columns[:index], changed, *columns[index + 1:]])
    for one, other in combinations(range(len(columns)), 2):
        for giver, taker in permutations(range(len(split)), 2):
            if columns[one][giver] and columns[other][taker]:
                changed = [list(column) for column in columns]
                _pass(hardware.sites[one], changed[one], giver, taker)
                _pass(hardware.sites[other], changed[other], taker, giver)
                yield _pools(changed)


def _given(site: Site, column: list[int]) -> Iterator[list[int]]:
    for giver, taker in permutations(range(len(column)), 2):
        for less in sorted({_most(site, column[giver] - 1), 0}) if column[giver] else ():
            changed = list(column)
            _pass(site, changed, giver, taker, less)
            yield changed
    for giver in range(len(column)):
        if column[giver]:
            yield [*column[:giver], 0, *column[giver + 1:]]
    yield [0] * len(column)
    for taker in range(len(column)):
        grown = _most(site, column[taker] + site.devices - sum(column))
        if grown > column[taker]:
            yield [*column[:taker], grown, *column[taker + 1:]]


def _pass(site: Site, column: list[int], giver: int, taker: int, less: int = 0) -> None:
    """Leave the giver `less` devices; the taker gets what is then free."""
    column[giver] = less
    column[taker] = _most(site, column[taker] + site.devices - sum(column))


def _pools(columns) -> Split:
    return tuple(zip(*(tuple(column) for column in columns)))


def _most(site: Site, limit: float) -> int:
    """The largest number that a pool may take within a limit."""
    return site.counts[max(0, bisect_right(site.counts, limit) - 1)]


def _next(site: Site, count: int) -> int | None:
    position = bisect_right(site.counts, count)
    return site.counts[position] if position < len(site.counts) else None
