"""Types of the joint problem and of its answers. All times are seconds, sizes bytes, rates a second.

A *device group* is alike machines that stand together; their devices are interchangeable, so a *device subset* is how
many it takes of each device group. A *model task* is a node of the DAG that runs a model. A *placement* decides

1. grouping: which tasks are colocated, and so take turns on one subset;
2. assignment: the subset of each group, and the device group of each shard (data-parallel share × stage) of a task;
3. strategy: into how many shares, stages and slices a task is cut, and the rows of a micro-batch;
4. balance: the rows of each share and the layers of each stage.

The subsets of the groups do not overlap. Tensor parallelism stays inside a machine.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate
from typing import NamedTuple

GENERATE, INFER, TRAIN = "generate", "infer", "train"
DeviceSubset = tuple[int, ...]  # devices of each device group
DeviceGroups = frozenset[int]  # indices of device groups: those of a subset, or those that a layout uses
Grouping = tuple[tuple[int, ...], ...]
"""The tasks of each group, by index; ordered, and so are the groups by their first task."""


class NetworkLink(NamedTuple):
    """Latency in seconds and bandwidth in bytes a second."""

    latency: float
    bandwidth: float

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class DeviceGroup:
    """`machines` alike machines of one zone, each with `each` devices. `peak` in FLOP/s, `memory` in bytes; rates are
    those that large tasks reach. `slowdown`: how many times longer a device takes than its description says relative to
    others, as measured. `launch`: seconds to start a pass through a layer. `overhead`: tokens of arithmetic that
    a pass costs beyond its own, so that small micro-batches are inefficient. `overlaps`: whether weights are gathered
    while it computes. `attention`: share of `peak` that attention over many tokens reaches."""

    name: str
    kind: str
    zone: str
    machines: int
    each: int
    peak: float
    memory: float
    bandwidth: float
    host: float
    inside: NetworkLink
    launch: float = 0.0
    overhead: float = 0.0
    overlaps: bool = False
    attention: float = 1.0
    slowdown: float = 1.0

    @property
    def devices(self) -> int:
        return self.machines * self.each

    @cached_property
    def counts(self) -> DeviceSubset:
        """Numbers of devices that a subset may take, ascending: of one machine any; of several, whole ones or a part
        that divides larger parts, so that subsets that add up to all devices fit the machines."""
        if self.machines == 1:
            return tuple(range(self.each + 1))
        parts, part = [], self.each
        while part > 1:
            part //= next(factor for factor in range(2, part + 1) if part % factor == 0)
            parts.append(part)
        return (0, *reversed(parts), *range(self.each, self.devices + 1, self.each))


@dataclass(frozen=True)
class Hardware:
    """Device groups, and the link between machines of each pair of them; `between[i][i]`: inside a group."""

    device_groups: tuple[DeviceGroup, ...]
    between: tuple[tuple[NetworkLink, ...], ...]

    @property
    def all(self) -> DeviceSubset:
        return tuple(device_group.devices for device_group in self.device_groups)

    @property
    def ranks(self) -> tuple[range, ...]:
        """Ranks of each device group, in the order of the cluster file."""
        return tuple(range(last - count, last) for count, last in zip(self.all, accumulate(self.all)))

    def subset(self, ranks: Collection[int]) -> DeviceSubset:
        return tuple(sum(rank in own for rank in ranks) for own in self.ranks)


class Measured(NamedTuple):
    """Measurements of a task. `times`: seconds over the roofline's; `launch`: seconds to start a pass through a layer;
    None: those of the device.
    Tokens of a row: mean `prompt` and `response`, `read` of a shared prompt, `longest` of a batch."""

    times: float = 1.0
    launch: float | None = None
    prompt: float | None = None
    read: float | None = None
    response: float | None = None
    longest: float | None = None


@dataclass(frozen=True)
class ModelTask:
    """Node that runs a model: the model's sizes, the work of an iteration, and the `engine` that trains and infers.
    `queries` is the width of a token's queries in a layer (heads × head size), `kv` the bytes of one token in the cache
    of one layer, `active` the parameters that compute for a token; `prompt` and `response` are tokens of a row.
    Training passes over the rows `epochs` times, in `mini_batches`. An engine that divides weights gathers `gathered`
    parameters at once; 0: all. A layer keeps `activations` bytes of each token for the backward pass. `at_once`: rows
    that a share samples at once; 0: as many as its cache has room for. `frozen` parameters of one that trains stay as
    they are; the weights of one that `follows` another role are state. `states` of `hidden` width are read or written
    for a token of a layer between products, forward (`states_of`): by default with fused kernels, as many query heads
    as key heads and one matrix before an activation of 4 × hidden. `looked_up` parameters are of embeddings, which no
    product reads, unless the head is the same matrix. `logit_bytes` pass through memory for a logit in all passes; 0:
    as many as of a plain softmax. `rescored`: the backward pass computes logits again. Of a task that trains low-rank
    adapters, `adapters` parameters in all, every other one is frozen; the model is whole on each share if it is
    `undivided`, as where transformers' rollout has the same weights."""

    name: str
    role: str
    kind: str
    parameters: int
    layers: int
    hidden: int
    queries: int
    kv: int
    rows: int
    prompt: int
    response: int
    active: int = 0
    width: int = 2
    outputs: int = 1
    heads: int = 1
    experts: int = 0
    expert_parameters: int = 0
    experts_per_token: int = 0
    micro_tokens: int = 16384
    epochs: int = 1
    mini_batches: int = 1
    recompute: bool = False
    engine: str = "fsdp"
    gathered: int = 0
    activations: int = 0
    at_once: int = 0
    frozen: int = 0
    follows: bool = False
    states: float = 22
    looked_up: int = 0
    logit_bytes: int = 0
    rescored: bool = False
    adapters: int = 0
    undivided: bool = False
    measured: Measured = Measured()
    stages: bool = True
    """Whether the task's engine can have the layers in several stages."""

    @property
    def tokens(self) -> int:
        """Tokens of a row at its longest, prompt and response: what memory must hold."""
        return self.prompt + self.response

    @property
    def read(self) -> float:
        """Mean tokens of a prompt that pass through the model for a row."""
        return self.prompt if self.measured.read is None else self.measured.read

    @property
    def answer(self) -> float:
        return self.response if self.measured.response is None else self.measured.response

    @property
    def computed(self) -> float:
        """Mean tokens that pass through the model for a row: what takes time."""
        return self.read + self.answer

    @property
    def seen(self) -> float:
        """Mean tokens of a prompt: what all that follow attend to."""
        return self.prompt if self.measured.prompt is None else self.measured.prompt

    @property
    def whole(self) -> float:
        """Mean tokens of a row, prompt and response, by which micro-batches are cut."""
        return self.seen + self.answer

    @property
    def longest(self) -> float:
        """Decoding steps until all rows of a batch have ended."""
        return self.response if self.measured.longest is None else self.measured.longest

    @property
    def trained(self) -> int:
        """Parameters that have a gradient, of a task that trains."""
        return self.parameters - self.frozen + self.adapters

    @property
    def divided(self) -> int:
        """Parameters that the shares gather to compute, of an engine that divides them."""
        return self.adapters if self.undivided else self.parameters

    @property
    def memory_item(self) -> str:
        """Name of the engine in memory: the role's rollout, or the one that trains and infers."""
        return f"{self.role}: rollout" if self.kind == GENERATE else self.role

    @property
    def computing(self) -> int:
        return self.active or self.parameters

    @property
    def head(self) -> int:
        """Parameters of the head, among those that compute."""
        return min(self.hidden * self.outputs, self.computing - self.looked_up)

    @property
    def scored(self) -> float:
        """Share of the tokens of a batch after which the head is applied: of a prompt that is read to sample, the
        last; of rows, those before tokens of the response."""
        return 1 / self.seen if self.kind == GENERATE else self.answer / self.computed


class Edge(NamedTuple):
    """`source` writes what `target` reads, or (of a sync) the weights that it runs with; tasks by index."""

    source: int
    target: int
    nbytes: float


@dataclass(frozen=True)
class Freedom:
    """Decisions that a solver may take: `groupings`, and by task the pairs of tp and pp (`cuts`), of which tasks that
    compute with one engine then have the same; `whole_beside`: with cuts, a group that samples and infers, and does not
    train, splits no model; `idle_shares`: tasks whose engines are on all devices of their group: those that such a task
    does not use have shares of 0 rows, among which weights are divided and gradients summed as among others; `in_step`:
    groups planned with samplers that ranks run in step are costed so (`Objective.in_step`). Without
    `assignment` groups span all device groups evenly, in the cluster file's order; without `balance` shares have equal
    rows and layers."""

    groupings: tuple[Grouping, ...] | None = None
    assignment: bool = True
    cuts: tuple[frozenset[tuple[int, int]], ...] | None = None
    whole_beside: bool = False
    idle_shares: frozenset[int] = frozenset()
    in_step: bool = False
    balance: bool = True


@dataclass(frozen=True)
class Problem:
    """Tasks in the order of the chain, their data dependencies, syncs of trained weights, and the share of memory that
    may be filled."""

    hardware: Hardware
    tasks: tuple[ModelTask, ...]
    edges: tuple[Edge, ...] = ()
    syncs: tuple[Edge, ...] = ()
    has_samplers: bool = False
    filled: float = 0.9
    freedom: Freedom = Freedom()


class Strategy(NamedTuple):
    """`dp` shares × `pp` stages × `tp` slices; experts cut `ep` ways over a stage's devices; rows of a micro-batch."""

    dp: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    micro: int = 1


class Replicas(NamedTuple):
    """`count` data-parallel shares whose stages are in the same device groups, first stage first."""

    stages: tuple[int, ...]
    count: int


Arrangement = tuple[Replicas, ...]  # the device group of each shard of a task, up to what makes no difference


class TaskLayout(NamedTuple):
    """Split of a task over a device subset, and its cost: `seconds` alone, `swap` for moving its state between device
    and host when it takes turns. `rows` are of one share of each entry of the arrangement, `layers` of each stage."""

    strategy: Strategy
    arrangement: Arrangement
    rows: tuple[int, ...]
    layers: tuple[int, ...]
    seconds: float
    swap: float

    def takes(self, shared: bool) -> float:
        return self.seconds + self.swap * shared

    @property
    def sites(self) -> DeviceGroups:
        return frozenset(group for kind in self.arrangement for group in kind.stages)


@dataclass(frozen=True)
class Placement:
    """Answer to a problem: the groups, their subsets, the layout of each task, and seconds of an iteration."""

    grouping: Grouping
    subsets: tuple[DeviceSubset, ...]
    layouts: tuple[TaskLayout, ...] = field(repr=False)
    seconds: float = math.inf


def device_groups_of(subset: DeviceSubset) -> DeviceGroups:
    return frozenset(index for index, count in enumerate(subset) if count)


def shared(problem: Problem, group: tuple[int, ...]) -> bool:
    return len({problem.tasks[task].memory_item for task in group}) > 1


def turns_of(problem: Problem, grouping: Grouping) -> list[bool]:
    turns = {task: shared(problem, group) for group in grouping for task in group}
    return [turns[task] for task in range(len(problem.tasks))]


@cache
def groups_of(grouping: Grouping) -> list[int]:
    return [index for _, index in sorted((task, index) for index, group in enumerate(grouping) for task in group)]
