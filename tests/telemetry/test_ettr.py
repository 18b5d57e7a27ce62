"""What failures have cost, from events whose times are known."""

from __future__ import annotations

import json

import pytest

from distflow.telemetry.ettr import STARTS_AGAIN, account, read


def event(time: float, rank: int, kind: str, **more) -> dict:
    return {"time": 1000.0 + time, "rank": rank, "step": 0, "event": kind, **more}


def ready(time: float, rank: int, attempt: int = 0) -> dict:
    return event(time, rank, "worker_ready", attempt=attempt, seconds={"connect": 0.25, "load": 0.5 + rank})


def failure(time: float, rank: int, ranks: list[int], seen_after: float = 0.0, verdict: str = STARTS_AGAIN) -> dict:
    return event(time, rank, "failure", group="trainer", ranks=ranks, attempt=0, phase="training", failed_step=3,
                 what="gone", seen_after=seen_after, verdict=verdict)


def test_while_the_trainer_starts_again_rollouts_count():
    """Two of four ranks are gone for 4 of 16 seconds."""
    events = [*(ready(0, rank) for rank in range(4)), failure(4, 1, [0, 1]),
              *(event(4.5, rank, "worker_started", attempt=1) for rank in (0, 1)), ready(8, 0, 1), ready(8, 1, 1),
              event(9, 0, "worker_caught_up", attempt=1), event(9.5, 1, "worker_caught_up", attempt=1),
              event(16, 0, "worker_ended")]
    found = account(events)
    assert found.ettr == pytest.approx(1 - 2 * 4 / (4 * 16))
    assert found.ettr_between(4, 8) == pytest.approx(0.5), "#rollout / (#rollout + #trainer)"
    assert found.sliding(8) == pytest.approx([1 - 0.25, 1.0])
    each, = found.recoveries
    assert (each.group, each.rank, each.step, each.began, each.detect) == ("trainer", 1, 3, 4.0, 0.0)
    assert (each.start, each.connect, each.load, each.first) == pytest.approx((0.5, 0.25, 1.5, 1.5))


def test_a_hang_counts_from_its_last_sign_of_work():
    events = [ready(0, 0), failure(6, 0, [0, 0], seen_after=3.0), ready(8, 0, 1), event(10, 0, "worker_ended")]
    found = account(events)
    assert found.ettr == pytest.approx(0.5)
    assert (found.recoveries[0].began, found.recoveries[0].detect) == (3.0, 3.0)


def test_what_ends_the_task_ends_all_its_ranks():
    """torchrun starts all of them again."""
    events = [ready(0, 0), ready(0, 1), failure(5, 0, [0, 0], verdict="its restarts are used up"),
              ready(9, 0), ready(9, 1), event(10, 0, "worker_ended")]
    assert account(events).ettr == pytest.approx(0.6)


def test_a_rank_that_rests_is_not_effective():
    events = [ready(0, 0), ready(0, 1), event(5, 1, "worker_scaled_down"), ready(8, 1), event(10, 0, "worker_ended")]
    assert account(events).ettr == pytest.approx(17 / 20)


def test_events_of_an_older_version_are_understood(tmp_path):
    events = [ready(0, 0), ready(0, 1), failure(5, 0, [0, 0]), event(6, 0, "worker started", attempt=1),
              ready(8, 0, 1), event(9, 0, "worker useful", attempt=1), event(12, 1, "worker rests"),
              event(20, 0, "worker ended")]
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in events))
    costs = account(read(tmp_path))
    assert costs.recoveries[0].first == pytest.approx(1.0)
    assert costs.intervals[1] == [(0.0, 12.0)]
