"""Which site each tasklet of a work is at.

The slices of a stage are neighbours in one machine and make a *block*. A pool offers so many blocks of each site, and
an arrangement gives each (share, stage) one of them. Few blocks are arranged in every way that makes a difference;
many, in rows by site: share after share, or stage after stage, in several orders of the sites.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

from planners.heterogeneous.problem import Arrangement, Hardware, Pool, Replicas

FEW = 6
"""Blocks that are arranged in every way."""
_ORDERED = 3
"""Sites whose every order is tried."""


def blocks_of(pool: Pool, tp: int, hardware: Hardware) -> Pool:
    """How many blocks of `tp` devices of one machine the pool has at each site."""
    return tuple(count // site.each * (site.each // tp) + count % site.each // tp
                 for count, site in zip(pool, hardware.sites))


def every(blocks: Pool, pp: int) -> Iterator[Arrangement]:
    """All arrangements of all blocks, up to the order of the shares."""
    dp, kinds = sum(blocks) // pp, sorted(set(permutations(_sequence(blocks), pp)))
    for chosen in _multisets(kinds, dp, list(blocks)):
        yield tuple(Replicas(kind, chosen.count(kind)) for kind in dict.fromkeys(chosen))


def _multisets(kinds: list[tuple[int, ...]], count: int, left: list[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    if not count:
        yield ()
        return
    for index, kind in enumerate(kinds):
        needed = [kind.count(site) for site in range(len(left))]
        if all(have >= need for have, need in zip(left, needed)):
            rest = [have - need for have, need in zip(left, needed)]
            yield from ((kind, *more) for more in _multisets(kinds[index:], count - 1, rest))


def _sequence(blocks: Pool) -> list[int]:
    return [site for site, count in enumerate(blocks) for _ in range(count)]


def few(blocks: Pool) -> bool:
    return sum(blocks) <= FEW


def in_rows(blocks: Pool, pp: int, order: tuple[int, ...], by_stage: bool) -> Arrangement:
    """Blocks in the order of the sites, dealt to share after share or to stage after stage; what is left over, idle."""
    dp = sum(blocks) // pp
    runs = [(site, blocks[site]) for site in order if blocks[site]]
    if not by_stage and len(runs) == 1 or pp == 1:
        return _alike(runs, pp, dp)
    starts, total = [], 0
    for _, count in runs:
        starts.append(total)
        total += count
    changes = sorted({0} | {at for start in starts[1:] for at in _changes(start, dp, pp, by_stage) if 0 < at < dp})
    found: dict[tuple[int, ...], int] = {}
    for first, after in zip(changes, [*changes[1:], dp]):
        places = [stage * dp + first if by_stage else first * pp + stage for stage in range(pp)]
        stages = tuple(runs[max(index for index, start in enumerate(starts) if start <= place)][0] for place in places)
        found[stages] = found.get(stages, 0) + after - first
    return tuple(Replicas(stages, count) for stages, count in found.items())


def _changes(start: int, dp: int, pp: int, by_stage: bool) -> tuple[int, ...]:
    """The shares from which on another kind begins, since a site's blocks begin at `start`."""
    return (start % dp,) if by_stage else (start // pp, -(-start // pp))


def _alike(runs: list[tuple[int, int]], pp: int, dp: int) -> Arrangement:
    found = []
    for site, count in runs:
        found.append(Replicas((site,) * pp, min(dp, count // pp)))
        dp -= found[-1].count
    return tuple(kind for kind in found if kind.count)


def orders(blocks: Pool, hardware: Hardware) -> list[tuple[int, ...]]:
    """Orders of the sites that have blocks: all of few sites; of more, by zone, by speed and by memory, both ways."""
    used = [site for site, count in enumerate(blocks) if count]
    if len(used) <= _ORDERED:
        return list(permutations(used))
    sites = hardware.sites
    keys = (lambda site: (sites[site].zone, sites[site].peak), lambda site: sites[site].peak,
            lambda site: sites[site].memory)
    found = [tuple(sorted(used, key=key)) for key in keys]
    return list(dict.fromkeys(found + [order[::-1] for order in found]))


def swaps(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Orders in which two sites have changed places."""
    for one in range(len(order)):
        for other in range(one + 1, len(order)):
            changed = list(order)
            changed[one], changed[other] = changed[other], changed[one]
            yield tuple(changed)
