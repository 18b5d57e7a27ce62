"""Links between machines: which machines one of them does not reach, and which one the run is to go on without.

Two machines whose link is broken both reach the store, and so neither counts as lost. After a failure in which all
ranks only missed others, each machine that trains tries to connect to all others, and says in the store which of them
it has not reached. What answers is the kernel: a process that is stopped, or has ended, is no broken link.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import time
from collections.abc import Mapping

_BACKLOG = 4096
_THERE = 0, errno.ECONNREFUSED
Address = tuple[str, int]


class LinkTarget:
    """Port of a machine to which the others connect to see that they reach it. address: None where the machine has
    another one than that by which the others know it."""

    address: Address | None = None

    def __init__(self, host: str):
        self.socket = socket.socket(_family(host))
        with contextlib.suppress(OSError):
            self.socket.bind((host, 0))
            self.socket.listen(_BACKLOG)
            self.socket.setblocking(False)
            self.address = host, self.socket.getsockname()[1]

    def clear(self) -> None:
        """Drop the connections that have come: the kernel keeps only so many."""
        with contextlib.suppress(OSError):
            while self.address:
                self.socket.accept()[0].close()


def unreachable_machines(addresses: Mapping[int, Address], seconds: float) -> list[int]:
    """Return the machines to which no connection is made within `seconds`, by their blocks."""
    poll, pending, found = select.poll(), dict[int, tuple[int, socket.socket]](), list[int]()
    for block, (host, port) in addresses.items():
        made = socket.socket(_family(host))
        made.setblocking(False)
        if (error := made.connect_ex((host, port))) == errno.EINPROGRESS:
            pending[made.fileno()] = block, made
            poll.register(made, select.POLLOUT)
            continue
        found += [block] if error not in _THERE else []
        made.close()
    until = time.monotonic() + seconds
    while pending and (left := until - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(left * 1000):
            poll.unregister(descriptor)
            block, made = pending.pop(descriptor)
            found += [block] if made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) not in _THERE else []
            made.close()
    for block, made in pending.values():
        found.append(block)
        made.close()
    return sorted(found)


def most_cut_off(reports: Mapping[int, list[int]]) -> tuple[int, int] | None:
    """Return the machine with the most broken links, and how many those are; of several the one that came last. None if
    no link between two that report is broken. `reports`: whom each machine has not reached; one end may see it alone.
    """
    links = {frozenset((one, other)) for one, others in reports.items() for other in others
             if other in reports}  # whoever is dead reports nothing: heartbeats show that
    broken = {block: sum(block in link for link in links) for block in reports}
    block = max(broken, key=lambda block: (broken[block], block), default=0)
    return (block, broken[block]) if broken.get(block) else None


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
