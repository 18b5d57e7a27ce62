"""The sides of the prediction for mixed hardware: what each may decide."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import heterogeneous
from benchmarks.heterogeneous import (
    ENGINES,
    SEEDS,
    Cell,
    finds_nothing_faster,
    main,
    seconds,
    stream_rl,
    stream_rl_as_described,
    that_run,
    verl,
    verl_as_shipped,
)
from planners.heterogeneous.layouts import CostedProblem
from planners.heterogeneous.problem import GENERATE, Problem
from planners.heterogeneous.search import search

CELL = Cell("two continents", "grpo", "sync", "4B")


def test_verl_like_shares_equally_and_uses_all_devices(tmp_path: Path) -> None:
    *_, found = search(verl(CELL.problem(tmp_path)), budget=500)
    assert found.placement.grouping == ((0, 1, 2),)
    assert found.placement.subsets == (CELL.problem(tmp_path).hardware.all,)
    for layout in found.placement.layouts:
        assert len(set(layout.rows)) == 1
        assert max(layout.layers) - min(layout.layers) <= 1


def test_stream_rl_like_has_two_pools(tmp_path: Path) -> None:
    problem = CELL.problem(tmp_path)
    *_, found = search(stream_rl(problem), budget=500)
    kinds = [{problem.tasks[task].kind == GENERATE for task in group} for group in found.placement.grouping]
    assert sorted(kinds, key=str) == [{False}, {True}]


@pytest.mark.parametrize("scenario", ["one zone", "two continents"])
def test_ours_is_never_slower(tmp_path: Path, scenario: str) -> None:
    problem = Cell(scenario, "grpo", "async", "4B").problem(tmp_path)
    ours = seconds(problem, 4000)
    assert ours <= seconds(verl(problem), 1000)
    assert ours <= seconds(stream_rl(problem), 1000)


def test_what_ships_is_no_better_than_what_is_optimised(tmp_path: Path) -> None:
    """Blind to kinds, verl's rollouts and shards wait for the slowest devices and links."""
    cell = Cell("one zone", "grpo", "sync", "4B")
    problem = cell.problem(tmp_path)
    optimised = min(seconds(verl(cell.problem(tmp_path, engine)), 1000) for engine in ENGINES)
    assert verl_as_shipped(problem) > 1.2 * optimised, "with the engine that has pipelines"
    assert stream_rl_as_described(problem) >= seconds(problem, 4000)
    assert verl_as_shipped(CELL.problem(tmp_path)) > 2 * verl_as_shipped(problem), "moves between continents are paid"


def test_continents_are_further_apart_than_regions(tmp_path: Path) -> None:
    near, far = (Cell(scenario, "grpo", "sync", "4B").problem(tmp_path).hardware.between[0][3]
                 for scenario in ("two regions", "two continents"))
    assert far.bandwidth < near.bandwidth
    assert far.latency > near.latency


def test_no_side_searches_longer_than_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is enumerated of plans that run, and costed as ranks run it, is a part of what a search may cost."""
    costed: list[CostedProblem] = []

    class Counted(CostedProblem):
        def __init__(self, problem: Problem):
            super().__init__(problem)
            costed.append(self)

    monkeypatch.setattr(heterogeneous, "CostedProblem", Counted)
    spec = Cell("one zone", "grpo", "sync", "4B").spec(tmp_path)
    that_run(spec, 2000)
    assert sum(each.evaluations for each in costed) <= 1.05 * 2000 * len(SEEDS)


@pytest.mark.parametrize(("run", "known", "nothing"), [(2.0, 2.0, True), (1.0, 2.0, False), (1.0, float("inf"), False),
                                                       (float("inf"), float("inf"), False)])
def test_a_plan_is_another_sides_only_if_there_is_one(run: float, known: float, nothing: bool) -> None:
    assert finds_nothing_faster({"that run": run, "known": known}) == nothing


@pytest.mark.parametrize("flag", ["--quick", "--accepted"])
def test_sizes_of_which_no_cell_is_left_are_refused(flag: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main([flag, "--size", "14B"])
    assert f"{flag} has models of 8B only" in capsys.readouterr().err
