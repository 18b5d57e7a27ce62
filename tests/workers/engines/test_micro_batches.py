"""How a rank's rows are cut into micro-batches."""

from hypothesis import given
from hypothesis import strategies as st

from workers.engines.trainer import cuts, even_cuts


def test_a_rank_with_fewer_rows_has_as_many_pieces_and_smaller_ones():
    """Another rank needs three: each of this one's takes a third of its time, and not two all of it."""
    assert cuts([2] * 6, 8) == [(0, 4), (4, 6)]
    assert even_cuts([2] * 6, 8, 3) == [(0, 2), (2, 4), (4, 6)]
    assert even_cuts([2] * 6, 8, 2) == [(0, 3), (3, 6)]


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
