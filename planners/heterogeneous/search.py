"""Hybrid search for a placement: fast, seeded and any-time (HetRL, arXiv 2512.12476, §4).

    groupings   which tasks are colocated: all of them, or a sample; what trains one role stays together, since it has
                one optimizer
    splits      the subsets of a grouping, by a genetic search, in the end improved by local search. Crossover takes
                all device groups of a zone from the same parent (after Soper et al. 2004)
    layouts     strategies and arrangements of each task (`layouts`)

No grouping is dropped: all in one and all apart are costed first, then groupings take turns, the better ones more
often, and one whose local search has ended begins elsewhere. Few devices are gone through completely. Budgets are
counted in layouts and placements costed, so that the same seed gives the same answer on any machine.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, permutations, product, zip_longest
from typing import Protocol

import numpy as np

from distflow.errors import Diagnostic, InvalidInput
from planners.heterogeneous.layouts import CostedProblem
from planners.heterogeneous.problem import TRAIN, DeviceGroup, DeviceSubset, Grouping, Hardware, Placement, Problem

MOST = 8  # of more tasks, not all groupings are listed: there are 4,140 of eight, 21,147 of nine
_LISTED = 6


def groupings(problem: Problem) -> list[Grouping]:
    """Return all allowed groupings. Raises InvalidInput if there are too many tasks."""
    if problem.freedom.groupings is not None:
        return list(problem.freedom.groupings)
    count = len(problem.tasks)
    if count > MOST:
        raise InvalidInput(Diagnostic(f"{count} nodes run models, too many for the exact program, which goes through "
                                      f"all ways to colocate up to {MOST}", None, "Use  --solver hybrid"))
    found: list[Grouping] = [()]
    for task in range(count):
        found = [longer for grouping in found for longer in _with(grouping, task)]
    return [grouping for grouping in found if allowed(problem, grouping)]


def sampled_groupings(problem: Problem, random: np.random.Generator, count: int) -> list[Grouping]:
    """Return all groupings of few tasks; of many, everything together, everything apart, and a random sample."""
    tasks = range(len(problem.tasks))
    if problem.freedom.groupings is not None or len(tasks) <= _LISTED:
        return groupings(problem)
    found = {(tuple(tasks),), _joined(problem, [[task] for task in tasks])}
    for _ in range(count):
        drawn: Grouping = ()
        for task in tasks:
            choices = _with(drawn, task)
            drawn = choices[int(random.integers(len(choices)))]
        found.add(_joined(problem, [list(group) for group in drawn]))
    return sorted(found)


def allowed(problem: Problem, grouping: Grouping) -> bool:
    """Return whether all training of a role is together, and the problem leaves this choice."""
    only, group_of = problem.freedom.groupings, {}
    if only is not None:
        return grouping in only
    return all(group_of.setdefault(problem.tasks[task].role, index) == index for index, group in enumerate(grouping)
               for task in group if problem.tasks[task].kind == TRAIN)


def _with(grouping: Grouping, task: int) -> list[Grouping]:
    joined = [(*grouping[:index], (*group, task), *grouping[index + 1:]) for index, group in enumerate(grouping)]
    return [*joined, (*grouping, (task,))]


def _joined(problem: Problem, groups: list[list[int]]) -> Grouping:
    group_of: dict[str, int] = {}
    for index, group in enumerate(groups):
        for task in list(group):
            role = problem.tasks[task].role
            if problem.tasks[task].kind == TRAIN and group_of.setdefault(role, index) != index:
                group.remove(task)
                groups[group_of[role]].append(task)
    return tuple(sorted(tuple(sorted(group)) for group in groups if group))


Split = tuple[DeviceSubset, ...]


def proportional(hardware: Hardware, shares: Sequence[float]) -> Split:
    """Return every device group divided in proportion to the shares, rounded to counts that it allows."""
    return _subsets(rounded(device_group, shares) for device_group in hardware.device_groups)


def whole_device_groups(hardware: Hardware, groups: int, random: np.random.Generator, most: int) -> list[Split]:
    """Return splits that give each device group to one group or none: all if they are few, else a random sample."""
    device_groups = hardware.device_groups
    if (groups + 1) ** len(device_groups) <= most:
        owners = list(product(range(groups + 1), repeat=len(device_groups)))
    else:
        owners = random.integers(0, groups, (most, len(device_groups))).tolist()
    return [_subsets([device_group.devices * (group == owner) for group in range(groups)]
                     for device_group, owner in zip(device_groups, drawn))
            for drawn in owners if set(range(groups)) <= set(drawn)]


def is_whole(split: Split) -> bool:
    return all(sum(count > 0 for count in column) <= 1 for column in zip(*split))


def rounded(device_group: DeviceGroup, shares: Sequence[float]) -> list[int]:
    """Return a device group's devices divided by shares; what rounding leaves goes to the group that lacks most."""
    total = sum(shares)
    wanted = [device_group.devices * share / total for share in shares]
    counts = [_most(device_group, want) for want in wanted]
    while True:
        free = device_group.devices - sum(counts)
        for group in sorted(range(len(counts)), key=lambda group: counts[group] - wanted[group]):
            grown = _next(device_group, counts[group])
            if grown is not None and grown - counts[group] <= free:
                counts[group] = grown
                break
        else:
            return counts


def crossover(hardware: Hardware, one: Split, other: Split, random: np.random.Generator) -> Split:
    """Return a child with the device groups of each zone from one of two parents."""
    zones = sorted({device_group.zone for device_group in hardware.device_groups})
    from_one = dict(zip(zones, random.integers(0, 2, len(zones)).astype(bool).tolist()))
    columns = [[subset[index] for subset in (one if from_one[device_group.zone] else other)]
               for index, device_group in enumerate(hardware.device_groups)]
    return _subsets(columns)


def mutation(hardware: Hardware, split: Split, random: np.random.Generator) -> Split:
    index = int(random.integers(len(hardware.device_groups)))
    columns = [list(column) for column in zip(*split)]
    columns[index] = rounded(hardware.device_groups[index], (random.dirichlet(np.ones(len(split))) + 1e-9).tolist())
    return _subsets(columns)


def random_split(hardware: Hardware, groups: int, random: np.random.Generator) -> Split:
    return _subsets(rounded(device_group, (random.dirichlet(np.ones(groups)) + 1e-9).tolist())
                    for device_group in hardware.device_groups)


def adjacent_splits(hardware: Hardware, split: Split) -> Iterator[Split]:
    """Yield the splits of a local search step: a group gives or takes devices, few or all, idle ones included; all
    leave a device group; two groups exchange what they have of two device groups."""
    columns = [list(column) for column in zip(*split)]
    for index, device_group in enumerate(hardware.device_groups):
        for changed in _given(device_group, columns[index]):
            yield _subsets([*columns[:index], changed, *columns[index + 1:]])
    for one, other in combinations(range(len(columns)), 2):
        for giver, taker in permutations(range(len(split)), 2):
            if columns[one][giver] and columns[other][taker]:
                changed = [list(column) for column in columns]
                _pass(hardware.device_groups[one], changed[one], giver, taker)
                _pass(hardware.device_groups[other], changed[other], taker, giver)
                yield _subsets(changed)


def _given(device_group: DeviceGroup, column: list[int]) -> Iterator[list[int]]:
    for giver, taker in permutations(range(len(column)), 2):
        for less in sorted({_most(device_group, column[giver] - 1), 0}) if column[giver] else ():
            changed = list(column)
            _pass(device_group, changed, giver, taker, less)
            yield changed
    for giver in range(len(column)):
        if column[giver]:
            yield [*column[:giver], 0, *column[giver + 1:]]
    yield [0] * len(column)
    for taker in range(len(column)):
        grown = _most(device_group, column[taker] + device_group.devices - sum(column))
        if grown > column[taker]:
            yield [*column[:taker], grown, *column[taker + 1:]]


def _pass(device_group: DeviceGroup, column: list[int], giver: int, taker: int, less: int = 0) -> None:
    column[giver] = less
    column[taker] = _most(device_group, column[taker] + device_group.devices - sum(column))


def _subsets(columns: Iterable[Sequence[int]]) -> Split:
    return tuple(zip(*columns))


def _most(device_group: DeviceGroup, limit: float) -> int:
    return device_group.counts[max(0, bisect_right(device_group.counts, limit) - 1)]


def _next(device_group: DeviceGroup, count: int) -> int | None:
    position = bisect_right(device_group.counts, count)
    return device_group.counts[position] if position < len(device_group.counts) else None


BUDGET = 40_000  # layouts and placements that may be costed
_PARENTS, _CHILDREN = 4, 8  # splits of a grouping that have children, and how many children it gets at estimates
_DRAWN = 400  # groupings that are drawn where there are too many to list
_SPLITS, _DRAFTS = 32, 4096
"""Splits by whole device groups that a grouping begins with, at least, and those of all groupings together."""
_ELITE, _WHOLE = 2, 2
"""Splits of a grouping that are costed first: the best ones, and the best ones that divide no device group."""
_HOPE = 1.02  # how many times as long an adjacent split may take at a first look to be costed in full
_GREED = 3  # how much more often the better groupings have a turn: the power of a uniform number
_MAPPINGS = 1000  # assignments of tasks to subsets that are enumerated, at most
_ENUMERATED = 5000  # placements of all groupings that are gone through if there are no more


@dataclass(frozen=True)
class Progress:
    """Best placement so far (None: none fits yet), a lower bound for any, and how many layouts and placements."""

    placement: Placement | None
    bound: float
    evaluations: int

    @property
    def gap(self) -> float:
        """How far the placement may be from the optimum, as a share of its time."""
        return max(0.0, 1 - self.bound / self.placement.seconds) if self.placement else 1.0


class Requirement(Protocol):
    """What a placement must be beside fast (`runnable.ByRanks`)."""

    def forms(self, placement: Placement) -> Sequence[Placement]:
        """Return the placement as it would be carried out, in one form or several, the fastest first; none if it cannot
        be."""
        ...

    def accepts(self, form: Placement) -> bool:
        """Return whether a form can be carried out; asked of those that would be the best."""
        ...


def search(problem: Problem, seed: int = 0, budget: int = BUDGET, stop: Callable[[], bool] = lambda: False,
           quality: float = 0.0, costed: CostedProblem | None = None,
           required: Requirement | None = None, begin: Placement | None = None) -> Iterator[Progress]:
    """Yield ever better placements, until the gap is at most `quality`, the budget is spent, or all placements were
    gone through; if something is `required`, only forms that it accepts, in their seconds. None is worse than `begin`,
    which has what is required, and near which the search looks too. `stop` is asked between steps: planners have no
    clock, callers have."""
    costed = costed or CostedProblem(problem)
    run = _Search(costed, np.random.default_rng(seed), required, begin)
    bound, before = costed.bound(), costed.evaluations
    for best in run.steps():
        found = Progress(best, bound, costed.evaluations - before)
        yield found
        if best is not None and found.gap <= quality or found.evaluations >= budget or stop():
            return


@dataclass
class _Arm:
    """Grouping with its best splits, and the seconds of the best one; both estimates at first."""

    grouping: Grouping
    value: float
    splits: list[Split]
    walk: Iterator[None]  # its local search


class _Search:
    def __init__(self, costed: CostedProblem, random: np.random.Generator, required: Requirement | None = None,
                 begin: Placement | None = None):
        self.costed, self.random, self.hardware = costed, random, costed.problem.hardware
        self.required = required
        self.begin = self.best = begin
        self.best_at: tuple[Grouping, Split] | None = (begin.grouping, begin.subsets) if begin else None
        """Where the search was as it found the best."""
        self.free = costed.problem.freedom.assignment
        self.groupings = sampled_groupings(costed.problem, random, _DRAWN)

    def steps(self) -> Iterator[Placement | None]:
        """Yield the best placement after each costly step. No grouping is dropped: one after the other has a turn of
        its local search, the better ones more often, and begins again elsewhere when that has ended."""
        arms = sorted((arm for arm in map(self._drafted, self.groupings) if arm.splits), key=lambda arm: arm.value)
        for arm in arms:  # the most promising one, all in one, and all apart
            if arm is arms[0] or len(arm.grouping) in (1, len(self.costed.problem.tasks)):
                self._value(arm.grouping, arm.splits[0])
                yield self.best
        everything = list(self._all())
        for _ in self._gone_through(everything) if everything else self._taking_turns(arms):
            yield self.best

    def _taking_turns(self, waiting: list[_Arm]) -> Iterator[None]:
        """Have a look at one grouping after the other, and in between let the better ones go on."""
        begun = [_Arm(each.grouping, each.seconds, [each.subsets], iter(())) for each in (self.begin,) if each]
        for arm in begun:
            arm.walk = self._polished(arm, arm.splits[0])
        while waiting or begun:
            for arm in waiting[:1]:
                arm.value, arm.walk = self.costed.rough(arm.grouping, arm.splits[0]), self._polished(arm, arm.splits[0])
                begun.append(arm)
                yield
            waiting = waiting[1:]
            begun.sort(key=lambda arm: arm.value)
            arm = begun[int(len(begun) * self.random.random() ** _GREED)]
            if not list(islice(arm.walk, 1)):
                self._again(begun, arm)
            yield

    def _again(self, arms: list[_Arm], arm: _Arm) -> None:
        """Begin another local search: at a child of the best splits, or anywhere."""
        if not self.free or len(arm.grouping) == 1:
            arms.remove(arm)
            return
        begin = self._child(arm.splits) if self.random.random() < 0.5 else \
            random_split(self.hardware, len(arm.grouping), self.random)
        arm.walk = self._polished(arm, begin)

    def _drafted(self, grouping: Grouping) -> _Arm:
        """Run the genetic search at estimates, for the best few splits."""
        shares, most = self.costed.shares(grouping), max(_SPLITS, _DRAFTS // len(self.groupings))
        found = {split: self.costed.estimate(grouping, split) for split in
                 [proportional(self.hardware, shares),
                  *(whole_device_groups(self.hardware, len(grouping), self.random, most) if self.free else ())]}
        for _ in range(_CHILDREN if self.free and len(grouping) > 1 else 0):
            child = self._child(sorted(found, key=found.__getitem__)[:_PARENTS])
            found.setdefault(child, self.costed.estimate(grouping, child))
        best = sorted((split for split in found if found[split] < math.inf), key=found.__getitem__)
        whole = [split for split in best if is_whole(split)]
        ahead = [split for pair in zip_longest(best[:_ELITE], whole[:_WHOLE]) for split in pair if split]
        return _Arm(grouping, min(found.values()), list(dict.fromkeys(ahead)), iter(()))

    def _child(self, parents: list[Split]) -> Split:
        one, other = self.random.integers(0, len(parents), 2)
        child = crossover(self.hardware, parents[one], parents[other], self.random)
        return mutation(self.hardware, child, self.random) if child in parents else child

    def _regroup(self) -> None:
        """Try other assignments of the tasks to the subsets of the best answer; their layouts are mostly cached."""
        if self.best_at is None:
            return
        (grouping, split), tasks = self.best_at, len(self.costed.problem.tasks)
        subsets = len(grouping)
        if subsets > 1 and subsets**tasks <= _MAPPINGS:
            for group_of in product(range(subsets), repeat=tasks):
                order = list(dict.fromkeys(group_of))
                changed = tuple(tuple(task for task in range(tasks) if group_of[task] == subset) for subset in order)
                if len(order) == subsets and allowed(self.costed.problem, changed):
                    self._value(changed, tuple(split[subset] for subset in order))

    def _value(self, grouping: Grouping, split: Split) -> float:
        """Cost a placement in full; return its seconds, and keep it if it is the best one so far."""
        found = self.costed.placement(grouping, split)
        if found is None:
            return math.inf
        forms = self.required.forms(found) if self.required else (found,)
        for form in forms:
            if self.best is not None and form.seconds >= self.best.seconds:
                break
            if self.required is None or self.required.accepts(form):
                self.best, self.best_at = form, (grouping, split)
                break
        return forms[0].seconds if forms else math.inf

    def _all(self) -> Iterator[tuple[Grouping, Split]]:
        """Yield all placements that leave no device out, if they are few: those with more devices are not slower, since
        a task may use a part of them."""
        sizes = [math.prod(math.comb(group.devices + len(grouping) - 1, group.devices)
                           for group in self.hardware.device_groups) for grouping in self.groupings]
        apart = all(group.machines == 1 for group in self.hardware.device_groups)
        if self.free and apart and sum(sizes) <= _ENUMERATED:
            for grouping in self.groupings:
                columns = [_dealt(group.devices, len(grouping)) for group in self.hardware.device_groups]
                yield from ((grouping, _subsets(list(column) for column in chosen)) for chosen in product(*columns))

    def _gone_through(self, everything: list[tuple[Grouping, Split]]) -> Iterator[None]:
        bounds = sorted((self.costed.ideal(grouping, split), grouping, split) for grouping, split in everything
                        if all(map(any, split)))
        for bound, grouping, split in bounds:
            if self.best is None or bound < self.best.seconds:
                self._value(grouping, split)
                yield

    def _polished(self, arm: _Arm, split: Split) -> Iterator[None]:
        """Run a local search: to the first better adjacent split, the most promising first, until none is better. An
        adjacent split is costed in full if it is nearly as good at a first look."""
        value, rough, seen = self._value(arm.grouping, split), self.costed.rough(arm.grouping, split), {split}
        yield
        improved = self.free
        while improved:
            improved = False
            ahead = {near: self.costed.estimate(arm.grouping, near) for near in adjacent_splits(self.hardware, split)}
            for near in sorted(set(ahead) - seen, key=lambda near: (ahead[near], near)):
                if self.costed.ideal(arm.grouping, near) >= value:
                    continue
                seen.add(near)
                look = self.costed.rough(arm.grouping, near)
                found = self._value(arm.grouping, near) if look < rough * _HOPE else math.inf
                yield
                if found < value:
                    value, rough, split, improved = found, look, near, True
                    break
            if self.best_at == (arm.grouping, split):
                self._regroup()
                yield
        splits = [split, *arm.splits] if value < arm.value else [*arm.splits, split]
        arm.value, arm.splits = min(value, arm.value), list(dict.fromkeys(splits))[:_PARENTS]


def _dealt(devices: int, groups: int) -> list[tuple[int, ...]]:
    """Return all ways to deal devices to groups."""
    if groups == 1:
        return [(devices,)]
    return [(first, *rest) for first in range(devices + 1) for rest in _dealt(devices - first, groups - 1)]
