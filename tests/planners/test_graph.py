"""Depths, ancestors and circles, against plain definitions of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planners.graph import Graph, find_cycle


@st.composite
def dependencies(draw, circles: bool = False) -> dict[str, list[str]]:
    """Up to eight nodes; without circles each waits for earlier ones only."""
    names = [f"n{index}" for index in range(draw(st.integers(1, 8)))]
    return {name: draw(st.lists(st.sampled_from(names if circles else names[:index]))) if circles or index else []
            for index, name in enumerate(names)}


@given(dependencies(), st.randoms())
def test_depth_and_ancestors(before: dict[str, list[str]], random) -> None:
    def depth(node: str) -> int:
        return 1 + max(map(depth, before[node]), default=-1)

    def reach(node: str) -> set[str]:
        return {other for start in before[node] for other in (start, *reach(start))}

    shuffled = random.sample(list(before), len(before))
    graph = Graph({node: before[node] for node in shuffled})
    expected = [sorted(node for node in before if depth(node) == level) for level in range(max(map(depth, before)) + 1)]
    assert graph.levels == expected
    assert graph.ancestors == {node: frozenset(reach(node)) for node in before}
    assert not find_cycle(before)


@given(dependencies(circles=True))
def test_a_circle_is_one_and_is_found_if_there_is_one(before: dict[str, list[str]]) -> None:
    removed: set[str] = set()  # peel off what waits for nothing; a circle remains if and only if there is one
    while ready := {node for node in before if node not in removed and set(before[node]) <= removed}:
        removed |= ready
    cycle = find_cycle(before)
    assert bool(cycle) == (removed != set(before))
    assert len(set(cycle)) == len(cycle)
    assert all(following in before[node] for node, following in zip(cycle, cycle[1:] + cycle[:1]))
