"""What benchmarks share: sides measured turn by turn in one run, and the last line that says what came out.

Seconds depend on the machine and on its mood; a ratio of neighbouring runs hardly does. So every figure here is the
median of such ratios, and the last line of a benchmark's output is one JSON object:
`{"claim", "value", "unit", "low", "high", "goal", "met"}`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
_STUDENT = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""How many standard errors either way hold 95%, by the number of values."""


@dataclass(frozen=True)
class Spread:
    """Median and range of repeated measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g})"


def options(description: str, repeats: int | None = 7) -> argparse.ArgumentParser:
    """Return the flags of every benchmark; `quick` is for seeing that it runs, not for figures. `repeats`: None where
    nothing is repeated."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="under a minute: shows that the benchmark works, no more")
    parser.set_defaults(usual_and_quick={})
    if repeats is not None:
        add_size(parser, "repeats", repeats, 1, "how often each side runs")
    return parser


def add_size(parser: argparse.ArgumentParser, name: str, usual: float, quick: float, about: str) -> None:
    """Add a flag whose default depends on `--quick`; `parsed` fills it in."""
    parser.add_argument(f"--{name}", type=type(usual), help=f"{about}; default {usual}, with --quick {quick}")
    parser.get_default("usual_and_quick")[name] = (usual, quick)


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags with all sizes filled in."""
    result = parser.parse_args(arguments)
    for name, (usual, quick) in result.usual_and_quick.items():
        if getattr(result, name) is None:
            setattr(result, name, quick if result.quick else usual)
    if getattr(result, "repeats", 1) < 1:
        parser.error("--repeats must be at least 1")
    return result


def interleaved(sides: dict[str, Callable[[int], T]], repeats: int) -> list[dict[str, T]]:
    """Call every side with 0, then every side with 1, and so on: what disturbs the machine meets all sides alike."""
    return [{name: measure(repeat) for name, measure in sides.items()} for repeat in range(repeats)]


def ratios(pairs: Sequence[dict[str, T]], over: str, under: str, value: Callable[[T], float]) -> Spread:
    """`over` divided by `under`, for each repeat on its own."""
    return Spread.of([value(pair[over]) / value(pair[under]) for pair in pairs])


def least(spreads: Iterable[Spread]) -> Spread:
    """Return the one with the lowest median."""
    return min(spreads, key=lambda spread: spread.median)


def interval_of(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean, and half its 95% interval (None: too few values to say), by Student's t."""
    if len(values) < 3:
        return statistics.mean(values), None
    quantile = _STUDENT.get(len(values), 2.2 if len(values) < 20 else 2.0)
    return statistics.mean(values), quantile * statistics.stdev(values) / len(values) ** 0.5


def conclude(claim: str, measured: Spread, goal: float, *, unit: str = "x", holds: bool = True,
             at_least: bool = True) -> bool:
    """Print the last line, and return whether the goal is met.

    Args:
        holds: False if something beside the figure spoils the claim; say what before.
        at_least: False for a figure that should stay below its goal.
    """
    met = holds and (measured.median >= goal if at_least else measured.median <= goal)
    print(json.dumps(summary(claim, measured, unit, goal, met)), flush=True)
    return met


def summary(claim: str, measured: Spread, unit: str, goal: float | None, met: bool | None) -> dict[str, Any]:
    """Return what the last line says. A figure that nothing is promised of has no goal, and meets none."""
    return {"claim": claim, "value": rounded(measured.median), "unit": unit, "low": rounded(measured.low),
            "high": rounded(measured.high), "goal": goal, "met": met}


def rounded(value: float) -> float:
    """Return a number rounded to four digits."""
    return float(f"{value:.4g}")
