"""How a rank's rows are cut into micro-batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.engines.trainer import cuts, even_cuts


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 60), st.integers(0, 5))
def test_pieces_are_whole_within_the_budget_and_no_cap_below_would_do(needed, budget, more):
    count = len(cuts(needed, budget)) + more
    found = even_cuts(needed, budget, count)
    assert [place for start, stop in found for place in range(start, stop)] == list(range(len(needed)))
    assert len(found) <= count
    heaviest = max(sum(needed[start:stop]) for start, stop in found)
    assert heaviest <= max(budget, max(needed))
    if heaviest > max(needed):
        assert len(cuts(needed, heaviest - 1)) > count
