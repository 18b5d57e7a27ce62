"""What each rank's nodes took: one file, and what usually comes out."""

from __future__ import annotations

from dataclasses import replace

from distflow.measurements import NodeTiming
from distflow.telemetry.timings import StepTimings, TimingsFile, read, usual


def test_every_rank_writes_a_line_for_a_step(tmp_path):
    for rank in range(2):
        times = TimingsFile()
        times.add("before", NodeTiming(9.0))
        times.open(tmp_path / "times.jsonl", rank, "abc")
        for step in range(1, 50):
            times.add("rollout", NodeTiming(0.5 + rank, 4, 40, 10, 20, 7))
            times.add("rollout", NodeTiming(0.25, 2, 20, 5, 10, 9))  # a second draw
            times.write(step, 2.0)
    found = read(tmp_path / "times.jsonl")
    assert [step.step for step in found if step.rank == 1] == [*range(1, 33), 40, 48]
    assert found[1] == StepTimings("abc", 1, 1, 2.0, {"rollout": NodeTiming(1.75, 6, 60, 15, 30, 9)})


def test_a_step_done_twice_counts_as_it_was_done_last_and_a_torn_line_does_not(tmp_path):
    times = TimingsFile()
    times.open(tmp_path / "times.jsonl", 0, "abc")
    for seconds in (5.0, 1.0):
        times.add("update", NodeTiming(seconds, 1, 1, 1, 1, 1))
        times.write(3, seconds)
    with (tmp_path / "times.jsonl").open("a") as file:
        file.write('12\n{"step": 4, "ra')
    assert [step.seconds for step in read(tmp_path / "times.jsonl")] == [1.0]


def _step(step: int, rank: int, seconds: float, *nodes: str) -> StepTimings:
    return StepTimings("abc", step, rank, seconds + rank,
                       {node: NodeTiming(seconds, 2, 20, 5, 10, 6) for node in nodes or ("a", "b")})


def test_the_usual_is_the_median_of_complete_steps_without_the_first():
    steps = [_step(step, rank, 100.0 if step < 3 else float(step)) for step in range(1, 8) for rank in range(2)]
    steps += [_step(8, 0, 1000.0)]  # of which the other rank has written nothing yet
    steps += [_step(9, rank, 1000.0, "b") for rank in range(2)]  # rows were taken over, not sampled
    found = usual(steps, 2, "abc")
    assert (found.steps, found.seconds) == (5, 6.0)
    assert found.nodes["a", 1] == NodeTiming(5.0, 2, 20, 5, 10, 6)
    assert usual(steps, 3, "abc").steps == 0
    idle = usual([_step(step, rank, 1.0, *"ab"[: 2 - rank]) for step in range(1, 8) for rank in range(2)], 2,
                 "abc")
    assert (idle.steps, idle.nodes["b", 1]) == (5, NodeTiming())


def test_what_was_done_by_another_plan_does_not_count():
    before = [replace(_step(step, 0, 100.0), plan="other") for step in range(1, 20)]
    assert usual([*before, *(_step(step, 0, 1.0) for step in range(20, 26))], 1, "abc").seconds == 1.0
    assert usual(before, 1, "abc").steps == 0
