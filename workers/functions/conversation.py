"""Multi-turn rollouts: conversations of a model with environments, which answer while the model samples for others."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from distflow.contracts.decorators import Environment, Turn, node
from distflow.contracts.environments import live_environment
from distflow.data.batch import Batch, Ragged
from distflow.errors import RewardsFailed
from distflow.telemetry import events, heartbeat, timeline
from distflow.telemetry.metrics import current
from distflow.telemetry.trajectories import trajectories
from workers.engines.chat import TurnTemplate
from workers.engines.role_engines import RoleEngines
from workers.engines.rollout import Session
from workers.functions.rewards import all_equal
from workers.functions.rollout import cut_thoughts, fingerprint, note_lengths
from workers.functions.trajectory import Recorded, Trajectory, digest_of, recorded_in, rows_of
from workers.isolation.env_pool import EnvAnswer, EnvFailure, EnvSettings
from workers.isolation.env_service import EnvClient, service_of
from workers.isolation.rewards.texts import marked_answer
from workers.isolation.user_code import failure_streak_of

_REASONS, _ROWS = 8, 20  # reasons of failure with an event in a step, and rows named in each event
_FAILED_STEPS = 3  # steps in a row in which all trajectories may fail before the run ends


@node(type="MODEL_INFERENCE", repeats="group_size",
      writes=("responses", "response_mask", "rollout_logprobs", "versions", "completions", "environment_rewards",
              "turns", "finished", "completions.cut_thoughts", "keep", "routed_experts"))
def converse(engine: RoleEngines, prompts: Ragged, row: Tensor, *, environment: Environment,
             environment_settings: dict | None = None, group_size: int = 1, max_turns: PositiveInt = 4,
             max_new_tokens: PositiveInt | None = None, max_tokens: PositiveInt = 1024,
             observation_role: Literal["user", "tool"] = "user", step_seconds: PositiveFloat = 10.0,
             processes: PositiveInt = 2, memory_gib: PositiveFloat = 4.0, **columns: list[str],
             ) -> tuple[Ragged, Ragged, Ragged, Ragged, list[str], Tensor, Tensor, Tensor, Tensor, Tensor, Ragged]:
    """Sample `group_size` conversations with an environment for each prompt: all tokens after the prompt, which of them
    were sampled, the rewards of the environment, the number of turns, whether they came to their end, whether they
    were cut off within thoughts, whether the environment did not fail, and with `generation.routing_replay` the experts
    chosen for each token.

    A turn has up to `max_new_tokens`, a whole conversation up to `max_tokens`; one that would be longer ends early. A
    trajectory whose environment fails, or takes longer than `step_seconds`, is not kept. Where the environment begins
    the conversation, the prompts are returned too, with what it has shown. Raises RewardsFailed: all trajectories have
    failed in several steps in a row."""
    own = engine.settings.generation.max_new_tokens if max_new_tokens is None else max_new_tokens
    ids = (row[:, None] * group_size + row.new_tensor(range(group_size))).flatten()
    found, kind = live_environment(environment)
    env_settings = EnvSettings(kind.key, environment_settings or {}, kind.safe, kind.coroutine, processes, step_seconds,
                               memory_gib, found.__distflow_together__, found.__distflow_stateless__)
    between = TurnTemplate(engine.tokenizer, engine.end_tokens, observation_role, engine.template_options)
    with engine.converse(prompts, ids, group_size, min(own, max_tokens)) as (session, rows), \
            service_of(env_settings).client(session.wake) as pool:
        saved = trajectories().claim(engine.step, engine.stream or 0, len(rows))
        episodes = [Trajectory(each, {name: columns[column][index // group_size]
                                   for name, column in kind.columns.items() if column in columns}, index < saved)
                    for index, each in enumerate(rows)]
        if kind.starts:
            begin_episodes(episodes, group_size, session, engine, env_settings, between, max_tokens)
        loop = _ConversationLoop(session, pool, engine, between, (max_turns, own, max_tokens))
        loop.start(episodes, group_size)
        loop.run()
    begun = Ragged.from_rows([episode.row.sequence[: episode.row.prompt] for episode in episodes])
    note_lengths(begun.lengths[::group_size], torch.tensor([episode.length for episode in episodes], dtype=torch.int64))
    report_episodes(episodes, ids, engine.step, ("environment", environment), None if session.shared else loop.idle)
    report_rewards(episodes, ids // group_size)
    found = columns_of(episodes, engine, begun)
    return (*found, begun) if kind.starts else found  # type: ignore[return-value]


def begin_episodes(episodes: list[Trajectory], group_size: int, session: Session, engine: RoleEngines,
                   settings: EnvSettings, between: TurnTemplate, longest: int) -> None:
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
                episode.row.sequence, episode.row.prompt, episode.began = tokens, len(tokens), digest_of(tokens)
                if episode.saved:
                    trajectories().write(engine.step, episode.row.id, {"turn": 0, "observation": shown.observation})


def _first_observations(session: Session, settings: EnvSettings,
                        columns: dict[int, dict[str, str]]) -> Iterator[tuple[int, Turn | EnvFailure]]:
    """Yield what the environment of each row of `columns` shows, or its failure, as they come."""
    start = getattr(live_environment(settings.kind)[0], "start", None)
    settings = replace(settings, starts=True, safe=True, coroutine=inspect.iscoroutinefunction(start))
    with service_of(settings).client(session.wake) as pool:
        for row, values in columns.items():
            pool.step(row, values, "")
        while pool.busy:
            with contextlib.nullcontext() if session.shared else heartbeat.current().within("tools"):
                found = pool.turns(math.inf)
            for row, shown in found:
                pool.end(row)
                yield row, shown


class _ConversationLoop:
    def __init__(self, session: Session, pool: EnvClient, engine: RoleEngines, between: TurnTemplate,
                 limits: tuple[int, int, int]):
        self.session, self.pool, self.engine, self.between = session, pool, engine, between
        self.max_turns, self.max_new_tokens, self.max_tokens = limits
        self.idle = 0.0  # seconds without anything to sample

    def start(self, episodes: list[Trajectory], together: int) -> None:
        """Begin all conversations, `together` for each prompt; one that others have begun goes on where it stood."""
        self.by_row, log = {episode.row.id: episode for episode in episodes}, self.session.turn_log
        recorded = self._recorded() if log else {}
        for start in range(0, len(episodes), together):
            prompt = [episode for episode in episodes[start : start + together] if not episode.failure]
            if fresh := [episode for episode in prompt if episode.row.id not in recorded]:
                self._sample(*fresh)
        resumed = [episode for episode in episodes if episode.row.id in recorded and not episode.failure]
        for episode in resumed:
            self._resume(episode, recorded[episode.row.id])
        if resumed:
            current().add("environment/resumed", len(resumed))
            events.record("conversations_resumed", rows=[episode.row.id for episode in resumed],
                          turns=[episode.turns for episode in resumed])
        if log:
            log.under_way = lambda: _rows([each for each in episodes if each.events], whole=True)

    def run(self) -> None:
        while self.session.busy or self.pool.busy:
            start = time.perf_counter()
            for row in self.session.step() if self.session.busy else ():
                self._step_environment(self.by_row[row.id])
            stepped = time.perf_counter()
            answered = self._turns(stepped - start)
            for row, answer in answered:
                self._take(self.by_row[row], answer)
            if answered and (log := self.session.turn_log):
                log.save(_rows([self.by_row[row] for row, _ in answered], whole=not log.appends))
            for row, answer in answered:
                self.by_row[row].record(answer, self.engine)
                self._go_on(self.by_row[row], answer)
        if self.engine.settings.generation.routing_replay:  # what others have sampled, and no engine has read here
            current().add("environment/unrouted", sum(episode.row.experts is None and not episode.failure
                                                      for episode in self.by_row.values()))

    def _recorded(self) -> dict[int, Recorded]:
        """Return what is recorded of these conversations, but for those that the environment begins otherwise now."""
        assert self.session.turn_log
        found = recorded_in(self.session.turn_log.recorded())
        differing = [row for row, recorded in found.items() if recorded.began != self.by_row[row].began]
        for row in differing:
            events.record("environment_differs", row=row, turn=0, turns=0)
            del found[row]
        current().add("environment/differs", len(differing))
        return found

    def _sample(self, *episodes: Trajectory) -> None:
        for episode in episodes:
            episode.known = True
        self.session.add([episode.row for episode in episodes])

    def _resume(self, episode: Trajectory, recorded: Recorded) -> None:
        row = episode.row
        episode.restore(recorded)
        current().add("response/continued", sum(len(piece.tokens) for piece in episode.pieces if piece.sampled))
        if episode.failure:
            return
        texts = [episode.text(self.engine, at) for at, piece in enumerate(episode.pieces) if piece.sampled]
        answers = episode.answers
        self.pool.resume(row.id, episode.columns, texts[: len(answers)], answers, episode.state)
        if episode.last == "sampled":
            self._ask(episode)
        elif episode.last == "answered":
            self._go_on(episode, answers[-1])
        else:
            row.limit = min(self.max_new_tokens, self.max_tokens - episode.length)
            self._sample(episode)

    def _turns(self, step: float) -> list[tuple[int, Turn | EnvFailure]]:
        """Return the answers of environments. With nothing to sample it waits for the first one, and for those that
        follow within the time of a step, which are then read together, unless the engine samples for other callers."""
        if self.session.busy or self.session.shared:
            if not (found := self.pool.turns()) and not self.session.busy:
                self.session.wait()  # which an answer ends, as does the engine
                found = self.pool.turns()
            return found
        start = time.perf_counter()
        with heartbeat.current().within("tools"):
            found = self.pool.turns(math.inf)
        until = time.perf_counter() + step
        while self.pool.busy and (rest := until - time.perf_counter()) > 0:
            found += self.pool.turns(rest)
        self.idle += time.perf_counter() - start
        return found

    def _step_environment(self, episode: Trajectory) -> None:
        episode.add_turn()
        self._ask(episode)

    def _ask(self, episode: Trajectory) -> None:
        heartbeat.current().notify("tools")
        episode.asked = timeline.now()
        self.pool.step(episode.row.id, episode.columns, episode.text(self.engine, len(episode.pieces) - 1))

    def _go_on(self, episode: Trajectory, answer: Turn | EnvFailure) -> None:
        """Sample another turn after an answer, or end the conversation."""
        row = episode.row
        episode.out_of_turns = isinstance(answer, Turn) and not answer.done and episode.turns >= self.max_turns
        if isinstance(answer, Turn) and not answer.done and not episode.out_of_turns:
            between = self.between.tokens(answer.observation, self.between.ended(row.tokens))
            observed = torch.tensor(between, dtype=torch.int64)
            room = self.max_tokens - episode.length - len(observed)
            if room > 0:
                episode.add_observed(observed)
                self._read(episode, observed, min(self.max_new_tokens, room))
                return
            episode.cut = True
        self.pool.end(row.id)
        self.session.forget(row)

    def _take(self, episode: Trajectory, answer: Turn | EnvFailure) -> None:
        """Take up an answer. A repeated step may have answered otherwise than before: what followed is dropped."""
        if isinstance(answer, EnvAnswer) and answer.turn < episode.turns:
            self.session.forget(episode.row)
            events.record("environment_differs", row=episode.row.id, turn=answer.turn, turns=episode.turns)
            current().add("environment/differs", 1)
            episode.rewind(answer.turn)
        if isinstance(answer, EnvAnswer) and answer.state is not None:
            episode.state = answer.turn, answer.state
        episode.add_answer(answer)

    def _read(self, episode: Trajectory, observed: Tensor, limit: int) -> None:
        """Sample another turn, after what was observed."""
        if episode.known:
            self.session.extend(episode.row, observed, limit)
        else:
            episode.row.extend(observed, limit)
            self._sample(episode)


def _rows(episodes: list[Trajectory], whole: bool) -> Batch:
    return rows_of([episode.row.id for episode in episodes], [episode.take(whole) for episode in episodes])


def report_episodes(episodes: list[Trajectory], ids: Tensor, step: int, who: tuple[str, str],
                    idle: float | None) -> None:
    """Report metrics and failures. `who` answers: its kind, as "environment", and its name. Raises RewardsFailed."""
    metrics, failures = current(), [episode.failure for episode in episodes if episode.failure]
    metrics.mean("environment/turns", sum(episode.turns for episode in episodes), len(episodes))
    metrics.mean("response/truncated", sum(not episode.finished for episode in episodes), len(episodes))
    metrics.add("environment/cut", sum(episode.cut for episode in episodes))
    metrics.add("environment/failed", len(failures))
    observations = [answer.observation for episode in episodes for answer in episode.answers if answer.observation]
    metrics.mean("environment/error_answers", sum(map(_is_error, observations)), len(observations))
    metrics.mean("environment/same_answers", max(Counter(map(str, observations)).values(), default=0),
                 len(observations))
    gives_away = [str(answer.observation).strip() == wanted for episode in episodes
                  if (wanted := marked_answer(episode.columns.get("answer", "")))
                  for answer in episode.answers[:-1] if answer.observation]  # no turn reads the last one
    metrics.mean("environment/told", sum(gives_away), len(gives_away))
    metrics.add("environment/timeouts", sum(failure.timeout for failure in failures))
    metrics.add("tokens", sum(len(piece.tokens) for episode in episodes for piece in episode.pieces if piece.sampled))
    if idle is not None:
        metrics.maximum("environment/idle_seconds", idle)
    metrics.add("response/fingerprint", fingerprint(_tokens(episodes), ids))
    if failures:
        _report_failures(episodes, who)
    if failure_streak_of(who[1]).count(step, len(episodes), len(failures)) >= _FAILED_STEPS:
        raise RewardsFailed(f"{who[0]} `{who[1]}` has failed for every trajectory of {_FAILED_STEPS} steps in a row; "
                            f"the last: {failures[-1].reason}")


_ERROR = re.compile(r"\b(?:error|exception|traceback|timed out|timeout|failed|invalid)\b", re.IGNORECASE)
_HEAD = 200  # characters of an observation in which an error is looked for


def _is_error(observation: object) -> bool:
    return isinstance(observation, str) and _ERROR.search(observation[:_HEAD]) is not None


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


def columns_of(episodes: list[Trajectory], engine: RoleEngines, prompts: Ragged,
             ) -> tuple[Ragged, Ragged, Ragged, Ragged, list[str], Tensor, Tensor, Tensor, Tensor, Tensor, Ragged]:
    responses, pieces = _tokens(episodes), [piece for episode in episodes for piece in episode.pieces]
    mask = [torch.full((len(piece.tokens),), piece.sampled and not episode.failure)
            for episode in episodes for piece in episode.pieces]
    logprobs, versions = [piece.logprobs for piece in pieces], [piece.versions for piece in pieces]
    experts = engine.routed_experts([episode.row.experts for episode in episodes], torch.tensor(
        [episode.row.prompt for episode in episodes], dtype=torch.int64), responses.lengths)
    finished = torch.tensor([episode.finished for episode in episodes], dtype=torch.bool)
    texts = engine.decode(responses)
    return (responses,  # pyright: ignore[reportReturnType]  # the last column where it is planned
            responses.with_values(torch.cat(mask) if mask else torch.empty(0, dtype=torch.bool)),
            responses.with_values(torch.cat(logprobs) if pieces else torch.empty(0)),
            responses.with_values(torch.cat(versions) if pieces else torch.empty(0, dtype=torch.int32)),
            texts, torch.tensor([episode.reward for episode in episodes]),
            torch.tensor([episode.turns for episode in episodes], dtype=torch.int64),
            finished, cut_thoughts(engine, prompts, texts, finished),
            torch.tensor([episode.failure is None for episode in episodes], dtype=torch.bool), *experts)
