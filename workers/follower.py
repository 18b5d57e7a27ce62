"""Connects the first trainer, the leader, with its followers: trainers of roles that have ranks of their own
(`groups.trainers`).

    columns        through the dock, put as soon as a node has written them and waited for where a node reads them
    checkpoints    the first one asks for the parts of a step, and commits its own when all others are written
    the end        a follower ends with the steps that the first one has done
    metrics        the first one writes all of them

A follower looks whether it is asked for anything whenever it waits for the first. It does so before it trains
(`planners.trainers` sees to that), so that its state is still the one after the step before.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from distflow.config.spec import Spec
from distflow.data.batch import Batch, ColumnData, dtype_name, from_levels, levels
from distflow.data.databuffer import Databuffer
from distflow.data.exchange import barrier, gather, gather_values
from distflow.errors import CheckpointError
from distflow.plan import TRAINER, Plan, Task
from distflow.recovery.detectors import Alert
from distflow.store.interface import Store
from distflow.telemetry import events
from distflow.telemetry.metrics import current
from workers.engines.role_engines import RoleEngines

_POLL_INTERVAL = 0.5  # seconds between two looks whether the first trainer has ended
_OF_RANKS = ("checkpoint", "data", "lines", "memory", "mfu", "peer_replica", "samples", "snapshot", "tokens",
             "waiting")
"""First parts of the names of metrics that each trainer has, whatever its nodes are."""


class RunOver(Exception):
    """Ends the loop of a follower: the first trainer has done its last step."""


def follower_roles(plan: Plan) -> list[str]:
    """Return the roles that train on ranks of their own."""
    return [group.name.removeprefix(f"{TRAINER} ") for group in plan.groups
            if group.kind == TRAINER and group.name != TRAINER]


Columns = tuple[Task, Mapping[str, ColumnData], Tensor]  # what a task wrote, for the rows of these ids


class _Exchange(Protocol):
    """Source of a trainer beside others, as far as it exchanges columns with them."""

    def receive_from(self, node: str, buffer: Databuffer) -> Iterator[Columns]: ...

    def put_for_others(self, task: Task, written: Batch, buffer: Databuffer) -> None: ...


class TrainerBuffer(Databuffer):
    """Databuffer of a trainer beside others. `source`: of its rows, to be set before a step begins."""

    source: _Exchange

    def __init__(self, plan: Plan, *given: Any):
        super().__init__(plan, *given)
        tasks = self.lineage.tasks
        self.arrival = next((task.layout for task in plan.tasks if task.arrives and not task.layout.early), plan.source)
        """In which rows come from the dock, and go back: all rows of a prompt on one rank."""
        self.outgoing = {move.producer: replace(
            move, kind="local" if tasks[move.producer].layout == self.arrival else "all_to_all")
            for move in plan.dock if not tasks[move.producer].arrives}

    def take(self, task: Task) -> Batch:
        for producer in dict.fromkeys(move.producer for move in task.transfers):
            writer = self.lineage.tasks.get(producer)
            if writer and writer.awaited and (producer, writer.layout) not in self.step_columns:
                self.receive(self.source.receive_from(producer, self))
        return super().take(task)

    def receive(self, written: Iterable[Columns]) -> None:
        arrived = [(task, dict(columns), ids) for task, columns, ids in written]
        for task, columns, ids in (each for each in arrived if each[0].node in self.outgoing):
            self.step_columns[task.node, task.layout] = Batch(ids, columns)  # before rows are dropped by one of them
            part = self._fetch(self.outgoing[task.node], replace(task, layout=self.arrival))
            if self.drawn is None:
                part = self._in_form(part)
            if self.arrival.leads(self.rank):
                self.source.put_for_others(task, part, self)
        super().receive(arrived)

    def _in_form(self, part: Batch) -> Batch:
        """Return a part whose rows may all have been dropped with the columns that other ranks have. Collective."""
        mine = {name: (len(lengths), dtype_name(values.dtype), values.shape[1:])
                for name, column in part.columns.items() for lengths, values in [levels(column)]}
        forms = next(filter(None, gather_values(mine if len(part) else {})), mine)
        return part if len(part) else Batch(part.ids, {name: from_levels(
            [torch.zeros(0, dtype=torch.int64)] * depth, torch.zeros((0, *shape), dtype=getattr(torch, dtype)))
            for name, (depth, dtype, shape) in forms.items()})


class LeaderLink:
    """The first trainer's view of those that train `roles`, on one of its ranks. `limit`: seconds to wait for them."""

    def __init__(self, store: Store, roles: list[str], rank: int, limit: float):
        self.store, self.roles, self.limit, self.leads = store, roles, limit, rank == 0
        self.written: set[str] = set()  # keys of metrics that were read

    def begin_checkpoint(self, step: int) -> None:
        if self.leads:
            self.store.put("asked", str(step))

    @contextlib.contextmanager
    def checkpoint_part(self, step: int) -> Iterator[None]:
        """Wait for the others' parts of a checkpoint before it is written. Raises CheckpointError: one is missing."""
        for role in self.roles:
            key = f"parts/{role}/{step}"
            said = self.store.get(key) if self.store.wait([key], self.limit) else f"nothing for {self.limit:g} s"
            if said != "written":
                raise CheckpointError(f"the checkpoint of step {step} lacks the part of role `{role}`: {said}")
        yield

    def metrics(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield the step and the metrics of what others have done since the last call, on rank 0."""
        found = self.store.below("metrics").list("") if self.leads else {}
        for step, key in sorted((int(key.rpartition("/")[2]), key) for key in found.keys() - self.written):
            yield step, json.loads(found[key])
        self.written.update(found)

    def forget(self, before: int) -> None:
        """Forget the metrics of steps to which no worker goes back."""
        for key in [key for key in self.written if int(key.rpartition("/")[2]) < before] if self.leads else ():
            self.store.below("metrics").delete(key)
            self.written.discard(key)

    @property
    def stopped(self) -> bool:
        """Whether a rank that trains another role is to stop, and the run with it."""
        return self.leads and self.store.has("stop")

    def end(self, step: int, finished: bool) -> None:
        """Have the others end after `step` steps, and wait until they have. `finished`: the run has finished,
        and was not stopped."""
        if not self.leads:
            return
        self.store.put("ended", json.dumps([step, finished]))
        for role in self.roles:
            if not self.store.wait([f"done/{role}"], self.limit):
                print(f"warning: the ranks that train `{role}` have not come to their end within {self.limit:g} s",
                      file=sys.stderr, flush=True)


class FollowerLink:
    """A follower's view of the first trainer, on one of its ranks."""

    def __init__(self, store: Store, role: str, rank: int):
        self.store, self.role, self.leads = store, role, rank == 0
        self.asked_before = -1  # the last step whose checkpoint was begun

    def begin_checkpoint(self, step: int) -> None:
        """Note that a checkpoint is being written, which is not to be asked for twice."""
        self.asked_before = step

    def post(self, done: int, values: dict[str, float]) -> None:
        """Send the metrics of a step."""
        if self.leads:
            self.store.put(f"metrics/{self.role}/{done}", json.dumps(values))

    @property
    def requested_checkpoint(self) -> int:
        """The step whose checkpoint the first trainer asks for, unless it was written before; else -1."""
        step = int(self.store.get("asked") or -1)
        return -1 if step == self.asked_before or self.store.has(f"parts/{self.role}/{step}") else step

    def poll(self, step: int) -> list[bool]:
        """Return whether the state after `step` steps is asked for, and whether the first trainer does no more. A
        state of before, to which that trainer has gone back, is refused: it is gone."""
        # In this order: the first trainer asks for the last state before it ends.
        over, asked = self.ended_by(step), self.requested_checkpoint
        if 0 <= asked < step:
            self._report(asked, "its ranks have done later steps, and kept no state of this one")
        return [asked == step, over]

    def ended_by(self, step: int) -> bool:
        """Return whether the first trainer does no more than `step` steps."""
        ended = self.store.get("ended")
        return ended is not None and json.loads(ended)[0] <= step

    @property
    def finished(self) -> bool:
        """Whether the run has finished, once it has ended."""
        return json.loads(self.store.get("ended") or "[0, false]")[1]

    @contextlib.contextmanager
    def checkpoint_part(self, step: int) -> Iterator[None]:
        """Report to the first trainer how the writing of this part has gone."""
        try:
            yield
        except CheckpointError as error:
            self._report(step, str(error))
            raise
        self._report(step, "written")  # after any other error this trainer starts again, or the first times out

    def _report(self, step: int, said: str) -> None:
        if self.leads:
            self.store.put(f"parts/{self.role}/{step}", said)

    def note_resumed(self, step: int) -> None:
        """Keep the step at which this trainer went on, for another attempt that has no later state."""
        if self.leads:
            self.store.put(f"resumed/{self.role}", str(step))

    @property
    def resumed_at(self) -> int | None:
        found = self.store.get(f"resumed/{self.role}")
        return None if found is None else int(found)

    def stop(self) -> None:
        """Ask the first trainer to stop the run."""
        self.store.put("stop", "")

    def done(self) -> None:
        if self.leads:
            self.store.put(f"done/{self.role}", "")


class FollowerSink:
    """Sink of a follower: the first trainer writes its metrics. It validates nothing."""

    late = False

    def __init__(self, spec: Spec, path: Path, link: FollowerLink, save: Callable[[int], None],
                 trained: Mapping[str, RoleEngines]):
        self.steps, self.path, self.link, self.save, self.trained = spec.run.steps, path, link, save, trained
        self.done = 0

    def start(self, step: int) -> bool:
        self.done, events.current().step = step, step + 1
        return False

    def record(self, done: int, *_: object) -> dict[str, float]:
        values = current().collect(gather)
        named = {f"{self.link.role}/{name}" if name.partition("/")[0] in _OF_RANKS else name: value
                 for name, value in values.items()}
        self.link.post(done, named)
        return values

    def warn(self, done: int, detector: str, alert: Alert) -> None:
        if self.link.leads:
            events.record(detector, what=alert.what, **alert.facts)
            events.show(f"step {done}: {alert.what} (detector `{detector}`, role `{self.link.role}`)")

    def conclude(self, done: int) -> bool:
        self.done, events.current().step = done, done + 1
        return done == self.steps

    def end(self, finished: bool = True) -> None:
        """Wait until the first trainer has ended, and save what it asks for meanwhile. Collective."""
        while True:
            due, over = gather_values(self.link.poll(self.done))[0]
            if due:
                self.save(self.done)
            elif over:
                return
            else:
                time.sleep(_POLL_INTERVAL)

    def close(self) -> None:
        if gather_values(self.link.finished)[0]:
            write_models(self.trained, self.path)
        self.link.done()

    def flush(self) -> None: ...

    def settle(self) -> None: ...


def write_models(trained: Mapping[str, RoleEngines], folder: Path) -> None:
    """Write each trained role as a Hugging Face folder: `model`, or `model-ROLE` if the DAG has several. Collective."""
    for name, role in trained.items():
        role.save_pretrained(folder / (f"model-{name}" if role.has_others else "model"))
    if any(role.writer for role in trained.values()):
        barrier()  # rank 0 goes on with a folder that another rank has written
