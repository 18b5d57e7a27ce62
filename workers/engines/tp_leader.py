"""One engine over several ranks that sample for others: the first of them decides, and the others do the same.

An engine whose model is split must be called alike on all of its ranks. Where all of them run one chain together, they
do so by themselves. A rollout takes prompts when there is room and weights when they have come, which no two processes
see alike: so only the first rank does, and tells the others each call before it makes it itself.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgpack
import torch
import torch.distributed as dist
from torch import Tensor

from distflow.data.exchange import gather
from distflow.telemetry import heartbeat
from distflow.weights.chunk_store import Weights
from workers.engines.rollout import Rollout, SampledRow, Session
from workers.engines.weight_updates import WeightUpdates

_BEAT = 1.0
"""Seconds after which the others hear something, if only that there is nothing to do: they wait no longer than the
run's wait limit."""


class TPLeader(Rollout):
    """The engine of a share's first rank. Everything that samples or changes weights is done on all ranks.

    `candidates` says which weights they have: each rank pulls them by itself, while it samples. `share`: the group of
    these ranks; None: all that this process has a group with.

    Raises:
        RankMissing: in any call; one of the others has ended, or did not come.
    """

    def __init__(self, engine: Rollout, share: dist.ProcessGroup | None = None):
        self.share, self.engine, self.generation, self.end_tokens = share, engine, engine.generation, engine.end_tokens
        self.dtype, self.sessions, self.told_at = engine.dtype, itertools.count(), time.monotonic()

    @classmethod
    def build(cls, *given: Any, **more: Any) -> Rollout:
        raise TypeError("it leads an engine that is there")

    @property
    def version(self) -> int:
        return self.engine.version

    def candidates(self, key: str) -> set[str]:
        if not key and time.monotonic() - self.told_at < _BEAT:
            return {key}
        return {key, *self.tell(key)}

    def tell(self, key: str, *call: Any) -> list[str]:
        """Have the others make a call; the keys of the weights that have come to them. Collective over the share."""
        self.told_at, page = time.monotonic(), heartbeat.current().read()
        said = msgpack.packb([key, page.step, page.finished, call])
        return [heard.decode() for heard in gather(said, self.share)[1:]]

    def session(self, key: int, temperature: float | None = None, keeps: bool = False) -> Session:
        self.tell("", "session", key, temperature, keeps)
        return _LeaderSession(self, next(self.sessions), self.engine.session(key, temperature, keeps), keeps)

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> int:
        self.tell("", "load")
        return self.engine.load(weights, version)

    def sleep(self) -> None:
        self.tell("", "sleep")
        self.engine.sleep()

    def wake(self) -> None:
        self.tell("", "wake")
        self.engine.wake()

    def check_health(self) -> None:
        self.tell("", "check_health")
        self.engine.check_health()

    def part(self) -> None:
        """Nothing is sampled any more: the others may go."""
        self.tell("", "part")

    def close(self) -> None:
        self.engine.close()


class _LeaderSession(Session):
    """A session that all ranks have, each with rows of its own."""

    def __init__(self, leading: TPLeader, number: int, session: Session, keeps: bool):
        self.leading, self.number, self.session, self.keeps, self.key = leading, number, session, keeps, session.key
        self.numbers: dict[SampledRow, int] = {}
        """Rows as the others know them."""
        self.count = itertools.count()

    @property
    def busy(self) -> bool:
        return self.session.busy

    def add(self, rows: list[SampledRow]) -> None:
        described = [[self._number(row), row.id, row.prompt, row.limit, self.session.key_of(row)] for row in rows]
        self._tell("add", _packed(rows[0].sequence), described)
        self.session.add(rows)

    def extend(self, row: SampledRow, observation: Tensor, limit: int) -> None:
        self._tell("extend", self.numbers[row], _packed(observation), limit)
        self.session.extend(row, observation, limit)

    def forget(self, row: SampledRow) -> None:
        self._tell("forget", self.numbers.pop(row))
        self.session.forget(row)

    def step(self) -> list[SampledRow]:
        if self.leading.paused or not self.busy:
            return []
        self._tell("step")
        return self._over(self.session.step())

    def abort(self, rows: Sequence[SampledRow] | None = None) -> list[SampledRow]:
        self._tell("abort", None if rows is None else [self.numbers[row] for row in rows])
        return self._over(self.session.abort(rows))

    def _number(self, row: SampledRow) -> int:
        if row not in self.numbers:
            self.numbers[row] = next(self.count)
        return self.numbers[row]

    def _over(self, rows: list[SampledRow]) -> list[SampledRow]:
        for row in () if self.keeps else rows:
            del self.numbers[row]
        return rows

    def _tell(self, *call: Any) -> None:
        self.leading.tell("", "of_session", self.number, *call)


class TPFollowerEngine:
    """The engine of one of the other ranks.

    Args:
        updates: pulls the weights that `load` takes; None where they stay as they are.
        share: as `TPLeader` has it.
    """

    def __init__(self, engine: Rollout, updates: WeightUpdates | None, share: dist.ProcessGroup | None = None):
        self.engine, self.updates, self.share = engine, updates, share
        self.sessions: list[_FollowerSession] = []

    def run(self) -> None:
        """Do what the first rank does, until it parts.

        Raises:
            RankMissing: it has ended, or says nothing any more.
        """
        parted = False
        while not parted:
            weights = self.updates.arrived() if self.updates else None
            mine = weights.key if weights else ""
            first, step, finished, call = msgpack.unpackb(gather(mine.encode(), self.share)[0])
            if first and mine and first != mine:
                self.updates.drop()
            self._keep_up(step, finished)
            parted = call == ["part"]
            if call and not parted:
                self._make(weights, *call)

    def _make(self, weights: Weights | None, name: str, *given: Any) -> None:
        if name == "load":
            self.engine.load(weights.tensors(), weights.version)
            self.updates.loaded()
        elif name == "session":
            self.sessions.append(_FollowerSession(self.engine.session(*given), keeps=given[-1]))
        elif name == "of_session":
            number, call, *values = given
            getattr(self.sessions[number], call)(*values)
        else:
            getattr(self.engine, name)()

    def _keep_up(self, step: int, finished: int) -> None:
        """This rank is where the first one is; its seat, too, is to know that."""
        page = heartbeat.current()
        if page.read().step != step:
            page.begin(step)
        for _ in range(finished - page.read().finished):
            page.finish()
        phase = "generating" if any(each.session.busy for each in self.sessions) else "waiting"
        if page.read().phase != phase:
            page.enter(phase)


class _FollowerSession:
    """A session with rows that are those of the first rank, by their numbers."""

    def __init__(self, session: Session, keeps: bool):
        self.session, self.keeps = session, keeps
        self.rows: dict[int, SampledRow] = {}

    def add(self, sequence: bytes, described: list[list[int]]) -> None:
        tokens = _unpacked(sequence)  # one tensor, which the engine reads once
        for number, id, prompt, limit, key in described:
            row = self.rows.setdefault(number, SampledRow(id, tokens, prompt, limit, key=key))
            row.sequence, row.limit = tokens, limit
        self.session.add([self.rows[number] for number, *_ in described])

    def extend(self, number: int, observation: bytes, limit: int) -> None:
        self.session.extend(self.rows[number], _unpacked(observation), limit)

    def forget(self, number: int) -> None:
        self.session.forget(self.rows.pop(number))

    def step(self) -> None:
        self._over(self.session.step())

    def abort(self, numbers: list[int] | None) -> None:
        self._over(self.session.abort(None if numbers is None else [self.rows[number] for number in numbers]))

    def _over(self, rows: list[SampledRow]) -> None:
        if rows and not self.keeps:
            self.rows = {number: row for number, row in self.rows.items() if row not in rows}


def _packed(tokens: Tensor) -> bytes:
    return tokens.to(torch.int32).numpy().tobytes()


def _unpacked(tokens: bytes) -> Tensor:
    values = torch.frombuffer(bytearray(tokens), dtype=torch.int32) if tokens else torch.empty(0)
    return values.to(torch.int64)
