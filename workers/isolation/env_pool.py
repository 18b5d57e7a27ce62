"""Pool of child processes that run a rank's environments: routes steps, and runs them again where a child was lost.

    EnvPool      one per rank and kind of environment; assigns episodes to children and retries failed steps
    EnvProcess   a child with its environments and the steps that wait for it
    Episode      one row's environment: its columns, the texts of the model so far, the child that runs it

An environment that is created again, because its child was lost or another rank has begun the conversation, is brought
to where it stood: from its snapshot if it makes them, else by its steps so far, each of which must answer as before.
The first one that does not is the newest turn then, and the conversation goes on from it. A stateless one needs none.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from distflow.contracts.decorators import Turn
from distflow.telemetry import events
from workers.isolation.env_worker import fingerprint_of
from workers.isolation.pool import Call, CallPool, ChildProcess, ForkServerLost
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


Answered = list[tuple["Episode", Turn | EnvFailure]]  # episodes that have answered
_keys = itertools.count()


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
    starts: bool = False  # its only turn is what it shows before the first one


@dataclass(eq=False)
class Episode(Call):
    """Environment of a row of `caller`, with all that is needed to create it again. As a call, it is the newest step.
    """

    caller: Any
    row: int
    columns: dict[str, str]
    texts: list[str] = field(default_factory=list)  # turns of the model, oldest first
    answers: list[bytes] = field(default_factory=list)  # fingerprints of the answers so far
    state: tuple[int, Any] | None = None  # turns, and a snapshot of the environment after them
    key: int = field(default_factory=_keys.__next__)  # callers may have rows of one id
    home: EnvProcess | None = None
    lives: bool = False  # whether the environment has been created there
    answer: Turn | EnvFailure | None = None  # to the newest step, as soon as there is one
    lost: bool = False  # whether the fork server has been lost while that step had no answer

    def steps(self, stateless: bool) -> dict[str, Any]:
        """Return what a child is asked to do."""
        if self.lives or stateless:
            return {"columns": {} if self.lives else self.columns, "texts": self.texts[-1:], "answers": []}
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
        self.episodes: set[Episode] = set()  # those that are asked here

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
        steps, call.lives = call.steps(self.config.stateless), True
        call.seconds = self.config.seconds * len(steps["texts"])
        self.ask(call, {"key": call.key, **steps})

    def forget(self, episode: Episode) -> None:
        self.leave(episode)
        self.pending.pop(episode.number, None)
        self.send({"forget": episode.key})

    def leave(self, *episodes: Episode) -> None:
        for episode in episodes:
            episode.home, episode.lives = None, False
            self.episodes.discard(episode)

    def read(self, message: Any) -> tuple[Episode, Turn | EnvFailure] | None:
        episode: Episode | None = self.pending.get(message["call"])
        if episode is None:
            return None
        answer: Turn | EnvFailure
        if "error" in message:
            answer = EnvFailure(str(message["error"]))
            episode.lives = False
        else:
            answer = episode.take(message)
        self.answered(episode)
        return episode, answer


class EnvPool(CallPool[EnvProcess]):
    """Environments by episode: `step` sends a turn of the model, `turns` returns the answers that have arrived. Not
    thread-safe, except for `wake`. The processes end with the thread that created the pool."""

    def __init__(self, config: EnvSettings):
        self.config = config
        self.shared: list[EnvProcess] = []
        self.answers: Answered = []
        super().__init__(EnvProcess, f"environments of `{config.kind}`",
                         "workers.isolation.env_worker:EnvironmentHandler",
                         {"kind": config.kind, "settings": config.settings, "starts": config.starts}, config.memory_gib,
                         named_secrets(config.settings))
        self.start()

    @property
    def busy(self) -> bool:
        return bool(self.answers or self.waiting) or any(each.pending for each in self.children)

    def step(self, episode: Episode, text: str) -> None:
        """Send the model's turn `text` to an environment, which is created on the first one here."""
        episode.texts.append(text)
        episode.attempt, episode.answer, episode.lost = 0, None, False
        self.waiting.append(episode)

    def turns(self, timeout_s: float = 0.0) -> Answered:
        """Return the answers of environments; [] after `timeout_s` seconds, after `wake`, or if none is under way."""
        until = time.monotonic() + timeout_s
        while True:
            try:
                self._isolate_slow_steps()
                self.assign()
                moving = min([until, *(each.blocked_at for each in self._shared_processes())])
                self.hand_out(0.0 if self.answers or not self.busy else moving)
                self.end_late()
            except ForkServerLost as error:
                self._start_again(error)
            if self.answers or self.woken or not self.busy or time.monotonic() >= until:
                found, self.answers = self.answers, []
                return found

    def done(self, call: Episode, answer: Turn | EnvFailure) -> None:
        if isinstance(answer, Turn):
            self._record(call, answer)
        else:
            self._retry(call, answer)

    def failed(self, call: Episode, reason: str, late: bool) -> None:
        self._retry(call, EnvFailure(reason, timeout=late))

    def lateness(self, child: EnvProcess, call: Episode) -> str:
        return f"took longer than {self.config.seconds:g} s"

    def lose(self, child: EnvProcess, blamed: list[Episode], reason: str, late: bool = False) -> None:
        self.shared = [each for each in self.shared if each is not child]
        child.leave(*child.episodes)
        super().lose(child, blamed, reason, late)

    def _shared_processes(self) -> list[EnvProcess]:
        return self.shared if len(self.children) < _MAX_PROCESSES else []

    def _isolate_slow_steps(self) -> None:
        """Leave a slow step alone in its process: create the other environments of that process again elsewhere."""
        for process in [each for each in self._shared_processes() if each.blocked_at <= time.monotonic()]:
            slow, *others = process.pending.values()
            self.shared.remove(process)
            for episode in process.episodes - {slow}:
                process.forget(episode)
            self.waiting.extendleft(reversed(others))

    def is_under_way(self, episode: Episode) -> bool:
        """Return whether a step of this environment has no answer and no failure yet."""
        return episode in self.waiting or (episode.home is not None and episode in episode.home.pending.values())

    def drop(self, episodes: Iterable[Episode]) -> None:
        """Drop environments, and end the processes that compute steps of theirs, which may take long; steps of others
        in such a process run again elsewhere."""
        dropped = {*episodes}
        self.waiting = deque(call for call in self.waiting if call not in dropped)
        for episode in dropped:
            episode.caller = None
        try:
            for process in {episode.home for episode in dropped if episode.home}:
                if process not in self.shared or not dropped.isdisjoint(process.pending.values()):
                    self.lose(process, [*dropped], "")
                else:
                    for episode in process.episodes & dropped:
                        process.forget(episode)
            self.kill_ended()
        except ForkServerLost as error:
            self._start_again(error, dropped)

    def _start_again(self, error: ForkServerLost, dropped: Collection[Episode] = ()) -> None:
        """Create all environments but `dropped` again, each with its next step. Raises the error if a step without an
        answer was lost so before: it may be what ends the fork server."""
        lost = [call for child in self.children for call in child.pending.values() if call not in dropped]
        for child in self.children:
            child.leave(*child.episodes)
        self.shared.clear()
        self.stop()
        self.waiting.extendleft(reversed(lost))
        if any(call.lost for call in self.waiting):
            raise error
        for call in self.waiting:
            call.lost = True
        events.show(f"[rank {events.current().rank}] {error} It starts again, and environments repeat their steps.",
                    sys.stderr)

    def choose(self, call: Episode) -> EnvProcess | None:
        """Return the process of an environment, or of a new one: another process, or the least loaded shared one."""
        home = call.home or self._pick_process()
        if home.full:
            return None
        call.home = home
        home.episodes.add(call)
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
            self._record(episode, failure)

    def _record(self, episode: Episode, answer: Turn | EnvFailure) -> None:
        episode.answer = answer
        self.answers.append((episode, answer))
