"""Pool of child processes that run a rank's environments: routes steps, and runs them again where a child was lost.

    EnvPool      one per rank and kind of environment; assigns rows to children and retries failed steps
    EnvProcess   a child with its environments and the steps that wait for it
    Episode      one row's environment: its columns, the texts of the model so far, the child that runs it

An environment that is created again, because its child was lost or another rank has begun the conversation, is brought
to where it stood: from its snapshot if it makes them, else by its steps so far, each of which must answer as before.
The first one that does not is the newest turn then, and the conversation goes on from it. A stateless one needs none.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from distflow.contracts.decorators import Turn
from workers.isolation.env_worker import fingerprint_of
from workers.isolation.pool import Call, ChildPool, ChildProcess
from workers.isolation.sandbox.variables import named_secrets

_MAX_PENDING = 64  # steps sent to a child ahead of their answers; the child runs them one after the other
_MAX_WAIT = 0.25  # seconds that steps wait behind a slow one before they move to another child
_MAX_PROCESSES = 512  # children at a time beyond which steps stay behind slow ones


@dataclass(frozen=True)
class EnvFailure:
    reason: str
    timeout: bool = False


@dataclass(frozen=True)
class EnvAnswer(Turn):
    """Answer to the model's turn number `turn`, which is not the newest one if a step that was repeated has answered
    otherwise than before. `state`: the environment's snapshot after it, if it makes them."""

    turn: int = 0
    state: Any = None


Answered = list[tuple[int, Turn | EnvFailure]]  # row and answer of each environment that has answered


@dataclass(frozen=True)
class EnvSettings:
    """Settings of a node's environments. `kind` is `module:Name`; `safe`, `coroutine` and `stateless` are marks of its
    class."""

    kind: str
    settings: dict[str, Any]
    safe: bool
    coroutine: bool
    processes: int = 2  # shared by safe environments; slow and unsafe environments get a process each
    seconds: float = 10.0  # limit of a step
    memory_gib: float = 4.0  # limit of each process
    together: int = 64  # steps under way in a process at a time, if `step` is a coroutine
    stateless: bool = False  # answers depend on the columns and the newest text alone


@dataclass(eq=False)
class Episode(Call):
    """Environment of a row, with all that is needed to create it again. As a call, it is the newest step."""

    row: int
    columns: dict[str, str]
    texts: list[str] = field(default_factory=list)  # turns of the model, oldest first
    process: EnvProcess | None = None
    attempts: int = 0  # attempts at the newest step
    answers: list[bytes] = field(default_factory=list)  # fingerprints of the answers so far
    state: tuple[int, Any] | None = None  # turns, and a snapshot of the environment after them

    def steps(self, known: bool, stateless: bool) -> dict[str, Any]:
        """Return what a child is asked to do; `known`: the environment lives there."""
        if known or stateless:
            return {"columns": {} if known else self.columns, "texts": self.texts[-1:], "answers": []}
        done, state = self.state or (0, None)
        return {"columns": self.columns, "texts": self.texts[done:], "answers": self.answers[done:],
                **({"state": state} if done else {})}

    def take(self, message: dict[str, Any]) -> Turn:
        """Return a child's answer, and forget the turns after the one that it answers."""
        answer = Turn(str(message["observation"]), bool(message["done"]), float(message["reward"]))
        turn = len(self.texts) - int(message.get("behind", 0))
        if not math.isfinite(answer.reward) or not 0 < turn <= len(self.texts):
            raise ValueError(f"a reward of {answer.reward} for turn {turn}")
        differs = turn < len(self.texts)
        self.texts, self.answers = self.texts[:turn], [*self.answers[: turn - 1], fingerprint_of(answer)]
        if "state" in message:
            self.state = turn, message["state"]
        elif self.state and self.state[0] >= turn:
            self.state = None
        return EnvAnswer(**vars(answer), turn=turn, state=message.get("state")) if differs or "state" in message \
            else answer


class EnvProcess(ChildProcess):

    config: EnvSettings

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self.queued: deque[Episode] = deque()
        self.rows: set[int] = set()  # rows whose environment lives here

    @property
    def steps(self) -> list[Episode]:
        return [*self.pending.values(), *self.queued]

    @property
    def blocked_at(self) -> float:
        """Time from which queued steps move away from a slow one; infinite if none waits."""
        if self.concurrent or not self.pending or len(self.pending) + len(self.queued) < 2:
            return math.inf
        slow: Episode = next(iter(self.pending.values()))
        return slow.deadline - slow.seconds + _MAX_WAIT

    def send_queued(self) -> None:
        most = self.config.together if self.concurrent else _MAX_PENDING
        while self.queued and len(self.pending) < most:
            episode = self.queued.popleft()
            known = episode.row in self.rows
            self.rows.add(episode.row)
            steps = episode.steps(known, self.config.stateless)
            episode.seconds = self.config.seconds * len(steps["texts"])
            self.ask(episode, {"key": episode.row, **steps})

    def forget(self, row: int) -> None:
        self.rows.discard(row)
        self.send({"forget": row})

    def keep_only(self, episode: Episode) -> None:
        """Give up all other steps and environments of this child."""
        for row in self.rows - {episode.row}:
            self.forget(row)
        self.pending = {episode.number: episode}
        self.queued.clear()

    def read(self, message: Any) -> tuple[Episode, Turn | EnvFailure] | None:
        episode: Episode | None = self.pending.get(message["call"])
        if episode is None:
            return None
        answer: Turn | EnvFailure
        if "error" in message:
            answer = EnvFailure(str(message["error"]))
            self.rows.discard(episode.row)
        else:
            answer = episode.take(message)
        self.answered(episode)
        return episode, answer


class EnvPool:
    """Environments by row: `step` sends a turn of the model, `turns` returns the answers that have arrived. Not
    thread-safe, except for `wake`. The processes end with the thread that created the pool."""

    def __init__(self, config: EnvSettings):
        self.config = config
        self.episodes: dict[int, Episode] = {}
        self.shared: list[EnvProcess] = []
        self.failures: Answered = []
        self.children = ChildPool(EnvProcess, f"environments of `{config.kind}`",
                                  "workers.isolation.env_worker:EnvironmentHandler",
                                  {"kind": config.kind, "settings": config.settings}, config.memory_gib,
                                  named_secrets(config.settings))
        self.children.start()

    @property
    def busy(self) -> bool:
        return bool(self.failures) or any(each.pending or each.queued for each in self.children.children)

    def step(self, row: int, columns: dict[str, str], text: str) -> None:
        """Send the model's turn `text` to the row's environment, which is created on its first turn."""
        episode = self.episodes.setdefault(row, Episode(row, columns))
        episode.texts.append(text)
        episode.attempts = 0
        self._queue(episode)

    def resume(self, row: int, columns: dict[str, str], texts: list[str], answers: list[Turn],
               state: tuple[int, Any] | None = None) -> None:
        """Go on with a conversation of another rank, whose environment is created with the next `step`."""
        self.episodes[row] = Episode(row, columns, texts, answers=[*map(fingerprint_of, answers)], state=state)

    def turns(self, timeout_s: float = 0.0) -> Answered:
        """Return the answers of environments; [] after `timeout_s` seconds, after `wake`, or if none is under way."""
        until, found = time.monotonic() + timeout_s, []
        while True:
            for process in self.children.children:
                process.send_queued()
            self._isolate_slow_steps()
            found += self._receive(until)
            self._end_late()
            found += self.failures
            self.failures = []
            if found or self.children.woken or not self.busy or time.monotonic() >= until:
                return found

    def wake(self) -> None:
        """Make a waiting `turns`, or the next one, return at once. Thread-safe."""
        self.children.wake()

    def _receive(self, until: float) -> Answered:
        found: Answered = []
        if self.failures or not self.busy:
            until = 0.0
        until = min([until, *(each.deadline for each in self.children.children),
                     *(each.blocked_at for each in self._shared_processes())])
        for process, answers, wrong in self.children.receive(until):
            for episode, answer in filter(None, answers):
                if isinstance(answer, Turn):
                    found.append((episode.row, answer))
                else:
                    self._retry(episode, answer)
            if wrong:
                self._end_process(process, process.due(math.inf), EnvFailure(wrong))
        return found

    def _end_late(self) -> None:
        now, failure = time.monotonic(), EnvFailure(f"took longer than {self.config.seconds:g} s", timeout=True)
        for process in self.children.children:
            if late := process.due(now):
                self._end_process(process, late, failure)

    def _shared_processes(self) -> list[EnvProcess]:
        return self.shared if len(self.children.children) < _MAX_PROCESSES else []

    def _isolate_slow_steps(self) -> None:
        """Leave a slow step alone in its process: create the other environments of that process again elsewhere."""
        for process in [each for each in self._shared_processes() if each.blocked_at <= time.monotonic()]:
            slow, *others = process.steps
            self.shared.remove(process)
            process.keep_only(slow)
            self._move(process, others, but=slow)

    def _move(self, process: EnvProcess, steps: list[Episode], but: Episode | None = None) -> None:
        for episode in self.episodes.values():
            if episode.process is process and episode is not but:
                episode.process = None
        for episode in steps:
            episode.attempts -= 1
            self._queue(episode).send_queued()

    def is_under_way(self, row: int) -> bool:
        """Return whether a step of this row has no answer and no failure yet."""
        episode = self.episodes.get(row)
        return bool(episode and episode.process and episode in episode.process.steps)

    def end(self, row: int) -> None:
        """Drop the environment of a row."""
        self._drop([row])

    def release(self, rows: Iterable[int] | None = None) -> None:
        """Drop the environments of these rows (None: of all)."""
        self._drop(list(self.episodes) if rows is None else rows)
        self.children.kill_ended()

    def _drop(self, rows: Iterable[int]) -> None:
        """Drop environments, and end the processes that compute steps of theirs, which may take long; steps of others
        in such a process run again elsewhere."""
        dropped: dict[EnvProcess, list[Episode]] = {}
        for episode in filter(None, [self.episodes.pop(row, None) for row in rows]):
            if episode.process is not None:
                dropped.setdefault(episode.process, []).append(episode)
        for process, episodes in dropped.items():
            if process not in self.shared:
                self._close(process)
                continue
            if any(episode in process.pending.values() for episode in episodes):
                self._end_process(process, episodes)
                continue
            for episode in episodes:
                if episode in process.queued:
                    process.queued.remove(episode)
                process.forget(episode.row)

    def close(self) -> None:
        self.children.close()

    def _queue(self, episode: Episode) -> EnvProcess:
        episode.attempts += 1
        if episode.process is None:
            episode.process = self._pick_process()
        episode.process.queued.append(episode)
        return episode.process

    def _pick_process(self) -> EnvProcess:
        """Return a process for an environment: a new one, or the least loaded of the shared ones."""
        if self.config.safe and len(self.shared) >= self.config.processes:
            return min(self.shared, key=lambda each: len(each.steps))
        process = self.children.fork()
        process.config, process.concurrent = self.config, self.config.coroutine
        if self.config.safe:
            self.shared.append(process)
        return process

    def _end_process(self, process: EnvProcess, late: list[Episode], failure: EnvFailure | None = None) -> None:
        """End a process. With a `failure`, the steps of `late` have failed; without one they are of no use."""
        others = [episode for episode in process.steps if episode not in late]
        self._close(process)
        self._move(process, others)
        if failure:
            for episode in late:
                self._retry(episode, failure)

    def _retry(self, episode: Episode, failure: EnvFailure) -> None:
        """Run a safe environment once more from its beginning; record the failure of any other."""
        if self.config.safe and episode.attempts < 2:
            self._queue(episode)
        else:
            self.failures.append((episode.row, failure))

    def _close(self, process: EnvProcess) -> None:
        if process in self.shared:
            self.shared.remove(process)
        self.children.end(process)
