"""Detectors of steps, on steps whose numbers are known: who holds up the others, and which filter drops all."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from distflow.recovery import detectors
from distflow.recovery.detectors import Alert, StepMonitor, StepReport, detector

SLOW = {"training": [(1.0, 8), (1.0, 8), (2.1, 8), (1.0, 8)]}


def alerts(steps: Iterable[StepReport], **settings: dict) -> list[tuple[int, str, Alert]]:
    detectors = StepMonitor(settings)
    return [(step.number, *found) for step in steps for found in detectors.look(step)]


def steps_of(*times: dict) -> list[StepReport]:
    return [StepReport(number, {}, compute_seconds) for number, compute_seconds in enumerate(times, 1)]


def test_a_rank_that_is_slow_five_times_in_a_row_is_named_once():
    even = {"training": [(1.0, 8)] * 4}
    (number, name, alert), = alerts(steps_of(*[SLOW] * 4, even, *[SLOW] * 9))
    assert (number, name, alert.restart) == (10, "straggler", False)
    assert alert.facts == {"rank": 2, "phase": "training", "factor": 2.1, "steps": 5}
    assert [number for number, *_ in alerts(steps_of(*[SLOW] * 5, even, *[SLOW] * 5))] == [5, 11]


@pytest.mark.parametrize("compute_seconds", [
    {"training": [(1.0, 8), (1.0, 8), (1.9, 8), (1.0, 8)]},
    {"training": [(1.0, 8), (1.0, 8), (2.4, 16), (1.0, 8)]},
    {"training": [(0.5, 4), (1.2, 8)]},
    {"training": [(0.0, 0), (1.0, 8)]},
    {"computing": [(0.01, 8), (0.05, 8)], "training": [(1.0, 8), (1.0, 8)]},
    {"training": [(1.0, 8)]},
    {},
], ids=["not by enough", "with more rows", "two ranks", "one without rows", "hardly takes time", "alone", "nothing"])
def test_what_is_no_straggler(compute_seconds):
    assert alerts(steps_of(*[compute_seconds] * 20)) == []


def test_of_two_ranks_one_may_be_slow_and_thresholds_are_settings():
    compute_seconds = {"generating": [(1.0, 8), (1.6, 8)]}
    assert alerts(steps_of(*[compute_seconds] * 9)) == []
    (number, _, alert), = alerts(steps_of(*[compute_seconds] * 9), straggler={"factor": 1.5, "during": 3})
    assert (number, alert.facts["rank"]) == (3, 1)


def trained(values: Iterable[float], name: str = "loss") -> list[StepReport]:
    return [StepReport(number, {name: value}) for number, value in enumerate(values, 1)]


def test_a_detector_of_ones_own_sees_the_steps():
    @detector(sees="steps")
    def endless(steps, *, tokens: float = 1000.0) -> Alert | None:
        return Alert("endless", about="it") if steps[-1].metrics["length"] > tokens else None

    try:
        found = alerts(trained([1.0, 20.0, 30.0, 1.0, 20.0], "length"), endless={"tokens": 10})
        assert [number for number, *_ in found] == [2, 5]
    finally:
        del detectors.STEP_DETECTORS["endless"]


def test_a_filter_that_drops_all_is_named():
    some, none = ({"filter/a/b/dropped": 8.0, "filter/a/b/kept": kept} for kept in (1.0, 0.0))
    reported = alerts(StepReport(number, values) for number, values in enumerate([some, none, none, some, none, {}], 1))
    assert [(number, name, alert.facts) for number, name, alert in reported] == [
        (number, "all_dropped", {"node": "a/b", "rows": 8.0}) for number in (2, 5)]
