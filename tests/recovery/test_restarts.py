"""Who dies together begins together, and for the reason that was first."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest
import torch.distributed as dist
from ranks import run_ranks
from stores import client, hosted

from distflow.recovery import restarts
from distflow.recovery.restarts import Attempt, Failure, RestartCoordinator, RestartGroup, pause_before, stop_reason
from distflow.store.tcp import TCPStoreClient


def failed(step: int = 3, finished: int = 1, rank: int = 0, **more) -> Failure:
    return Failure(rank, "it broke", "training" if step else "starting", step, finished, **more)


def concluding(phase: str = "ending", step: int = 3, finished: int = 2, **more) -> Failure:
    return Failure(0, "it broke", phase, step, finished, **more)


def starved(**more) -> Failure:
    return Failure(0, "RuntimeError: can't start new thread", "waiting", exhausted=True, **more)


@pytest.mark.parametrize(("failures", "budget", "why"), [
    ([failed()], 20, ""),
    ([failed(step=1, finished=0)], 20, "it failed before it had done its first step"),
    ([failed(step=7, finished=0)], 20, "it failed before it had done its first step"),  # of a run that was resumed
    ([failed(step=0, finished=0)], 20, "it failed before it had done its first step"),
    ([failed(step=1, finished=1)], 20, ""),  # done, and now it is saved
    ([failed(), failed(step=4, finished=0)], 20, ""),
    ([failed(), failed(step=3, finished=0)], 20, "it failed twice in step 3"),
    ([failed(), failed(step=4), failed()], 20, ""),  # not one after the other
    ([failed(), failed(step=0, finished=0)], 20, ""),
    ([failed(), failed(step=0, finished=0), failed(step=0, finished=0)], 20, "its restart has failed twice"),
    ([failed(), failed(step=0, finished=0), failed(step=3, finished=0)], 20, ""),
    ([failed(), failed(step=4)], 2, ""),
    ([Failure(0, "it broke", "waiting")] * 3, 20, ""),  # a rollout that had no prompt yet
    ([failed(), failed(step=4), failed(step=5)], 2, "its 2 restarts are used up"),
    ([failed()], 0, "its 0 restarts are used up"),
    ([failed(step=9, finished=8, hopeless=True)], 20, "it would fail the next time too"),
    ([failed(step=0, finished=0, outside=True)], 20, ""),  # killed before its first step
    ([failed(outside=True), failed(outside=True)], 20, ""),  # killed twice in one step
    ([failed(), failed(outside=True)], 20, ""),
    ([failed(outside=True), failed()], 20, ""),
    ([failed(step=0, finished=0, outside=True)] * 3, 20, ""),  # its restarts were killed
    ([failed(), failed(outside=True), failed(finished=0)], 20, "it failed twice in step 3"),
    ([failed(step=0, finished=0, outside=True), failed(step=1, finished=0)], 20, ""),
    ([concluding()], 20, ""),
    ([concluding(step=0, finished=0)], 20, ""),  # all steps were done before
    ([concluding(), concluding(step=0, finished=0)], 20, "it failed twice in the same place (ending)"),
    ([concluding("validating"), concluding("validating", 0, 0)], 20, "it failed twice in the same place (validating)"),
    ([concluding("saving"), concluding("saving", 0, 0)], 20, "it failed twice in the same place (saving)"),
    ([concluding("validating"), concluding("validating", step=4)], 20, ""),  # of another step
    ([concluding("validating", 40), failed(300, 250, outside=True), concluding("validating", 0, 0)], 20, ""),
    ([concluding("validating", 40), failed(0, 0, outside=True), concluding("validating", 0, 0)], 20,
     "it failed twice in the same place (validating)"),
    ([starved(), failed(300, 250, outside=True), starved()], 20, ""),
    ([concluding("validating"), concluding(step=0, finished=0)], 20, ""),  # further than before
    ([concluding(outside=True)] * 3, 20, ""),
    ([starved()], 20, ""),
    ([replace(starved(), phase="starting")], 20, ""),
    ([starved(), starved()], 20, "threads, open files or memory have run out twice"),
    ([starved(), starved(finished=9)], 20, ""),  # it has worked in between
    ([starved(), Failure(0, "the trainer has ended", "waiting"), starved()], 20, ""),
    ([concluding(outside=True), concluding(step=0, finished=0)], 20, ""),
    ([failed(outside=True)] * 3, 2, "its 2 restarts are used up"),
    ([failed(outside=True)], 0, "its 0 restarts are used up"),
])
def test_what_happens_again_is_a_mistake(failures, budget, why):
    end = stop_reason(tuple(failures), budget)
    assert end.startswith(why)
    assert bool(end) == bool(why)


@pytest.mark.parametrize(("failures", "waits"), [
    ([], False), ([concluding()], True), ([concluding("validating")], True), ([concluding("saving")], True),
    ([failed()], False), ([concluding(outside=True)], False), ([concluding(symptom=True)], False),
    ([concluding(), failed()], False), ([starved()], True)])
def test_pause_before_waits_for_what_may_pass_at_the_end_of_a_step(failures, waits):
    assert bool(pause_before(Attempt(len(failures), tuple(failures)))) is waits


def rank_of(store: TCPStoreClient, rank: int, ranks: int = 3, name: str = "trainer",
            budget: int = 20) -> RestartCoordinator:
    return RestartCoordinator(store, RestartGroup(name, range(ranks), "trainer"), rank, budget)


def together(*actions: Callable[[], Attempt]) -> list[Attempt]:
    """At one moment, each in a thread of its own."""
    gate = threading.Barrier(len(actions))
    with ThreadPoolExecutor(len(actions)) as threads:
        return [job.result() for job in [threads.submit(lambda act=act: (gate.wait(), act())[1]) for act in actions]]


def test_the_cause_is_chosen_and_not_its_symptom(store, monkeypatch):
    """The rank that only misses another sees it first."""
    monkeypatch.setattr(restarts, "_SETTLE", 30.0)
    first, second, third = (rank_of(store, rank) for rank in range(3))
    symptom, cause = failed(rank=0, symptom=True), failed(rank=1)

    def late():
        while not first.store.has("0/failed/1"):
            time.sleep(0.01)
        return second.next(Attempt(), cause)

    found = together(lambda: first.next(Attempt(), symptom), late, lambda: third.next(Attempt(), None))
    assert found[0] == found[1] == found[2]
    assert found[0].failures == (replace(cause, order=2),)


def test_the_order_of_failures_is_the_stores_and_no_machines_clock(store, monkeypatch):
    """The clock of the machine that failed first is an hour ahead."""
    monkeypatch.setattr(restarts, "_SETTLE", 1.0)
    first, second, now = rank_of(store, 1), rank_of(store, 0), time.time()
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time", lambda: now + 3600)
        early = failed(rank=1, symptom=True)

    def later() -> Attempt:
        assert first.store.wait(["0/failed/1"], 30.0)
        return second.next(Attempt(), failed(rank=0, symptom=True))

    found = together(lambda: first.next(Attempt(), early), later)
    assert [attempt.failures[-1].rank for attempt in found] == [1, 1]


def test_a_kill_from_outside_is_the_cause_of_what_fails_with_it(store):
    """The rank that lost another rank raised an error of its own first."""
    first, second = (rank_of(store, rank) for rank in range(2))
    kill = failed(rank=1, outside=True)
    first.store.put(f"0/failed/{first.store.add('0/failures')}", json.dumps(asdict(failed(rank=0, order=1))))
    assert second.next(Attempt(), kill).failures == (replace(kill, order=2),)
    assert first.next(Attempt(), None).failures == (replace(kill, order=2),)


def test_a_symptom_alone_is_not_waited_on_for_ever(store, monkeypatch):
    monkeypatch.setattr(restarts, "_SETTLE", 0.2)
    began = time.monotonic()
    attempt = rank_of(store, 0).next(Attempt(), failed(symptom=True))
    assert attempt.failures[0].symptom
    assert time.monotonic() - began < 20


def test_a_failure_that_comes_late_joins_the_attempt_that_has_begun(store):
    first, second = rank_of(store, 0), rank_of(store, 1)
    following = first.next(Attempt(), failed(rank=0))
    assert second.is_superseded(Attempt())
    assert second.next(Attempt(), failed(rank=1)) == following


def fail_at_once(port: int) -> list[str]:
    rank = dist.get_rank()
    mine = RestartCoordinator(client(port),
                              RestartGroup("all", range(3), "ranks"), rank, 100)
    attempt, seen = Attempt(), []
    settle, restarts._SETTLE = restarts._SETTLE, 30.0  # in a rank's process, which goes on to other tests
    try:
        for number in range(1, 21):
            dist.barrier()
            attempt = mine.next(attempt, failed(number, rank=rank, symptom=rank != number % 3))
            seen.append(attempt.pack())
    finally:
        restarts._SETTLE = settle
    return seen


def test_three_processes_that_fail_at_once_begin_the_same_attempts():
    store = hosted()
    zero, one, two = run_ranks(3, fail_at_once, store.port)
    assert zero == one == two
    assert [each.rank for each in Attempt.unpack(zero[-1]).failures] == [number % 3 for number in range(1, 21)]
