"""The small shared store of a run: who is there, and what all must agree on. Never samples."""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from distflow.errors import Disagreement

_SHOWN, _MOMENT = 8, 0.05
"""Ranks that a message names, and seconds between two looks at what else there is."""


class Store:
    """A view of the store that torchrun hosts; outside torchrun, a store of this process alone.

    Every `what` is told or agreed on once in a run.

    Args:
        look: called now and then while somebody is waited for; it may raise.
        here: the ranks that are waited for; default: all.

    Raises:
        Disagreement: the store is not reached within `wait_limit` seconds.
    """

    def __init__(self, wait_limit: float, look: Callable[[], None] | None = None, here: Sequence[int] | None = None):
        self.wait_limit, self.look = wait_limit, look
        limit = datetime.timedelta(seconds=wait_limit)
        if "RANK" in os.environ:
            try:
                store, self.rank, self.ranks = next(dist.rendezvous("env://", timeout=limit))
            except dist.DistNetworkError as error:
                place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
                raise Disagreement(f"rank {os.environ['RANK']} does not reach the others at {place} (MASTER_ADDR, "
                                   f"MASTER_PORT): {error}") from None
            # torchrun keeps one store when it starts all processes again
            self.store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        else:
            self.store, self.rank, self.ranks = dist.TCPStore("127.0.0.1", 0, is_master=True), 0, 1
        self.store.set_timeout(limit)
        self.here = range(self.ranks) if here is None else here

    def tell(self, what: str, value: str | None = None) -> str:
        """Rank 0's `value`, on every rank.

        Raises:
            Disagreement: rank 0 has not come within the wait limit.
        """
        if self.rank == 0:
            self.store.set(what, value)
        self._wait(what, {0: what})
        return self.store.get(what).decode()

    def gather(self, what: str, value: str, ranks: Sequence[int]) -> list[str]:
        """The `value` of each of `ranks`, on every rank.

        Raises:
            Disagreement: one of them has not come within the wait limit.
        """
        keys = {rank: f"{what}/{rank}" for rank in ranks}
        if self.rank in keys:
            self.store.set(keys[self.rank], value)
        self._wait(what, keys)
        return [self.store.get(key).decode() for key in keys.values()]

    def agree(self, what: str, value: str, cause: str) -> None:
        """Require the same `value` on all ranks.

        Raises:
            Disagreement: on every rank, with the ranks that differ from rank 0 and the probable `cause`; or when a
                rank has not come within the wait limit, with the ranks that are missing.
        """
        expected = self.tell(what, value)
        if value != expected:
            self.store.append(f"{what}/differs", f"{self.rank} {value}\n")
        self.store.set(f"{what}/seen/{self.rank}", "")
        self._wait(what, {rank: f"{what}/seen/{rank}" for rank in self.here})
        alone = self.look is not None  # where machines come and go, what others had may be long past
        if self.store.check([f"{what}/differs"]) and (value != expected or not alone):
            lines = self.store.get(f"{what}/differs").decode().splitlines()
            others = sorted((int(rank), other) for rank, _, other in (line.partition(" ") for line in lines))
            shown = _listed([f"rank {rank} has {other}" for rank, other in others])
            raise Disagreement(f"the ranks do not have the same {what}: {shown}, rank 0 has {expected}. {cause}")

    def _wait(self, what: str, keys: dict[int, str]) -> None:
        """Until each of these ranks has set its key."""
        try:
            self._come(list(keys.values()))
        except dist.DistStoreError:
            missing = _listed([str(rank) for rank, key in keys.items() if not self.store.check([key])])
            raise Disagreement(f"waiting for the {what}: rank {missing} did not come. Its machine may be down, or its "
                               "output may say why.") from None

    def _come(self, keys: list[str]) -> None:
        if self.look is None:
            self.store.wait(keys)
            return
        until = time.monotonic() + self.wait_limit
        while not self.store.check(keys):
            self.look()
            if time.monotonic() > until:
                raise dist.DistStoreError
            time.sleep(_MOMENT)


def store_on(host: str, port: int = 0) -> dist.TCPStore:
    """A store that listens at this address of the machine alone.

    Args:
        port: 0: the system chooses.

    Raises:
        OSError: it cannot listen there.
    """
    with socket.create_server((host, port)) as listening:
        port = listening.getsockname()[1]
        return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True,
                             master_listen_fd=listening.detach())


def _listed(items: Sequence[str]) -> str:
    more = f", … ({len(items)} in all)" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more
