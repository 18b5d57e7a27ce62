"""The planner's frozen answer, and the whole interface between planners and workers.

A plan describes each node once, for all its ranks. `Plan.chain(rank)` gives one rank its tasks, so that a rank of
a thousand never handles the tasks of the others.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from itertools import accumulate
from typing import Any, Literal

SOURCE = "source"  # the producer of columns that come from the dataset
TRAINING, SAMPLING = "training", "sampling"
TRAINER, ROLLOUT = "trainer", "rollout"  # groups of a run whose training and sampling do not share their ranks
RankOrder = Literal["tp-pp-dp", "tp-dp-pp"]  # which ranks are neighbours, from the nearest on
SHARES_OUTERMOST: RankOrder = "tp-pp-dp"
STAGES_OUTERMOST: RankOrder = "tp-dp-pp"
INFERENCE = "inference"  # kind of a group that only reads the model of one role; its name has the role's behind it
Lineage = tuple[str, ...]  # nodes that repeated a row, outermost first. Written `fan` in plan.json.
ROW = "row"  # column of row ids, which is no transfer of its own: ids travel with every row
KEEP = "keep"  # column by which a node drops rows: those where it is False leave the step for all later nodes
ROUTED_EXPERTS = "routed_experts"  # column of the experts that a mixture chose, written with routing_replay alone
FINISHED = "finished"  # column of whether an answer came to its end, which most DAGs do not read
CUT_THOUGHTS = "cut_thoughts"  # column of whether it was cut off within its thoughts: no answer is in these
REWARD_PARTS = "reward_parts"  # column in which `score` writes the value of each part of a reward, for people to read


@dataclass(frozen=True)
class Layout:
    """Assignment of rows to ranks, and how the ranks split a model between them.

    Data-parallel share `i` of `dp` is on `width` ranks, which split each layer's matrices `tp` ways (neighbours), each
    row's tokens `cp` ways, and the layers `pp` ways; `ep` cuts experts across tp, cp and dp. Ranks from `first` on have
    one share after the other, or with the `order` STAGES_OUTERMOST the first stage of all shares, then the second.
    `rows` of each share are in proportion (empty: alike); or, with `early`, as they come. `layers` of each stage;
    empty: equally many.
    """

    dp: int
    first: int = 0
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    rows: tuple[int, ...] = ()
    early: bool = False
    order: RankOrder = SHARES_OUTERMOST
    layers: tuple[int, ...] = field(default=(), compare=False)  # no matter for rows

    @property
    def width(self) -> int:
        return self.tp * self.cp * self.pp

    @property
    def split(self) -> dict[str, int]:
        return {"tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep}

    def share(self, rank: int) -> int | None:
        """Return the data-parallel index of a rank; None for a rank that holds no rows in this layout."""
        index = rank - self.first
        if not 0 <= index < self.dp * self.width:
            return None
        return index // self.width if self.order == SHARES_OUTERMOST else index // (self.tp * self.cp) % self.dp

    def leader(self, share: int) -> int:
        """Return the first rank of a share, which sends the share's rows."""
        return self.first + share * (self.width if self.order == SHARES_OUTERMOST else self.tp * self.cp)

    def ranks_of(self, share: int) -> list[int]:
        return [rank for rank in range(self.first, self.last + 1) if self.share(rank) == share]

    def stages(self, layers: int) -> list[range]:
        """Return the layers of each stage of a model with so many."""
        ends = [*accumulate(self.layers or (layers // self.pp,) * self.pp)]
        return [range(first, end) for first, end in zip([0, *ends], ends)]

    def part(self, share: int) -> Fraction:
        return Fraction(self.rows[share], sum(self.rows)) if self.rows else Fraction(1, self.dp)

    def cut(self, count: int, share: int) -> range:
        """Return which of `count` rows a share has, cut in the order of the shares; unequal shares are rounded."""
        edges, half = [0, *accumulate(map(self.part, range(share + 1)))], Fraction(1, 2) if self.rows else 0
        return range(int(count * edges[share] + half), int(count * edges[share + 1] + half))

    @property
    def last(self) -> int:
        return self.first + self.dp * self.width - 1

    @property
    def active_shares(self) -> list[int]:
        """The shares that have rows."""
        return [share for share in range(self.dp) if not self.rows or self.rows[share]]

    @property
    def active_ranks(self) -> list[int]:
        shares = {*self.active_shares}
        return [rank for rank in range(self.first, self.last + 1) if self.share(rank) in shares]

    def leads(self, rank: int) -> bool:
        share = self.share(rank)
        return share is not None and rank == self.leader(share)


@dataclass(frozen=True)
class Column:
    """Parameter of a node function, the column that it reads, and the node that wrote the column."""

    parameter: str
    name: str
    producer: str
    form: str = ""


@dataclass(frozen=True)
class Transfer:
    """Columns that a task gets from one producer: "local" (same layout, by reference), "all_to_all" or "dock" (another
    group ran it). Bytes are estimates at the run's longest rows."""

    producer: str
    columns: tuple[str, ...]
    kind: str
    bytes_per_step: int = 0
    bytes_of_busiest_rank: int = 0


@dataclass(frozen=True)
class Task:
    """Node on its ranks. A rank outside `layout` runs nothing, but sends the rows that others need."""

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
    fan: tuple[str, ...] = ()  # lineage of the rows that it reads; `out_fan`, of those that it writes
    out_fan: tuple[str, ...] = ()
    keep_together: bool = False
    draws: int = 1  # most draws of prompts in a step, for each of which this task and all before it run
    samples: bool = False
    arrives: bool = False  # whether its columns come from elsewhere: from the dock, or from `Plan.early`


@dataclass(frozen=True)
class MemoryItem:
    """Estimated bytes of one item in a rank's memory or a machine's, and the `formula` of the estimate."""

    name: str
    bytes: int
    formula: str
    phase: str = ""  # of a task of its role during which the item is in memory, `TRAINING` or `SAMPLING`; "": always


@dataclass(frozen=True)
class Plan:
    """Tasks, layouts, transfers and memory of a run, computed by every rank alike before step 0."""

    name: str
    mode: str
    ranks: int
    tasks: tuple[Task, ...]
    source: Layout
    added: tuple[tuple[str, str], ...] = ()
    """Dependencies (earlier, later) that the planner added between nodes of equal depth."""
    memory: tuple[MemoryItem, ...] = ()  # of one rank of a group; where they are not alike, of the fullest
    notes: tuple[str, ...] = ()
    inputs: str = ""  # digest of the DAG and the run, by which ranks with other settings are found
    dock: tuple[Transfer, ...] = ()
    """Transfers through the dock, by producer: to and from the trainer, or from another group."""
    early: Plan | None = None
    """Tasks that the trainer runs on a step's prompts as they come, while others are still sampled."""
    models: tuple[tuple[str, bool, Layout], ...] = ()
    """Layout of each model, by role and whether it is that of the engine which samples: ranks whose share has 0 rows
    have nothing of it."""
    groups: tuple[Group, ...] = ()
    """Empty in sync mode. Else this plan only describes the whole, and each rank runs the plan of its group."""
    host_memory: tuple[MemoryItem, ...] = ()  # of a machine, beside that of its ranks

    def chain(self, rank: int) -> tuple[Task, ...]:
        """Return the ordered tasks of a rank; those of whose layout it is no part, for the rows that it sends."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} of a plan for {self.ranks} ranks")
        group, _ = self.group_of(rank)
        if group is not None:
            return group.plan.chain(0)
        ahead = self.early.chain(rank) if self.early else ()
        return (*ahead, *(task for task in self.tasks if not task.arrives)) if self.dock else self.tasks

    def task(self, node: str) -> Task:
        return next(task for task in self.tasks if task.node == node)

    def group_of(self, rank: int) -> tuple[Group | None, int]:
        """Return the group of a rank and the index of its replica; (None, 0) in sync mode."""
        for group in self.groups:
            if group.first <= rank <= group.last:
                return group, (rank - group.first) // group.plan.ranks
        return None, 0

    @property
    def rollouts(self) -> int:
        """Number of models on ranks that only sample."""
        return sum(group.replicas for group in self.groups if group.kind == ROLLOUT)

    def layout_of(self, role: str, samples: bool) -> Layout:
        """Return how ranks together hold a role's model, in the engine that samples or in the one that trains."""
        return next(layout for *engine, layout in self.models if engine == [role, samples])

    def to_json(self) -> str:
        return json.dumps({"digest": self.digest, **asdict(self)}, indent=1, sort_keys=True)

    @property
    def digest(self) -> str:
        """16 hexadecimal digits, equal if and only if plans are, but for what is only estimated or said."""
        canonical = json.dumps(_without_estimates(asdict(self)), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _without_estimates(value: Any) -> Any:
    """Return parts of a plan without what depends on the sizes of models, which a machine may not know."""
    if isinstance(value, dict):
        return {name: _without_estimates(part) for name, part in value.items()
                if name not in ("memory", "host_memory", "notes")}
    return [_without_estimates(part) for part in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Group:
    """`replicas` sets of `plan.ranks` ranks that each run one chain, one set after the other from rank `first` on; each
    numbers its ranks from 0 in its plan, and is a process group of its own."""

    name: str
    first: int
    replicas: int
    plan: Plan

    @property
    def kind(self) -> str:
        """TRAINER, ROLLOUT or INFERENCE."""
        return self.name.partition(" ")[0]

    @property
    def role(self) -> str:
        """The role whose ranks these are; "" of the trainer and of rollouts."""
        return self.name.partition(" ")[2]

    @property
    def last(self) -> int:
        return self.first + self.replicas * self.plan.ranks - 1

    @property
    def ranks(self) -> range:
        return range(self.first, self.last + 1)


def proportion(rows: Sequence[int]) -> tuple[int, ...]:
    """Return `Layout.rows` for shares with these row counts, reduced to lowest terms; empty if all are equal."""
    alike = len(set(rows)) < 2
    return () if alike else tuple(count // math.gcd(*rows) for count in rows)


def meetings(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Return the ranks that move the inputs of each node: those that have them, and its own."""
    layouts = {SOURCE: plan.source} | {task.node: task.layout for task in plan.tasks}
    meet = {task.node: [task.layout, *(layouts[move.producer] for move in task.transfers if move.kind != "local")]
            for task in plan.tasks}
    return {node: tuple(sorted({rank for layout in parts for rank in layout.active_ranks}))
            for node, parts in meet.items()}


def passed_on(plan: Plan) -> dict[str, list[Task]]:
    """Return the tasks whose inputs move as soon as an earlier one has written, by the node of that: the last whose
    columns move, or that drops rows. Of others the inputs move when their turn has come.

    These are the tasks behind one that only some of the ranks run that move their inputs: the others would wait for it.
    """
    found: dict[str, list[Task]] = {}
    chain, meet = plan.tasks, meetings(plan)
    for index, task in enumerate(chain):
        read = {move.producer for move in task.transfers if move.kind != "local"}
        last = max((number for number, other in enumerate(chain[:index]) if other.node in read or KEEP in other.writes),
                   default=-1)
        if any(not {*other.layout.active_ranks}.issuperset(meet[task.node]) for other in chain[last + 1 : index]):
            found.setdefault(chain[last].node if last >= 0 else SOURCE, []).append(task)
    return found


class RowLineage:
    def __init__(self, tasks: Iterable[Task], source: Layout):
        self.tasks = {task.node: task for task in tasks}
        self.source = source

    def of(self, producer: str) -> Lineage:
        return () if producer == SOURCE else self.tasks[producer].out_fan

    def times(self, lineage: Iterable[str]) -> int:
        return math.prod(self.tasks[node].repeats for node in lineage)

    def unit(self, layout: Layout) -> Lineage:
        """Return the lineage of the rows that `layout` keeps together; empty if a prompt's rows must be on one rank."""
        tasks = [task for task in self.tasks.values() if task.layout == layout]
        if layout == self.source or any(task.keep_together for task in tasks):
            return ()
        return common([task.fan for task in tasks])


def common(lineages: list[Lineage]) -> Lineage:
    """Return the longest prefix that all share; empty if there are none."""
    same = 0
    while lineages and all(len(each) > same and each[same] == lineages[0][same] for each in lineages):
        same += 1
    return lineages[0][:same]
