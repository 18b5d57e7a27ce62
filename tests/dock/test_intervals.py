from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.dock.intervals import Intervals


@settings(max_examples=200)
@given(st.lists(st.tuples(st.booleans(), st.integers(-3, 20))))
def test_it_is_a_set(changes):
    ours, theirs = Intervals(), set()
    for adds, number in changes:
        (ours.add if adds else ours.remove)(number)
        (theirs.add if adds else theirs.discard)(number)
        assert len(ours) == len(theirs)
        assert {n for n in range(-5, 25) if n in ours} == theirs
    ranges = ours.ranges
    assert all(first[1] < second[0] for first, second in zip(ranges, ranges[1:])), "adjacent ranges are joined"
    assert Intervals(ranges).ranges == ranges
