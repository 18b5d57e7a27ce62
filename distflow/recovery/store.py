"""What the ranks of a run must agree on, at torchrun's store or, where machines come and go, at an etcd."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Sequence

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from distflow.errors import Disagreement
from distflow.rpc.run_token import TOKEN, run_token, token_checksum
from distflow.store.interface import Store, StoreUnavailable, poll_interval
from distflow.store.tcp import TCPStoreClient, store_on

_SHOWN, _SLICE = 8, 0.2  # ranks that a message names, and seconds between two polls of what else may have happened

COMPLETED = "completed"
"""Key of torchrun's own store, once all ranks have done their work."""


class RunStore:
    """A rank's part in what the ranks of a run agree on.

    Every `topic` is used once in a run.

    Args:
        store: of the run, if this process has joined it; default: the one that torchrun hosts, or outside torchrun one
            of this process alone.
        poll: called now and then while ranks are waited for; it may raise.
        present: the ranks that are waited for; default: all.

    Raises:
        Disagreement: the store is not reached within `wait_limit` seconds.
    """

    def __init__(self, wait_limit: float, store: Store | None = None, poll: Callable[[], None] | None = None,
                 present: Sequence[int] | None = None):
        self.wait_limit, self.poll = wait_limit, poll
        self.rank, self.ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        # torchrun keeps one store when it starts all processes again
        self.store = (store or _store_of_torchrun(wait_limit)).below(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.store.deadline.seconds = wait_limit
        self.present = range(self.ranks) if present is None else present

    def complete(self) -> None:
        """Say that this rank has done all its work: torchrun learns of no exit code once it is told to end."""
        if self.store.add(COMPLETED) >= self.ranks:
            self.store.root.put(COMPLETED, "")

    def broadcast(self, topic: str, value: str | None = None) -> str:
        """Return rank 0's `value` on every rank. Raises Disagreement: rank 0 has not come within the wait limit."""
        if self.rank == 0:
            if value is None:  # or all ranks would wait
                raise TypeError(f"rank 0 broadcasts {topic} without a value")
            self.store.put(topic, value)
        self._wait(topic, [topic], {0: topic})
        return self.store.get(topic) or ""

    def gather(self, topic: str, value: str, ranks: Sequence[int]) -> list[str]:
        """Return each `value` of `ranks` on every rank. Raises Disagreement: one has not come within the wait limit."""
        return json.loads(self._collected(topic, value, ranks, json.dumps))

    def agree(self, topic: str, value: str, cause: str) -> None:
        """Require the same `value` on all ranks. Raises Disagreement: on every rank, with those that differ from rank 0
        and the probable `cause`, or with those that have not come within the wait limit."""
        expected = self.broadcast(topic, value)
        differ = dict(json.loads(self._collected(topic, value, self.present, lambda values: json.dumps(
            [(rank, each) for rank, each in zip(self.present, values) if each != expected]))))
        if value != expected:  # perhaps on a machine that came later
            differ[self.rank] = value
        if differ:
            shown = _listed([f"rank {rank} has {other}" for rank, other in sorted(differ.items())])
            raise Disagreement(f"the ranks do not have the same {topic}: {shown}, rank 0 has {expected}. {cause}")

    def agreed_token(self) -> bytes:
        """Return the token of this run, the same on all ranks. Raises Disagreement: their DISTFLOW_TOKEN differs."""
        run = self.store.put_if("token", secrets.token_hex(32), None)
        self.agree(TOKEN, token_checksum(run), f"Export the same {TOKEN} on all machines.")
        return run_token(run)

    def _collected(self, topic: str, value: str, ranks: Sequence[int], combine: Callable[[list[str]], str]) -> str:
        """Return on every rank what the first of `ranks` makes of the values of all of them: it alone reads them."""
        values, result = {rank: f"{topic}/{rank}" for rank in ranks}, f"{topic}/of all"
        if self.rank in values:
            self.store.put(values[self.rank], f"={value}")  # which is never empty
        if self.rank != ranks[0]:
            self._wait(topic, [result], values)
            return self.store.get(result) or ""
        keys = list(values.values())
        self._wait(topic, keys, values)
        self.store.put(result, found := combine([each[1:] for each in self.store.get_all(keys)]))
        return found

    def _wait(self, topic: str, keys: Sequence[str], values: dict[int, str]) -> None:
        """Wait for `keys`. Raises Disagreement: they are not there, since ranks have not put their `values`."""
        until, pause = time.monotonic() + self.wait_limit, poll_interval(_SLICE, self.ranks)
        while not self.store.wait(keys, pause if self.poll else self.wait_limit):
            if self.poll:
                self.poll()
            if time.monotonic() >= until:
                found = zip(values, self.store.get_all(list(values.values())))
                missing = [rank for rank, value in found if not value] or [next(iter(values))]
                raise Disagreement(f"waiting for the {topic}: rank {_listed([str(rank) for rank in missing])} did not "
                                   "come. Its machine may be down, or its output may say why.")


def _store_of_torchrun(wait_limit: float) -> Store:
    if "RANK" not in os.environ:
        return TCPStoreClient.hosting(store_on("127.0.0.1"), wait_limit)
    host, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", 0))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and os.environ["RANK"] == "0":
        return TCPStoreClient.hosting(TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True),
                                      wait_limit)
    until = time.monotonic() + wait_limit
    while True:
        try:
            return TCPStoreClient(host, port, wait_limit)
        except StoreUnavailable as error:  # rank 0 may host it, and come later
            if time.monotonic() > until:
                raise Disagreement(f"rank {os.environ['RANK']} does not reach the others at {host}:{port} "
                                   f"(MASTER_ADDR, MASTER_PORT): {error}") from None
        time.sleep(_SLICE)


def _listed(items: Sequence[str]) -> str:
    more = f", … ({len(items)} in all)" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more
