"""What can go wrong at the dock.

DistflowError
└── DockError         the dock cannot do what was asked
    ├── Refused       the other side does not know the run's token, or is not a dock at all
    ├── Unreachable   a warehouse or a controller does not answer
    ├── Full          the warehouse has no room and none came within the wait
    ├── TimedOut      rows were waited for and did not come; names what is missing and who owes it
    └── LeaseLost     the lease ran out and its rows were given to another
"""

from __future__ import annotations

from typing import Any

from distflow.errors import DistflowError


class DockError(DistflowError):
    """The dock cannot do what was asked of it. The message says what to change."""


class Refused(DockError):
    """The other side did not prove that it knows the run's token. Give all processes of a run the same token."""


class Unreachable(DockError):
    """A process of the dock does not answer. It may be down, or stopped; restore it from its snapshot."""

    elsewhere = True


class Full(DockError):
    """There was no room. Consume faster, produce less far ahead, or give the warehouse more rows or bytes."""


class TimedOut(DockError):
    """Rows did not come within the limit. `report` holds what the message says, for programs.

    `report["lacking"]` has, for each set of missing columns, the ids of some rows; `report["owed"]` who owes them.
    """

    def __init__(self, message: str, report: dict[str, Any] | None = None):
        super().__init__(message)
        self.report = report or {}


class LeaseLost(DockError):
    """The rows of this lease were given to another holder or are committed: throw away what was made of them."""


KINDS = {kind.__name__: kind for kind in (DockError, Refused, Unreachable, Full, TimedOut, LeaseLost)}
"""By the name under which an error travels."""
