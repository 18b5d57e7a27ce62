import statistics

import pytest

from benchmarks.modes import AHEAD, Course
from benchmarks.slow_tools import latency


def test_the_seconds_of_calls_are_lognormal_and_depend_on_what_was_said():
    seconds = sorted(latency(f"question {number}", 0.1, 1.2) for number in range(4000))
    assert statistics.median(seconds) == pytest.approx(0.1, rel=0.1)
    assert seconds[3960] == pytest.approx(1.6, rel=0.3)
    assert latency("question 7", 0.1, 1.2) == latency("question 7", 0.1, 1.2)


def test_only_steady_steps_are_timed_and_all_tokens_are_counted():
    steps = [{"seconds": seconds, "staleness/tokens/0": 3.0, "staleness/tokens/1": 1.0}
             for seconds in (50.0, 2.0, 2.0, 0.1)]
    course = Course(steps, 8, 0.5)
    assert course.samples_per_second(1) == 4.0
    assert course.ages() == {0: 12.0, 1: 4.0}
    assert all(side.startswith(("async", "semi_sync")) for side in AHEAD)
