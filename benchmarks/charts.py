"""Draws curves as SVG, readable on light and on dark: pictures of the pages, and of what recipes come to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

GREY, BLUE, RED = "#808080", "#4a7fd6", "#d64a4a"


def picture(width: int, height: int, parts: Iterable[str], size: int = 12) -> str:
    """Return an SVG file. `size`: of its letters, in pixels."""
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
            f'font-size="{size}" fill="{GREY}">')
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: object, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more and f" {more}"}>{words}</text>'


@dataclass(frozen=True)
class Axes:
    """Rectangle in pixels that shows x from `first` to `last`, and y from 0 to `highest`."""

    left: float
    top: float
    width: float
    height: float
    last: float
    highest: float = 1.0
    first: float = 0.0

    def x(self, value: float) -> float:
        return self.left + self.width * (value - self.first) / (self.last - self.first)

    def y(self, value: float) -> float:
        return self.top + self.height * (1 - value / self.highest)

    def frame(self) -> str:
        return (f'<path d="M{self.left} {self.top}V{self.top + self.height}H{self.left + self.width}" fill="none" '
                f'stroke="{GREY}" stroke-opacity="0.4"/>')

    def grid(self, across: Iterable[int], up: Iterable[float]) -> Iterator[str]:
        """Yield a line for each of some values of y, and the numbers of both axes."""
        for value in up:
            yield (f'<path d="M{self.left} {self.y(value):.1f}h{self.width}" stroke="{GREY}" stroke-opacity="0.3"/>'
                   + text(self.left - 8, self.y(value) + 4, f"{value:g}", "end"))
        for value in across:
            yield text(self.x(value), self.top + self.height + 20, value, "middle")

    def curve(self, points: Iterable[tuple[float, float]], colour: str) -> str:
        line = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        return f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{line}"/>'

    def dots(self, points: Iterable[Sequence[float]], colour: str) -> Iterator[str]:
        """Yield a dot for each point [x, y], with a bar from low to high where it is [x, y, low, high]."""
        for x, y, *interval in points:
            if interval:
                low, high = map(self.y, interval)
                yield f'<path d="M{self.x(x):.1f} {low:.1f}V{high:.1f}" stroke="{colour}" stroke-opacity="0.4"/>'
            yield f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="3" fill="{colour}"/>'
