"""Multi-turn rollouts: conversations of a model with environments, which answer while the model samples for others."""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from distflow import Ragged, Turn, node
from distflow.contracts.decorators import Environment
from distflow.contracts.environments import environment_contract, load_environment
from distflow.errors import RewardsFailed
from distflow.telemetry import events, heartbeat, timeline
from distflow.telemetry.metrics import current
from distflow.telemetry.trajectories import trajectories
from workers.engines.chat import Between
from workers.engines.rollout import SampledRow, Session
from workers.functions.rewards import all_equal
from workers.functions.rollout import fingerprint, note_lengths
from workers.isolation.env_pool import EnvFailure, EnvPool, EnvSettings
from workers.isolation.env_service import EnvClient, environments_for
from workers.isolation.user_code import failure_streak_of
from workers.roles import RoleEngines

_REASONS, _ROWS = 8, 20  # reasons of failure with an event in a step, and rows named in each event
_FIRST = "workers.isolation.first_observation:FirstObservation"
_PATIENCE = 3  # steps in a row in which all trajectories may fail before the run ends


@node(type="MODEL_INFERENCE", repeats="group_size",
      writes=("responses", "response_mask", "rollout_logprobs", "versions", "completions", "environment_rewards",
              "turns", "keep"))
def converse(engine: RoleEngines, prompts: Ragged, row: Tensor, *, environment: Environment,
             environment_settings: dict | None = None, group_size: int = 1, max_turns: PositiveInt = 4,
             max_new_tokens: PositiveInt | None = None, max_tokens: PositiveInt = 1024,
             observation_role: Literal["user", "tool"] = "user", step_seconds: PositiveFloat = 10.0,
             processes: PositiveInt = 2, memory_gib: PositiveFloat = 4.0, **columns: list[str],
             ) -> tuple[Ragged, Ragged, Ragged, Ragged, list[str], Tensor, Tensor, Tensor]:
    """Sample `group_size` conversations with an environment for each prompt: all tokens after the prompt, which of them
    were sampled, the rewards of the environment, the number of turns, and whether the environment did not fail.

    A turn has up to `max_new_tokens`, a whole conversation up to `max_tokens`; one that would be longer ends early. A
    trajectory whose environment fails, or takes longer than `step_seconds`, is not kept. Where the environment begins
    the conversation, the prompts are returned too, with what it has shown. Raises RewardsFailed: all trajectories have
    failed in several steps in a row."""
    own = engine.settings.generation.max_new_tokens if max_new_tokens is None else max_new_tokens
    ids = (row[:, None] * group_size + row.new_tensor(range(group_size))).flatten()
    found = load_environment(environment)
    kind = environment_contract(found)
    env_settings = EnvSettings(kind.key, environment_settings or {}, kind.safe, kind.coroutine, processes, step_seconds,
                               memory_gib, found.__distflow_together__)
    between = Between(engine.tokenizer, engine.end_tokens, observation_role)
    with engine.converse(prompts, ids, group_size, min(own, max_tokens)) as (session, rows), \
            environments_for(session, env_settings) as pool:
        saved = trajectories().claim(engine.step, engine.stream or 0, len(rows))
        episodes = [Trajectory(each, {name: columns[column][index // group_size]
                                   for name, column in kind.columns.items() if column in columns}, index < saved)
                    for index, each in enumerate(rows)]
        if kind.starts:
            begin_episodes(episodes, group_size, session, engine, env_settings, between, max_tokens)
        for start in range(0, len(rows), group_size):
            if not episodes[start].failure:
                session.add(rows[start : start + group_size])
        loop = _ConversationLoop(session, pool, engine, between, (max_turns, own, max_tokens))
        loop.run(episodes)
    begun = Ragged.from_rows([episode.row.sequence[: episode.row.prompt] for episode in episodes])
    note_lengths(begun.lengths[::group_size], torch.tensor([episode.length for episode in episodes], dtype=torch.int64))
    report_episodes(episodes, ids, engine.step, ("environment", environment), None if session.shared else loop.idle)
    report_rewards(episodes, ids // group_size)
    found = columns_of(episodes, engine)
    return (*found, begun) if kind.starts else found  # type: ignore[return-value]


class Piece(NamedTuple):
    tokens: Tensor
    logprobs: Tensor
    versions: Tensor
    sampled: bool


@dataclass(eq=False)
class Trajectory:
    row: SampledRow
    columns: dict[str, str]
    saved: bool  # its turns are written to the run folder
    pieces: list[Piece] = field(default_factory=list)
    turns: int = 0
    reward: float = 0.0
    asked: int = 0  # when its environment was, in the timeline's microseconds
    failure: EnvFailure | None = None
    cut: bool = False

    @property
    def length(self) -> int:
        return sum(len(piece.tokens) for piece in self.pieces)

    def add_turn(self) -> None:
        """Take up the turn that was sampled last."""
        self.turns += 1
        self.pieces.append(Piece(self.row.tokens, self.row.logprobs, self.row.versions, True))
        self.asked = timeline.now()

    def add_observed(self, tokens: Tensor) -> None:
        """Take up tokens after the last turn that the model did not sample."""
        self.pieces.append(Piece(tokens, torch.zeros(len(tokens)), self.row.versions[-1:].expand(len(tokens)), False))

    def record(self, answer: Turn | EnvFailure, engine: RoleEngines) -> None:
        """Write the last turn, and what answered it, to the timeline and the trajectories of the run."""
        timeline.current().add(timeline.TOOLS, f"row {self.row.id}", self.asked, engine.step + 1, turn=self.turns)
        if not self.saved:
            return
        turn = {"failed": answer.reason} if isinstance(answer, EnvFailure) else {
            "observation": answer.observation, "reward": answer.reward, "done": answer.done}
        trajectories().write(engine.step, self.row.id, {
            "turn": self.turns, "text": text_of(engine, self.row), "tokens": len(self.row.tokens), **turn,
            "seconds": (timeline.now() - self.asked) / 1e6})


class _ConversationLoop:
    def __init__(self, session: Session, pool: EnvPool | EnvClient, engine: RoleEngines, between: Between,
                 limits: tuple[int, int, int]):
        self.session, self.pool, self.engine, self.between = session, pool, engine, between
        self.max_turns, self.max_new_tokens, self.max_tokens = limits
        self.idle = 0.0  # seconds without anything to sample

    def run(self, episodes: list[Trajectory]) -> None:
        self.by_row = {episode.row.id: episode for episode in episodes}
        while self.session.busy or self.pool.busy:
            start = time.perf_counter()
            for row in self.session.step() if self.session.busy else ():
                self._step_environment(self.by_row[row.id])
            stepped = time.perf_counter()
            for row, answer in self._turns(stepped - start):
                self._continue(self.by_row[row], answer)

    def _turns(self, step: float) -> list[tuple[int, Turn | EnvFailure]]:
        """Return the answers of environments. With nothing to sample it waits for the first one, and for those that
        follow within the time of a step, which are then read together, unless the engine samples for other callers."""
        if self.session.busy:
            return self.pool.turns()
        start = time.perf_counter()
        with contextlib.nullcontext() if self.session.shared else heartbeat.current().within("tools"):
            found = self.pool.turns(math.inf)
        until = time.perf_counter() + (0.0 if self.session.shared else step)
        while self.pool.busy and (rest := until - time.perf_counter()) > 0:
            found += self.pool.turns(rest)
        self.idle += time.perf_counter() - start
        return found

    def _step_environment(self, episode: Trajectory) -> None:
        episode.add_turn()
        heartbeat.current().notify("tools")
        self.pool.step(episode.row.id, episode.columns, text_of(self.engine, episode.row))

    def _continue(self, episode: Trajectory, answer: Turn | EnvFailure) -> None:
        row = episode.row
        episode.record(answer, self.engine)
        if isinstance(answer, EnvFailure):
            episode.failure = answer
        else:
            episode.reward += answer.reward
            if not answer.done and episode.turns < self.max_turns:
                between = self.between.tokens(answer.observation, self.between.ended(row.tokens))
                observed = torch.tensor(between, dtype=torch.int64)
                room = self.max_tokens - episode.length - len(observed)
                if room > 0:
                    episode.add_observed(observed)
                    self.session.extend(row, observed, min(self.max_new_tokens, room))
                    return
                episode.cut = True
        self.pool.end(row.id)
        self.session.forget(row)


def text_of(engine: RoleEngines, row: SampledRow) -> str:
    return str(engine.tokenizer.decode(row.tokens.tolist(), skip_special_tokens=True))


def report_episodes(episodes: list[Trajectory], ids: Tensor, step: int, who: tuple[str, str],
                    idle: float | None) -> None:
    """Report metrics and failures. `who` answers: its kind, as "environment", and its name. Raises RewardsFailed."""
    metrics, failures = current(), [episode.failure for episode in episodes if episode.failure]
    metrics.mean("environment/turns", sum(episode.turns for episode in episodes), len(episodes))
    truncated = sum(episode.cut or not episode.row.finished for episode in episodes)
    metrics.mean("response/truncated", truncated, len(episodes))
    metrics.add("environment/cut", sum(episode.cut for episode in episodes))
    metrics.add("environment/failed", len(failures))
    metrics.add("environment/timeouts", sum(failure.timeout for failure in failures))
    metrics.add("tokens", sum(len(piece.tokens) for episode in episodes for piece in episode.pieces if piece.sampled))
    if idle is not None:
        metrics.maximum("environment/idle_seconds", idle)
    metrics.add("response/fingerprint", fingerprint(_tokens(episodes), ids))
    if failures:
        _report_failures(episodes, who)
    if failure_streak_of(who[1]).count(step, len(episodes), len(failures)) >= _PATIENCE:
        raise RewardsFailed(f"{who[0]} `{who[1]}` has failed for every trajectory of {_PATIENCE} steps in a row; the "
                            f"last: {failures[-1].reason}")


def report_rewards(episodes: list[Trajectory], group: Tensor) -> None:
    kept = [index for index, episode in enumerate(episodes) if not episode.failure]
    rewards, metrics = torch.tensor([episodes[index].reward for index in kept]), current()
    metrics.mean_of("environment/reward", rewards)
    metrics.extremes_of("environment/reward", rewards)
    metrics.deviation_of("environment/reward_std", rewards)
    metrics.mean_of("environment/zero_std_groups", all_equal(rewards, group[kept]))


def _report_failures(episodes: list[Trajectory], who: tuple[str, str]) -> None:
    alike: dict[str, list[int]] = {}
    for episode in episodes:
        if episode.failure:
            alike.setdefault(episode.failure.reason, []).append(episode.row.id)
    rank = f"[rank {events.current().rank}] "
    reason, rows = max(alike.items(), key=lambda item: len(item[1]))
    events.show(f"{rank}{who[0]} `{who[1]}`: {sum(map(len, alike.values()))} of {len(episodes)} trajectories "
                f"failed and are left out; {len(rows)} of them, as row {rows[0]}: {reason}", sys.stderr)
    for reason, rows in list(alike.items())[:_REASONS]:
        events.record("environment_failed", environment=who[1], reason=reason, rows=rows[:_ROWS], count=len(rows))


def _tokens(episodes: list[Trajectory]) -> Ragged:
    nothing = torch.empty(0, dtype=torch.int64)
    return Ragged.from_rows([torch.cat([nothing, *(piece.tokens for piece in episode.pieces)]) for episode in episodes])


def columns_of(episodes: list[Trajectory], engine: RoleEngines,
             ) -> tuple[Ragged, Ragged, Ragged, Ragged, list[str], Tensor, Tensor, Tensor]:
    responses, pieces = _tokens(episodes), [piece for episode in episodes for piece in episode.pieces]
    mask = [torch.full((len(piece.tokens),), piece.sampled and not episode.failure)
            for episode in episodes for piece in episode.pieces]
    logprobs, versions = [piece.logprobs for piece in pieces], [piece.versions for piece in pieces]
    return (responses, responses.with_values(torch.cat(mask) if mask else torch.empty(0, dtype=torch.bool)),
            responses.with_values(torch.cat(logprobs) if pieces else torch.empty(0)),
            responses.with_values(torch.cat(versions) if pieces else torch.empty(0, dtype=torch.int32)),
            engine.decode(responses), torch.tensor([episode.reward for episode in episodes]),
            torch.tensor([episode.turns for episode in episodes], dtype=torch.int64),
            torch.tensor([episode.failure is None for episode in episodes], dtype=torch.bool))


def begin_episodes(episodes: list[Trajectory], group_size: int, session: Session, engine: RoleEngines,
                   settings: EnvSettings, between: Between, longest: int) -> None:
    """Put what the environment of each prompt shows before the first turn, in up to `longest` tokens, into the prompt;
    its rows have failed where that fails."""
    groups = {episodes[index].row.id: episodes[index : index + group_size]
              for index in range(0, len(episodes), group_size)}
    for row, shown in _first_observations(session, settings, {row: group[0].columns for row, group in groups.items()}):
        group = groups[row]
        first = group[0].row
        if isinstance(shown, Turn):
            tokens = torch.tensor(between.into_prompt(first.sequence, shown.observation), dtype=torch.int64)
            if (extra := len(tokens) - first.prompt) > longest:
                shown = EnvFailure(f"its first observation has {extra} tokens, more than `max_tokens: {longest}`")
        for episode in group:
            if isinstance(shown, EnvFailure):
                episode.failure = shown
            else:
                episode.row.sequence, episode.row.prompt = tokens, len(tokens)
                if episode.saved:
                    trajectories().write(engine.step, episode.row.id, {"turn": 0, "observation": shown.observation})


def _first_observations(session: Session, settings: EnvSettings,
                        columns: dict[int, dict[str, str]]) -> Iterator[tuple[int, Turn | EnvFailure]]:
    """Yield what the environment of each row of `columns` shows, or its failure, as they come."""
    start = getattr(load_environment(settings.kind), "start", None)
    settings = replace(settings, kind=_FIRST, coroutine=inspect.iscoroutinefunction(start),
                       settings={"named": settings.kind, "its_settings": settings.settings})
    with environments_for(session, settings) as pool:
        for row, values in columns.items():
            pool.step(row, values, "")
        while pool.busy:
            with contextlib.nullcontext() if session.shared else heartbeat.current().within("tools"):
                found = pool.turns(math.inf)
            for row, shown in found:
                pool.end(row)
                yield row, shown
