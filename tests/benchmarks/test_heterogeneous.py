"""The sides of the prediction for mixed hardware: what each may decide."""

import pytest

from benchmarks.heterogeneous import (
    ENGINES,
    Cell,
    main,
    seconds,
    stream_rl,
    stream_rl_as_described,
    verl,
    verl_as_shipped,
)

CELL = Cell("two continents", "grpo", "sync", "4B")


@pytest.mark.parametrize("scenario", ["one zone", "two continents"])
def test_ours_is_never_slower(tmp_path, scenario):
    problem = Cell(scenario, "grpo", "async", "4B").problem(tmp_path)
    ours = seconds(problem, 4000)
    assert ours <= seconds(verl(problem), 1000)
    assert ours <= seconds(stream_rl(problem), 1000)


def test_what_ships_is_no_better_than_what_is_optimised(tmp_path):
    """Blind to kinds, verl's rollouts and shards wait for the slowest devices and links."""
    cell = Cell("one zone", "grpo", "sync", "4B")
    problem = cell.problem(tmp_path)
    optimised = min(seconds(verl(cell.problem(tmp_path, engine)), 1000) for engine in ENGINES)
    assert verl_as_shipped(problem) > 1.2 * optimised, "with the engine that has pipelines"
    assert stream_rl_as_described(problem) >= seconds(problem, 4000)
    assert verl_as_shipped(CELL.problem(tmp_path)) > 2 * verl_as_shipped(problem), "moves between continents are paid"


@pytest.mark.parametrize("flag", ["--quick", "--accepted"])
def test_sizes_of_which_no_cell_is_left_are_refused(flag, capsys):
    with pytest.raises(SystemExit):
        main([flag, "--size", "14B"])
    assert f"{flag} has models of 8B only" in capsys.readouterr().err
