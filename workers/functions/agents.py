"""Rollouts of agents that own their loop: each row starts a command, which samples turns through the endpoint.

    run_agent   the node: starts the commands, and returns what was sampled for them, as `converse` does
    AgentLoop   samples the turns that the endpoint asks for, in the thread of the node, until all commands have ended
"""

from __future__ import annotations

import contextlib
import json
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from distflow.contracts.agents import filled_words
from distflow.contracts.decorators import Agent, Turn, node
from distflow.contracts.templates import readable_fields
from distflow.data.batch import Ragged
from distflow.telemetry import heartbeat, timeline
from distflow.telemetry.trajectories import trajectories
from workers.endpoint.dialogue import AnsweredTurn, Dialogue, DialogueLimits
from workers.endpoint.server import ServedRow, TurnRequest, endpoint
from workers.engines.chat import TurnTemplate
from workers.engines.rollout import Session
from workers.functions.conversation import Trajectory, columns_of, report_episodes, report_rewards
from workers.functions.rollout import note_lengths
from workers.isolation.env_pool import EnvFailure, EnvSettings
from workers.isolation.env_service import EnvClient, service_of

_COMMAND = "workers.isolation.agent_command:AgentCommand"
_POLL_INTERVAL = 1.0  # seconds between checks of the service that runs the commands, while nothing is sampled


@node(type="MODEL_INFERENCE", repeats="group_size",
      writes=("prompts", "responses", "response_mask", "rollout_logprobs", "versions", "completions",
              "environment_rewards", "turns", "finished", "completions.cut_thoughts", "keep", "routed_experts"))
def run_agent(engine: Any, prompts: Ragged, row: Tensor, *, agent: Agent, group_size: int = 1,
              max_turns: PositiveInt = 16, max_new_tokens: PositiveInt | None = None, max_tokens: PositiveInt = 1024,
              max_prompt_tokens: PositiveInt = 1024, printed_reward: bool = True, seconds: PositiveFloat = 300.0,
              processes: PositiveInt = 16, memory_gib: PositiveFloat = 4.0, **columns: list[str],
              ) -> tuple[Ragged, Ragged, Ragged, Ragged, Ragged, list[str], Tensor, Tensor, Tensor, Tensor, Tensor,
                         Ragged]:
    """Start the command `agent` `group_size` times for each prompt, up to `processes` at a time. Return the prompt of
    its first request in place of the dataset's, and then what `converse` returns.

    It finds the model at OPENAI_BASE_URL with OPENAI_API_KEY. The last line that it prints is `{"reward": NUMBER}`,
    unless `printed_reward` is false. A row whose command fails, takes longer than `seconds` or samples nothing is
    not kept. Raises RewardsFailed: all of them have failed in several steps in a row."""
    turn_tokens = engine.settings.generation.max_new_tokens if max_new_tokens is None else max_new_tokens
    ids = (row[:, None] * group_size + row.new_tensor(range(group_size))).flatten()
    stop = tuple(engine.settings.generation.stop or ())
    limits = DialogueLimits(max_turns, max_tokens, turn_tokens, max_prompt_tokens, stop)
    settings = EnvSettings(_COMMAND, {"printed_reward": printed_reward}, safe=False, coroutine=False,
                           processes=processes, seconds=seconds, memory_gib=memory_gib)
    inbox: queue.SimpleQueue[TurnRequest | None] = queue.SimpleQueue()
    with engine.converse(prompts, ids, group_size, min(turn_tokens, max_tokens)) as (session, rows):
        saved = trajectories().claim(engine.step, engine.stream or 0, len(rows))
        episodes = [Trajectory(each, {name: columns[name][index // group_size] for name in readable_fields(agent)},
                            index < saved) for index, each in enumerate(rows)]

        def wake(request: TurnRequest | None = None) -> None:
            inbox.put(request)
            session.wake()

        with service_of(settings).client(wake, again=False) as commands, \
                _served(engine, episodes, limits, wake) as served:
            loop = AgentLoop(engine, session, commands, served, inbox)
            loop.run(agent, episodes, processes)
    own_prompts = Ragged.from_rows([episode.row.sequence[: episode.row.prompt] for episode in episodes])
    note_lengths(own_prompts.lengths, torch.tensor([episode.length for episode in episodes], dtype=torch.int64))
    report_episodes(episodes, ids, engine.step, ("agent", agent), None if session.shared else loop.idle)
    report_rewards(episodes, ids // group_size)
    return (own_prompts, *columns_of(episodes, engine, own_prompts))


@contextlib.contextmanager
def _served(engine: Any, episodes: list[Trajectory], limits: DialogueLimits,
            ask: Callable[[TurnRequest], None]) -> Iterator[dict[int, ServedRow]]:
    """Yield the rows as the endpoint serves them, by id; it refuses their tokens afterwards."""
    between = TurnTemplate(engine.tokenizer, engine.end_tokens, options=engine.template_options)
    served = {episode.row.id: ServedRow(episode.row.id, Dialogue(
        f"{engine.step + 1}-{episode.row.id}", engine.tokenizer, between, limits), ask) for episode in episodes}
    try:
        yield served
    finally:
        for each in served.values():
            endpoint().remove(each)


class AgentLoop:
    def __init__(self, engine: Any, session: Session, commands: EnvClient, served: dict[int, ServedRow],
                 inbox: queue.SimpleQueue[TurnRequest | None]):
        self.engine, self.session, self.commands, self.served, self.inbox = engine, session, commands, served, inbox
        self.requests: dict[int, TurnRequest] = {}  # turns under way, by row
        self.running: dict[int, Trajectory] = {}  # by row
        self.idle = 0.0  # seconds without anything to sample

    def run(self, agent: str, episodes: list[Trajectory], at_once: int) -> None:
        waiting = deque(episodes)
        while waiting or self.running:
            while waiting and len(self.running) < at_once:
                self._start(agent, waiting.popleft())
            for row, answer in self.commands.turns():  # submits those that have started, too
                self._end(self.running.pop(row), answer)
            for request in self._arrived():
                if request.row in self.running:
                    self._sample(self.running[request.row], request)
            for row in self.session.step() if self.session.busy else ():
                if row.id in self.requests:  # its command may have ended
                    self._answer(self.running[row.id])

    def _start(self, agent: str, episode: Trajectory) -> None:
        row = episode.row.id
        self.running[row] = episode
        endpoint().add(self.served[row])
        heartbeat.current().notify("tools")
        episode.asked = timeline.now()
        variables = {"OPENAI_BASE_URL": endpoint().address, "OPENAI_API_KEY": self.served[row].token}
        self.commands.step(row, {"command": json.dumps(filled_words(agent, episode.columns))}, json.dumps(variables))

    def _arrived(self) -> list[TurnRequest]:
        """Return the turns that agents ask for. With nothing to sample it waits for one, or for a command's end."""
        found = [self._wait()] if self.running and not self.session.busy else []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self.inbox.get_nowait())
        return [ask for ask in found if ask is not None]

    def _wait(self) -> TurnRequest | None:
        start = time.perf_counter()
        with contextlib.nullcontext() if self.session.shared else heartbeat.current().within("tools"):
            while True:
                try:
                    return self.inbox.get(timeout=_POLL_INTERVAL)
                except queue.Empty:
                    self.commands.service.check()
                    self.session.check()
                finally:
                    self.idle += time.perf_counter() - start
                    start = time.perf_counter()

    def _sample(self, episode: Trajectory, request: TurnRequest) -> None:
        row, tokens = episode.row, torch.tensor(request.addition.tokens, dtype=torch.int64)
        self.requests[row.id] = request
        if episode.turns:
            episode.record(Turn(request.addition.text), self.engine)
            episode.add_observed(tokens)
            self.session.extend(row, tokens, request.addition.limit)
        else:
            row.sequence, row.prompt, row.limit = tokens, len(tokens), request.addition.limit
            self.session.add([row])

    def _answer(self, episode: Trajectory) -> None:
        row = episode.row
        episode.add_turn()
        version = int(row.versions[-1]) if len(row.versions) else -1
        turn = AnsweredTurn(row.tokens.tolist(), row.logprobs.tolist(), version, row.finished)
        self.requests.pop(row.id).answer(turn)

    def _end(self, episode: Trajectory, answer: Turn | EnvFailure) -> None:
        row = episode.row
        served = self.served[row.id]
        endpoint().remove(served)
        if self.requests.pop(row.id, None) is not None:  # it is not served, and so not trained
            self.session.abort([row])
            _drop_unserved(episode)
        if isinstance(answer, Turn) and served.lost:
            answer = EnvFailure(served.lost)
        elif isinstance(answer, Turn) and not episode.turns:
            answer = EnvFailure("its command ended without a turn of the model: it must ask for one at OPENAI_BASE_URL")
        episode.record(answer, self.engine)
        if isinstance(answer, Turn):
            episode.reward = answer.reward
        else:
            episode.failure = answer
        episode.cut = served.dialogue.cut
        self.commands.end(row.id)
        self.session.forget(row)


def _drop_unserved(episode: Trajectory) -> None:
    """Drop the tokens before a turn that was not sampled to its end."""
    if episode.pieces and not episode.pieces[-1].sampled:
        episode.pieces.pop()
