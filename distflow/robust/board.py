"""The small shared store of a run: who is there, and what all must agree on. Never samples."""

from __future__ import annotations

import datetime
import os

import torch.distributed as dist

from distflow.schema.errors import Disagreement


class Board:
    """A view of the store that torchrun hosts; outside torchrun, a store of this process alone."""

    def __init__(self, wait_limit: float):
        limit = datetime.timedelta(seconds=wait_limit)
        if "RANK" in os.environ:
            self.store, self.rank, self.ranks = next(dist.rendezvous("env://", timeout=limit))
        else:
            self.store, self.rank, self.ranks = dist.TCPStore("127.0.0.1", 0, is_master=True), 0, 1
        self.store.set_timeout(limit)

    def tell(self, what: str, value: str | None = None) -> str:
        """Rank 0's `value`, on every rank."""
        if self.rank == 0:
            self.store.set(what, value)
        return self.store.get(what).decode()

    def agree(self, what: str, value: str, cause: str) -> None:
        """Require the same `value` on all ranks.

        Raises:
            Disagreement: on every rank, with the first rank that differs and the probable `cause`; or when a rank
                has not come within the wait limit, with the ranks that are missing.
        """
        expected = self.tell(what, value)
        if value != expected:
            self.store.set(f"{what}/differs", f"rank {self.rank} has {value}, rank 0 has {expected}")
        self.store.set(f"{what}/seen/{self.rank}", "")
        self._wait_for_all(f"{what}/seen", what)
        if self.store.check([f"{what}/differs"]):
            raise Disagreement(f"the ranks do not have the same {what}: {self.store.get(f'{what}/differs').decode()}. {cause}")

    def _wait_for_all(self, prefix: str, what: str) -> None:
        keys = [f"{prefix}/{rank}" for rank in range(self.ranks)]
        try:
            self.store.wait(keys)
        except dist.DistStoreError:
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            raise Disagreement(f"waiting for the {what} of all ranks: rank {', '.join(map(str, missing))} did not come. "
                               "Its machine may be down, or its output may say why.") from None
