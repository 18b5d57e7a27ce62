"""What ranks ask of the store is counted right, and does not grow with the number of ranks."""

from __future__ import annotations

import pytest

from benchmarks import control_plane
from benchmarks.control_plane import PARTS, growth_exponent

SIZES = (16, 64)


@pytest.fixture(autouse=True)
def _launched(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "TORCHELASTIC_RESTART_COUNT"):  # `measure` sets them: they are taken back
        monkeypatch.setenv(name, "0")


def test_the_power_is_the_slope_of_the_logarithms():
    assert growth_exponent({ranks: 3.0 * ranks**2 for ranks in SIZES}) == pytest.approx(2.0)
    assert growth_exponent(dict.fromkeys(SIZES, 7.0)) == pytest.approx(0.0)
    assert growth_exponent({16: 0.0, 64: 5.0}) == 0.0, "what was not seen to cost anything has no slope"


def test_no_part_asks_more_of_the_store_when_there_are_more_ranks(capsys):
    found = control_plane.measured(SIZES)
    for part in PARTS:
        operations = {ranks: cost[part].operations for ranks, cost in found.items()}
        assert min(operations.values()) >= 1, part
        limit = 0.5 if part == "join" else 0.05  # who joins looks again as long as machines come
        assert growth_exponent(operations) < limit, (part, operations)
    said = capsys.readouterr().out
    assert all(said.count(f"\n  {part:8} {ranks:5}  ") == 1 for part in PARTS for ranks in SIZES), said
