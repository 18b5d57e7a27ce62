"""Threads that sample from one engine get what each would get alone."""

from __future__ import annotations

import copy
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from training import built

from distflow.config.run import Generation
from distflow.data.batch import Ragged
from distflow.errors import EngineError
from workers.engines.hf import HFRollout
from workers.engines.rollout import SampledRow
from workers.engines.shared_engine import SharedEngine

PROMPTS = Ragged.from_rows([torch.arange(3, 3 + length) for length in (4, 7, 5, 6, 9, 2)])
SOON = 60


@pytest.fixture
def rollout(model):
    made = HFRollout(model, Generation(max_new_tokens=12, batch_rows=7), pad_token=0, end_tokens=[1])
    made.version = 0
    return made


def alone(rollout, place, key):
    prompt = PROMPTS.select(torch.tensor([place]))
    return rollout.generate(prompt, 3, torch.arange(3) + 10 * place, key)


@pytest.fixture
def driven(rollout):
    """A shared and the pool of its callers; ends with them."""
    shared, over = SharedEngine(rollout), threading.Event()
    with ThreadPoolExecutor(len(PROMPTS) + 1) as pool:
        driving = pool.submit(shared.drive, over.is_set)
        yield shared, pool, driving
        over.set()


def test_callers_get_the_tokens_that_they_would_get_alone(rollout, driven):
    """Each under a key of its own, and more rows than there are slots."""
    expected = [alone(rollout, place, place) for place in range(len(PROMPTS))]
    shared, pool, _ = driven
    found = [job.result(SOON) for job in [pool.submit(alone, shared, place, place) for place in range(len(PROMPTS))]]
    for ours, theirs in zip(found, expected):
        assert torch.equal(ours.tokens.values, theirs.tokens.values)
        assert torch.allclose(ours.logprobs.values, theirs.logprobs.values, atol=1e-5)
        assert torch.equal(ours.finished, theirs.finished)


def test_an_idle_engine_shows_what_its_rank_does_otherwise(rollout, monkeypatch):
    """A model that hangs while nothing is sampled is seen by the detectors of phase inference."""
    entered: list[str] = []
    monkeypatch.setattr("distflow.telemetry.heartbeat.Heartbeat.enter", lambda own, phase: entered.append(phase))
    shared = SharedEngine(rollout)
    for shared.idle_phase in ("waiting", "inference", "inference", "waiting"):
        shared._show()
    assert entered == ["inference", "waiting"]


def test_aborted_rows_come_back_with_what_they_have(driven):
    shared, _, _ = driven
    shared.rollout.end_tokens = torch.tensor([10_000])  # none ends before it is aborted
    session = shared.session(key=1)
    rows = shared.rows(PROMPTS.slice(0, 1), 4, torch.arange(4), max_new_tokens=200)
    session.add(rows)
    assert set(session.abort()) == set(rows)
    assert not session.busy
    assert all(not row.finished and len(row.tokens) < 200 for row in rows)
    assert not shared.owners


def test_an_engine_that_fails_fails_all_callers(rollout, driven):
    shared, pool, driving = driven

    def broken():
        raise EngineError("its memory is gone")

    jobs = [pool.submit(alone, shared, place, place) for place in range(len(PROMPTS))]
    shared.submit(broken)
    with pytest.raises(EngineError, match="its memory is gone"):
        driving.result(SOON)
    failed = [job.exception(SOON) for job in jobs]
    assert any(failed)
    with pytest.raises(EngineError, match="its memory is gone"):
        shared.session(key=0).add(shared.rows(PROMPTS.slice(0, 1), 1, torch.arange(1)))


def test_a_caller_whose_row_ends_as_the_engine_fails_hears_of_both(rollout):
    shared = SharedEngine(rollout)
    session = shared.session(key=0)
    rows = shared.rows(PROMPTS.slice(0, 1), 2, torch.arange(2))
    session.add(rows)
    session.ended.put(rows[0])
    shared.submit(lambda: shared._fail(EngineError("its memory is gone")))
    shared.drive(lambda: shared.failure is not None)
    assert session.step() == [rows[0]]
    said: queue.SimpleQueue[str] = queue.SimpleQueue()

    def hear() -> None:
        with pytest.raises(EngineError) as error:
            session.step()
        said.put(str(error.value))

    threading.Thread(target=hear, daemon=True).start()  # one that waits for ever must not hold up the test
    assert said.get(timeout=SOON) == "its memory is gone"


@pytest.mark.parametrize("failed", [False, True])
def test_rows_get_what_is_there_at_an_orderly_end_alone(rollout, failed):
    """An engine that has suffered from a failure would hide it by another."""
    shared = SharedEngine(rollout)
    rows = shared.rows(PROMPTS.slice(0, 1), 2, torch.arange(2))
    shared.session(key=0).add(rows)
    steps = iter(range(4))
    shared.drive(lambda: next(steps, None) is None, lambda: failed)
    assert [len(row.tokens) for row in rows] == ([0, 0] if failed else [4, 4])


@pytest.mark.parametrize("anew", [False, True], ids=["continue", "restart"])
def test_new_weights_come_between_two_tokens(model, rollout, anew):
    """Rows under way go on with them, or begin anew."""
    renewed = threading.Event()

    def renew(shared):
        session = next(iter(shared.sessions.values()), None)
        turns = session and session.turns
        if not renewed.is_set() and turns and turns.live and int(turns.state["count"].max()) >= 5:
            shared.rollout.load([(name, weight.data) for name, weight in model.named_parameters()], version=9)
            if anew:
                shared.restart()
            renewed.set()

    shared, over = SharedEngine(rollout, renew), threading.Event()
    shared.end_tokens = rollout.end_tokens = torch.tensor([10_000])
    with ThreadPoolExecutor(2) as pool:
        pool.submit(shared.drive, over.is_set)
        samples = pool.submit(alone, shared, 1, 3).result(SOON)
        shared.wait(9)
        over.set()
    versions = set(samples.versions.values.tolist())
    assert versions == ({9} if anew else {0, 9})
    assert samples.tokens.lengths.tolist() == [12, 12, 12]


@pytest.mark.parametrize("between", [False, True], ids=["in a turn", "between turns"])
def test_a_restarted_turn_is_one_of_the_new_weights_alone(between):
    """Nothing that the old ones have read of the conversation counts: keys, values and experts are the new ones'."""
    model = built(architecture="qwen3_moe", mixture=(8, 3))
    generation = Generation(max_new_tokens=8, batch_rows=4, routing_replay=True)
    rollout = HFRollout(model, generation, pad_token=0, end_tokens=[10_000])
    rollout.version, old, armed, renewed = 0, copy.deepcopy(model.state_dict()), threading.Event(), threading.Event()

    def renew(shared):
        session = next(iter(shared.sessions.values()), None)
        if armed.is_set() and not renewed.is_set() and (between or int(session.turns.state["count"].max()) >= 3):
            shared.rollout.load([(name, old[name] + 0.02 * torch.randn(
                old[name].shape, generator=torch.Generator().manual_seed(len(name)))) for name in old
                if name in rollout.weight_buffers()], version=9)
            shared.restart()
            renewed.set()

    shared, over = SharedEngine(rollout, renew), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(shared.drive, over.is_set)
        session = shared.session(key=3, keep_cache=True)
        rows = shared.rows(PROMPTS.slice(0, 1), 2, torch.arange(2))
        session.add(rows)
        while session.busy:
            session.step()
        armed.set()
        assert not between or renewed.wait(SOON)
        for row in rows:
            session.extend(row, torch.tensor([9, 10 + row.id, 11]), 8)
        while session.busy:
            session.step()
        over.set()
    fresh = [SampledRow(row.id, row.sequence, row.prompt, row.limit) for row in rows]
    alone = rollout.session(3)
    for row in fresh:
        alone.add([row])
    while alone.busy:
        alone.step()
    for row, other in zip(rows, fresh):
        assert row.versions.tolist() == [9] * 8
        assert row.tokens.tolist() == other.tokens.tolist()
        assert torch.allclose(row.logprobs, other.logprobs, atol=1e-5)
        assert torch.equal(row.experts, other.experts)
