"""Key-value store of a run: small metadata that all ranks must agree on, behind one interface. Never samples."""

from __future__ import annotations

import contextlib
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

from distflow.errors import DistflowError


class StoreUnavailable(DistflowError):
    """The store does not answer. Look after the process that keeps it, and the network to its machine. `gone`: the
    connection is lost for good, and what the store knew with it; else it may answer again."""

    elsewhere = True

    def __init__(self, address: str, seconds: float, why: str = "", gone: bool = False):
        self.address, self.seconds, self.gone = address, seconds, gone
        what = f"does not answer any more: {why}" if gone else f"has not answered for {seconds:.1f} s"
        super().__init__(f"the store at {address} {what}. What keeps it (torchrun or etcd) or its "
                         f"machine may have {'ended' if gone else 'been stopped or cut off'}")


ETCD = "etcd://"  # scheme of the URLs of stores in etcd
_MOST_LOOKS = 5000.0  # a second, of all clients together


def poll_interval(seconds: float, clients: int) -> float:
    """Return the seconds between two looks at the store by each of `clients`: more, where they would be its whole work.
    """
    return max(seconds, clients / _MOST_LOOKS)


@dataclass
class Deadline:
    """Seconds within which the store must answer a call."""

    seconds: float


class Store(ABC):
    """A view of the keys below `prefix`; keys and values are text.

    All threads, and forked processes, may use one view. Every call raises StoreUnavailable if there is no answer within
    `deadline`, which all views of one client share.
    """

    url: str
    """Address by which `open_store` makes another client."""

    def __init__(self, address: str, deadline: float):
        self.address, self.prefix, self.deadline, self.url = address, "", Deadline(deadline), address

    def below(self, prefix: str) -> Self:
        """Return a view of the keys that begin with `prefix/`."""
        return self._view(f"{self.prefix}{prefix}/")

    @property
    def root(self) -> Self:
        return self._view("")

    def _view(self, prefix: str) -> Self:
        view = copy(self)
        view.prefix = prefix
        return view

    @property
    def own_host(self) -> str:
        """The address of this machine on its way to the store, at which the store's other clients reach it too unless
        it is loopback: the store is on this machine then."""
        return self._own_host(self.address)

    def _own_host(self, address: str) -> str:
        host, _, port = address.rpartition(":")
        family, _, _, _, peer = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect(peer)
            return probe.getsockname()[0]

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Set another deadline for the calls in the `with` block."""
        before, self.deadline.seconds = self.deadline.seconds, seconds
        try:
            yield
        finally:
            self.deadline.seconds = before

    @abstractmethod
    def get(self, key: str) -> str | None:
        """Return the present value; None if there is none."""

    @abstractmethod
    def get_all(self, keys: Sequence[str]) -> list[str]:
        """Return the present values; an empty one where there is none."""

    @abstractmethod
    def put(self, key: str, value: str) -> None: ...

    @abstractmethod
    def put_all(self, values: Mapping[str, str]) -> None:
        """Set values, of which others may see some before the last one is set."""

    @abstractmethod
    def post(self, key: str, value: str) -> None:
        """Set a value soon, without waiting for the store; it may be lost."""

    @abstractmethod
    def put_if(self, key: str, value: str, before: str | None) -> str:
        """Set a value, which is not empty, if the present one is `before` (None: there is none), atomically. Return the
        value afterwards: `value` if it was set, or was so already."""

    @abstractmethod
    def add(self, key: str, number: int = 1) -> int:
        """Add to a counter, which begins at 0, and return its new value. A call that raises may have counted."""

    @abstractmethod
    def delete(self, *keys: str) -> None: ...

    @abstractmethod
    def has(self, *keys: str) -> bool:
        """Return whether all keys have values."""

    @abstractmethod
    def list(self, prefix: str) -> dict[str, str]:
        """Return the keys that begin with `prefix`, and their values."""

    @abstractmethod
    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Wait at most `seconds` until all keys have values; return whether they have."""
