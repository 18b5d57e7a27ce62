"""Metrics of a run's steps as the rules of `learning_rules` read them, and their registry.

    Series      the metrics of the steps so far
    @detector   registers a rule: a function of a `Series` that returns `Evidence`, or None
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean as mean
from statistics import median
from typing import Literal

Rows = Literal["high", "low", "long", ""]
_OF_NORMAL = 1.4826  # standard deviations in the median absolute deviation of normal values
_REMEMBERED = 400  # steps that rules see


class Series:
    """The metrics of a run's last steps, by name, a value a step or None. settings: of the run, as `section.key`."""

    def __init__(self, settings: Mapping[str, str] | None = None):
        self.steps: list[int] = []
        self.settings = settings or {}
        self._values: dict[str, list[float | None]] = {}

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        for name in metrics.keys() - self._values.keys():
            self._values[name] = [None] * len(self.steps)
        self.steps.append(step)
        for name, values in self._values.items():
            values.append(metrics.get(name))
        if len(self.steps) > _REMEMBERED:
            for values in (self.steps, *self._values.values()):
                del values[len(values) // 4 : len(values) // 4 + 1]  # the first steps stay, to compare with

    def names(self, beginning: str) -> list[str]:
        """Return the metrics of the last step whose names begin so."""
        return [name for name, values in self._values.items() if name.startswith(beginning) and values[-1] is not None]

    def known_names(self, beginning: str) -> list[str]:
        """Return the metrics of any step whose names begin so, in order."""
        return sorted(name for name in self._values if name.startswith(beginning))

    def last(self, name: str, count: int) -> list[float]:
        """Return a metric's values of the last `count` steps; none if one of them lacks it."""
        values = self._values.get(name, [])[-count:]
        return [value for value in values if value is not None] if len(values) == count and None not in values else []

    def known(self, name: str) -> list[tuple[int, float]]:
        """Return the steps that have a metric, with its values."""
        return [(step, value) for step, value in zip(self.steps, self._values.get(name, ())) if value is not None]

    def first(self, name: str, count: int) -> list[float]:
        """Return a metric's first values, if there are as many."""
        values = [value for _, value in self.known(name)[:count]]
        return values if len(values) == count else []

    def before(self, name: str, recent: int, count: int, least: int) -> list[float]:
        """Return up to `count` values before the `recent` last ones; none if there are fewer than `least`."""
        values = [value for _, value in self.known(name)[-recent - count : -recent]]
        return values if len(values) >= least else []

    def since(self, name: str, holds: Callable[[float], bool]) -> int:
        """Return the first of the last steps in all of which a metric holds."""
        start = self.steps[-1]
        for step, value in reversed(self.known(name)):
            if not holds(value):
                break
            start = step
        return start

    @property
    def reward(self) -> str:
        """Name of the metric that is the mean reward."""
        return "environment/reward" if "environment/reward" in self._values else "reward/mean"

    @property
    def parts(self) -> list[str]:
        """Names of the metrics that are means of one part of the reward."""
        return [name for name in self.names("reward/") if name.count("/") == 1 and name not in NO_PARTS]


NO_PARTS = frozenset(f"reward/{name}" for name in (
    "mean", "std", "min", "max", "zero_std_groups", "kl", "overlong", "failed", "retried", "timeouts", "seconds",
    "unanswered", "length_correlation", "inconsistent"))


def middle(values: Sequence[float]) -> float:
    return median(values) if values else math.nan


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation of most of the values: outliers do not count."""
    center = median(values)
    return _OF_NORMAL * median(abs(value - center) for value in values)


def variance(values: Sequence[float]) -> float:
    """Return the unbiased variance; statistics' own computes with fractions, which takes a hundred times as long."""
    center = mean(values)
    return sum((value - center) ** 2 for value in values) / (len(values) - 1)


_SPLIT, _SURE = 8, 6.0  # fewest steps on each side of a fall, and standard errors that make it one


def fall(values: list[float]) -> int | None:
    """Return the index since which values are lower, where the two sides differ most; None if that may be chance."""
    best, found = _SURE, None
    for at in range(max(_SPLIT, len(values) - 40), len(values) - _SPLIT + 1):
        before, after = values[max(0, at - 5 * _SPLIT) : at], values[at:]
        error = (variance(before) / len(before) + variance(after) / len(after)) ** 0.5
        gap = mean(before) - mean(after)
        if gap > best * error and gap > 0.1 * abs(mean(before)):
            best, found = gap / error if error else float("inf"), at
    return found


@dataclass(frozen=True)
class Evidence:
    """What a rule has seen. since: the step at which it began. metric: whose curve shows it. figures: for the event."""

    since: int
    metric: str
    what: str
    cause: str
    remedy: str
    figures: Mapping[str, float] = field(default_factory=dict)


Rule = Callable[[Series], Evidence | None]
RULES: dict[str, tuple[Rule, Rows, bool]] = {}
"""The detectors of learning by name, which samples show what they detect, and whether it may follow from another."""


def detector(rows: Rows = "", symptom: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule by its function's name. symptom: what it detects may follow from another fault."""
    def register(rule: Rule) -> Rule:
        RULES[rule.__name__] = rule, rows, symptom
        return rule

    return register
