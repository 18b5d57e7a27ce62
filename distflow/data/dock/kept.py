"""What a warehouse knows of a row, what its producer said of it, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from distflow.data.dock.layout import Ids


@dataclass(slots=True)
class Kept:
    """What a warehouse knows of a row."""

    columns: frozenset[str] = frozenset()
    tokens: int = 0
    version: int = 0
    group: int = -1
    priority: int = 0
    turn: int = -1
    """The last saved turn of a row that is not finished."""
    saved: int = -1
    """The place of that turn's rows."""
    consumed: set[str] = field(default_factory=set)


@dataclass
class Marks:
    """What a producer says of its rows; None leaves what is known: weight version, group, priority ([rows] int64)."""

    version: Ids | None = None
    group: Ids | None = None
    priority: Ids | None = None


@dataclass
class Counts:
    """What went through a warehouse, for metrics."""

    rows_in: int = 0
    rows_out: int = 0
    duplicates: int = 0
    """Rows that came again and were dropped."""
    removed: int = 0
