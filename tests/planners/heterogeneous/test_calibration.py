"""What was measured comes back as coefficients. The measurements here are made by the cost model with known ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distflow.measurements import NodeTiming
from distflow.plan import Layout
from planners.heterogeneous.calibration import (
    MeasuredRun,
    at_run_sizes,
    calibrated,
    measured_run,
    with_run_lengths,
)
from planners.heterogeneous.layouts import CostedProblem
from planners.heterogeneous.problem import (
    GENERATE,
    INFER,
    TRAIN,
    DeviceGroup,
    Hardware,
    Measured,
    ModelTask,
    NetworkLink,
    Problem,
    Replicas,
)

FAST = DeviceGroup("fast", "big", "a", 1, 1, 0.5e12, 64e9, 35e9, 25e9, NetworkLink(1e-5, 4e9))
SLOW = replace(FAST, name="slow", kind="small", slowdown=4.0)
LINK = NetworkLink(1e-4, 0.8e9)
TASKS = (ModelTask("rollout", "actor", GENERATE, 10**7, 4, 512, 512, 2048, 64, 40, 30, width=4, engine="megatron"),
         ModelTask("reference", "reference", INFER, 10**7, 4, 512, 512, 2048, 64, 40, 30, width=4, engine="megatron"),
         ModelTask("update", "actor", TRAIN, 10**7, 4, 512, 512, 2048, 64, 40, 30, width=4, engine="megatron"))
TRUTH = {"rollout": (3.0, 2e-3), "reference": (1.5, 5e-4), "update": (0.7, 1e-3)}
"""`times` and `launch`."""


def problem(rows: int = 64, groups: tuple[DeviceGroup, ...] = (FAST,)) -> Problem:
    links = tuple(tuple(LINK for _ in groups) for _ in groups)
    plain = tuple(replace(group, slowdown=1.0) for group in groups)
    return Problem(Hardware(plain, links), tuple(replace(task, rows=rows) for task in TASKS))


def run(rows: int, shares: tuple[int, ...] = (), groups: tuple[DeviceGroup, ...] = (FAST,),
        rest: float = 0.0) -> MeasuredRun:
    """A run as the true coefficients have it, with prompts of 20 tokens that four rows share, and responses of 12
    on the mean, 15 at most."""
    shares = shares or (rows,)
    layouts = {task.name: Layout(len(shares)) for task in TASKS}
    taken = {(task.name, rank): NodeTiming(1.0, count, 20 * count, 5 * count, 12 * count, 15)
             for task in TASKS for rank, count in enumerate(shares)}
    ideal = measured_run(problem(rows, groups), layouts, taken, 0.0)
    tasks = tuple(replace(task, measured=task.measured._replace(times=TRUTH[task.name][0], launch=TRUTH[task.name][1]))
                  for task in ideal.problem.tasks)
    costed = CostedProblem(replace(ideal.problem, tasks=tasks,
                                   hardware=replace(ideal.problem.hardware, device_groups=groups)))
    for number, task in enumerate(TASKS):
        for rank, share in enumerate(ideal.shares[number]):
            waits = task.kind != GENERATE
            layout = ideal.layout(costed, number, ideal.shares[number] if waits else (share,))
            taken[task.name, rank].seconds = layout.seconds
    seconds = sum(max(taken[task.name, rank].seconds for rank in range(len(shares))) for task in TASKS)
    return measured_run(problem(rows, groups), layouts, taken, seconds + rest)


def test_two_batch_sizes_show_both_coefficients():
    found = calibrated(problem(), [run(64), run(8)])
    for task in found.tasks:
        assert (task.measured.times, task.measured.launch) == pytest.approx(TRUTH[task.name], rel=0.01)
    third = run(24)
    predicted = third.placement(CostedProblem(at_run_sizes(third, found)))
    for layout, measured in zip(predicted.layouts, third.durations):
        assert layout.seconds == pytest.approx(measured, rel=0.01)


def test_one_batch_size_shows_what_it_takes_itself():
    one = run(64)
    found = calibrated(problem(), [one])
    assert all(task.measured.launch == 0 for task in found.tasks)
    predicted = one.placement(CostedProblem(at_run_sizes(one, found)))
    assert [layout.seconds for layout in predicted.layouts] == pytest.approx(one.durations, rel=0.01)


def test_a_slow_device_shows_its_pace_where_ranks_do_not_wait():
    groups = (FAST, SLOW)
    runs = [run(64, (32, 32), groups), run(8, (4, 4), groups)]
    found = calibrated(problem(64, groups), runs)
    assert [group.slowdown for group in found.hardware.device_groups] == pytest.approx([1.0, 4.0], rel=0.01)
    uneven = run(64, (52, 12), groups)
    predicted = uneven.placement(CostedProblem(at_run_sizes(uneven, found)))
    for layout, measured in zip(predicted.layouts, uneven.durations):
        assert layout.seconds == pytest.approx(measured, rel=0.05)


def test_lengths_are_those_of_the_run_and_those_of_responses_shares_of_the_longest():
    found = calibrated(problem(), [run(64)]).tasks[0]
    assert (found.seen, found.read, found.answer, found.longest) == (20, 5, 12, 15)
    longer = with_run_lengths(replace(TASKS[0], response=60), TASKS[0], run(64).shares[0])
    assert (longer.seen, longer.read, longer.answer, longer.longest) == (20, 5, 24, 30)
    assert found.tokens == 70


def test_memory_is_for_rows_at_their_longest():
    before, after = (CostedProblem(each).costs.tasks[0] for each in (problem(), calibrated(problem(), [run(64)])))
    assert after.cache(1) == before.cache(1)


def test_what_no_work_takes_is_left_over():
    one = run(64, rest=0.5)
    assert one.rest(CostedProblem(calibrated(problem(), [one]))) == pytest.approx(0.5, abs=0.01)


def test_what_a_rank_waits_within_a_task_is_no_work():
    """The slow rank begins the update 0.75 s later, for which the fast one waits in it; a task on another rank than the
    one before takes what it has taken all the same."""
    groups = (FAST, SLOW)
    ranks = {"rollout": (0.2, 0.8), "reference": (0.1, 0.25), "update": (1.75, 1.0)}
    rows = NodeTiming(0.0, 32, 640, 160, 384, 15)
    taken = {(name, rank): replace(rows, seconds=seconds) for name, both in ranks.items()
             for rank, seconds in enumerate(both)}
    one = measured_run(problem(64, groups), {task.name: Layout(2) for task in TASKS}, taken, 2.05)
    assert one.durations == pytest.approx((0.8, 0.25, 1.0))
    costed = CostedProblem(calibrated(problem(64, groups), [one]))
    assert [layout.seconds for layout in one.placement(costed).layouts] == pytest.approx(one.durations, rel=0.01)
    layouts = {"rollout": Layout(1), "reference": Layout(1, first=1), "update": Layout(2)}
    assert measured_run(problem(64, groups), layouts, taken, 2.0).durations == pytest.approx((0.2, 0.25, 1.95 - 0.25))


def test_works_that_share_ranks_take_turns():
    layouts = {"rollout": Layout(1, first=0), "reference": Layout(1, first=1), "update": Layout(2)}
    taken = {(task.name, rank): NodeTiming(1.0, 8, 8, 8, 8, 1) for task in TASKS for rank in range(2)}
    two = replace(FAST, each=2)
    found = measured_run(problem(64, (two,)), layouts, taken, 3.0)
    assert found.grouping == ((0, 1, 2),)
    assert found.subsets == ((2,),)
    del layouts["update"]
    apart = measured_run(replace(problem(64, (two,)), tasks=problem(64, (two,)).tasks[:2]), layouts, taken, 3.0)
    assert apart.grouping == ((0,), (1,))
    assert apart.subsets == ((1,), (1,))


def test_further_draws_are_seconds_of_the_batch():
    """Twice as many rows were sampled as a batch has: so it will be with another placement."""
    layouts = {task.name: Layout(1) for task in TASKS}
    taken = {(task.name, 0): NodeTiming(6.0, 128, 2560, 640, 1536, 15) for task in TASKS}
    one = measured_run(problem(64), layouts, taken, 18.0)
    costs = CostedProblem(calibrated(problem(64), [one])).costs
    found = [costs.layout(number, strategy, (Replicas((0,), 1),)) for number, strategy in enumerate(one.strategies)]
    assert [layout.rows for layout in found] == [(64,)] * 3
    assert [layout.seconds for layout in found] == pytest.approx([6.0] * 3, rel=0.01)
    assert one.problem.tasks[0].seen == 20


def test_what_showed_no_tokens_has_them_at_their_longest():
    layouts = {task.name: Layout(1) for task in TASKS}
    taken = {(task.name, 0): NodeTiming(6.0, 64) for task in TASKS}
    one = measured_run(problem(64), layouts, taken, 18.0)
    assert [(task.whole, task.read, task.longest) for task in one.problem.tasks] == [(70, 40, 30)] * 3
    found = CostedProblem(calibrated(problem(64), [one]))
    assert [layout.seconds for layout in one.placement(found).layouts] == pytest.approx([6.0] * 3, rel=0.01)
    assert found.layouts.exactly(0, found.problem.hardware.all)


def _as_if(one: MeasuredRun, seconds: float) -> MeasuredRun:
    """Each share had taken so long."""
    return replace(one, shares=tuple(tuple(share._replace(timing=replace(share.timing, seconds=seconds))
                                           for share in shares) for shares in one.shares),
                   durations=(seconds,) * len(one.shares))


def test_a_type_that_has_sampled_nothing_has_the_pace_of_the_first():
    groups = (FAST, SLOW)
    one = run(64, (64, 0), groups)
    found = calibrated(problem(64, groups), [_as_if(one, seconds) for seconds in (1.0, 1.0, 3.0)])
    assert [group.slowdown for group in found.hardware.device_groups] == [1.0, 1.0]


def test_rows_are_never_free():
    found = calibrated(problem(), [_as_if(run(rows), 1.0) for rows in (64, 8)])
    assert all(task.measured.times > 0 for task in found.tasks)
    assert all(task.measured.launch > 0 for task in found.tasks)


def test_what_took_no_time_shows_nothing():
    found = calibrated(problem(), [_as_if(run(64), 0.0)])
    assert all((task.measured.times, task.measured.launch) == (1.0, 0.0) for task in found.tasks)


def sharded(gb_s: float, times: float, launch: float) -> tuple[Problem, MeasuredRun]:
    """A run in which two devices gather a layer of weights while they compute the one before, with such a link."""
    two = replace(FAST, each=2, overlaps=True, inside=NetworkLink(0.0, gb_s * 1e9))
    task = replace(TASKS[2], engine="fsdp", gathered=10**6, recompute=True, micro_tokens=1)
    plain = Problem(Hardware((two,), ((LINK,),)), (task,))
    one = measured_run(plain, {"update": Layout(2)}, {("update", rank): NodeTiming(1.0, 32) for rank in range(2)}, 1.0)
    known = replace(plain, tasks=(replace(task, measured=Measured(times, launch)),))
    return plain, _as_if(one, one.layout(CostedProblem(known), 0).seconds)


@pytest.mark.parametrize("gb_s", [10, 3])
def test_devices_that_gather_while_they_compute_show_what_they_compute(gb_s):
    plain, one = sharded(gb_s, 3.0, 0.0)
    assert calibrated(plain, [one]).tasks[0].measured.times == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize("gb_s", [0.3, 0.001])
def test_computation_that_gathering_hides_shows_nothing(gb_s):
    """The optimizer alone is seen to take its time."""
    plain, one = sharded(gb_s, 3.0, 1e-4)
    assert calibrated(plain, [one]).tasks[0].measured[:2] == (1.0, 0.0)
