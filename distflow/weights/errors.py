"""What can go wrong when weights move.

DistflowError
└── WeightsError       weights cannot be published, or moved, as asked
    ├── WeightsLost    no living process has all of this version any more; wait for a newer one
    ├── WeightsLate    a version, or a trainer's other ranks, did not come within the limit
    └── NoTransport    the transport that was asked for cannot be used here
"""

from __future__ import annotations

from distflow.errors import DistflowError


class WeightsError(DistflowError):
    """Weights cannot be published or moved as asked. The message says what to change."""


class WeightsLost(WeightsError):
    """No living process has all of this version. `Puller.pull()` without a version waits for one that can be had."""


class WeightsLate(WeightsError):
    """What was waited for did not come within the limit. The trainer may be down, or slower than the limit."""


class NoTransport(WeightsError):
    """A transport was asked for by name and cannot be used. Install what the message names, or set  transport: auto"""
