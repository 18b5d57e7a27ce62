"""Leader and followers of an engine that is split over several ranks.

All ranks of a split model must make the same calls. Ranks that run one chain do so anyway; a rollout takes prompts when
there is room and weights when they arrive, which no two processes see alike. So the leader alone decides, and
broadcasts each call before it makes it.

    TPLeader           engine of the first rank, with sessions that broadcast their calls
    TPFollowerEngine   loop of every other rank: receives a call and makes it
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
from distflow.weights.fingerprint import Sums
from workers.engines.rollout import Rollout, SampledRow, Session
from workers.engines.sampling import TokenLimits
from workers.engines.weight_updates import WeightUpdates

_KEEPALIVE = 1.0  # longest time between two broadcasts: followers time out after the run's wait limit


class TPLeader(Rollout):
    """Engine of the first rank; every call that samples or changes weights is made on all ranks. `candidates`: weights
    that the ranks have pulled. Any call raises RankMissing: a follower has ended, or timed out."""

    def __init__(self, engine: Rollout, group: dist.ProcessGroup | None = None):
        self.group, self.engine, self.generation, self.end_tokens = group, engine, engine.generation, engine.end_tokens
        self.dtype, self.sessions, self.last_broadcast = engine.dtype, itertools.count(), time.monotonic()

    @classmethod
    def build(cls, *given: Any, **more: Any) -> Rollout:
        raise TypeError("TPLeader wraps an engine that is already built")

    @property
    def version(self) -> int:
        return self.engine.version

    def candidates(self, key: str) -> set[str]:
        if not key and time.monotonic() - self.last_broadcast < _KEEPALIVE:
            return {key}
        return {key, *self.broadcast(key)}

    def broadcast(self, key: str, *call: Any) -> list[str]:
        """Have the others make a call; the keys of the weights that have come to them. Collective over the share."""
        self.last_broadcast, state = time.monotonic(), heartbeat.current().read()
        message: bytes = msgpack.packb([key, state.step, state.finished, call])  # pyright: ignore[reportAssignmentType]
        return [reply.decode() for reply in gather(message, self.group)[1:]]

    def session(self, key: int, temperature: float | None = None, keep_cache: bool = False,
                limits: TokenLimits | None = None) -> Session:
        self.broadcast("", "session", key, temperature, keep_cache, limits)
        own = self.engine.session(key, temperature, keep_cache, limits)
        return _LeaderSession(self, next(self.sessions), own, keep_cache)

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> int:
        self.broadcast("", "load")
        return self.engine.load(weights, version)

    def held(self) -> Sums:
        return self.engine.held()

    def prove(self, role: str, published: Sums, fingerprint: int = 0) -> None:
        """See `Rollout.prove`. A follower that has loaded weights does so too."""
        self.engine.prove(role, published, fingerprint)
        self.proved = self.engine.proved

    def sleep(self) -> None:
        self.broadcast("", "sleep")
        self.engine.sleep()

    def wake(self) -> None:
        self.broadcast("", "wake")
        self.engine.wake()

    def check_health(self) -> None:
        self.broadcast("", "check_health")
        self.engine.check_health()

    def release_followers(self) -> None:
        self.broadcast("", "release")

    def close(self) -> None:
        self.engine.close()


class _LeaderSession(Session):
    def __init__(self, leader: TPLeader, number: int, session: Session, keep_cache: bool):
        self.leader, self.number, self.session = leader, number, session
        self.key, self.keep_cache = session.key, keep_cache
        self.numbers: dict[SampledRow, int] = {}  # number of each row in the broadcasts
        self.count = itertools.count()

    @property
    def busy(self) -> bool:
        return self.session.busy

    def add(self, rows: list[SampledRow]) -> None:
        described = [[self._number(row), row.id, row.prompt, row.limit, self.session.key_of(row)] for row in rows]
        self._call("add", _pack(rows[0].sequence), described)
        self.session.add(rows)

    def extend(self, row: SampledRow, observation: Tensor, limit: int) -> None:
        self._call("extend", self.numbers[row], _pack(observation), limit)
        self.session.extend(row, observation, limit)

    def forget(self, row: SampledRow) -> None:
        if row in self.numbers:  # else it was never sampled
            self._call("forget", self.numbers.pop(row))
        self.session.forget(row)

    def step(self) -> list[SampledRow]:
        if self.leader.paused or not self.busy:
            return []
        self._call("step")
        return self._drop_ended(self.session.step())

    def abort(self, rows: Sequence[SampledRow] | None = None) -> list[SampledRow]:
        self._call("abort", None if rows is None else [self.numbers[row] for row in rows])
        return self._drop_ended(self.session.abort(rows))

    def _number(self, row: SampledRow) -> int:
        if row not in self.numbers:
            self.numbers[row] = next(self.count)
        return self.numbers[row]

    def _drop_ended(self, rows: list[SampledRow]) -> list[SampledRow]:
        for row in () if self.keep_cache else rows:
            del self.numbers[row]
        return rows

    def _call(self, *call: Any) -> None:
        self.leader.broadcast("", "of_session", self.number, *call)


class TPFollowerEngine:
    """Engine of a follower rank. `updates` pulls the weights that `load` takes; None if they never change."""

    def __init__(self, engine: Rollout, updates: WeightUpdates | None, group: dist.ProcessGroup | None = None):
        self.engine, self.updates, self.group = engine, updates, group
        self.sessions: list[_FollowerSession] = []

    def run(self) -> None:
        """Make the leader's calls until it releases this rank; raise RankMissing if it has ended, or is silent."""
        released = False
        while not released:
            weights = self.updates.pulled_weights() if self.updates else None
            mine = weights.key if weights else ""
            first, step, finished, call = msgpack.unpackb(gather(mine.encode(), self.group)[0])
            if self.updates and first and mine and first != mine:
                self.updates.drop()
            self._mirror_heartbeat(step, finished)
            released = call == ["release"]
            if call == ["load"] and self.updates and weights:
                self.updates.load_into(self.engine)
                self.updates.mark_loaded()
            elif call and not released:
                self._make(*call)

    def _make(self, name: str, *given: Any) -> None:
        if name == "session":
            key, temperature, keep_cache, limits = given
            session = self.engine.session(key, temperature, keep_cache, limits and TokenLimits(*limits))
            self.sessions.append(_FollowerSession(session, keep_cache))
        elif name == "of_session":
            number, call, *values = given
            getattr(self.sessions[number], call)(*values)
        else:
            getattr(self.engine, name)()

    def _mirror_heartbeat(self, step: int, finished: int) -> None:
        """Report the leader's step and progress to this rank's own supervisor."""
        own = heartbeat.current()
        if own.read().step != step:
            own.begin(step)
        for _ in range(finished - own.read().finished):
            own.finish()
        phase = "generating" if any(each.session.busy for each in self.sessions) else "waiting"
        if own.read().phase != phase:
            own.enter(phase)


class _FollowerSession:
    def __init__(self, session: Session, keep_cache: bool):
        self.session, self.keep_cache = session, keep_cache
        self.rows: dict[int, SampledRow] = {}

    def add(self, sequence: bytes, described: list[list[int]]) -> None:
        tokens = _unpack(sequence)  # one tensor, which the engine reads once
        for number, id, prompt, limit, key in described:
            row = self.rows.setdefault(number, SampledRow(id, tokens, prompt, limit, key=key))
            row.sequence, row.limit = tokens, limit
        self.session.add([self.rows[number] for number, *_ in described])

    def extend(self, number: int, observation: bytes, limit: int) -> None:
        self.session.extend(self.rows[number], _unpack(observation), limit)

    def forget(self, number: int) -> None:
        self.session.forget(self.rows.pop(number))

    def step(self) -> None:
        self._drop_ended(self.session.step())

    def abort(self, numbers: list[int] | None) -> None:
        self._drop_ended(self.session.abort(None if numbers is None else [self.rows[number] for number in numbers]))

    def _drop_ended(self, rows: list[SampledRow]) -> None:
        if rows and not self.keep_cache:
            self.rows = {number: row for number, row in self.rows.items() if row not in rows}


def _pack(tokens: Tensor) -> bytes:
    return tokens.to(torch.int32).numpy().tobytes()


def _unpack(tokens: bytes) -> Tensor:
    values = torch.frombuffer(bytearray(tokens), dtype=torch.int32) if tokens else torch.empty(0)
    return values.to(torch.int64)
