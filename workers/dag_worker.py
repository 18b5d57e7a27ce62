"""One rank: initialise, then run the chain step after step (DistFlow §5)."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distflow.data.batch import Batch, ColumnData, Ragged, decode_text, encode_text
from distflow.data.databuffer import Databuffer
from distflow.data.dataloader import Dataloader
from distflow.data.exchange import attended
from distflow.data.records import open_records
from distflow.observe.metrics import current
from distflow.observe.trajectories import trajectories
from distflow.robust.checkpoint import Checkpoints
from distflow.robust.presence import Presence
from distflow.schema.contract import ENGINE_TYPES
from distflow.schema.errors import ColumnError, RankMissing
from distflow.schema.plan import KEEP, Plan, Task
from distflow.schema.spec import Spec
from workers.encode import encoder
from workers.engines.sampling import key_of
from workers.eyes import eyes_of
from workers.roles import build_roles
from workers.sink import Sink
from workers.validation import Validator


class DagWorker:
    """Holds a rank's engines, buffer and loader, and runs its chain."""

    def __init__(self, spec: Spec, plan: Plan, functions: dict[str, Callable[..., Any]], device: str,
                 folder: Path, resume: bool, presence: Presence, writes: bool = True):
        """`writes`: the run folder is this worker's to write to; without that it cannot `run`."""
        self.presence = presence
        self.spec, self.plan, self.rank = spec, plan, dist.get_rank()
        self.chain = plan.chain(self.rank)
        self.functions = functions
        count = Counter(task.function for task in self.chain)
        self.shared = {function for function, nodes in count.items() if nodes > 1}
        """Functions of several nodes; what they report is told apart."""
        names = {task.role for task in self.chain if task.type in ENGINE_TYPES}
        self.roles = build_roles(spec, plan, names, self._sampling_roles(), device)
        self.streams = streams_of(self.chain, {name: role.stream for name, role in self.roles.items()})
        self.buffer = Databuffer(plan, self.rank, current(), limit=spec.run.wait_limit)
        self.source = self._dataloader()
        self.trained = {name: role for name, role in self.roles.items() if spec.dag.roles[name].trained}
        self.checkpoints = Checkpoints(folder / "checkpoints", spec.run.checkpoint.keep)
        self.first = self._restore() if resume else 0
        if writes:
            self._open(folder, self.first if resume else None)

    def _open(self, folder: Path, resumed_at: int | None) -> None:
        """Lines of steps that a resumed run does again are dropped."""
        trajectories().open(folder / f"trajectories/rank{self.rank}.jsonl", self.spec.run.trajectories, resumed_at)
        validator = self._validator() if self.spec.run.validation else None
        self.sink = Sink(self.spec, self.plan, folder, resumed_at, validator, self._save)

    def run(self) -> None:
        """All steps, from the first or from where the checkpoint stands."""
        for step in self.steps():
            for task in self.tasks():
                with self._watch(task, step), attended():
                    inputs = self.buffer.take(task)
                    self.presence.now(f"is in step {step}, computing node `{task.node}`")
                    written = self.execute(task, inputs)
                    if KEEP in task.writes:
                        self.presence.now(f"is in step {step}, waiting to drop rows after node `{task.node}`")
                    self.buffer.put(task, *written)
            with _Watch(self.presence, f"is finishing step {step}", f"at the end of step {step}"), attended():
                last = self.sink.finish(step, self.buffer)
            if last:
                break
        with _Watch(self.presence, "is ending the run", "at the end of the run"), attended():
            self.sink.close(self.trained)
            dist.barrier()  # a rank that leaves early tears the group down under the others

    def _watch(self, task: Task, step: int) -> _Watch:
        return _Watch(self.presence, f"is in step {step}, waiting for the inputs of node `{task.node}`",
                      f"in node `{task.node}` (function {task.function}), step {step}")

    def steps(self) -> Iterator[int]:
        """Step numbers. Each step's global randomness depends on (seed, step) alone, so that none has to be saved."""
        self.sink.start(self.first)
        for step in range(self.first, self.spec.run.steps):
            torch.manual_seed(key_of(self.spec.run.seed, step))
            trajectories().start(step)
            for role in self.roles.values():
                role.step = step
            yield step

    def tasks(self) -> Iterator[Task]:
        """The chain over the step's prompts; its beginning over further ones while a filter leaves too few."""
        self.buffer.start(self.source.next(), self.source.drawn)
        for index, task in enumerate(self.chain):
            yield task
            while task.draws > 1 and not self.buffer.full(task, self.source.batch):
                self.buffer.draw_again(self.source.next(), self.source.drawn)
                yield from self.chain[: index + 1]

    def execute(self, task: Task, inputs: Batch) -> tuple[dict[str, ColumnData], torch.Tensor]:
        """Run a task's function on its columns: what it wrote, and the ids of the rows it wrote."""
        ids = inputs.repeat(task.repeats).ids if task.repeats > 1 else inputs.ids
        if not len(inputs) and task.type not in ENGINE_TYPES:
            return {}, ids  # a rank without rows has nothing to compute; model functions are collective
        arguments = {column.parameter: _as_form(inputs[column.parameter], column.form) for column in task.reads}
        engine = (self.roles[task.role],) if task.type in ENGINE_TYPES else ()
        if task.node in self.streams:
            self.roles[task.role].stream = self.streams[task.node]
        start = time.perf_counter()
        before = {name: _versions(column) for name, column in arguments.items()}
        with self._speaking_for(task):
            result = self.functions[task.node](*engine, **arguments, **task.settings)
        for name in (name for name, column in arguments.items() if _versions(column) != before[name]):
            raise ColumnError(f"{task.function} changed its input `{name}` in place, which other nodes read too. Write "
                              f"to a copy:  {name} = {name}.clone()")
        current().maximum(f"seconds/{task.node}", time.perf_counter() - start)
        return _as_columns(task, result, len(ids)), ids

    @contextlib.contextmanager
    def _speaking_for(self, task: Task) -> Iterator[None]:
        """What is reported meanwhile is the task's; of the ranks that share its rows, one reports."""
        metrics, layout = current(), task.layout
        speaks = self.roles[task.role].engine.speaks if task.type == "MODEL_TRAIN" else layout.leads(self.rank)
        metrics.scope = task.node if task.function in self.shared else ""
        metrics.muted = layout.width > 1 and not speaks
        try:
            yield
        finally:
            metrics.scope, metrics.muted = "", False

    def _dataloader(self) -> Dataloader:
        spec, layout = self.spec, self.plan.source
        role = self.roles[prompted_role(spec, self.chain)]
        records = open_records(spec.data_path(spec.run.data.train))
        eyes = eyes_of(role, spec.run.data, spec.data_path(spec.run.data.train))
        return Dataloader(records, encoder(role.tokenizer, spec.run.data, eyes), spec.run.data.batch, spec.run.seed,
                          layout.share(self.rank), layout.dp)

    def _sampling_roles(self) -> set[str]:
        sampling = {task.role for task in self.chain if task.samples}
        return sampling | ({prompted_role(self.spec, self.chain)} if self.spec.run.validation else set())

    def _validator(self) -> Validator:
        name = prompted_role(self.spec, self.chain)
        return Validator(self.spec, self.roles[name], self.plan.layout_of(name, samples=True))

    def _save(self, step: int) -> None:
        engines = {name: role.engine for name, role in self.trained.items()}
        self.checkpoints.save(step, engines, {"source": self.source.state_dict()})

    def _restore(self) -> int:
        progress = self.checkpoints.load({name: role.engine for name, role in self.trained.items()})
        self.source.load_state_dict(progress["source"])
        return progress["step"]


def prompted_role(spec: Spec, chain: Iterable[Task]) -> str:
    """The role for whose tokenizer the prompts are made, and whose answers are validated: the first trained one in the
    chain that has a vocabulary, else the chain's first."""
    tasks = [task for task in chain if task.type in ENGINE_TYPES]
    trained = (task.role for task in tasks if task.type == "MODEL_TRAIN" and spec.dag.roles[task.role].head == "lm")
    return next(trained, tasks[0].role)


def streams_of(chain: Iterable[Task], of_role: Mapping[str, int | None]) -> dict[str, int]:
    """The number under which each sampling node draws: its role's, or one of its own behind all roles' where the role
    has sampled before, since rows of two nodes may have equal ids."""
    found: dict[str, int] = {}
    for task in (task for task in chain if task.samples):
        own = of_role[task.role]
        found[task.node] = len(of_role) + len(found) if own in found.values() else own
    return found


class _Watch:
    """Tells the others what this rank does; adds to an error that passes through where it comes from and who is
    missing."""

    def __init__(self, presence: Presence, doing: str, where: str):
        self.presence, self.note = presence, f"{where}, rank {presence.rank}"
        presence.now(doing)

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            error.add_note(self.note)
        if isinstance(error, RankMissing) and (missing := self.presence.missing()):
            error.add_note(f"missing: {missing}")


def _as_form(column: ColumnData, form: str) -> Any:
    return decode_text(column) if form == "list[str]" and isinstance(column, Ragged) else column


def _as_columns(task: Task, result: Any, rows: int) -> dict[str, ColumnData]:
    values = () if not task.writes else result if isinstance(result, tuple) else (result,)
    if len(values) != len(task.writes):
        raise ColumnError(f"{task.function} returned {len(values)} columns; it declares {', '.join(task.writes)}")
    columns = {name: encode_text(value) if isinstance(value, list) else _without_graph(value)
               for name, value in zip(task.writes, values)}
    for name, column in columns.items():
        if not isinstance(column, torch.Tensor | Ragged):
            raise ColumnError(f"{task.function} returned {type(column).__name__} for column `{name}`; a column is a "
                              "Tensor, a Ragged or a list of str")
        if len(column) != rows:
            raise ColumnError(f"{task.function} returned {len(column)} rows of column `{name}` for {rows} rows")
    return columns


def _without_graph(column: Any) -> Any:
    """A column for later nodes is on the CPU, wherever it was made, and keeps nothing alive that it was made from."""
    if isinstance(column, Ragged):
        return Ragged(_without_graph(column.values), column.lengths.cpu())
    return column.detach().cpu() if isinstance(column, torch.Tensor) else column


def _versions(column: Any) -> list[int]:
    """How often each tensor of a column was written to."""
    if isinstance(column, Ragged):
        return [*_versions(column.values), *_versions(column.lengths)]
    if not isinstance(column, torch.Tensor) or column.is_inference():  # torch refuses to write into the latter
        return []
    return [column._version]
