"""The planner's frozen answer; all that planners and workers say to each other.

A plan describes each node once, for all its ranks. `Plan.chain(rank)` gives one rank its tasks, so that a rank of
a thousand never handles the tasks of the others.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any

SOURCE = "source"
"""The producer of columns that come from the dataset."""
TRAINING, SAMPLING = "training", "sampling"
TRAINER, ROLLOUT = "trainer", "rollout"
"""The groups of a run whose training and sampling do not share their ranks."""
Fan = tuple[str, ...]
"""Nodes that repeated a row, outermost first."""
ROW = "row"
"""The column of row ids. It is never moved: ids travel with every row."""
KEEP = "keep"
"""The column by which a node drops rows: those where it is False leave the step for all later nodes."""
REWARD_PARTS = "reward_parts"
"""The column in which `score` writes what each part of a reward gave, for people to read."""


@dataclass(frozen=True)
class Layout:
    """Which ranks hold which rows, and how they split a model between them.

    Data-parallel share `i` of `dp` is at the `width` ranks from `first + i * width` on. These split each layer's
    matrices `tp` ways (tensor parallelism; neighbours), each row's tokens `cp` ways (context parallelism) and the
    layers `pp` ways (pipeline parallelism; furthest apart). `ep` cuts the experts of a layer across ranks that are
    there anyway: those of `dp` and `cp`. `rows` says how many rows each share has, in proportion; empty: all alike.
    `early`: rows are dealt to the shares as they come, so that they have others than in a layout of the whole step.
    """

    dp: int
    first: int = 0
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    rows: tuple[int, ...] = ()
    early: bool = False

    @property
    def width(self) -> int:
        """Ranks that split one model between them."""
        return self.tp * self.cp * self.pp

    @property
    def split(self) -> dict[str, int]:
        """How a model is split: every size but `dp`, by name."""
        return {"tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep}

    def share(self, rank: int) -> int | None:
        """The data-parallel index of a rank, or None for a rank that holds no rows in this layout."""
        index = (rank - self.first) // self.width
        return index if 0 <= index < self.dp else None

    def part(self, share: int) -> Fraction:
        """What a share has of all rows."""
        return Fraction(self.rows[share], sum(self.rows)) if self.rows else Fraction(1, self.dp)

    def cut(self, count: int, share: int) -> range:
        """Which of `count` rows a share has if they are cut in the order of the shares, unlike ones to the nearest."""
        edges, half = [0, *accumulate(map(self.part, range(share + 1)))], Fraction(1, 2) if self.rows else 0
        return range(int(count * edges[share] + half), int(count * edges[share + 1] + half))

    @property
    def last(self) -> int:
        """The last rank that holds rows."""
        return self.first + self.dp * self.width - 1

    def leads(self, rank: int) -> bool:
        """Whether a rank is the first of its share: the one that puts the share's rows."""
        return self.share(rank) is not None and (rank - self.first) % self.width == 0


@dataclass(frozen=True)
class Column:
    """A parameter of the function, the column that it reads, and the node that wrote it."""

    parameter: str
    name: str
    producer: str
    form: str = ""


@dataclass(frozen=True)
class Transfer:
    """An edge: columns that come to a task from one producer.

    kind: "local" (same layout, handed over by reference), "all_to_all" (layouts differ) or "dock" (another group ran
    the producer). `bytes_per_step` is what the planner expects of all its rows together, at the run's longest, and
    `bytes_of_busiest_rank` what leaves and reaches the rank that moves most of it. Ids and lengths are not counted;
    local transfers move nothing.
    """

    producer: str
    columns: tuple[str, ...]
    kind: str
    bytes_per_step: int = 0
    bytes_of_busiest_rank: int = 0


@dataclass(frozen=True)
class Task:
    """A node, ready to run. A rank outside `layout` runs nothing, but sends the rows that others need."""

    node: str
    role: str
    type: str
    function: str
    settings: dict[str, Any]
    reads: tuple[Column, ...]
    writes: tuple[str, ...]
    layout: Layout
    transfers: tuple[Transfer, ...] = ()
    repeats: int = 1
    """Rows that it writes for each row that it reads."""
    fan: tuple[str, ...] = ()
    """The nodes that repeated the rows which it reads, outermost first."""
    out_fan: tuple[str, ...] = ()
    """The same for the rows that it writes."""
    keep_together: bool = False
    """Whether all rows that stem from one prompt must be on the same rank."""
    draws: int = 1
    """How often a step may draw prompts, at most, until as many as a batch has are left after this task. It and all
    tasks before it run once for each draw."""
    samples: bool = False
    """Whether its role must be ready to sample."""
    arrives: bool = False
    """The step begins with what it wrote: another group has run it, and it comes through the dock; or it was run ahead
    of the step, by this group (`Plan.early`)."""


@dataclass(frozen=True)
class MemoryItem:
    """One inhabitant of a rank's memory. Bytes are the planner's estimate; `formula` says how it was made."""

    name: str
    bytes: int
    formula: str
    phase: str = ""
    """Of a role that swaps: when it is there, `TRAINING` or `SAMPLING`; else it counts all the time."""


@dataclass(frozen=True)
class Plan:
    """What every rank computes alike before step 0."""

    name: str
    mode: str
    ranks: int
    tasks: tuple[Task, ...]
    source: Layout
    added: tuple[tuple[str, str], ...] = ()
    """Dependencies (earlier, later) that the planner added between nodes of equal depth."""
    memory: tuple[MemoryItem, ...] = ()
    """Of one rank; the group is alike on all of them."""
    notes: tuple[str, ...] = ()
    inputs: str = ""
    """A digest of what the DAG and the run say beyond what stands in the plan (learning rates, seeds, lengths, …), so
    that ranks with other settings are noticed too."""
    dock: tuple[Transfer, ...] = ()
    """What the rollout group puts into the dock and the trainer fetches, by producer."""
    early: Plan | None = None
    """Of the trainer: what it runs on the prompts of a step as they come, while others are still sampled."""
    samplers: tuple[tuple[str, Layout], ...] = ()
    """Of the trainer: how it holds the models, by role, with which others sample, if it samples or validates with
    them."""
    groups: tuple[Group, ...] = ()
    """Empty in sync mode, where all ranks run one chain together. Else this plan is a picture of the whole: each rank
    runs that of its group."""

    def chain(self, rank: int) -> tuple[Task, ...]:
        """The ordered tasks of one rank.

        Every rank of a group has a task for each of its nodes: a rank outside a task's layout has it for the rows that
        it sends.
        """
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} of a plan for {self.ranks} ranks")
        group, _ = self.group_of(rank)
        if group is not None:
            return group.plan.chain(0)
        ahead = self.early.chain(rank) if self.early else ()
        return (*ahead, *(task for task in self.tasks if not task.arrives)) if self.dock else self.tasks

    def group_of(self, rank: int) -> tuple[Group | None, int]:
        """The group of a rank and which of its replicas it is in; (None, 0) in sync mode."""
        for group in self.groups:
            if group.first <= rank <= group.last:
                return group, (rank - group.first) // group.plan.ranks
        return None, 0

    def layout_of(self, role: str, samples: bool) -> Layout:
        """How all ranks together hold the model of a role's engine: the one that samples, or the other one."""
        if samples and (held := dict(self.samplers).get(role)):
            return held
        return whole([task.layout for task in self.tasks if task.role == role and task.samples == samples
                      and task.type != "COMPUTE"], self.ranks)

    def to_json(self) -> str:
        return json.dumps({"digest": self.digest, **asdict(self)}, indent=1, sort_keys=True)

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that are equal if and only if the plans are."""
        canonical = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Group:
    """Ranks that run one chain. `replicas` of them stand beside each other from rank `first` on; each has `plan.ranks`
    ranks, which count from 0 in it and belong to no group of processes but their own."""

    name: str
    first: int
    replicas: int
    plan: Plan

    @property
    def last(self) -> int:
        return self.first + self.replicas * self.plan.ranks - 1

    @property
    def ranks(self) -> range:
        """Of the run."""
        return range(self.first, self.last + 1)


def whole(layouts: list[Layout], ranks: int) -> Layout:
    """All of `ranks`, with the model split as in the first of `layouts`; not split if there is none."""
    split = layouts[0].split if layouts else {}
    return Layout(ranks // Layout(1, **split).width, 0, **split)


def proportion(rows: Sequence[int]) -> tuple[int, ...]:
    """`Layout.rows` for shares of so many rows: the same for all in which the shares have the same parts."""
    alike = len(set(rows)) < 2
    return () if alike else tuple(count // math.gcd(*rows) for count in rows)


class RowLineage:
    """The repetitions of a plan: which rows stem from which."""

    def __init__(self, tasks: Iterable[Task], source: Layout):
        self.tasks = {task.node: task for task in tasks}
        self.source = source

    def of(self, producer: str) -> Fan:
        """The nodes that repeated the rows of a producer, outermost first."""
        return () if producer == SOURCE else self.tasks[producer].out_fan

    def times(self, fan: Iterable[str]) -> int:
        """How many rows the repetitions of `fan` make of one."""
        return math.prod(self.tasks[node].repeats for node in fan)

    def unit(self, layout: Layout) -> Fan:
        """The fan of what `layout` keeps together: the longest that all rows in it share; none if prompts must stay
        whole."""
        tasks = [task for task in self.tasks.values() if task.layout == layout]
        if layout == self.source or any(task.keep_together for task in tasks):
            return ()
        return common([task.fan for task in tasks])


def common(fans: list[Fan]) -> Fan:
    """The longest beginning that all share; none of nothing."""
    same = 0
    while fans and all(len(fan) > same and fan[same] == fans[0][same] for fan in fans):
        same += 1
    return fans[0][:same]
