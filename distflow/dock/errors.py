"""Errors of the dock, and how a client rebuilds the one that a reply reports.

DistflowError
└── DockError
    ├── DockFull
    ├── TimedOut
    └── LeaseLost

A connection that breaks is no `DockError`: see `distflow.rpc.errors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distflow.errors import ColumnError, DistflowError


class DockError(DistflowError):
    """The dock cannot do what was asked of it. The message says what to change."""


class DockFull(DockError):
    """A process of the dock has no memory for a request. Give its machine more, or the dock less: `dock_gib`."""

    exhausted = True


class TimedOut(DockError):
    """Rows did not come in time. `report["missing"]`: each set of missing columns, some rows' ids and their count."""

    def __init__(self, message: str, report: dict[str, Any] | None = None):
        super().__init__(message)
        self.report = report or {}


class LeaseLost(DockError):
    """The rows of this lease were given to another holder, or are committed: throw away what was made of them."""


_BY_NAME = {kind.__name__: kind for kind in (DockError, DockFull, LeaseLost, ColumnError)}


def error_from(reply: Mapping[str, Any]) -> DistflowError:
    """Return the error that a shard's reply reports by its class's name; an unknown name becomes a `DockError`."""
    return _BY_NAME.get(reply["error"], DockError)(reply["message"])
