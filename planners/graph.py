"""Which nodes wait for which. A few lines instead of a graph library, whose import would be half of start-up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Graph:
    """Dependencies without a circle. `before[node]` are the nodes that it waits for."""

    def __init__(self, before: Mapping[str, Iterable[str]]):
        self.before = {node: sorted(set(others)) for node, others in before.items()}
        self.levels: list[list[str]] = []
        """Nodes by depth (DistFlow §4.2): the longest way from a node that waits for none; ids sorted."""
        self.ancestors: dict[str, frozenset[str]] = {}
        """All nodes that a node waits for, directly or not."""
        depth: dict[str, int] = {}
        for node in _forwards(self.before):
            depth[node] = 1 + max((depth[other] for other in self.before[node]), default=-1)
            self.ancestors[node] = frozenset(self.before[node]).union(
                *(self.ancestors[other] for other in self.before[node]))
            if depth[node] == len(self.levels):
                self.levels.append([])
            self.levels[depth[node]].append(node)
        for level in self.levels:
            level.sort()

    def ordered(self, first: str, second: str) -> bool:
        """Whether one of them waits for the other."""
        return first in self.ancestors[second] or second in self.ancestors[first]

    def downstream(self, nodes: Iterable[str]) -> set[str]:
        """`nodes` and all that wait for them."""
        start = set(nodes)
        return start | {node for node, ancestors in self.ancestors.items() if ancestors & start}


def find_cycle(before: Mapping[str, Iterable[str]]) -> list[str]:
    """Nodes of which each waits for the next, and the last for the first; empty if there is no circle."""
    settled = set(_forwards(before))
    path: list[str] = []
    node = next((node for node in before if node not in settled), None)
    while node is not None and node not in path:
        path.append(node)
        node = next(other for other in before[node] if other not in settled)  # what never settles waits for its like
    return path[path.index(node) :] if node is not None else []


def _forwards(before: Mapping[str, Iterable[str]]) -> list[str]:
    """Nodes in an order in which each comes after what it waits for; those in or behind a circle are left out."""
    waiting = {node: len(set(others)) for node, others in before.items()}
    after: dict[str, list[str]] = {node: [] for node in before}
    for node, others in before.items():
        for other in set(others):
            after[other].append(node)
    order = [node for node, count in waiting.items() if count == 0]
    for node in order:  # grows while it is walked
        for follower in after[node]:
            waiting[follower] -= 1
            if waiting[follower] == 0:
                order.append(follower)
    return order
