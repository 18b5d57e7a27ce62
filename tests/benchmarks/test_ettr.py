import json
import math

import pytest

from benchmarks.ettr import Outcome, judge
from benchmarks.modes import RANKS
from distflow.telemetry.ettr import FailureCosts, Recovery

STEPS = [1, 2]


def outcome(total: float, away: tuple[float, float] | None, start: float = 1.0, updates: list[int] = STEPS) -> Outcome:
    """A run in which rank 0 trains and is away once; rank 1 samples all the time."""
    first, last = away or (total, total)
    account = FailureCosts(total, [], {0: [(0.0, first), (last, total)], 1: [(0.0, total)]})
    if away:
        rest = last - first - start
        account.recoveries.append(Recovery("trainer", 0, 2, "training", "gone", "starts again", first, 0.0, start, 0.0,
                                           rest))
    return Outcome(account, updates, RANKS - 1, 990.0)


def test_while_the_trainer_restarts_the_rollouts_share_counts():
    assert outcome(10.0, (4.0, 8.0)).in_recovery == pytest.approx(0.5)


def judged(capsys, role: Outcome, share: float = 0.4) -> tuple[list[str], list[dict]]:
    judge("async", [{"none": outcome(10.0, None), "role": role, "task": outcome(15.0, (2.0, 9.0), math.nan)}], 2, share)
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if line[0] != "{"], [json.loads(line) for line in lines if line[0] == "{"]


def test_the_claims_say_how_often_faults_happened(capsys):
    said, (time, ettr) = judged(capsys, outcome(11.0, (4.0, 5.0)))
    assert "a trainer fault in 40% of the steps" in time["claim"]
    assert "a trainer fault in 40% of the steps" in ettr["claim"]
    assert (time["value"], time["met"]) == (pytest.approx(15 / 11, abs=1e-3), True)
    assert (ettr["value"], ettr["met"]) == (pytest.approx(1 - 1 / 22, abs=1e-3), True)
    assert "async, task: effective 0.767 (0.767 to 0.767), tokens per second over those without faults 0.667" in said[2]
    assert said[-1].startswith("async, role: effective while the trainer restarted 0.5 (0.5 to 0.5) (rollouts are 0.50")
    assert not [line for line in said if "nan" in line], "of the task side nothing is claimed"


def test_an_update_that_is_lost_or_made_twice_spoils_the_claims(capsys):
    _, claims = judged(capsys, outcome(11.0, (4.0, 5.0), updates=[1, 1, 2]))
    assert [claim["met"] for claim in claims] == [False, False]
