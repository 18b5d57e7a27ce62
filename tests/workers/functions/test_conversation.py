"""Conversations: what is written, what is trained, and that sampling goes on while environments work."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import pytest
import torch
from columns import random_rows
from reported import reported
from training import built

from distflow.config.run import Generation
from distflow.contracts.decorators import Turn
from distflow.data.batch import Batch, Ragged
from distflow.errors import InvalidInput
from distflow.telemetry import heartbeat
from distflow.telemetry.trajectories import trajectories
from workers.engines.chat import TurnTemplate, sampled_text
from workers.engines.embedded import ASSISTANT
from workers.engines.hf import HFRollout
from workers.engines.policy import Policy, inputs_of
from workers.engines.rollout import TurnLog
from workers.functions import conversation
from workers.functions.conversation import converse
from workers.functions.trajectory import recorded_in

SOURCE = '''
import time
from distflow import Turn, environment

@environment(safe=True)
class Echo:
    """Says what it heard and how long it is; the second column decides what becomes of the row."""
    def __init__(self, question, fate, *, turns=3):
        self.question, self.fate, self.turns, self.heard = question, fate, turns, 0

    def step(self, text):
        self.heard += 1
        if self.fate == "break" and self.heard == 2:
            raise OSError("the tool is gone")
        if self.fate == "sleep" and self.heard == 2:
            open(self.question, "w").close()
            time.sleep(3600)
        if self.fate == "long":
            return Turn("so " * 500)
        return Turn(f"{self.question}: {len(text)}", done=self.heard == self.turns, reward=0.5 * self.heard)


@environment(safe=True, stateless=True)
class Stateless:
    def __init__(self, question, fate):
        self.question = question

    def step(self, text):
        if hasattr(self, "heard"):
            raise ValueError("it was asked before")
        return Turn(f"{self.question}: {len(text)}", done="!" in text, reward=len(text) / 8)


@environment(safe=True)
class Snapshot(Echo):
    """Its steps may not be repeated."""
    def step(self, text):
        turn = super().step(text)
        return Turn(turn.observation + str(self.heard), turn.done, turn.reward)

    def snapshot(self):
        return {"heard": self.heard, "bytes": bytes([self.heard]), 7: {self.heard: 1.5}}

    def restore(self, state):
        assert state["bytes"] == bytes([state["heard"]]) and state[7] == {state["heard"]: 1.5}
        self.heard = state["heard"]


@environment(safe=True)
class Teller:
    """Says the answer, and nothing after the last turn."""
    def __init__(self, question, answer):
        self.heard = 0

    def step(self, text):
        self.heard += 1
        return Turn("" if self.heard == 2 else "7", done=self.heard == 2)


STARTED = time.time_ns()


@environment(safe=True)
class Moody(Echo):
    """Says something else in each process that starts it."""
    def step(self, text):
        turn = super().step(text)
        return Turn(f"{turn.observation} again {STARTED}", turn.done, turn.reward)
'''
COLUMNS = ("responses", "mask", "logprobs", "versions", "completions", "rewards", "turns", "finished",
           "completions.cut_thoughts", "keep")


@pytest.fixture(autouse=True)
def _environments(tmp_path, monkeypatch):
    (tmp_path / "echoes.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def prompts():
    return random_rows(6, 3, 9, seed=5)


def converse_with(role, prompts, fates=("", "", ""), **settings):
    settings = {"environment": "echoes:Echo", "group_size": 2, "max_tokens": 200, **settings}
    values = converse(role, prompts, torch.arange(3), questions=["one", "two", "three"], fate=list(fates), **settings)
    return SimpleNamespace(**dict(zip(COLUMNS, values, strict=True)))


def test_converse_columns_agree_with_turns_and_observations(role, prompts):
    found, between = converse_with(role, prompts), TurnTemplate(role.tokenizer, role.rollout.end_tokens.tolist())
    assert found.turns.tolist() == [3] * 6
    assert found.rewards.tolist() == [3.0] * 6
    assert found.keep.tolist() == [True] * 6
    assert set(found.versions.values.tolist()) == {4}
    assert found.versions.values.dtype == torch.int32
    assert found.logprobs.values[~found.mask.values].eq(0).all()
    assert found.logprobs.values[found.mask.values].lt(0).all()
    for row, (tokens, mask) in enumerate(zip(found.responses.rows, found.mask.rows)):
        turns = _runs(tokens.tolist(), mask.tolist())
        assert len(turns) == 5
        for sampled, observed in zip(turns[::2], turns[1::2]):
            text = sampled_text(role.tokenizer, sampled, role.end_tokens)
            ended = sampled[-1] in role.rollout.end_tokens.tolist()
            assert observed == between.tokens(f"{('one', 'two', 'three')[row // 2]}: {len(text)}", ended)
    assert role.decode(found.responses) == found.completions


def test_converse_counts_answers_that_turns_read(role, prompts):
    converse(role, prompts, torch.arange(3), environment="echoes:Teller", questions=["one", "two", "three"],
             answers=["#### 7", "#### 7", "#### 8"], group_size=2, max_tokens=200)
    assert reported()["environment/told"] == pytest.approx(2 / 3)


def test_converse_passes_template_variables_to_each_turn(role, prompts):
    role.tokenizer.chat_template += "{{ effort }}"
    role.template_options = {"effort": "low"}
    found = converse_with(role, prompts)
    for tokens, mask in zip(found.responses.rows, found.mask.rows):
        observed = _runs(tokens.tolist(), mask.tolist())[1::2]
        assert [role.tokenizer.decode(run)[-3:] for run in observed] == ["low", "low"]


def _runs(tokens: list[int], mask: list[bool]) -> list[list[int]]:
    """Tokens in runs of the same mask."""
    runs, last = [], None
    for token, sampled in zip(tokens, mask):
        if sampled != last:
            runs.append([])
        runs[-1].append(token)
        last = sampled
    return runs


def test_converse_limits_turns_and_tokens(role, prompts):
    whole = converse_with(role, prompts)
    reported()
    short = converse_with(role, prompts, max_turns=2)
    metrics = reported()
    assert short.turns.tolist() == [2] * 6
    assert whole.finished.any()
    assert not short.finished.any(), "the environment would have gone on"
    assert (metrics["response/truncated"], metrics.get("environment/cut", 0)) == (1, 0)
    assert metrics["environment/same_answers"] == pytest.approx(1 / 6), "each conversation has its own observation"
    assert converse_with(role, prompts, max_turns=3).finished.tolist() == whole.finished.tolist()
    assert converse_with(role, prompts, environment_settings={"turns": 1}).turns.tolist() == [1] * 6
    reported()
    cut = converse_with(role, prompts, fates=("", "long", ""), max_tokens=60)
    metrics = reported()
    assert cut.turns.tolist() == [3, 3, 1, 1, 3, 3]
    assert cut.keep.all()
    assert not cut.finished[2:4].any()
    assert metrics["environment/cut"] == 2
    assert cut.responses.lengths.max() <= 60
    assert converse_with(role, prompts, max_tokens=4).responses.lengths.max() <= 4
    short = converse_with(role, prompts, max_new_tokens=1)
    assert [sum(mask.tolist()) for mask in short.mask.rows] == [3] * 6


class Late:
    """Answers the even rows at once, and the odd ones when nothing is left to sample."""

    def __init__(self, log):
        self.log, self.asked, self.waited_in = log, [], set()

    @property
    def busy(self):
        return bool(self.asked)

    def step(self, row, columns, text):
        self.asked.append(row)
        self.log.append(("ask", row))

    def turns(self, patience=0.0):
        if patience > 60:
            self.waited_in.add(heartbeat.current().read().phase)
        ready = [row for row in self.asked if row % 2 == 0] or (self.asked if patience > 60 else [])
        self.asked = [row for row in self.asked if row not in ready]
        self.log += [("answer", row) for row in ready]
        return [(row, Turn("go on", done=self.log.count(("ask", row)) == 3)) for row in ready]

    def end(self, row): ...


def test_converse_samples_other_rows_while_an_environment_works(role, prompts, monkeypatch):
    """The rows with a quick environment come to their ends before any of the slow ones has answered once."""
    log = []
    late = Late(log)
    service = SimpleNamespace(client=lambda _: contextlib.nullcontext(late))
    monkeypatch.setattr(conversation, "service_of", lambda _: service)
    heartbeat.current().enter("generating")
    found = converse_with(role, prompts)
    assert found.turns.tolist() == [3] * 6
    assert late.waited_in == {"tools"}  # it is no silence
    assert heartbeat.current().read().phase == "generating"
    first_late = log.index(next(event for event in log if event[0] == "answer" and event[1] % 2))
    assert {row: log[:first_late].count(("answer", row)) for row in (0, 2, 4)} == {0: 3, 2: 3, 4: 3}
    assert all(log[:first_late].count(("ask", row)) == 1 for row in (1, 3, 5))


def test_converse_writes_each_turn_once_and_at_its_end(role, prompts, tmp_path, monkeypatch):
    """Also by a worker that samples them again."""
    path = tmp_path / "trajectories/rank0.jsonl"
    trajectories().open(path, rows=4)
    role.step = 6
    beginning = {"turn": 0, "observation": 'You are, "seconds" away'}
    trajectories().write(6, 0, beginning)
    seen, open_session = [], role.rollout.session

    def session(*given, **more):
        opened = open_session(*given, **more)
        step = opened.step
        opened.step = lambda: seen.append(len(path.read_text())) or step()
        return opened

    monkeypatch.setattr(role.rollout, "session", session)
    found = converse_with(role, prompts)
    try:
        assert seen[0] < max(seen[:-1]) < len(path.read_text())
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in range(4):
            mine = [line for line in rows if line["row"] == row and line["turn"]]
            assert [(line["turn"], line["step"]) for line in mine] == [(1, 7), (2, 7), (3, 7)]
            assert sum(line["reward"] for line in mine) == 3.0
            assert sum(line["tokens"] for line in mine) == int(found.mask.rows[row].sum())
            assert mine[-1]["done"]
        trajectories().open(path, rows=4)
        trajectories().written.clear()
        converse_with(role, prompts)
        trajectories().write(6, 0, beginning)
        assert len(path.read_text().splitlines()) == len(rows)
        trajectories().write(6, 1, {"turn": 0, "observation": "on"})
        assert len(path.read_text().splitlines()) == len(rows) + 1, "another beginning is written"
        trajectories().open(path, rows=4, resumed_at=6)
        assert path.read_text() == ""
    finally:
        trajectories().__init__()


GUIDE = '''
import os
from distflow import Turn, environment

@environment(safe=True)
class Guide:
    """Begins the conversation; the second column decides what becomes of the row."""
    def __init__(self, question, fate):
        self.question, self.fate = question, fate

    def start(self):
        if self.fate == "break":
            raise OSError("no way in")
        return {"": f"You are in {self.question}.", "long": "far " * 300, "odd": 7,
                "process": str(os.getpid())}[self.fate]

    def step(self, text):
        return Turn("on", done=True, reward=1.0)

@environment
class LateGuide(Guide):
    def __init__(self, question, fate, place=""):
        super().__init__(question, fate + place)

    async def start(self):
        return super().start()
'''


@pytest.mark.parametrize("name", ["guides:Guide", "guides:LateGuide"])
def test_converse_shows_the_first_observation_of_an_environment(role, prompts, tmp_path, name):
    """What it shows stands in the prompt before the marker of the answer, once for all rows of the prompt."""
    (tmp_path / "guides.py").write_text(GUIDE)
    trajectories().open(tmp_path / "trajectories/rank0.jsonl", rows=3)
    asked = Ragged.from_rows([torch.cat([row, torch.tensor([role.tokenizer.encode(ASSISTANT)[0]])])
                              for row in prompts.rows])
    try:
        *columns, begun = converse(role, asked, torch.arange(3), environment=name, group_size=2, max_tokens=200,
                                   questions=["one", "two", "three"], fate=["", "break", ""])
        written = [json.loads(line) for line in (tmp_path / "trajectories/rank0.jsonl").read_text().splitlines()]
    finally:
        trajectories().__init__()
    assert dict(zip(COLUMNS, columns))["keep"].tolist() == [True, True, False, False, True, True]
    texts = [role.tokenizer.decode(row) for row in begun.rows]
    assert texts[0] == texts[1] == f"{role.tokenizer.decode(prompts.rows[0])}\nYou are in one.{ASSISTANT}"
    assert texts[2] == role.tokenizer.decode(asked.rows[1])
    assert texts[5] == f"{role.tokenizer.decode(prompts.rows[2])}\nYou are in three.{ASSISTANT}"
    assert [line["observation"] for line in written if line["turn"] == 0] == ["You are in one."] * 2
    repeated = Policy(role.model)(*inputs_of(begun, columns[0], 0, torch.device("cpu")), 1.0)[0]
    assert (repeated - columns[2].values)[columns[1].values].abs().max() < 1e-5


def test_converse_leaves_out_rows_whose_environment_fails_to_begin(role, prompts, tmp_path, capsys):
    (tmp_path / "guides.py").write_text(GUIDE)
    given = {"environment": "guides:Guide", "questions": ["one"] * 3, "fate": ["long", "odd", "break"]}
    with pytest.raises(InvalidInput, match="the last message of the data must be the user's"):
        converse(role, prompts, torch.arange(3), **{**given, "fate": [""] * 3})
    asked = Ragged.from_rows([torch.tensor(role.tokenizer.encode(ASSISTANT))] * 3)
    *columns, _ = converse(role, asked, torch.arange(3), max_tokens=200, **given)
    assert columns[-1].tolist() == [False] * 3
    assert columns[0].lengths.tolist() == [0] * 3
    printed = capsys.readouterr().err
    assert "3 of 3 trajectories failed" in printed


class Killed(Exception):
    """The process that converses ends here."""


class Log(TurnLog):
    """Keeps what is saved in this process, and ends the conversation after so many saves."""

    def __init__(self, appends, left=1 << 30):
        self.appends, self.left, self.rows = appends, left, []

    def recorded(self):
        return Batch.concat(self.rows) if self.rows else Batch(torch.empty(0, dtype=torch.int64))

    def save(self, rows):
        mine = set(rows.ids.tolist())
        others = self.rows if self.appends else [
            kept for each in self.rows if len(kept := each.select(torch.tensor(
                [place for place, row in enumerate(each.ids.tolist()) if row not in mine], dtype=torch.int64)))]
        self.rows = [*others, rows]
        self.left -= 1
        if self.left < 0:
            raise Killed


@pytest.fixture
def resumable(role, prompts, close_environments):
    """Converse with a log, one row at a time, in processes of its own."""
    role.rollout.generation = Generation(max_new_tokens=6, batch_rows=1)
    open_session = role.rollout.session

    def run(log, **settings):
        def session(*words, **more):
            log.session = open_session(*words, **more)
            log.session.turn_log = log
            return log.session

        role.rollout.session = session
        close_environments()
        return converse_with(role, prompts, **settings)

    return run


def columns_of(found):
    return [value if isinstance(value, list) else [row.tolist() for row in value.rows] if isinstance(value, Ragged)
            else value.tolist() for value in vars(found).values()]


@pytest.mark.parametrize(("appends", "kind"), [(True, "Echo"), (False, "Stateless"), (True, "Snapshot")])
def test_converse_resumes_at_the_turn_where_a_worker_died(resumable, recorded, appends, kind):
    """Also where the one that goes on is lost too: with the tokens of one that was not."""
    whole, log, found = resumable(Log(appends), environment=f"echoes:{kind}"), Log(appends), None
    while found is None:
        log.left = 2
        with contextlib.suppress(Killed):
            found = resumable(log, environment=f"echoes:{kind}")
    assert columns_of(whole) == columns_of(found)
    turns = [sum(event["turns"]) for event in recorded("conversations_resumed")]
    assert turns
    assert turns == sorted(set(turns)), "each goes on where the one before stood"
    assert recorded("environment_differs") == []


def test_converse_counts_resumed_rows_without_experts(role, resumable):
    model = built(vocabulary=len(role.tokenizer), architecture="qwen3_moe", mixture=(8, 3))
    role.settings.generation = Generation(max_new_tokens=6, batch_rows=1, routing_replay=True)
    rollout, role.rollout.model = HFRollout(model, role.settings.generation, 0, role.end_tokens), model
    role.rollout.routers, log = rollout.routers, Log(False, left=7)
    with contextlib.suppress(Killed):
        resumable(log)
    over = sum(each.events.count(b"answered") == 3 for each in recorded_in(log.recorded()).values())
    log.left = 1 << 30
    reported()
    resumable(log)
    metrics = reported()
    assert 0 < metrics["environment/unrouted"] == over <= metrics["environment/resumed"]


def test_converse_resume_keeps_failures(resumable):
    fates = ("", "break", "")
    whole, log = resumable(Log(False), fates=fates), Log(False, left=7)
    with contextlib.suppress(Killed):
        resumable(log, fates=fates)
    log.left = 1 << 30
    found = resumable(log, fates=fates)
    assert columns_of(whole) == columns_of(found)
    assert found.keep.tolist() == [True, True, False, False, True, True]


def test_converse_resume_continues_from_another_answer_of_the_environment(resumable, recorded, role):
    """What the model said up to that answer stays; what followed is sampled again."""
    log = Log(False, left=1)
    with contextlib.suppress(Killed):
        resumable(log, environment="echoes:Moody", group_size=1)
    before, log.left = recorded_in(log.recorded()), 1 << 30
    found = resumable(log, environment="echoes:Moody", group_size=1)
    differing = {event["row"]: event["turn"] for event in recorded("environment_differs")}
    assert set(differing.values()) == {1}
    assert reported()["environment/differs"] == len(differing)
    for row in differing:
        first = found.mask.rows[row].tolist().index(False)
        assert found.responses.rows[row][:first].tolist() == before[row].tokens[:first].tolist()
        assert found.responses.rows[row].tolist() != before[row].tokens.tolist()
    assert found.turns.tolist() == [3, 3, 3]
    assert found.rewards.tolist() == [3.0, 3.0, 3.0]


def test_converse_resume_takes_over_turns_without_an_answer(resumable):
    """As where a trainer stops to sample, and others go on."""
    whole = resumable(Log(False))
    for left in (1, 5, 9):
        log = Log(False, left=left)
        with contextlib.suppress(Killed):
            resumable(log)
        log.session.abort()
        log.rows, log.left = [log.under_way()], 1 << 30
        assert columns_of(whole) == columns_of(resumable(log))
