"""Threads that sample from one engine get what each would get alone."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from distflow.config.run import Generation
from distflow.data.batch import Ragged
from distflow.errors import EngineError
from workers.engines.hf import HFRollout
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


def test_shared_engine_gives_callers_the_tokens_that_they_would_get_alone(rollout, driven):
    """Each under a key of its own, and more rows than there are slots."""
    expected = [alone(rollout, place, place) for place in range(len(PROMPTS))]
    shared, pool, _ = driven
    found = [job.result(SOON) for job in [pool.submit(alone, shared, place, place) for place in range(len(PROMPTS))]]
    for ours, theirs in zip(found, expected):
        assert torch.equal(ours.tokens.values, theirs.tokens.values)
        assert torch.allclose(ours.logprobs.values, theirs.logprobs.values, atol=1e-5)
        assert torch.equal(ours.finished, theirs.finished)


def test_shared_engine_shows_its_idle_phase(rollout, monkeypatch):
    """A model that hangs while nothing is sampled is seen by the detectors of phase inference."""
    entered: list[str] = []
    monkeypatch.setattr("distflow.telemetry.heartbeat.Heartbeat.enter", lambda own, phase: entered.append(phase))
    shared = SharedEngine(rollout)
    for shared.idle_phase in ("waiting", "inference", "inference", "waiting"):
        shared._show()
    assert entered == ["inference", "waiting"]


def test_shared_engine_failure_reaches_all_callers(rollout, driven):
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


def test_shared_engine_that_fails_as_a_row_ends_tells_its_caller_of_both(rollout):
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
def test_shared_engine_returns_partial_rows_only_at_an_orderly_end(rollout, failed):
    """An engine that has suffered from a failure would hide it by another."""
    shared = SharedEngine(rollout)
    rows = shared.rows(PROMPTS.slice(0, 1), 2, torch.arange(2))
    shared.session(key=0).add(rows)
    steps = iter(range(4))
    shared.drive(lambda: next(steps, None) is None, lambda: failed)
    assert [len(row.tokens) for row in rows] == ([0, 0] if failed else [4, 4])
