"""The sides of the prediction for mixed hardware: what each may decide."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import heterogeneous
from benchmarks.heterogeneous import (
    ENGINES,
    SEEDS,
    Cell,
    main,
    seconds,
    stream_rl,
    stream_rl_as_described,
    that_run,
    verl,
    verl_as_shipped,
)
from planners.heterogeneous.layouts import CostedProblem
from planners.heterogeneous.problem import Problem

CELL = Cell("two continents", "grpo", "sync", "4B")


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


@pytest.mark.parametrize("flag", ["--quick", "--accepted"])
def test_sizes_of_which_no_cell_is_left_are_refused(flag: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main([flag, "--size", "14B"])
    assert f"{flag} has models of 8B only" in capsys.readouterr().err
