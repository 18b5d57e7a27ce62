"""All pools of a cluster that a placement may use, and what each work takes on each of them."""

from __future__ import annotations

import math
from functools import cached_property
from itertools import product

import numpy as np

from distflow.schema.errors import InvalidInput, Mistake
from planners.heterogeneous.costed import Costed
from planners.heterogeneous.layouts import fastest
from planners.heterogeneous.problem import Layout, Pool

POOLS = 20_000
"""More than so many are not listed."""


class Family:
    """The pools in a grid, one axis a site; durations are arrays over it, infinite where a work does not fit.

    A pool serves a work at least as well as any part of it, since devices may stay idle; so the grid is filled by a
    running minimum along each axis.

    Raises:
        InvalidInput: there are too many pools to list.
    """

    def __init__(self, costed: Costed, cutoff: float = math.inf):
        self.costed, self.cutoff = costed, cutoff
        self.counts = [site.counts for site in costed.problem.hardware.sites]
        self.shape = tuple(map(len, self.counts))
        if math.prod(self.shape) > POOLS:
            raise InvalidInput(Mistake(f"this cluster has {math.prod(self.shape):,} pools, too many for the exact "
                                       f"program, which lists up to {POOLS:,}", None,
                                       "Use  --solver hybrid  , or describe fewer kinds of machines."))

    def pool(self, place: tuple[int, ...]) -> Pool:
        """The pool at a place of the grid."""
        return tuple(counts[index] for counts, index in zip(self.counts, place))

    @cached_property
    def durations(self) -> np.ndarray:
        """Seconds by (work, 0 alone or 1 taking turns, place…). What cannot undercut the cutoff is not costed."""
        works = range(len(self.costed.problem.works))
        found = np.full((len(works), 2, *self.shape), math.inf)
        for work, place in product(works, product(*map(range, self.shape))):
            pool = self.pool(place)
            if any(pool) and self.costed.ideal_of(work, pool) <= self.cutoff:
                for turns, layout in enumerate(self.costed.layouts.exactly(work, pool)):
                    found[work, turns][place] = layout.takes(bool(turns)) if layout else math.inf
        for axis in range(len(self.shape)):
            found = np.minimum.accumulate(found, axis=axis + 2)
        return found

    def layout(self, work: int, pool: Pool, turns: bool) -> Layout:
        """The layout behind a duration."""
        parts = product(*([count for count in counts if count <= limit] for counts, limit in zip(self.counts, pool)))
        layouts = (layout for part in parts if any(part) and self.costed.ideal_of(work, part) <= self.cutoff
                   for layout in self.costed.layouts.exactly(work, part))
        return fastest(layouts)[turns]
