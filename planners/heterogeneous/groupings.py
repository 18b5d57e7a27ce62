"""Ways to colocate works. What trains one role stays together, since it has one optimizer."""

from __future__ import annotations

import numpy as np

from distflow.schema.errors import InvalidInput, Mistake
from planners.heterogeneous.problem import TRAIN, Grouping, Problem

MOST = 8
"""Of more works, not all groupings are listed: there are 4,140 of eight, 21,147 of nine."""
_LISTED = 6


def groupings(problem: Problem) -> list[Grouping]:
    """All that are allowed.

    Raises:
        InvalidInput: there are too many works.
    """
    if problem.freedom.groupings is not None:
        return list(problem.freedom.groupings)
    count = len(problem.works)
    if count > MOST:
        raise InvalidInput(Mistake(f"{count} nodes run models, too many for the exact program, which goes through all "
                                   f"ways to colocate up to {MOST}", None, "Use  --solver hybrid"))
    found: list[Grouping] = [()]
    for work in range(count):
        found = [longer for grouping in found for longer in _with(grouping, work)]
    return [grouping for grouping in found if allowed(problem, grouping)]


def some(problem: Problem, random: np.random.Generator, count: int) -> list[Grouping]:
    """All of few works; of many, everything together, everything apart, and others, drawn."""
    works = range(len(problem.works))
    if problem.freedom.groupings is not None or len(works) <= _LISTED:
        return groupings(problem)
    found = {(tuple(works),), _joined(problem, [[work] for work in works])}
    for _ in range(count):
        drawn: Grouping = ()
        for work in works:
            choices = _with(drawn, work)
            drawn = choices[int(random.integers(len(choices)))]
        found.add(_joined(problem, [list(group) for group in drawn]))
    return sorted(found)


def allowed(problem: Problem, grouping: Grouping) -> bool:
    """Whether what trains a role is together, and the problem leaves this choice."""
    only, homes = problem.freedom.groupings, {}
    if only is not None:
        return grouping in only
    return all(homes.setdefault(problem.works[work].role, index) == index for index, group in enumerate(grouping)
               for work in group if problem.works[work].kind == TRAIN)


def _with(grouping: Grouping, work: int) -> list[Grouping]:
    """The grouping with one more work: in each of its groups, or in one of its own."""
    joined = [(*grouping[:index], (*group, work), *grouping[index + 1:]) for index, group in enumerate(grouping)]
    return [*joined, (*grouping, (work,))]


def _joined(problem: Problem, groups: list[list[int]]) -> Grouping:
    """With all that trains a role moved to where the first of it is."""
    homes: dict[str, int] = {}
    for index, group in enumerate(groups):
        for work in list(group):
            role = problem.works[work].role
            if problem.works[work].kind == TRAIN and homes.setdefault(role, index) != index:
                group.remove(work)
                groups[homes[role]].append(work)
    return tuple(sorted(tuple(sorted(group)) for group in groups if group))
