"""What moving bytes costs, on the links that they really cross."""

from __future__ import annotations

import math
from functools import cache

from planners.heterogeneous.problem import Hardware, Sites, Strategy, Way


class Network:
    """The ways of a cluster, with the share of their bandwidth that transfers reach; answers are remembered."""

    def __init__(self, hardware: Hardware, efficiency: float):
        self._sites = hardware.sites
        self._inside = [Way(site.inside.latency, site.inside.bandwidth * efficiency) for site in hardware.sites]
        self._between = [[Way(way.latency, way.bandwidth * efficiency) for way in row] for row in hardware.between]
        self.reach = cache(self._reach)
        self._spans = cache(self._spanning)

    def inside(self, site: int) -> Way:
        """The link between two devices of a machine."""
        return self._inside[site]

    def slices(self, site: int, tp: int, nbytes: float) -> float:
        """An all-reduce among the slices of a layer, inside a machine: a ring, 2(n-1) messages of 1/n each
        (Thakur et al. 2005, §4.4)."""
        way = self._inside[site]
        return 2 * (tp - 1) * (way.latency + nbytes / tp / way.bandwidth)

    def hop(self, source: int, target: int, run: int, strategy: Strategy, nbytes: float) -> float:
        """Activations of a micro-batch from a stage to the next (Narayanan et al. 2021, §3.2).

        `run` stages in a row are at this site; as many as one machine has slices for stay inside it. What leaves it
        shares its link with the shares beside it.
        """
        site = self._sites[source]
        if source == target and (site.machines == 1 or run * strategy.tp <= site.each):
            return self._inside[source].seconds(nbytes)
        beside = min(max(1, site.each // strategy.tp), strategy.dp)
        return self._between[source][target].seconds(nbytes * beside)

    def gradients(self, sites: Sites, strategy: Strategy, nbytes: float) -> float:
        """An all-reduce among the shares of a stage: the bytes of a ring, the latency of two trees, at the slowest link
        of the widest spanning tree (Patarasuk and Yuan 2009; NCCL's trees). The slices of a machine share its link."""
        if strategy.dp == 1:
            return 0.0
        way, crossing = self._spans(sites, strategy.dp * strategy.tp)
        ring = 2 * (strategy.dp - 1) / strategy.dp * nbytes * (strategy.tp if crossing else 1)
        return 2 * math.ceil(math.log2(strategy.dp)) * way.latency + ring / way.bandwidth

    def experts(self, sites: Sites, strategy: Strategy, nbytes: float) -> float:
        """An all-to-all of tokens among the devices that share the experts (Lepikhin et al. 2021, §3.2)."""
        if strategy.ep == 1:
            return 0.0
        way, _ = self._spans(sites, strategy.ep * strategy.tp)
        return way.latency + nbytes * (strategy.ep - 1) / strategy.ep / way.bandwidth

    def _spanning(self, sites: Sites, devices: int) -> tuple[Way, bool]:
        """The slowest way of a widest tree among devices of these sites, and whether it leaves a machine."""
        if len(sites) == 1:
            (only,) = sites
            crossing = self._sites[only].machines > 1 and devices > self._sites[only].each
            return (self._between[only][only] if crossing else self._inside[only]), crossing
        first = min(sites)
        return self._reach(frozenset({first}), sites), True

    def _reach(self, sources: Sites, targets: Sites) -> Way:
        """How weights or rows come from one pool to another, each machine passing on what it has (relays, RobustRL
        §5.2): at the slowest way of the widest tree, all parts at once, after the latency of its slowest way."""
        reached, slowest = set(sources), Way(0.0, math.inf)
        for site in targets:
            slowest = _slower(slowest, self._own(site))
        missing = set(targets) - reached
        while missing:
            way, site = max(((self._between[near][far], far) for near in reached for far in missing),
                            key=lambda found: (found[0].bandwidth, -found[0].latency, -found[1]))
            slowest = _slower(slowest, way)
            reached.add(site)
            missing.remove(site)
        return slowest

    def _own(self, site: int) -> Way:
        return self._inside[site] if self._sites[site].machines == 1 else self._between[site][site]


def _slower(one: Way, other: Way) -> Way:
    return Way(max(one.latency, other.latency), min(one.bandwidth, other.bandwidth))
