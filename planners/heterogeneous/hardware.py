"""From a cluster file to sites and ways.

What moving bytes costs, on the links that they really cross.

What a layer of a model takes on a device, in seconds and in bytes: rooflines (Williams et al. 2009).

A layer's arithmetic and its reading of memory go on at the same time, so the slower of both counts. Arithmetic of a
token, forward: 2 FLOP for each parameter and, for its attention, 2 × context × hidden in a causal row and twice as much
for a token that sees all of its context (Kaplan et al. 2020, table 1). Backward takes twice as much as forward, and
recomputation once more (Korthikanti et al. 2022, §5). Slices of a layer add up their activations twice forward and
twice backward (Shoeybi et al. 2019, §3). Embeddings and the head are counted as if spread over the layers.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from distflow.config.cluster import Cluster, Link
from planners.heterogeneous.problem import (
    GENERATE,
    TRAIN,
    Coefficients,
    DeviceGroup,
    Hardware,
    ModelTask,
    NetworkLink,
    Sites,
    Strategy,
)


class Network:
    """The ways of a cluster, with the share of their bandwidth that transfers reach; answers are remembered."""

    def __init__(self, hardware: Hardware, efficiency: float):
        self._sites = hardware.sites
        self._inside = [NetworkLink(site.inside.latency, site.inside.bandwidth * efficiency) for site in hardware.sites]
        self._between = [[NetworkLink(way.latency,
                                      way.bandwidth * efficiency) for way in row] for row in hardware.between]
        self.reach = cache(self._reach)
        self._spans = cache(self._spanning)

    def inside(self, site: int) -> NetworkLink:
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

    def _spanning(self, sites: Sites, devices: int) -> tuple[NetworkLink, bool]:
        """The slowest way of a widest tree among devices of these sites, and whether it leaves a machine."""
        if len(sites) == 1:
            (only,) = sites
            crossing = self._sites[only].machines > 1 and devices > self._sites[only].each
            return (self._between[only][only] if crossing else self._inside[only]), crossing
        first = min(sites)
        return self._reach(frozenset({first}), sites), True

    def _reach(self, sources: Sites, targets: Sites) -> NetworkLink:
        """How weights or rows come from one pool to another, each machine passing on what it has (relays, RobustRL
        §5.2): at the slowest way of the widest tree, all parts at once, after the latency of its slowest way."""
        reached, slowest = set(sources), NetworkLink(0.0, math.inf)
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

    def _own(self, site: int) -> NetworkLink:
        return self._inside[site] if self._sites[site].machines == 1 else self._between[site][site]


def _slower(one: NetworkLink, other: NetworkLink) -> NetworkLink:
    return NetworkLink(max(one.latency, other.latency), min(one.bandwidth, other.bandwidth))


_ACTIVATIONS = 17
"""Values kept for each token, layer and hidden element (Korthikanti et al. 2022, §4.1: 34 bytes of two each)."""
_LOGITS = 12
_LOGITS_AT_ONCE = 2**25
_OWN, _DIVIDED = 4, 12
"""Bytes of a trained parameter beside its weight: its gradient; master weight and Adam's state, which the shares of a
stage divide among themselves (Rajbhandari et al. 2020, §5.1)."""
Rows = Any
"""A number of rows, or an array of such numbers."""


class Roofline:
    """The costs of one work."""

    def __init__(self, work: ModelTask, coefficients: Coefficients, network: Network):
        self.work, self._network, self._shares = work, network, coefficients
        self._weights = work.parameters / work.layers * work.width
        self._expert_weights = work.expert_parameters / work.layers * work.width
        self._flop = 2 * work.computing / work.layers

    def batch(self, number: int, site: DeviceGroup, strategy: Strategy, tokens: float, context: float) -> float:
        """Seconds of one layer on one micro-batch: rows whose tokens are all there at once."""
        work, shares, tp = self.work, self._shares, strategy.tp
        trains = work.kind == TRAIN
        passes = (4 if work.recompute else 3) if trains else 1
        flop = tokens * (self._flop + 2 * context * work.hidden)
        read = (self._weights - self._expert_weights * (1 - 1 / strategy.ep)) / tp
        roof = max(flop / tp / (site.peak * shares.compute), read / (site.bandwidth * shares.memory))
        sums = 2 * (passes - trains) * self._network.slices(number, tp, tokens * work.hidden * work.width)
        return passes * self._pass(site, roof) + sums

    def decode(self, number: int, site: DeviceGroup, tp: int, rows: Rows) -> Rows:
        """Seconds of one layer for the next token of each of `rows`: it reads its weights once (of experts, those that
        are asked for) and the cache of every row, at half of the response's length."""
        work, shares = self.work, self._shares
        context = self._context
        asked = np.minimum(1.0, rows * work.experts_per_token / work.experts) if work.experts else 1.0
        read = self._weights - self._expert_weights * (1 - asked) + rows * (work.kv * context)
        flop = rows * (self._flop + 4 * context * work.hidden)
        roof = np.maximum(flop / (tp * site.peak * shares.compute), read / (tp * site.bandwidth * shares.memory))
        return self._pass(site, roof) + 2 * self._network.slices(number, tp, rows * (work.hidden * work.width))

    def _pass(self, site: DeviceGroup, roof: Rows) -> Rows:
        """A pass through a layer, as runs have shown it beside its roofline."""
        return site.pace * (self.work.measured.launch + self.work.measured.times * roof)

    def state(self, strategy: Strategy) -> float:
        """Bytes that one layer has on a device as long as the work is there."""
        work = self.work
        own = (work.parameters - work.expert_parameters * (1 - 1 / strategy.ep)) / work.layers / strategy.tp
        return own * (work.width + _OWN + _DIVIDED / strategy.dp) if work.kind == TRAIN else own * work.width

    def kept(self, strategy: Strategy, stage: int) -> tuple[float, float]:
        """Bytes of activations on a device: for each of its layers, and beside them. A stage of a training pipeline
        holds a micro-batch for itself and one for each stage after it (Narayanan et al. 2021, §2.2); what is
        recomputed keeps its inputs only."""
        work = self.work
        tokens = strategy.micro * work.prompt if work.kind == GENERATE else \
            min(strategy.micro * work.tokens, max(work.micro_tokens, work.tokens))
        whole = _ACTIVATIONS * work.width * work.hidden * tokens / strategy.tp
        logits = _LOGITS * min(tokens * work.outputs / strategy.tp, max(_LOGITS_AT_ONCE, work.outputs))
        if work.kind != TRAIN:
            return 0.0, whole + (0.0 if work.kind == GENERATE else logits)
        under_way = strategy.pp - stage
        if work.recompute:
            return under_way * tokens * work.hidden * work.width, whole + logits
        return under_way * whole, logits

    def room(self, site: DeviceGroup) -> float:
        """Bytes of a device that may be filled."""
        return site.memory * self._shares.filled

    def fits(self, site: DeviceGroup, strategy: Strategy, stage: int) -> float:
        """How many layers a device of this site has room for."""
        none, one = self.fills(strategy, stage, 0), self.fills(strategy, stage, 1)
        return (self.room(site) - none) // (one - none)

    def fills(self, strategy: Strategy, stage: int, layers: int) -> float:
        """Bytes that so many layers take on a device; of a generating one with the cache of one row."""
        each, beside = self.kept(strategy, stage)
        each += self.state(strategy) + (self.cache(strategy.tp) if self.work.kind == GENERATE else 0.0)
        return beside + layers * each

    def cache(self, tp: int) -> float:
        """Bytes of the cache of one layer for one row at its longest."""
        return self.work.kv * self.work.tokens / tp

    def swap(self, site: DeviceGroup, strategy: Strategy, layers: int) -> float:
        """Seconds to bring one's state from host memory and, of training, to put it back afterwards. Weights to sample
        with come anew in every iteration (see `syncs`). What runs have shown of a work has this in it."""
        if self.work.measured.prompt is not None:
            return 0.0
        times = {TRAIN: 2, GENERATE: 0}.get(self.work.kind, 1)
        return times * layers * self.state(strategy) / site.host

    def step(self, site: DeviceGroup, strategy: Strategy, layers: int) -> float:
        """Seconds of the optimizer: reads and writes all of its part of the state once."""
        nbytes = layers * self.work.parameters / self.work.layers / strategy.tp * (_DIVIDED / strategy.dp + _OWN)
        return site.pace * self.work.measured.times * 2 * nbytes / (site.bandwidth * self._shares.memory)

    def ideal(self, devices: list[tuple[DeviceGroup, int]]) -> float:
        """Seconds below which no layout on these devices can come: all of them busy at their peak, without a message,
        weights read once for a token of all rows. Infinite if they have too little memory together."""
        work, shares = self.work, self._shares
        room = sum(self.room(site) * count for site, count in devices)
        each = work.width + (_OWN + _DIVIDED if work.kind == TRAIN else 0)
        if not room or work.parameters * each > room:
            return float("inf")
        if work.kind != GENERATE:
            return self.arithmetic(devices)
        bandwidth = sum(site.bandwidth * count / site.pace for site, count in devices) * shares.memory
        weights = work.layers * (self._weights - self._expert_weights) * work.longest
        read = weights + work.layers * work.rows * work.kv * self._context * work.answer
        decode = max(self._flops(work.answer, 4 * self._context) / self._peak(devices), read / bandwidth)
        return work.measured.times * (self._flops(work.read, 2 * work.seen) / self._peak(devices) + decode)

    def arithmetic(self, devices: list[tuple[DeviceGroup, int]]) -> float:
        """Seconds of the arithmetic alone, divided among these devices by their peaks."""
        work = self.work
        if work.kind == GENERATE:
            flop = self._flops(work.read, 2 * work.seen) + self._flops(work.answer, 4 * self._context)
        else:
            passes = (4 if work.recompute else 3) if work.kind == TRAIN else 1
            flop = passes * work.epochs * self._flops(work.computed, 2 * work.whole)
        return work.measured.times * flop / self._peak(devices)

    def _peak(self, devices: list[tuple[DeviceGroup, int]]) -> float:
        return sum(site.peak * count / site.pace for site, count in devices) * self._shares.compute

    @property
    def _context(self) -> float:
        return self.work.seen + self.work.answer / 2

    def _flops(self, tokens: float, seen: float) -> float:
        """Of all layers, for so many tokens of each row that see so much."""
        return self.work.layers * self.work.rows * tokens * (self._flop + seen * self.work.hidden)


_GIB, _GB, _TERA, _MICRO = 2**30, 1e9, 1e12, 1e-6
_POOLS = 4096
"""Up to so many pools each machine is a site of its own; beyond, alike machines are folded into one."""


def hardware_of(cluster: Cluster, dtype: str = "bfloat16", fold: bool | None = None) -> Hardware:
    """The sites of a cluster that passed `check_cluster`.

    Args:
        dtype: whose peak rate counts; where a device does not say it, the one that it says.
        fold: whether machines that are alike are one site; default: if there are many.
    """
    if fold is None:
        fold = math.prod((kind.devices + 1) ** kind.count for kind in cluster.machines.values()) > _POOLS
    kinds = [(kind, number) for kind, said in cluster.machines.items() for number in range(1 if fold else said.count)]
    sites = tuple(_site(cluster, kind, number, fold, dtype) for kind, number in kinds)
    between = tuple(tuple(_between(cluster, one, other) for other, _ in kinds) for one, _ in kinds)
    return Hardware(sites, between)


def _site(cluster: Cluster, name: str, number: int, fold: bool, dtype: str) -> DeviceGroup:
    kind = cluster.machines[name]
    machines = kind.count if fold else 1
    device = cluster.devices[kind.device]
    inside = cluster.inside(name) or Link(gb_s=device.memory_gb_s)
    peak = device.tflops.get(dtype) or next(iter(device.tflops.values()))
    name = name if fold or kind.count == 1 else f"{name}.{number + 1}"
    return DeviceGroup(name, kind.device, kind.zone, machines, kind.devices, peak * _TERA, device.memory_gib * _GIB,
                       device.memory_gb_s * _GB, kind.host_gb_s * _GB, _way(inside))


def _between(cluster: Cluster, one: str, other: str) -> NetworkLink:
    """The way between machines of two kinds, or of one that has several, at what both can send."""
    link = cluster.between(one, other) or Link(gb_s=1.0)
    limits = [cluster.machines[name].network_gb_s or math.inf for name in (one, other)]
    return NetworkLink(link.latency_us * _MICRO, min(link.gb_s, *limits) * _GB)


def _way(link: Link) -> NetworkLink:
    return NetworkLink(link.latency_us * _MICRO, link.gb_s * _GB)
