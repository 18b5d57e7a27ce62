"""Errors of weight transfer.

DistflowError
└── WeightsError       weights cannot be published or moved as requested
    ├── WeightsLost    no living process has all of this version any more; wait for a newer one
    ├── WeightsLate    a version, or the trainer's other ranks, timed out
    └── NoTransport    the requested transport cannot be used here
"""

from __future__ import annotations

from distflow.errors import DistflowError


class WeightsError(DistflowError):
    """Weights cannot be published or moved as requested. The message says what to change."""


class WeightsLost(WeightsError):
    """No living process has all of this version. `Puller.pull` waits for another one."""


class WeightsLate(WeightsError):
    """A wait timed out. The trainer may be down, or slower than the limit."""


class NoTransport(WeightsError):
    """A transport was requested by name and cannot be used. Install what the message names, or set  transport: auto"""
