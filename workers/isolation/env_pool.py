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
from workers.isolation.pool import Call, CallPool, ChildProcess
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
        self.rows: set[int] = set()  # rows whose environment lives here

    @property
    def blocked_at(self) -> float:
        """Time from which steps move away from a slow one; infinite if none waits behind it."""
        if self.concurrent or len(self.pending) < 2:
            return math.inf
        slow: Episode = next(iter(self.pending.values()))
        return slow.deadline - slow.seconds + _MAX_WAIT

    @property
    def full(self) -> bool:
        return len(self.pending) >= (self.config.together if self.concurrent else _MAX_PENDING)

    def start(self, call: Episode) -> None:
        steps = call.steps(call.row in self.rows, self.config.stateless)
        self.rows.add(call.row)
        call.seconds = self.config.seconds * len(steps["texts"])
        self.ask(call, {"key": call.row, **steps})

    def forget(self, row: int) -> None:
        self.rows.discard(row)
        self.send({"forget": row})

    def keep_only(self, episode: Episode) -> None:
        """Give up all other steps and environments of this child."""
        for row in self.rows - {episode.row}:
            self.forget(row)
        self.pending = {episode.number: episode}

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


class EnvPool(CallPool[EnvProcess]):
    """Environments by row: `step` sends a turn of the model, `turns` returns the answers that have arrived. Not
    thread-safe, except for `wake`. The processes end with the thread that created the pool."""

    def __init__(self, config: EnvSettings):
        self.config = config
        self.episodes: dict[int, Episode] = {}
        self.homes: dict[int, EnvProcess] = {}  # process of each row's environment
        self.shared: list[EnvProcess] = []
        self.answers: Answered = []
        super().__init__(EnvProcess, f"environments of `{config.kind}`",
                         "workers.isolation.env_worker:EnvironmentHandler",
                         {"kind": config.kind, "settings": config.settings}, config.memory_gib,
                         named_secrets(config.settings))
        self.start()

    @property
    def busy(self) -> bool:
        return bool(self.answers or self.waiting) or any(each.pending for each in self.children)

    def step(self, row: int, columns: dict[str, str], text: str) -> None:
        """Send the model's turn `text` to the row's environment, which is created on its first turn."""
        episode = self.episodes.setdefault(row, Episode(row, columns))
        episode.texts.append(text)
        episode.attempt = 0
        self.waiting.append(episode)

    def resume(self, row: int, columns: dict[str, str], texts: list[str], answers: list[Turn],
               state: tuple[int, Any] | None = None) -> None:
        """Go on with a conversation of another rank, whose environment is created with the next `step`."""
        self.episodes[row] = Episode(row, columns, texts, answers=[*map(fingerprint_of, answers)], state=state)

    def turns(self, timeout_s: float = 0.0) -> Answered:
        """Return the answers of environments; [] after `timeout_s` seconds, after `wake`, or if none is under way."""
        until = time.monotonic() + timeout_s
        while True:
            self._isolate_slow_steps()
            self.assign()
            moving = min([until, *(each.blocked_at for each in self._shared_processes())])
            self.hand_out(0.0 if self.answers or not self.busy else moving)
            self.end_late()
            if self.answers or self.woken or not self.busy or time.monotonic() >= until:
                found, self.answers = self.answers, []
                return found

    def done(self, call: Episode, answer: Turn | EnvFailure) -> None:
        if isinstance(answer, Turn):
            self.answers.append((call.row, answer))
        else:
            self._retry(call, answer)

    def failed(self, call: Episode, reason: str, late: bool) -> None:
        self._retry(call, EnvFailure(reason, timeout=late))

    def lateness(self, child: EnvProcess, call: Episode) -> str:
        return f"took longer than {self.config.seconds:g} s"

    def lose(self, child: EnvProcess, blamed: list[Episode], reason: str, late: bool = False) -> None:
        if child in self.shared:
            self.shared.remove(child)
        self._leave(child)
        super().lose(child, blamed, reason, late)

    def _shared_processes(self) -> list[EnvProcess]:
        return self.shared if len(self.children) < _MAX_PROCESSES else []

    def _isolate_slow_steps(self) -> None:
        """Leave a slow step alone in its process: create the other environments of that process again elsewhere."""
        for process in [each for each in self._shared_processes() if each.blocked_at <= time.monotonic()]:
            slow, *others = process.pending.values()
            self.shared.remove(process)
            process.keep_only(slow)
            self._leave(process, but=slow.row)
            self.waiting.extendleft(reversed(others))

    def _leave(self, process: EnvProcess, but: int | None = None) -> None:
        self.homes = {row: home for row, home in self.homes.items() if home is not process or row == but}

    def is_under_way(self, row: int) -> bool:
        """Return whether a step of this row has no answer and no failure yet."""
        calls = self.homes[row].pending.values() if row in self.homes else ()
        return any(call.row == row for call in (*calls, *self.waiting))

    def end(self, row: int) -> None:
        """Drop the environment of a row."""
        self._drop([row])

    def release(self, rows: Iterable[int] | None = None) -> None:
        """Drop the environments of these rows (None: of all)."""
        self._drop(list(self.episodes) if rows is None else rows)
        self.kill_ended()

    def _drop(self, rows: Iterable[int]) -> None:
        """Drop environments, and end the processes that compute steps of theirs, which may take long; steps of others
        in such a process run again elsewhere."""
        dropped: dict[EnvProcess, list[Episode]] = {}
        for row in rows:
            episode, home = self.episodes.pop(row, None), self.homes.pop(row, None)
            if episode and home:
                dropped.setdefault(home, []).append(episode)
        self.waiting = deque(call for call in self.waiting if call.row in self.episodes)
        for process, episodes in dropped.items():
            if process not in self.shared:
                self.end_child(process)
                continue
            if any(episode in process.pending.values() for episode in episodes):
                self.lose(process, episodes, "")
                continue
            for episode in episodes:
                process.forget(episode.row)

    def choose(self, call: Episode) -> EnvProcess | None:
        """Return the process of an environment, or of a new one: another process, or the least loaded shared one."""
        home = self.homes.get(call.row) or self._pick_process()
        if home.full:
            return None
        self.homes[call.row] = home
        return home

    def _pick_process(self) -> EnvProcess:
        if self.config.safe and len(self.shared) >= self.config.processes:
            return min(self.shared, key=lambda each: len(each.pending))
        process = self.fork()
        process.config, process.concurrent = self.config, self.config.coroutine
        if self.config.safe:
            self.shared.append(process)
        return process

    def _retry(self, episode: Episode, failure: EnvFailure) -> None:
        """Run a safe environment once more from its beginning; record the failure of any other."""
        if self.config.safe and not episode.attempt:
            episode.attempt = 1
            self.waiting.append(episode)
        else:
            self.answers.append((episode.row, failure))
