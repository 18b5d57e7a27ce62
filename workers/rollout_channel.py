"""The dock between the groups of a run: who keeps it, what is in it, and how a rank reaches it.

A row is a sample, by its id in the run. It begins as an order: the trainer puts a prompt's rows without anything but
their ids, and so says how far ahead may be sampled. A rollout takes a prompt's rows, and puts what it made of them.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from distflow.data.batch import Batch, ColumnData, Ragged
from distflow.data.databuffer import Databuffer
from distflow.dock import Consumer, DockClient
from distflow.dock.process import DockProcess, start
from distflow.dock.selection import Address, DockLayout
from distflow.errors import EngineError
from distflow.plan import ROLLOUT, TRAINER, Plan, RowLineage, Task
from distflow.recovery.store import Store

ORDER, REPORT = "order", "report"
"""Columns beside those that nodes write: that a row may be sampled; what was measured while it was made."""
HOST = "DISTFLOW_HOST"
_OVER, _FIRST, _CAME, _LEFT = "over", "first step", "came", "left"
_PARTING, _MOMENT = 10.0, 0.05
"""Seconds in which all ranks see that the run is over, and between two looks."""


@dataclass
class RolloutChannel:
    """A rank's knowledge of the run's dock. `rows`: samples of a prompt."""

    store: dist.Store
    token: bytes
    addresses: list[Address]
    host: str
    rows: int
    prompts: int
    """Of a step."""
    ranks: int
    child: DockProcess | None = None
    """The process of this machine's warehouse, if this rank keeps it."""
    layout: DockLayout | None = None
    """Of the dock."""

    def joined(self, store: dist.Store) -> RolloutChannel:
        """The same for a worker, by a connection of its own to the board. The warehouse stays its seat's."""
        if self.child is not None:  # or the warehouse would not see its seat end
            self.child.process.stdin.close()
        return replace(self, store=store, child=None)

    def dock(self, who: str) -> DockClient:
        """A connection; for one thread."""
        return DockClient(self.addresses, self.token, who)

    def weights(self, role: str) -> dist.Store:
        """Where a role's weights are made known; a connection of its own, since one that waits holds up the others."""
        return dist.PrefixStore(f"weights/{role}", self.store.clone())

    def rows_of(self, prompts: Tensor) -> Tensor:
        """The ids of all samples of these prompts."""
        return (prompts[:, None] * self.rows + torch.arange(self.rows)).flatten()

    def order(self, dock: DockClient, first: int, last: int, issue: int, wait: float) -> None:
        """Let the prompts from `first` to `last` be sampled, by weights that are at least those of an issue."""
        prompts = torch.arange(first, last + 1)
        ids = self.rows_of(prompts)
        dock.put(Batch(ids, {ORDER: torch.zeros(len(ids), dtype=torch.uint8)}), version=issue, group=ids // self.rows,
                 wait=wait)

    def issue(self, versions: dict[str, int]) -> int:
        """These versions of the roles' weights are published; the number of this issue, which no other has."""
        number = self.store.add("issues", 1)
        self.store.set(f"issue/{number}", json.dumps(versions))
        return number

    def versions_of(self, issue: int) -> dict[str, int]:
        """Those of an issue that something was ordered of."""
        return json.loads(self.store.get(f"issue/{issue}"))

    def begin(self, step: int) -> None:
        """Let those that sample know at which step the trainer begins."""
        self.store.set(_FIRST, str(step))

    @property
    def first(self) -> int:
        """The step at which the trainer begins; waits for it."""
        return int(self.store.get(_FIRST))

    def end(self) -> None:
        """Nobody has to sample any more."""
        self.store.set(_OVER, "")

    @property
    def over(self) -> bool:
        return self.store.check([_OVER])

    def part(self) -> None:
        """This rank needs the dock no more; one that keeps a warehouse waits for the others."""
        self.store.add(_LEFT, 1)
        until = time.monotonic() + (_PARTING if self.child is not None else 0.0)
        while self.store.add(_LEFT, 0) < self.store.add(_CAME, 0) and time.monotonic() < until:
            time.sleep(_MOMENT)

    def begin_anew(self) -> None:
        """Start this machine's warehouse again, empty and at the same address. What it held is asked for again by the
        trainer's next life.

        Raises:
            DockError: it does not come up.
        """
        if self.child is not None:
            self.child.kill()
            host, port = self.child.address
            number = self.addresses.index((host, port))
            self.child = start(self.token, host=host, port=port, layout=self.layout, number=number)

    def close(self) -> None:
        """End this machine's warehouse."""
        if self.child is not None:
            self.child.stop()


class ReceivedColumns:
    """What the other group's nodes wrote, as rows of the dock bring it to a plan's tasks. `rows`: of a prompt."""

    def __init__(self, plan: Plan, rows: int):
        fans = RowLineage(plan.tasks, plan.source)
        self.tasks = [(task, rows // fans.times(task.out_fan)) for task in plan.tasks
                      if task.arrives and not task.layout.early]
        self.columns = [f"{task.node}/{name}" for task, _ in self.tasks for name in task.writes]

    def of(self, rows: Batch) -> Iterator[tuple[Task, dict[str, ColumnData], Tensor]]:
        """What each node wrote. Of rows that were repeated later on, the first of each repetition brings it."""
        for task, times in self.tasks:
            part = rows if times == 1 else rows.select(torch.arange(0, len(rows), times))
            yield task, {name: part[f"{task.node}/{name}"] for name in task.writes}, part.ids // times


def crossing(plan: Plan, buffer: Databuffer) -> Batch:
    """What the other group needs of these rows; what belongs to several of them is repeated."""
    tasks = {task.node: task for task in plan.tasks}
    finest = max(plan.dock, key=lambda move: len(tasks[move.producer].out_fan)).producer
    ids = buffer.shelves[finest, tasks[finest].layout].ids
    columns = {}
    for move in plan.dock:
        task = tasks[move.producer]
        part = buffer.shelves[task.node, task.layout]
        times = len(ids) // len(part)
        if times > 1:
            part = part.select(torch.arange(len(part)).repeat_interleave(times))
        columns |= {f"{task.node}/{name}": part[name] for name in move.columns}
    return Batch(ids, columns)


def reported(reports: list[bytes], rows: int) -> Ragged:
    """A column that has each prompt's report in the first of its rows, and nothing in the others."""
    lengths = torch.zeros(len(reports) * rows, dtype=torch.int64)
    lengths[::rows] = torch.tensor([len(report) for report in reports])
    return Ragged(torch.frombuffer(bytearray(b"".join(reports)), dtype=torch.uint8), lengths)


def open_channel(plan: Plan, prompts: int, board: Store) -> RolloutChannel:
    """The run's dock, with a warehouse on each machine that trains: there the rows are read, and a machine that only
    samples may be lost. Every rank of every group calls it.

    Raises:
        EngineError: there are several machines, and none says at which address the others reach it.
    """
    token = bytes.fromhex(board.tell("token", secrets.token_hex(32)))
    board.store.add(_CAME, 1)
    host, training = _host(int(os.environ.get("GROUP_WORLD_SIZE", 1))), plan.groups[0].ranks
    keeps = board.rank in training and int(os.environ.get("LOCAL_RANK", 0)) == 0
    child = start(token, host=host) if keeps else None
    said = board.gather("dock", json.dumps(child.address if child else None), training)
    addresses = [tuple(address) for address in map(json.loads, said) if address]
    fans = RowLineage(plan.tasks, plan.source)
    rows = max(fans.times(fans.of(move.producer)) for move in plan.groups[0].plan.dock)
    consumers = _consumers(plan, rows, prompts)
    channel = RolloutChannel(board.store, token, addresses, host, rows, prompts, plan.ranks, child,
                             DockLayout(tuple(addresses), tuple(consumers)))
    if board.rank == 0:
        with channel.dock("trainer 0") as dock:
            dock.meet(consumers)
    board.tell("dock met", "yes")
    return channel


def _consumers(plan: Plan, rows: int, prompts: int) -> list[Consumer]:
    made = (*(f"{move.producer}/{name}" for move in plan.groups[0].plan.dock for name in move.columns), REPORT)
    whole = {"whole_groups": {"size": rows}}
    return [Consumer(ROLLOUT, (ORDER,), made, whole),
            Consumer(TRAINER, made, (), {**whole, "of_step": {"rows": rows * prompts}}, seconds=3600.0, recalls=True)]


def _host(machines: int) -> str:
    if machines == 1:
        return os.environ.get(HOST, "127.0.0.1")
    if HOST not in os.environ:
        raise EngineError(f"this run has {machines} machines, whose groups talk to each other over the network; say on "
                          f"each at which address the others reach it:  export {HOST}=10.0.0.N  (of a private "
                          "network: rows and weights travel there in the clear)")
    return os.environ[HOST]
