"""Finds faults of learning in the metrics of a run's steps: live after each step, and afterwards for `why` and reports.

    LearningMonitor   asks all rules after each step; yields each `LearningFault` once, when it begins
    faults_of         what a monitor would have said of a run that is recorded
    main_fault        which of several faults the others follow from

The rules are in `learning_table` and `learning_curves`, causes in `learning_causes`. They read metrics and settings
alone, so that all readers come to the same result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from distflow.telemetry import learning_curves, learning_table
from distflow.telemetry.learning_causes import explained
from distflow.telemetry.learning_series import RULES, Doubt, Evidence, Rows, Rule, Series

__all__ = ["RULES", "learning_curves", "learning_table"]  # which fill the table

_SOON = 20  # steps in which a cause may be detected after its symptom
_TOGETHER = 5  # steps after the first fault in which its cause may begin to show
_EQUAL = 2  # steps within which causes count as begun together
_SETTLED = 8  # first step of which symptoms are judged: a trial of a few steps says little
_QUIET = 20  # steps without evidence after which a fault that comes back is a new one


@dataclass(frozen=True)
class LearningFault:
    """A fault of learning, as one detector names it. step: at which it was detected."""

    detector: str
    step: int
    evidence: Evidence
    rule: Rule

    @property
    def rows(self) -> Rows:
        """Which samples show it best: those of `high` or `low` reward, or the `long` ones."""
        return self.rule.rows

    @property
    def sentence(self) -> str:
        return f"{self.evidence.what}, since step {self.evidence.since}"

    @property
    def message(self) -> str:
        return f"{self.sentence} ({self.detector}). Probably {self.evidence.cause}. Change: {self.evidence.remedy}"

    @property
    def facts(self) -> dict[str, object]:
        """Keys of its event besides `what`."""
        seen = self.evidence
        return {"since": seen.since, "cause": seen.cause, "remedy": seen.remedy, "metric": seen.metric,
                "figures": {name: float(f"{value:.4g}") for name, value in seen.figures.items()}}


class LearningMonitor:
    """Asks all rules after each step. actions: what to do by detector, `note` where nothing is said. settings: of the
    run, for the lines that are to change."""

    def __init__(self, actions: Mapping[str, object] | None = None, settings: Mapping[str, str] | None = None,
                 doubts: Sequence[Doubt] = ()):
        self.actions = actions or {}
        self.series = Series(settings, doubts)
        self.seen: dict[str, int] = {}  # the last step of which each detector had evidence

    def look(self, step: int, metrics: Mapping[str, float]) -> Iterator[LearningFault]:
        """Yield what has begun to go wrong with this step."""
        self.series.add(step, metrics)
        for name, rules in RULES.items():
            seen = [] if self.actions.get(name) == "off" else \
                [(rule, evidence) for rule in rules if (evidence := rule.look(self.series)) is not None and
                 (step >= _SETTLED or not rule.symptom or not evidence.is_finite)]
            if not seen:
                continue
            begun = step - self.seen.get(name, -_QUIET - 1) > _QUIET
            self.seen[name] = step
            if begun:
                rule, evidence = seen[0]
                yield LearningFault(name, step, explained(self.series, name, evidence, rule.symptom), rule)


def faults_of(steps: Iterable[Mapping[str, float]], settings: Mapping[str, str] | None = None,
              actions: Mapping[str, object] | None = None, doubts: Sequence[Doubt] = ()) -> list[LearningFault]:
    """Return the faults of a recorded run: `steps` have the metrics of each and its number as `step`."""
    monitor = LearningMonitor(actions, settings, doubts)
    return [fault for line in with_start(steps) for fault in monitor.look(int(line["step"]), line)]


def with_start(steps: Iterable[Mapping[str, float]]) -> Iterator[Mapping[str, float]]:
    """Yield the metrics of each step, of the first one with those of the validation before it, as a live run has
    them."""
    start: Mapping[str, float] = {}
    for line in steps:
        if line["step"]:
            yield {**start, **line}
        start = {} if line["step"] else line


def actions_of(settings: Mapping[str, str]) -> dict[str, str]:
    """Return what a run's settings say to do, by detector."""
    start = "robust.detectors."
    return {key.removeprefix(start): value for key, value in settings.items() if key.startswith(start)}


def main_fault(faults: Sequence[LearningFault]) -> LearningFault | None:
    """Return the fault that others probably follow from, of those that are detected soon after the first one. Causes
    come before symptoms, unless they began later; what is wrong early in a step (see `Origin`) before what follows."""
    soon = min((fault.step for fault in faults), default=0) + _SOON
    found = [fault for fault in faults if fault.step <= soon]
    begun = min((fault.evidence.since for fault in found), default=0) + _TOGETHER
    causes = [fault for fault in found if fault.evidence.since <= begun and not fault.rule.symptom]
    first = min((fault.evidence.since for fault in causes), default=0) + _EQUAL
    causes = [fault for fault in causes if fault.evidence.since <= first]
    return min(causes or [fault for fault in found if fault.rule.symptom] or found, default=None, key=_rank)


def _rank(fault: LearningFault) -> tuple[bool, int, int]:
    return fault.rule.symptom and not fault.evidence.sure, fault.rule.origin, fault.step
