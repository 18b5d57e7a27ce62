"""The small shared store of a run: who is there, and what all must agree on. Never samples."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence

import torch.distributed as dist

from distflow.schema.errors import Disagreement

_SHOWN = 8


class Board:
    """A view of the store that torchrun hosts; outside torchrun, a store of this process alone.

    Every `what` is told or agreed on once in a run.

    Raises:
        Disagreement: the store is not reached within `wait_limit` seconds.
    """

    def __init__(self, wait_limit: float):
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

    def tell(self, what: str, value: str | None = None) -> str:
        """Rank 0's `value`, on every rank.

        Raises:
            Disagreement: rank 0 has not come within the wait limit.
        """
        if self.rank == 0:
            self.store.set(what, value)
        self._wait(what, {0: what})
        return self.store.get(what).decode()

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
        self._wait(what, {rank: f"{what}/seen/{rank}" for rank in range(self.ranks)})
        if self.store.check([f"{what}/differs"]):
            lines = self.store.get(f"{what}/differs").decode().splitlines()
            others = sorted((int(rank), other) for rank, _, other in (line.partition(" ") for line in lines))
            shown = _listed([f"rank {rank} has {other}" for rank, other in others])
            raise Disagreement(f"the ranks do not have the same {what}: {shown}, rank 0 has {expected}. {cause}")

    def _wait(self, what: str, keys: dict[int, str]) -> None:
        """Until each of these ranks has set its key."""
        try:
            self.store.wait(list(keys.values()))
        except dist.DistStoreError:
            missing = _listed([str(rank) for rank, key in keys.items() if not self.store.check([key])])
            raise Disagreement(f"waiting for the {what}: rank {missing} did not come. Its machine may be down, or its "
                               "output may say why.") from None


def _listed(items: Sequence[str]) -> str:
    more = f", … ({len(items)} in all)" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more
