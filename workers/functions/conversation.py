"""Conversations of a model with environments: turns sampled, turns observed, and sampling that does not wait.

Which rows are computed together depends on when environments answer. The random numbers of a row do not; what two runs
differ by is the rounding of their log-probabilities.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from distflow import Ragged, Turn, node
from distflow.contracts.decorators import Environment
from distflow.contracts.environments import kind_of, load_environment
from distflow.errors import RewardsFailed
from distflow.telemetry import events, heartbeat
from distflow.telemetry.metrics import current
from distflow.telemetry.trajectories import trajectories
from workers.engines.chat import Between
from workers.engines.rollout import SampledRow, Session
from workers.functions.rewards import all_equal
from workers.functions.rollout import fingerprint, note_lengths
from workers.isolation.env_pool import EnvFailure, EnvPool, EnvSettings
from workers.isolation.env_service import EnvClient, environments_for
from workers.isolation.user_code import failures_of
from workers.roles import RoleEngines

_REASONS, _ROWS = 8, 20
"""So many are named in the events of a step, and in each of them."""
_PATIENCE = 3
"""Steps in a row of which every trajectory may fail."""
Columns = tuple[Ragged, Ragged, Ragged, Ragged, list[str], Tensor, Tensor, Tensor]


@node(type="MODEL_INFERENCE", repeats="group_size",
      writes=("responses", "response_mask", "rollout_logprobs", "versions", "completions", "environment_rewards",
              "turns", "keep"),
      bounds={"max_turns": ">= 1", "max_new_tokens": ">= 1", "max_tokens": ">= 1", "step_seconds": "> 0",
              "processes": ">= 1", "memory_gib": "> 0"})
def converse(engine: RoleEngines, prompts: Ragged, row: Tensor, *, environment: Environment,
             environment_settings: dict | None = None, group_size: int = 1, max_turns: int = 4,
             max_new_tokens: int | None = None, max_tokens: int = 1024,
             observation_role: Literal["user", "tool"] = "user", step_seconds: float = 10.0, processes: int = 2,
             memory_gib: float = 4.0, **columns: list[str],
             ) -> tuple[Ragged, Ragged, Ragged, Ragged, list[str], Tensor, Tensor, Tensor]:
    """`group_size` conversations with an environment for each prompt: all that follows the prompt, which tokens of it
    were sampled, the rewards that the environment gave, the number of turns, and whether it came to a proper end.

    A turn has up to `max_new_tokens`, a whole conversation up to `max_tokens`; one that would be longer ends before.
    A trajectory whose environment fails, or takes longer than `step_seconds`, is not kept.

    Raises:
        RewardsFailed: all of them have failed in several steps in a row.
    """
    own = engine.settings.generation.max_new_tokens if max_new_tokens is None else max_new_tokens
    ids = (row[:, None] * group_size + row.new_tensor(range(group_size))).flatten()
    found = load_environment(environment)
    kind = kind_of(found)
    hosting = EnvSettings(kind.key, environment_settings or {}, kind.safe, kind.coroutine, processes, step_seconds,
                          memory_gib, found.__distflow_together__)
    between = Between(engine.tokenizer, engine.rollout.end_tokens.tolist(), observation_role)
    with engine.converse(prompts, ids, group_size, min(own, max_tokens)) as (session, rows), \
            environments_for(session, hosting) as host:
        saved = trajectories().claim(engine.step, engine.stream, len(rows))
        talks = [_Conversation(each, {name: columns[column][place // group_size] for name,
                                      column in kind.columns.items()},
                               place < saved) for place, each in enumerate(rows)]
        for start in range(0, len(rows), group_size):
            session.add(rows[start : start + group_size])
        talking = _ConversationLoop(session, host, engine, between, (max_turns, own, max_tokens))
        talking.run(talks)
    note_lengths(prompts.lengths, torch.tensor([talk.length for talk in talks], dtype=torch.int64))
    _report(talks, ids, environment, None if session.shared else talking.idle)
    _report_rewards(talks, ids // group_size)
    failures = [talk.failure for talk in talks if talk.failure]
    if failures_of(environment).count(engine.step, len(talks), len(failures)) >= _PATIENCE:
        raise RewardsFailed(f"environment `{environment}` has failed for every trajectory of {_PATIENCE} steps in a "
                            f"row; the last: {failures[-1].reason}")
    return _columns(talks, engine)


@dataclass(eq=False)
class _Conversation:
    """A conversation. Its pieces, sampled and observed ones: tokens, log-probabilities, versions, whether sampled."""

    row: SampledRow
    columns: dict[str, str]
    saved: bool
    """Its turns are written to the run folder."""
    pieces: list[tuple[Tensor, Tensor, Tensor, bool]] = field(default_factory=list)
    turns: int = 0
    length: int = 0
    reward: float = 0.0
    asked: float = 0.0
    failure: EnvFailure | None = None
    cut: bool = False

    @property
    def text(self) -> list[int]:
        return torch.cat([tokens for tokens, *_ in self.pieces]).tolist()

    def add(self, tokens: Tensor, logprobs: Tensor, versions: Tensor, sampled: bool) -> None:
        self.pieces.append((tokens, logprobs, versions, sampled))
        self.length += len(tokens)


class _ConversationLoop:
    """Samples what can be sampled while environments work on the rest."""

    def __init__(self, session: Session, host: EnvPool | EnvClient, engine: RoleEngines, between: Between,
                 limits: tuple[int, int, int]):
        self.session, self.host, self.engine, self.between = session, host, engine, between
        self.max_turns, self.max_new_tokens, self.max_tokens = limits
        self.idle = 0.0
        """Seconds without anything to sample."""

    def run(self, talks: list[_Conversation]) -> None:
        """All of them to their ends."""
        self.by_row = {talk.row.id: talk for talk in talks}
        while self.session.busy or self.host.busy:
            start = time.perf_counter()
            for row in self.session.step() if self.session.busy else ():
                self._said(self.by_row[row.id])
            stepped = time.perf_counter()
            for row, answer in self._turns(stepped - start):
                self._heard(self.by_row[row], answer)

    def _turns(self, step: float) -> list[tuple[int, Turn | EnvFailure]]:
        """What environments have answered. With nothing to sample the first one is waited for, and those that follow
        it within the time of a step: they are then read together, unless the engine has others to sample for."""
        if self.session.busy:
            return self.host.turns()
        start = time.perf_counter()
        with contextlib.nullcontext() if self.session.shared else heartbeat.current().within("tools"):
            found = self.host.turns(math.inf)
        until = time.perf_counter() + (0.0 if self.session.shared else step)
        while self.host.busy and (rest := until - time.perf_counter()) > 0:
            found += self.host.turns(rest)
        self.idle += time.perf_counter() - start
        return found

    def _said(self, talk: _Conversation) -> None:
        """The model has ended its turn: the environment's begins."""
        row = talk.row
        talk.turns += 1
        talk.add(row.tokens, row.logprobs, row.versions, True)
        talk.asked = time.perf_counter()
        heartbeat.current().happens("tools")
        self.host.step(row.id, talk.columns, self._text(row))

    def _heard(self, talk: _Conversation, answer: Turn | EnvFailure) -> None:
        """The environment has answered: go on, or end here."""
        row = talk.row
        if talk.saved:
            self._save(talk, answer)
        if isinstance(answer, EnvFailure):
            talk.failure = answer
        else:
            talk.reward += answer.reward
            if not answer.done and talk.turns < self.max_turns:
                between = self.between.tokens(answer.observation, self.between.ended(row.tokens))
                observed = torch.tensor(between, dtype=torch.int64)
                room = self.max_tokens - talk.length - len(observed)
                if room > 0:
                    talk.add(observed, torch.zeros(len(observed)), row.versions[-1:].expand(len(observed)), False)
                    self.session.extend(row, observed, min(self.max_new_tokens, room))
                    return
                talk.cut = True
        self.host.end(row.id)
        self.session.forget(row)

    def _text(self, row: SampledRow) -> str:
        return self.engine.tokenizer.decode(row.tokens.tolist(), skip_special_tokens=True)

    def _save(self, talk: _Conversation, answer: Turn | EnvFailure) -> None:
        turn = {"failed": answer.reason} if isinstance(answer, EnvFailure) else {
            "observation": answer.observation, "reward": answer.reward, "done": answer.done}
        trajectories().write(self.engine.step, talk.row.id, {
            "turn": talk.turns, "text": self._text(talk.row), "tokens": len(talk.row.tokens), **turn,
            "seconds": round(time.perf_counter() - talk.asked, 6)})


def _report(talks: list[_Conversation], ids: Tensor, environment: str, idle: float | None) -> None:
    metrics, failed = current(), [talk for talk in talks if talk.failure]
    metrics.mean("environment/turns", sum(talk.turns for talk in talks), len(talks))
    metrics.mean("response/truncated", sum(talk.cut or not talk.row.finished for talk in talks), len(talks))
    metrics.add("environment/cut", sum(talk.cut for talk in talks))
    metrics.add("environment/failed", len(failed))
    metrics.add("environment/timeouts", sum(talk.failure.timeout for talk in failed))
    metrics.add("tokens", sum(len(tokens) for talk in talks for tokens, _, _, sampled in talk.pieces if sampled))
    if idle is not None:
        metrics.maximum("environment/idle_seconds", idle)
    metrics.add("response/fingerprint", fingerprint(Ragged.from_rows([torch.tensor(talk.text) for talk in talks]), ids))
    if failed:
        _tell(talks, failed, environment)


def _report_rewards(talks: list[_Conversation], group: Tensor) -> None:
    kept = [place for place, talk in enumerate(talks) if not talk.failure]
    rewards, metrics = torch.tensor([talks[place].reward for place in kept]), current()
    metrics.mean_of("environment/reward", rewards)
    metrics.extremes_of("environment/reward", rewards)
    metrics.deviation_of("environment/reward_std", rewards)
    metrics.mean_of("environment/zero_std_groups", all_equal(rewards, group[kept]))


def _tell(talks: list[_Conversation], failed: list[_Conversation], environment: str) -> None:
    """Say what has failed: one line for people, and an event for each reason."""
    alike: dict[str, list[int]] = {}
    for talk in failed:
        alike.setdefault(talk.failure.reason, []).append(talk.row.id)
    rank = f"[rank {events.current().rank}] "
    reason, rows = max(alike.items(), key=lambda item: len(item[1]))
    events.show(f"{rank}environment `{environment}`: {len(failed)} of {len(talks)} trajectories failed and are left "
                f"out; {len(rows)} of them, as row {rows[0]}: {reason}", sys.stderr)
    for reason, rows in list(alike.items())[:_REASONS]:
        events.record("environment_failed", environment=environment, reason=reason, rows=rows[:_ROWS], count=len(rows))


def _columns(talks: list[_Conversation], engine: RoleEngines) -> Columns:
    """What `converse` writes. No token of a trajectory that is not kept is trained."""
    responses = Ragged.from_rows([torch.cat([piece[0] for piece in talk.pieces]) for talk in talks])
    logprobs, versions = ([piece[index] for talk in talks for piece in talk.pieces] for index in (1, 2))
    mask = [torch.full((len(tokens),), sampled and not talk.failure) for talk in talks
            for tokens, _, _, sampled in talk.pieces]
    return (responses, responses.with_values(torch.cat(mask) if talks else torch.empty(0, dtype=torch.bool)),
            responses.with_values(torch.cat(logprobs) if talks else torch.empty(0)),
            responses.with_values(torch.cat(versions) if talks else torch.empty(0, dtype=torch.int32)),
            engine.decode(responses), torch.tensor([talk.reward for talk in talks]),
            torch.tensor([talk.turns for talk in talks], dtype=torch.int64),
            torch.tensor([talk.failure is None for talk in talks], dtype=torch.bool))
