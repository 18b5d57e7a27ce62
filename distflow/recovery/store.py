"""Key-value store of a run (torch's TCPStore): what all ranks must agree on. Never samples."""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from distflow.errors import Disagreement

_SHOWN, _POLL = 8, 0.05  # ranks that a message names, and seconds between two looks

COMPLETED = "completed"
"""Key of torchrun's own store, once all ranks have done their work."""


class Store:
    """A client of the store that torchrun hosts; outside torchrun, a store of this process alone.

    Every `topic` is used once in a run.

    Args:
        poll: called now and then while ranks are waited for; it may raise.
        present: the ranks that are waited for; default: all.

    Raises:
        Disagreement: the store is not reached within `wait_limit` seconds.
    """

    def __init__(self, wait_limit: float, poll: Callable[[], None] | None = None, present: Sequence[int] | None = None):
        self.wait_limit, self.poll = wait_limit, poll
        limit = datetime.timedelta(seconds=wait_limit)
        if "RANK" in os.environ:
            try:
                store, self.rank, self.ranks = next(rendezvous("env://", timeout=limit))
            except dist.DistNetworkError as error:
                address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
                raise Disagreement(f"rank {os.environ['RANK']} does not reach the others at {address} (MASTER_ADDR, "
                                   f"MASTER_PORT): {error}") from None
            # torchrun keeps one store when it starts all processes again
            self.store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        else:
            self.store, self.rank, self.ranks = TCPStore("127.0.0.1", 0, is_master=True), 0, 1
        self.store.set_timeout(limit)
        self.present = range(self.ranks) if present is None else present

    def complete(self) -> None:
        """Say that this rank has done all its work: torchrun learns of no exit code once it is told to end."""
        if self.store.add(COMPLETED, 1) == self.ranks:
            store = self.store.underlying_store if isinstance(self.store, PrefixStore) else self.store
            store.set(COMPLETED, "")

    def broadcast(self, topic: str, value: str | None = None) -> str:
        """Return rank 0's `value` on every rank. Raises Disagreement: rank 0 has not come within the wait limit."""
        if self.rank == 0:
            if value is None:  # or all ranks would wait
                raise TypeError(f"rank 0 broadcasts {topic} without a value")
            self.store.set(topic, value)
        self._wait(topic, {0: topic})
        return self.store.get(topic).decode()

    def gather(self, topic: str, value: str, ranks: Sequence[int]) -> list[str]:
        """Return the `value` of each of `ranks` on every rank. Raises Disagreement: one of them has not come within the
        wait limit."""
        keys = {rank: f"{topic}/{rank}" for rank in ranks}
        if self.rank in keys:
            self.store.set(keys[self.rank], value)
        self._wait(topic, keys)
        return [self.store.get(key).decode() for key in keys.values()]

    def agree(self, topic: str, value: str, cause: str) -> None:
        """Require the same `value` on all ranks. Raises Disagreement: on every rank, with the ranks that differ from
        rank 0 and the probable `cause`; or when a rank has not come within the wait limit, with the ranks that are
        missing."""
        expected = self.broadcast(topic, value)
        if value != expected:
            self.store.append(  # pyright: ignore[reportAttributeAccessIssue]
                f"{topic}/differs", f"{self.rank} {value}\n")
        self.store.set(f"{topic}/seen/{self.rank}", "")
        self._wait(topic, {rank: f"{topic}/seen/{rank}" for rank in self.present})
        elastic = self.poll is not None  # where machines come and go, what others had may be long past
        if self.store.check([f"{topic}/differs"]) and (value != expected or not elastic):
            lines = self.store.get(f"{topic}/differs").decode().splitlines()
            others = sorted((int(rank), other) for rank, _, other in (line.partition(" ") for line in lines))
            shown = _listed([f"rank {rank} has {other}" for rank, other in others])
            raise Disagreement(f"the ranks do not have the same {topic}: {shown}, rank 0 has {expected}. {cause}")

    def _wait(self, topic: str, keys: dict[int, str]) -> None:
        try:
            self._wait_for_keys(list(keys.values()))
        except dist.DistStoreError:
            missing = _listed([str(rank) for rank, key in keys.items() if not self.store.check([key])])
            raise Disagreement(f"waiting for the {topic}: rank {missing} did not come. Its machine may be down, or its "
                               "output may say why.") from None

    def _wait_for_keys(self, keys: list[str]) -> None:
        if self.poll is None:
            self.store.wait(keys)
            return
        until = time.monotonic() + self.wait_limit
        while not self.store.check(keys):
            self.poll()
            if time.monotonic() > until:
                raise dist.DistStoreError
            time.sleep(_POLL)


def store_on(host: str, port: int = 0) -> TCPStore:
    """Host a store at one address of the machine.

    Args:
        port: 0: the system chooses.

    Raises:
        OSError: it cannot listen there.
    """
    with socket.create_server((host, port)) as listening:
        port = listening.getsockname()[1]
        return TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True,
                             master_listen_fd=listening.detach())


def _listed(items: Sequence[str]) -> str:
    more = f", … ({len(items)} in all)" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more
