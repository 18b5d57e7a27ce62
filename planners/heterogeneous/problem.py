"""The joint problem: what is to be decided, and over what. All times are seconds, sizes bytes, rates a second.

A *site* is machines that are alike and stand together; their devices are interchangeable, so a *pool* of devices is
how many it takes of each site. A *work* is a node of the DAG that runs a model. A *placement* decides

1. grouping: which works are colocated, and so take turns on one pool;
2. assignment: the pool of each group, and which site each tasklet (data-parallel share × stage) of a work is at;
3. strategy: into how many shares, stages and slices a work is cut, and the rows of a micro-batch;
4. balance: how many rows each share has, and how many layers each stage.

The pools of the groups do not overlap. Tensor parallelism stays inside a machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

GENERATE, INFER, TRAIN = "generate", "infer", "train"
SYNC, ASYNC = "sync", "async"
Pool = tuple[int, ...]
"""Devices of each site."""
Sites = frozenset[int]
"""Where a pool is: the indices of the sites of which it has devices."""
Grouping = tuple[tuple[int, ...], ...]
"""The works of each group, by index; ordered, and so are the groups by their first work."""


class NetworkLink(NamedTuple):
    """A link: seconds until the first byte comes, and bytes a second."""

    latency: float
    bandwidth: float

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class DeviceGroup:
    """`machines` alike machines of one zone, each with `each` devices. `peak` in FLOP/s, `memory` in bytes. `pace`: how
    many times longer a device takes than its description says beside others, as runs have shown."""

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
    pace: float = 1.0

    @property
    def devices(self) -> int:
        return self.machines * self.each

    @cached_property
    def counts(self) -> Pool:
        """How many devices a pool may take of it, in ascending order.

        Of one machine any number. Of several: whole machines, or a part that divides those larger than itself, so that
        whatever adds up to no more than all devices fits the machines.
        """
        if self.machines == 1:
            return tuple(range(self.each + 1))
        parts, part = [], self.each
        while part > 1:
            part //= next(factor for factor in range(2, part + 1) if part % factor == 0)
            parts.append(part)
        return (0, *reversed(parts), *range(self.each, self.devices + 1, self.each))


@dataclass(frozen=True)
class Hardware:
    """The sites, and the way between two machines of each pair of them; `between[i][i]`: inside a site."""

    sites: tuple[DeviceGroup, ...]
    between: tuple[tuple[NetworkLink, ...], ...]

    @property
    def all(self) -> Pool:
        return tuple(site.devices for site in self.sites)


class Measured(NamedTuple):
    """What runs have shown of a work; without runs nothing is known, and rows count at their longest.

    `times`: seconds over those of the roofline. `launch`: seconds of each pass of a micro-batch, or of a token of all
    rows, through a layer, however little it computes. Tokens of a row: `prompt` and `response` on the mean, `read` of
    a prompt if those that share it divide it among them, and `longest` of the responses that are made together.
    """

    times: float = 1.0
    launch: float = 0.0
    prompt: float | None = None
    read: float | None = None
    response: float | None = None
    longest: float | None = None


@dataclass(frozen=True)
class ModelTask:
    """A node that runs a model: the model's sizes, and what an iteration asks of it.

    `kv` is the bytes that one token has in the cache of one layer; `active` the parameters that compute for a token.
    `prompt` and `response` are tokens of a row. Training passes over the rows `epochs` times, in `mini_batches`.
    """

    name: str
    role: str
    kind: str
    parameters: int
    layers: int
    hidden: int
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
    measured: Measured = Measured()

    @property
    def tokens(self) -> int:
        """Of a row at its longest, prompt and response: what memory must hold."""
        return self.prompt + self.response

    @property
    def read(self) -> float:
        """Tokens of a prompt that pass through the model for a row, on the mean."""
        return self.prompt if self.measured.read is None else self.measured.read

    @property
    def answer(self) -> float:
        """Tokens of a response, on the mean."""
        return self.response if self.measured.response is None else self.measured.response

    @property
    def computed(self) -> float:
        """Tokens that pass through the model for a row, on the mean: what takes time."""
        return self.read + self.answer

    @property
    def seen(self) -> float:
        """Tokens of a prompt, on the mean: what all that follow attend to."""
        return self.prompt if self.measured.prompt is None else self.measured.prompt

    @property
    def whole(self) -> float:
        """Tokens of a row on the mean, prompt and response: as micro-batches are cut by."""
        return self.seen + self.answer

    @property
    def longest(self) -> float:
        """Tokens that are sampled one after the other until all rows of a batch have ended."""
        return self.response if self.measured.longest is None else self.measured.longest

    @property
    def tenant(self) -> str:
        """What lies in memory for it: the role's engine that samples, or the one that trains and infers."""
        return f"{self.role}: rollout" if self.kind == GENERATE else self.role

    @property
    def computing(self) -> int:
        return self.active or self.parameters


class Edge(NamedTuple):
    """`source` writes what `target` reads, or (of a sync) the weights that it runs with; works by index."""

    source: int
    target: int
    nbytes: float


@dataclass(frozen=True)
class Coefficients:
    """Which share of its peak rate a device or link reaches, and which share of a device's memory may be filled.

    0.5 of the arithmetic is what large training runs report (Narayanan et al. 2021, table 1: 0.44 to 0.52).
    """

    compute: float = 0.5
    memory: float = 0.7
    network: float = 0.8
    filled: float = 0.9


@dataclass(frozen=True)
class Freedom:
    """Which of the four decisions a solver may take; the others are as a homogeneous system has them.

    groupings: those that may be chosen. assignment: False: every group spans all sites evenly, and tasklets are laid
    out in the order of the cluster file. cut: tp and pp of all works. balance: False: equal shares of rows and of
    layers.
    """

    groupings: tuple[Grouping, ...] | None = None
    assignment: bool = True
    cut: tuple[int, int] | None = None
    balance: bool = True


@dataclass(frozen=True)
class Problem:
    """Works in the order of the chain; who waits for whom; whose weights follow whose training."""

    hardware: Hardware
    works: tuple[ModelTask, ...]
    edges: tuple[Edge, ...] = ()
    syncs: tuple[Edge, ...] = ()
    mode: str = SYNC
    coefficients: Coefficients = Coefficients()
    freedom: Freedom = Freedom()


class Strategy(NamedTuple):
    """`dp` shares × `pp` stages × `tp` slices; experts cut `ep` ways over the shares; rows of a micro-batch."""

    dp: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    micro: int = 1


class Replicas(NamedTuple):
    """`count` data-parallel shares whose stages are at the same sites, first stage first."""

    stages: tuple[int, ...]
    count: int


Arrangement = tuple[Replicas, ...]
"""Which site each tasklet is at, up to what makes no difference."""


class TaskLayout(NamedTuple):
    """How a work runs on a pool, and what that takes.

    `seconds` is alone; `swap` what moving its state between device and host memory adds when it takes turns. `rows` are
    those of one share of each entry of the arrangement, `layers` those of each stage.
    """

    strategy: Strategy
    arrangement: Arrangement
    rows: tuple[int, ...]
    layers: tuple[int, ...]
    seconds: float
    swap: float

    def takes(self, shared: bool) -> float:
        return self.seconds + self.swap * shared


@dataclass(frozen=True)
class Placement:
    """An answer: the groups, their pools, the layout of each work, and seconds of an iteration."""

    grouping: Grouping
    pools: tuple[Pool, ...]
    layouts: tuple[TaskLayout, ...] = field(repr=False)
    seconds: float = math.inf


def sites_of(pool: Pool) -> Sites:
    return frozenset(index for index, count in enumerate(pool) if count)


def shared(problem: Problem, group: tuple[int, ...]) -> bool:
    """Whether works of different tenants take turns there."""
    return len({problem.works[work].tenant for work in group}) > 1
