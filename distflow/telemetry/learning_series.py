"""Metrics of a run's steps as rules read them, and the table of rules.

    Series      the metrics of the steps so far
    RULES       rules by detector; `learning_table`, `learning_causes` and `learning_curves` fill it
    @detector   adds a rule: a function of a `Series` that returns `Evidence`, or None
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from fnmatch import fnmatchcase
from functools import cached_property
from statistics import median
from typing import Literal, NamedTuple

Rows = Literal["high", "low", "long", ""]
RECENT = 4  # steps in which something must be seen
FIRST = 5  # steps of a run that count as its beginning
_OF_NORMAL = 1.4826  # standard deviations in the median absolute deviation of normal values
_REMEMBERED = 400  # steps that rules see


class Doubt(str):
    """A note on a run's inputs, made before its start. kind: one of `learning_facts.DOUBTS`, "" if nothing that is
    learnt goes wrong for it; share: of the records that it is about; change: how its text ends."""

    kind: str
    share: float
    change: str

    def __new__(cls, text: str, kind: str = "", share: float = 0.0, change: str = "") -> Doubt:
        self = super().__new__(cls, text)
        self.kind, self.share, self.change = kind, share, change
        return self


class Series:
    """The metrics of a run's last steps, by name, a value a step or None. settings: of the run, as `section.key`;
    doubts: of its inputs, before it started."""

    def __init__(self, settings: Mapping[str, str] | None = None, doubts: Sequence[Doubt] = ()):
        self.steps: list[int] = []
        self.settings, self.doubts = settings or {}, doubts
        self._values: dict[str, list[float | None]] = {}
        self._keys: dict[str, list[str]] = {}

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        for name in metrics.keys() - self._values.keys():
            self._values[name] = [None] * len(self.steps)
        self.steps.append(step)
        for name, values in self._values.items():
            values.append(metrics.get(name))
        if len(self.steps) > _REMEMBERED:
            for values in (self.steps, *self._values.values()):
                del values[len(values) // 4 : len(values) // 4 + 1]  # the first steps stay, to compare with

    def matching(self, pattern: str) -> list[str]:
        """Return the metrics of the last step whose names a pattern matches."""
        return [name for name in (self._values if "*" in pattern else [pattern]) if fnmatchcase(name, pattern)
                and self._values.get(name, [None])[-1] is not None]

    def keys(self, pattern: str) -> list[str]:
        """Return the settings whose keys a pattern matches and that are not null."""
        if pattern not in self._keys:
            self._keys[pattern] = [key for key, value in self.settings.items()
                                   if fnmatchcase(key, pattern) and value != "null"]
        return self._keys[pattern]

    def setting(self, pattern: str) -> tuple[str, str]:
        """Return the first setting that a pattern matches, with its value; the pattern and "" if there is none."""
        key = next(iter(self.keys(pattern)), "")
        return (key, self.settings[key]) if key else (pattern, "")

    def known_names(self, beginning: str) -> list[str]:
        """Return the metrics of any step whose names begin so, in order."""
        return sorted(name for name in self._values if name.startswith(beginning))

    def last(self, name: str, count: int) -> list[float]:
        """Return a metric's values of the last `count` steps; none if one of them lacks it."""
        values = self._values.get(name, [])[-count:]
        return [value for value in values if value is not None] if len(values) == count and None not in values else []

    def recent(self, name: str, count: int = 8) -> float:
        """Return the median of a metric's last values; NaN if a step lacks it."""
        return middle(self.last(name, count))

    def start(self, name: str, count: int = FIRST) -> float:
        """Return the median of a metric's first values; NaN if there are fewer."""
        return middle(self.first(name, count))

    def latest(self, name: str, count: int) -> list[float]:
        """Return the last `count` values of a metric that not every step has; none if the last step lacks it."""
        known = self.known(name)[-count:]
        return [value for _, value in known] if len(known) == count and known[-1][0] == self.steps[-1] else []

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

    @cached_property
    def trained_role(self) -> str:
        """Name of the first role that is trained."""
        return next((key.split(".")[1] for key, value in self.settings.items()
                     if key.startswith("roles.") and key.endswith(".trained") and value == "true"), "actor")

    @cached_property
    def update_node(self) -> str:
        """Name of the node that trains the policy."""
        return next((key.split(".")[1] for key, value in self.settings.items()
                     if key.startswith("nodes.") and key.endswith(".function") and value == "policy_update"), "update")

    def setting_of_role(self, name: str, usual: float) -> float:
        """Return a number in the trained role's settings."""
        return self.number(f"roles.{self.trained_role}.{name}", usual)

    def number(self, key: str, usual: float) -> float:
        """Return a setting that is a number; `usual` where it has none."""
        return number(self.settings.get(key, ""), usual)

    @cached_property
    def functions(self) -> set[str]:
        """Names of the nodes' functions."""
        return {value for key, value in self.settings.items() if key.startswith("nodes.") and key.endswith(".function")}

    @cached_property
    def own_nodes(self) -> str:
        """The nodes whose functions are the run's own, to be said behind a reading; "" if none is."""
        found = [f"`{key.split('.')[1]}` ({value})" for key, value in self.settings.items() if ":" in value and
                 key.startswith("nodes.") and key.endswith(".function")]
        return f"; of its own it has the node {', '.join(found)}" if found else ""

    @cached_property
    def group_sizes(self) -> list[int]:
        """Samples of a prompt, by each node that says it."""
        return [int(self.number(key, 0.0)) for key in self.settings if key.endswith(".with.group_size")]

    @property
    def prompts(self) -> float:
        """Prompts of a step, as far as settings or rows say it."""
        rows = (self.last("samples", 1) or [0.0])[0]
        return self.number("data.batch", rows / max(self.group_sizes, default=1))

    @cached_property
    def copies_policy(self) -> bool:
        """Whether a role takes the policy's weights after each step."""
        return any(self.number(f"roles.{key.split('.')[1]}.follow.mix", 1.0) == 1 and value == "1"
                   for key, value in self.settings.items() if key.endswith(".follow.every"))

    @property
    def copied(self) -> bool:
        """Whether nearly all samples of a prompt are alike."""
        recent, sizes = self.last("response/alike", 3), self.group_sizes
        return bool(recent) and len(sizes) == 1 and sizes[0] > 1 and min(recent) >= 0.98 * (1 - 1 / sizes[0])

    @cached_property
    def own_form(self) -> str:
        """The settings by which the run reads and forms prompts in its own way, to be said of prompts of another
        form."""
        found = [f"`{key}` is {self.settings[key]!r}" for key in map("data.{}".format, _FORM) if
                 self.settings.get(key, "null") not in ("null", "", "{}", "[]", "false", "last", key[5:])]
        return f" ({', '.join(found)})" if found else ""

    @property
    def goal(self) -> tuple[str, int]:
        """The metric that training improves, and 1, or -1 if less of it is better."""
        goals = {self.reward: 1, "preference/margin": 1, "distillation/reverse_kl": -1, "distillation/divergence": -1}
        return next(((name, sign) for name, sign in goals.items() if self.known(name)), ("loss", -1))

    @property
    def deciding_part(self) -> str:
        """The part that the reward goes with, to be said after a cause; "" if it has one part, or right answers count
        as much."""
        start, right = "reward/correlation/", [value for _, value in self.known("reward/answer_correlation")]
        found = {name: middle([value for _, value in self.known(name)[:8]]) for name in self.known_names(start)}
        most = max(found, key=lambda name: found[name], default="")
        return f"; its part `{most.removeprefix(start)}` decides it (correlation {found[most]:.2f})" \
            if most and found[most] > 0.7 and middle(right) < 0.45 else ""

    @property
    def window(self) -> int:
        """Steps in which something must be seen: more of them where each has few rows."""
        return RECENT if (self.last("samples", 1) or [math.inf])[0] >= 32 else 3 * RECENT

    @property
    def earned(self) -> float:
        """How much more is earned than in the first steps, in two standard deviations: 1 for the whole of a reward from
        0 to 1 that half of the samples earn. NaN without rewards."""
        name = "reward/std" if self.reward == "reward/mean" else "environment/reward_std"
        spread = max(self.start(name), self.recent(name, self.window))
        return (self.recent(self.reward, self.window) - self.start(self.reward)) / max(2 * spread, 1e-3)

    @property
    def scheduled(self) -> bool:
        """Whether the learning rate falls by a schedule."""
        return self.settings.get(f"roles.{self.trained_role}.schedule", "constant") != "constant"

    @property
    def policy_leapt(self) -> bool:
        """Whether the policy itself leapt in the last steps, which changes all that it earns."""
        name = "policy/kl_reference"
        recent, before = self.last(name, RECENT), self.before(name, RECENT, 5, 5)
        return bool(recent and before) and middle(recent) > max(0.2, 4 * max(before))

    @property
    def lower_rate(self) -> str:
        """The line that divides the learning rate by ten."""
        return f"roles.{self.trained_role}.learning_rate={self.setting_of_role('learning_rate', 1e-5) / 10:g}"

    @property
    def reward(self) -> str:
        """Name of the metric that is the mean reward."""
        return "environment/reward" if "environment/reward" in self._values else "reward/mean"

    @property
    def parts(self) -> list[str]:
        """Names of the metrics that are means of one part of the reward."""
        return [name for name in self.matching("reward/*") if name.count("/") == 1 and name not in NO_PARTS]


_FORM = ("question", "answer", "targets", "drop_answer", "system_prompt", "prompt_suffix", "chat_template_kwargs")
NO_PARTS = frozenset(f"reward/{name}" for name in (
    "mean", "std", "min", "max", "zero_std_groups", "kl", "overlong", "failed", "retried", "timeouts", "seconds",
    "unanswered", "unanswerable", "length_correlation", "place_correlation", "answer_correlation", "inconsistent"))


def number(text: str, usual: float) -> float:
    """Return the number that a setting has; `usual` if it has none."""
    try:
        return float(text)
    except ValueError:
        return usual


def middle(values: Sequence[float]) -> float:
    return median(values) if values else math.nan


def mean(values: Iterable[float]) -> float:
    """Return the mean, which may be NaN or infinite; statistics' own raises where the sum has no value."""
    known = [*values]
    return sum(known) / len(known)


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation of most of the values: outliers do not count."""
    center = median(values)
    return _OF_NORMAL * median(abs(value - center) for value in values)


def variance(values: Sequence[float]) -> float:
    """Return the unbiased variance; statistics' own computes with fractions, which takes a hundred times as long."""
    center = mean(values)
    return sum((value - center) * (value - center) for value in values) / (len(values) - 1)


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


SPIKE_WINDOW = 50  # steps before, with which a step is compared
_MANY, _FEW, _DEVIATIONS, _TIMES = 20, 6, 15.0, 10.0


def spike(name: str, before: Sequence[float], value: float) -> str:
    """Return how a loss or a gradient norm differs from those of the steps before; "" if it does not."""
    usual = [each for each in before if each and math.isfinite(each)]
    if not math.isfinite(value):
        return f"{name} is {value}"
    if len(usual) < (_FEW if name.endswith("grad_norm") else _MANY):
        return ""
    center = median(usual)
    if name.endswith("grad_norm"):
        far = value > _TIMES * center
    else:  # a loss that hardly differs, as where each step makes one update, differs by more than its rounding
        far = abs(value - center) > _DEVIATIONS * max(spread(usual), abs(center) / 20, 1e-3)
    return f"{name} is {value:.4g}; the median of {len(usual)} steps before is {center:.4g}" if far else ""


@dataclass(frozen=True)
class Evidence:
    """What a rule has seen. since: the step at which it began. metric: whose curve shows it. figures: for the event.
    sure: whether another reading confirms the cause."""

    since: int
    metric: str
    what: str
    cause: str
    remedy: str
    figures: Mapping[str, float] = field(default_factory=dict)
    sure: bool = False

    @property
    def probable(self) -> str:
        """The first of the causes that it names."""
        return self.cause.partition("; or ")[0]

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, self.figures.values()))


class Origin(IntEnum):
    """Where a fault begins: what is wrong early on shows in all that comes after it."""

    DATA = 0
    REWARD = 1
    ADVANTAGE = 2
    UPDATE = 3
    POLICY = 4
    OUTCOME = 5


class Rule(NamedTuple):
    """A rule of a detector. rows: which samples show what it detects. symptom: whether that may follow from another
    fault."""

    look: Callable[[Series], Evidence | None]
    rows: Rows
    symptom: bool
    origin: Origin


RULES: dict[str, list[Rule]] = {}
"""The rules of each detector of learning, by its name: the first that sees something is heard."""


def add_rule(name: str, look: Callable[[Series], Evidence | None], *, rows: Rows = "", symptom: bool = False,
             origin: Origin = Origin.UPDATE) -> None:
    RULES.setdefault(name, []).append(Rule(look, rows, symptom, origin))


def detector(rows: Rows = "", symptom: bool = False,
             origin: Origin = Origin.UPDATE) -> Callable[..., Callable[[Series], Evidence | None]]:
    """Register a rule by its function's name, see `Rule`."""
    def register(look: Callable[[Series], Evidence | None]) -> Callable[[Series], Evidence | None]:
        add_rule(look.__name__, look, rows=rows, symptom=symptom, origin=origin)
        return look

    return register
