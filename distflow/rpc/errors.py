"""Errors of the connections between the processes of a run.

DistflowError
└── RpcError          a connection cannot be used as asked: a short token, a taken port, a message that is too long
    ├── Refused       the other side does not know the run's token, or does not speak this protocol
    └── Unreachable   the other side does not answer
        └── NoThread  it has no thread for this connection
"""

from __future__ import annotations

from distflow.errors import DistflowError


class RpcError(DistflowError):
    """A connection cannot be used as asked."""


class Refused(RpcError):
    """The other side did not prove that it knows the run's token. Give all processes of a run the same token."""


class Unreachable(RpcError):
    """A process does not answer. It may be down, or stopped."""

    elsewhere = True


class NoThread(Unreachable):
    """A process has no thread for another connection. Raise its limits, or start fewer processes."""

    elsewhere, exhausted = False, True
