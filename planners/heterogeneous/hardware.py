"""Hardware model: device groups and links of a cluster file, collectives on them (`Network`), a layer's `Roofline`.

Rooflines (Williams et al. 2009): a layer's arithmetic and its reading of memory overlap, so the slower of both counts.
Arithmetic of a token, forward: 2 FLOP for each parameter and, for its attention, 2 × context × width of its queries in
a causal row and twice as much for a token that sees all of its context (Kaplan et al. 2020, table 1). Backward takes
twice as much as forward, half of it for gradients of weights, which frozen ones have none of; recomputation takes once
more as forward (Korthikanti et al. 2022, §5). Slices of a layer add up their activations twice forward and twice
backward (Shoeybi et al. 2019, §3). What is computed between products (norms, sums, activations, the softmax over the
vocabulary) is bound by memory and adds to that (Ivanov et al. 2021, table 1). Engines apply the head before tokens of
responses alone (`SharedPrompt`, and `logits_to_keep` as prompts are read), and look embeddings up, which multiplies
nothing. Both are counted as if spread over the layers.
"""

from __future__ import annotations

import math
from functools import cache, reduce
from typing import Any, Literal

import numpy as np

from distflow.config.cluster import Cluster, Link
from planners.heterogeneous.efficiency import BETWEEN, efficiency_of
from planners.heterogeneous.problem import (
    GENERATE,
    INFER,
    TRAIN,
    DeviceGroup,
    DeviceGroups,
    Hardware,
    ModelTask,
    NetworkLink,
    Strategy,
)
from planners.memory import (
    LOGITS_AT_ONCE,
    ParameterBytes,
    adapted_bytes,
    bytes_per_logit,
    parameter_bytes,
    stay_gathered,
)


class Network:
    """Seconds of collectives on the links of a cluster; cached."""

    def __init__(self, hardware: Hardware):
        self._device_groups, self._between = hardware.device_groups, hardware.between
        self._inside = [group.inside for group in hardware.device_groups]
        self.rows, self.weights = cache(self._rows), cache(self._weights)
        self._spans = cache(self._spanning)

    def inside(self, group: int) -> NetworkLink:
        return self._inside[group]

    def slices(self, group: int, tp: int, nbytes: float) -> float:
        """Return the seconds of an all-reduce among a layer's slices, as a ring (Thakur et al. 2005, §4.4)."""
        link = self._inside[group]
        return 2 * (tp - 1) * (link.latency + nbytes / tp / link.bandwidth)

    def hop(self, source: int, target: int, run: int, strategy: Strategy, nbytes: float) -> float:
        """Return the seconds of a micro-batch's activations to the next stage (Narayanan et al. 2021, §3.2). `run`
        consecutive stages are in this device group; what leaves a machine shares its link with the shares there."""
        group = self._device_groups[source]
        if source == target and (group.machines == 1 or run * strategy.tp <= group.each):
            return self._inside[source].seconds(nbytes)
        beside = min(max(1, group.each // strategy.tp), strategy.dp)
        return self._between[source][target].seconds(nbytes * beside)

    def half_ring(self, groups: DeviceGroups, strategy: Strategy, nbytes: float) -> float:
        """Return the seconds of an all-gather or a reduce-scatter among a stage's shares, of which an all-reduce has
        both: the bytes of a ring, the latency of a tree, at the slowest link of the widest spanning tree (Patarasuk and
        Yuan 2009; NCCL's trees), whose slices of a machine share its link. Inside a machine it is a ring with its
        latency, or for few bytes NCCL's LL, whose flags take half of the bandwidth (Hu et al. 2025, §II)."""
        if strategy.dp == 1:
            return 0.0
        link, crossing = self._spans(groups, strategy.dp * strategy.tp)
        seconds = (strategy.dp - 1) / strategy.dp * nbytes * (strategy.tp if crossing else 1) / link.bandwidth
        tree = math.ceil(math.log2(strategy.dp)) * link.latency
        return tree + seconds if crossing else min((strategy.dp - 1) * link.latency + seconds, tree + 2 * seconds)

    def experts(self, groups: DeviceGroups, strategy: Strategy, nbytes: float) -> float:
        """Return the seconds of an all-to-all of tokens among the experts' devices (Lepikhin et al. 2021, §3.2). Each
        slice sends its part of a share's tokens; those of a machine share its link."""
        if strategy.ep == 1:
            return 0.0
        link, crossing = self._spans(groups, strategy.ep)
        sent = nbytes * (strategy.ep - 1) / strategy.ep / (1 if crossing else strategy.tp)
        return link.latency + sent / link.bandwidth

    def _spanning(self, groups: DeviceGroups, devices: int) -> tuple[NetworkLink, bool]:
        """Return the slowest link of a widest tree among devices of these groups, and whether it leaves a machine."""
        if len(groups) == 1:
            (only,) = groups
            crossing = self._device_groups[only].machines > 1 and devices > self._device_groups[only].each
            return (self._between[only][only] if crossing else self._inside[only]), crossing
        return self._reach(frozenset({min(groups)}), groups), True

    def _rows(self, sources: DeviceGroups, targets: DeviceGroups) -> NetworkLink:
        """Return the effective link for rows: they stay where both tasks are, and leave where only the first is."""
        return reduce(_slower, [self._reach(frozenset({group}), targets) for group in sources - targets],
                      self._reach(sources, targets))

    def _weights(self, sources: DeviceGroups, targets: DeviceGroups) -> NetworkLink:
        """Return the effective link for weights: each device group that trains has a part that all targets need."""
        return reduce(_slower, [self._reach(frozenset({group}), targets) for group in sources])

    def _reach(self, sources: DeviceGroups, targets: DeviceGroups) -> NetworkLink:
        """Return the effective link from any of the sources to all targets, each machine relaying what it has
        (RobustRL §5.2): the bandwidth and latency of the slowest links of the widest tree, all parts at once."""
        reached, slowest = set(sources), NetworkLink(0.0, math.inf)
        for group in targets:
            slowest = _slower(slowest, self._own(group))
        missing = set(targets) - reached
        while missing:
            link, group = max(((self._between[near][far], far) for near in reached for far in missing),
                              key=lambda found: (found[0].bandwidth, -found[0].latency, -found[1]))
            slowest = _slower(slowest, link)
            reached.add(group)
            missing.remove(group)
        return slowest

    def _own(self, group: int) -> NetworkLink:
        return self._inside[group] if self._device_groups[group].machines == 1 else self._between[group][group]


def _slower(one: NetworkLink, other: NetworkLink) -> NetworkLink:
    return NetworkLink(max(one.latency, other.latency), min(one.bandwidth, other.bandwidth))


_LEAST_TRAINED = 16  # bytes of a trained parameter on all devices together, whatever the engine
_LOGIT_BYTES = {GENERATE: 28, INFER: 16, TRAIN: 34}
"""Bytes that pass through memory for a logit: a product writes it in bfloat16 (2), it is converted to float32 (6) and
goes through a log-softmax (8); drawing reads, scales and compares it (12); training has the softmax's gradient (8),
converts it back (6), and two products read it (4)."""
_GRADIENT_SHARD = 20
"""Bytes for each gradient of a share after FSDP2 has added up those of all: the sum is written and copied (8), and
added to that of earlier micro-batches (12)."""
Rows = Any  # a number of rows, or an array of such numbers


class Roofline:
    """Seconds and bytes of one model task on one kind of device."""

    def __init__(self, task: ModelTask, filled: float, network: Network):
        self.task, self._network, self._filled = task, network, filled
        self._weights = (task.parameters - task.looked_up) / task.layers * task.width
        self._expert_weights = task.expert_parameters / task.layers * task.width
        self._head = 2 * task.head / task.layers
        self._flop = 2 * (task.computing - task.looked_up - task.head) / task.layers
        self._between_products = task.states * task.hidden * task.width
        self._logits = (task.logit_bytes or _LOGIT_BYTES[task.kind]) * task.outputs / task.layers
        self._scored = task.scored * self._passes_of_head / self._passes

    def batch(self, number: int, group: DeviceGroup, strategy: Strategy, tokens: float, context: float) -> float:
        task, tp = self.task, strategy.tp
        trains, passes = task.kind == TRAIN, self._passes
        flop = tokens * ((self._flop + self._scored * self._head) * (1 - task.frozen / task.parameters / passes)
                         + 2 * context * task.queries / group.attention)
        read = (self._weights - self._expert_weights) / tp + self._expert_weights / self._of_experts(strategy).tp
        roof = max((1 + group.overhead / tokens) * flop / tp / group.peak, read / group.bandwidth) \
            + tokens * (self._between_products + task.scored * self._logits / passes) / tp / group.bandwidth \
            + self._copied(strategy) / passes / group.bandwidth
        sums = 2 * (passes - trains) * self._network.slices(number, tp, tokens * task.hidden * task.width)
        return passes * self._pass(group, roof) + sums

    def decode(self, number: int, group: DeviceGroup, tp: int, rows: Rows) -> Rows:
        """Return the seconds of one layer for the next token of each of `rows`: reads weights once, and then all
        caches, each as fast as arithmetic or memory lets it."""
        task, context = self.task, self._context
        asked = np.minimum(1.0, rows * task.experts_per_token / task.experts) if task.experts else 1.0
        weights = self._weights - self._expert_weights * (1 - asked)
        roof = np.maximum((rows + group.overhead) * (self._flop + self._head) / group.peak, weights / group.bandwidth) \
            + rows * max(4 * context * task.queries / group.peak, task.kv * context / group.bandwidth) \
            + rows * (self._between_products + self._logits) / group.bandwidth
        return self._pass(group, roof / tp) + 2 * self._network.slices(number, tp, rows * (task.hidden * task.width))

    @property
    def _passes(self) -> int:
        """Passes through a layer, counted in arithmetic of a forward one."""
        return (4 if self.task.recompute else 3) if self.task.kind == TRAIN else 1

    @property
    def _passes_of_head(self) -> int:
        return (4 if self.task.rescored else 3) if self.task.kind == TRAIN else 1

    def _pass(self, group: DeviceGroup, roof: Rows) -> Rows:
        measured = self.task.measured
        launch = group.launch if measured.launch is None else measured.launch
        return group.slowdown * (launch + measured.times * roof)

    def state(self, strategy: Strategy) -> float:
        """Return the bytes of one layer on a device as long as the task is resident."""
        held = self._held(strategy)
        return sum(each / split.tp * (held.whole + held.divided / split.dp) for each, split in self.splits(strategy))

    def splits(self, strategy: Strategy) -> list[tuple[float, Strategy]]:
        """Return one layer's parameters that all of a stage's devices split alike, and how: `dp` of them have the same,
        one of `tp` slices."""
        dense = self.task.parameters - self.task.expert_parameters
        return [(dense / self.task.layers, strategy),
                (self.task.expert_parameters / self.task.layers, self._of_experts(strategy))]

    def _of_experts(self, strategy: Strategy) -> Strategy:
        """Return the split of experts: Megatron divides them over `ep` of a stage's devices, whatever its `tp`."""
        if self.task.kind == GENERATE or self.shards(strategy):
            return strategy
        return strategy._replace(dp=strategy.dp * strategy.tp // strategy.ep, tp=strategy.ep)

    def shards(self, strategy: Strategy) -> bool:
        """Return whether the shares divide the weights among themselves and gather them to compute, as FSDP2 does; it
        splits no layers or experts over ranks, so what does is costed as Megatron."""
        return self.task.kind != GENERATE and self.task.engine == "fsdp" and strategy.pp == strategy.ep == 1

    def by_layer(self, strategy: Strategy) -> bool:
        """Return whether weights that are divided are gathered by layer, and gradients scattered so."""
        return self.shards(strategy) and 0 < self.task.gathered < self.task.parameters

    def _copied(self, strategy: Strategy) -> float:
        """Return the bytes that FSDP2 reads and writes in device memory for a layer and micro-batch, beside what links
        carry: weights as they are cast and copied out of the gathered buffer, and gradients as they are copied into one
        and added up (torch 2.11, `fsdp/_fully_shard/_fsdp_collectives.py`)."""
        task, width = self.task, self.task.width
        if not self.shards(strategy):
            return 0.0
        trains = task.kind == TRAIN
        kept = 4 if (trains and not task.adapters) or task.follows else width
        weight = (2 * width + (kept + width) / strategy.dp) * task.divided / task.parameters
        gradient = (width + 4 + _GRADIENT_SHARD / strategy.dp) * task.trained / task.parameters
        each = 2 * weight + gradient * self.by_layer(strategy) if trains else weight
        return each * task.parameters / task.layers / strategy.tp

    def _held(self, strategy: Strategy) -> ParameterBytes:
        if self.task.kind == GENERATE:
            return ParameterBytes(self.task.width, 0)
        if self.task.adapters:
            base, adapter = adapted_bytes(self.task.width, self.task.undivided)
            return base.with_adapters(adapter, self.task.adapters / self.task.parameters)
        engine = "fsdp" if self.shards(strategy) else "megatron"
        held = parameter_bytes(engine, self.task.width, self.task.kind == TRAIN, self.task.follows)
        return held.with_frozen(self.task.frozen, self.task.parameters) if engine == "fsdp" else held

    def kept(self, strategy: Strategy, stage: int) -> tuple[float, float]:
        """Return the bytes of activations for each layer, and beside them. A stage of a training pipeline holds a
        micro-batch for itself and each later stage (Narayanan et al. 2021, §2.2); of recomputed layers, inputs."""
        task = self.task
        tokens = strategy.micro * task.prompt if task.kind == GENERATE else \
            min(strategy.micro * task.tokens, max(task.micro_tokens, task.tokens))
        whole = task.activations * tokens / strategy.tp
        each = bytes_per_logit("fsdp" if self.shards(strategy) else "megatron", task.width, task.kind == TRAIN)
        logits = each * min(tokens * task.outputs / strategy.tp, max(LOGITS_AT_ONCE, task.outputs))
        if task.kind != TRAIN:
            return 0.0, whole + (0.0 if task.kind == GENERATE else logits)
        under_way = strategy.pp - stage
        if task.recompute:
            return under_way * tokens * task.hidden * task.width, whole + logits
        return under_way * whole, logits

    def room(self, group: DeviceGroup) -> float:
        return group.memory * self._filled

    def fits(self, group: DeviceGroup, strategy: Strategy, stage: int) -> float:
        none, one = self.fills(strategy, stage, 0), self.fills(strategy, stage, 1)
        return (self.room(group) - none) // (one - none)

    def fills(self, strategy: Strategy, stage: int, layers: int) -> float:
        """Return the bytes of so many layers on a device; of a generating one with the cache of one row."""
        each, beside = self.kept(strategy, stage)
        held = self._held(strategy)
        at_once = self.task.gathered or self.task.parameters
        beside += at_once / strategy.tp * held.gathered
        if self.by_layer(strategy):
            beside += stay_gathered(self.task.parameters, at_once) / strategy.tp * self.task.width
        each += self.state(strategy)
        each += self.cache(strategy.tp) if self.task.kind == GENERATE else 0.0
        return beside + layers * each

    def cache(self, tp: int) -> float:
        return self.task.kv * self.task.tokens / tp

    def swap(self, group: DeviceGroup, strategy: Strategy, layers: int) -> float:
        """Return the seconds of loading the state from host memory and, of training, of offloading it afterwards.
        Rollout weights arrive in every iteration (see `syncs`). Measured tasks have this in their measurements."""
        return self._swaps * layers * self.state(strategy) / group.host

    @property
    def _swaps(self) -> int:
        return 0 if self.task.measured.prompt is not None else {TRAIN: 2, GENERATE: 0}.get(self.task.kind, 1)

    def ideal_swap(self, devices: list[tuple[DeviceGroup, int]]) -> float:
        """Return a lower bound on `swap`: one copy of the state, over the host links of all devices."""
        host = sum(group.host * count for group, count in devices)
        return self._swaps * self.task.parameters * self._least_state / host if host else float("inf")

    @property
    def _least_state(self) -> float:
        task, trained = self.task, ParameterBytes(0, _LEAST_TRAINED)
        if task.adapters:
            return task.width
        return trained.with_frozen(task.frozen, task.parameters).divided if task.kind == TRAIN else task.width

    def step(self, group: DeviceGroup, strategy: Strategy, layers: int) -> float:
        """Return the seconds of the optimizer, which reads and writes the state once."""
        task = self.task
        each = _LEAST_TRAINED * task.adapters / task.layers / strategy.dp if task.adapters else self.state(strategy)
        nbytes = layers * each
        return group.slowdown * self.task.measured.times * 2 * nbytes / group.bandwidth

    def ideal(self, devices: list[tuple[DeviceGroup, int]]) -> float:
        """Return a lower bound on the seconds of any layout on these devices; infinite if memory is too little."""
        task = self.task
        room = sum(self.room(group) * count for group, count in devices)
        if not room or task.parameters * self._least_state > room:
            return float("inf")
        if task.kind != GENERATE:
            return self.arithmetic(devices)
        bandwidth = sum(group.bandwidth * count / group.slowdown for group, count in devices)
        weights = task.layers * (self._weights - self._expert_weights) * task.longest
        read = weights + task.layers * task.rows * task.kv * self._context * task.answer
        decode = max(self._flops(task.answer, 4 * self._context, 1.0) / self._peak(devices), read / bandwidth)
        prefill = self._flops(task.read, 2 * task.seen, self._scored) / self._peak(devices)
        return task.measured.times * (prefill + decode)

    def arithmetic(self, devices: list[tuple[DeviceGroup, int]]) -> float:
        task = self.task
        if task.kind == GENERATE:
            flop = self._flops(task.read, 2 * task.seen, self._scored) \
                + self._flops(task.answer, 4 * self._context, 1.0)
        else:
            frozen = task.frozen / task.parameters * self._flops(task.computed, 0, self._scored)
            flop = task.epochs * (self._passes * self._flops(task.computed, 2 * task.whole, self._scored) - frozen)
        return task.measured.times * flop / self._peak(devices)

    def _peak(self, devices: list[tuple[DeviceGroup, int]]) -> float:
        return sum(group.peak * count / group.slowdown for group, count in devices)

    @property
    def _context(self) -> float:
        return self.task.seen + self.task.answer / 2

    def _flops(self, tokens: float, seen: float, scored: float) -> float:
        each = self._flop + scored * self._head + seen * self.task.queries
        return self.task.layers * self.task.rows * tokens * each


_GIB, _GB, _TERA, _MICRO = 2**30, 1e9, 1e12, 1e-6
_HOST = 25e9  # bytes a second between a device and its machine's memory
Dtype = Literal["bfloat16", "float32"]
_MAX_SUBSETS = 4096
"""Up to so many subsets each machine is a device group of its own; beyond, alike machines are folded into one."""


def hardware_of(cluster: Cluster, dtype: Dtype = "bfloat16", fold: bool | None = None) -> Hardware:
    """Return the device groups and links of a cluster that passed `check_cluster`, at the rates that they reach. Where
    a device lacks `dtype`, its first peak rate counts. `fold`: whether alike machines are one device group; default:
    if there are many."""
    if fold is None:
        fold = math.prod((kind.devices + 1) ** kind.count for kind in cluster.machines.values()) > _MAX_SUBSETS
    kinds = [(kind, number) for kind, said in cluster.machines.items() for number in range(1 if fold else said.count)]
    groups = tuple(_device_group(cluster, kind, number, fold, dtype) for kind, number in kinds)
    between = tuple(tuple(_between(cluster, one, other) for other, _ in kinds) for one, _ in kinds)
    return Hardware(groups, between)


def _device_group(cluster: Cluster, name: str, number: int, fold: bool, dtype: Dtype) -> DeviceGroup:
    kind = cluster.machines[name]
    machines = kind.count if fold else 1
    device, reached = cluster.devices[kind.device], efficiency_of(cluster, kind.device)
    inside = kind.inside or Link(gb_s=device.memory_gb_s)
    peak = (device.tflops.get(dtype) or next(iter(device.tflops.values()))) * reached.compute
    name = name if fold or kind.count == 1 else f"{name}.{number + 1}"
    links = NetworkLink(inside.latency_us * _MICRO, inside.gb_s * reached.links * _GB)
    return DeviceGroup(name, kind.device, kind.zone, machines, kind.devices, peak * _TERA, device.memory_gib * _GIB,
                       device.memory_gb_s * reached.memory * _GB, _HOST, links, *reached[3:])


def _between(cluster: Cluster, one: str, other: str) -> NetworkLink:
    link = cluster.between(one, other) or Link(gb_s=1.0)
    limits = [cluster.machines[name].network_gb_s or math.inf for name in (one, other)]
    return NetworkLink(link.latency_us * _MICRO, min(link.gb_s, *limits) * _GB * (1 if cluster.measured else BETWEEN))
