"""A process's view of the dock: put rows, lease them, fetch them, commit them."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from distflow.data.batch import Batch
from distflow.dock.errors import DockError, TimedOut, Unreachable
from distflow.dock.index import Lease
from distflow.dock.selection import Address, Consumer, DockLayout, Ids
from distflow.dock.storage import RecordBatch, gather, order_of, pack, spans_of, unpack
from distflow.dock.timeouts import explain
from distflow.rpc.pool import ConnectionPool

_COMMITS_KEPT = 256
_log = logging.getLogger("distflow.dock")


class DockClient:
    """Talks to all processes of a dock; for one thread at a time.

    Args:
        addresses: of all warehouses by number. One is enough to find the others.
        token: the run's.
        who: what messages call this process, as "rollout 3"; the host and process id are added.
        patience: seconds without any answer after which a process of the dock counts as unreachable.

    Raises:
        Refused: the token is another run's.
        Unreachable: a process of the dock does not answer.
    """

    def __init__(self, addresses: Sequence[Address], token: bytes, who: str, patience: float = 10.0, *,
                 session: str = ""):
        self.who = who if session else f"{who} ({socket.gethostname()}:{os.getpid()})"
        self.session = session or secrets.token_hex(8)
        self.reach = ConnectionPool(token, self.who, self.session, patience, self._again)
        self.commits: deque[dict[str, Any]] = deque(maxlen=_COMMITS_KEPT)
        """The last ones, told again to a controller that was restored from an older snapshot."""
        self.known: DockLayout | None = None
        self.addresses = [tuple(address) for address in addresses]

    @property
    def layout(self) -> DockLayout:
        if self.known is None:
            reply, _ = self.reach.ask(self.addresses[0], {"op": "layout"})
            self.known = DockLayout.from_plain(reply["layout"])
        return self.known

    def meet(self, consumers: Sequence[Consumer]) -> None:
        """Make one dock of the processes at `addresses`; once, by any process, and again when one was replaced."""
        self.known = DockLayout(tuple(self.addresses), tuple(consumers))
        for number, address in enumerate(self.addresses):
            self.reach.ask(address, {"op": "meet", "layout": self.known.to_plain(), "number": number})

    def doing(self, what: str) -> None:
        """Say what this process is doing now; it travels with the next request, and costs nothing."""
        self.reach.doing = what

    def put(self, batch: Batch, *, version: Tensor | int | None = None, group: Tensor | None = None,
            priority: Tensor | int | None = None, turn: int | None = None, wait: float = 0.0) -> int:
        """Store rows, or columns of rows that are there; returns how many were new (a row that came again is dropped).

        Columns that are made together must be put together. `turn` marks unfinished rows: whoever leases them next
        gets them from `saved` and goes on; each turn replaces the one before.

        Args:
            version, group, priority: [rows] int64, or one number for all; without, what is known of a row stays.
            wait: seconds to wait for room; 0 refuses at once.

        Raises:
            Full: there is no room. Rows for other warehouses may have been stored: putting all again is safe.
        """
        ids = batch.ids.to("cpu", torch.int64).numpy()
        marks = {name: _column(value, len(ids)) for name, value in
                 (("version", version), ("group", group), ("priority", priority)) if value is not None}
        whole, requests = RecordBatch(batch, 0, 0), []
        for number, places in self.layout.split(ids):
            spans = spans_of(places, [0], [whole])
            heads, buffers = pack(ids[places], [(name, spans) for name in batch.columns])
            header = {"op": "put", "ids": ids[places].tobytes(), "columns": heads, "turn": turn, "wait": wait,
                      "marks": {name: values[places].tobytes() for name, values in marks.items()}}
            requests.append((self.layout.addresses[number], header, buffers))
        return sum(reply["kept"] for reply, _ in self.reach.ask_all(requests, wait))

    def lease(self, consumer: str, count: int, *, least: int | None = None, wait: float = 0.0, step: int | None = None,
              share: int = 0, shares: int = 1, version: int | None = None) -> Lease:
        """Up to `count` ready rows, at least `least` (all of them unless said otherwise), for this process alone.

        The ranks of a group that work on one `step` each ask for their `share` of `shares`: the rows are drawn once and
        dealt. Asking again for a step that is not committed returns the same rows, also to a restarted group.

        Args:
            wait: seconds to wait for rows.
            version: of the asker's weights, for rules that bound staleness.

        Raises:
            TimedOut: not enough rows came in time; says which columns of which rows are missing, and who owes them.
        """
        request = {"op": "lease", "consumer": consumer, "count": count, "least": count if least is None else least,
                   "wait": wait, "step": step, "share": share, "shares": shares, "version": version,
                   "request": secrets.randbits(62) + 1}
        return Lease.granted(consumer, step, self._await_rows(request))

    def look(self, consumer: str, count: int, *, least: int, step: int, wait: float = 0.0,
             version: int | None = None) -> tuple[Tensor, Tensor]:
        """What all shares of such a lease have, or would have: the rows' ids, ascending, and the tokens of each."""
        reply = self._await_rows({"op": "look", "consumer": consumer, "count": count, "least": least, "wait": wait,
                                  "step": step, "version": version})
        return tuple(torch.frombuffer(bytearray(reply[name]), dtype=torch.int64) for name in ("id", "tokens"))

    def fetch(self, rows: Lease | Tensor, columns: Sequence[str] | None = None) -> Batch:
        """Columns of leased rows (those that its consumer reads), or of the rows with these ids, in their order.

        Raises:
            ColumnError: a row or a column is not there; names it.
        """
        if isinstance(rows, Lease):
            columns = self.layout.consumer(rows.consumer).reads if columns is None else columns
            if not len(rows) and len(rows.all_ids):  # an empty share has columns too; only rows know of which form
                return self.fetch(rows.all_ids[:1], columns).slice(0, 0)
            rows = rows.ids
        if columns is None:
            raise DockError("which columns? fetch(ids, columns=[…]); only a lease knows what its consumer reads")
        return self._gather(rows, {"op": "fetch", "columns": list(columns)})[0]

    def saved(self, rows: Lease | Tensor) -> tuple[Batch, Tensor]:
        """Those of the rows that an earlier holder left unfinished, as it last saved them, and the turn of each."""
        return self._gather(rows.ids if isinstance(rows, Lease) else rows, {"op": "saved"})

    def renew(self, lease: Lease) -> None:
        """The holder is alive and at work.

        Raises:
            LeaseLost: too late; others have the rows.
        """
        self.reach.ask(self._home(lease.consumer), {"op": "renew", "consumer": lease.consumer, "lease": lease.number})

    def release(self, lease: Lease) -> None:
        """Give the rows back before the time."""
        self.reach.ask(self._home(lease.consumer), {"op": "release", "consumer": lease.consumer, "lease": lease.number})

    def commit(self, lease: Lease) -> bool:
        """All shares of the lease are consumed for good; rows that all consumers committed leave the dock.

        Safe to repeat, by any rank: only the first returns True. Train, commit, and only then publish or keep the
        weights; a commit that is refused means that others train on these rows.

        Raises:
            LeaseLost: the lease ran out and others were given its rows, or its controller was restored and cannot
                know whether they were. Nothing was committed.
        """
        request = {"op": "commit", "consumer": lease.consumer, "lease": lease.number, "step": lease.step,
                   "ids": lease.all_ids.numpy().tobytes()}
        reply, _ = self.reach.ask(self._home(lease.consumer), request)
        self.commits.append(request | {"told": True})
        return reply["new"]

    def take_back(self, consumer: str, step: int) -> int:
        """A consumer that `recalls` was set back to before this step: rows that it has committed from there on are
        ready again. Returns how many.

        Raises:
            DockError: rows of such a step have left; nothing was taken back.
        """
        reply, _ = self.reach.ask(self._home(consumer), {"op": "take_back", "consumer": consumer, "step": step})
        later = [each for each in self.commits if each["consumer"] == consumer and each["step"] is not None
                 and each["step"] >= step]
        for each in later:
            self.commits.remove(each)
        return reply["rows"]

    def settle(self, consumer: str, before: int) -> None:
        """Commits of steps before this one will not be taken back: their rows leave."""
        self.reach.ask(self._home(consumer), {"op": "settle", "consumer": consumer, "before": before})

    @contextlib.contextmanager
    def keep(self, lease: Lease) -> Iterator[None]:
        """Renew from a thread while the block runs. A stopped or dead process loses its lease, a stuck one does not."""
        over = threading.Event()
        other = DockClient(self.addresses, self.reach.token, self.who, self.reach.patience, session=self.session)
        other.known, other.commits = self.layout, self.commits

        def beat() -> None:
            with contextlib.suppress(DockError):  # the commit will say that the lease was lost
                while not over.wait(lease.seconds / 3):
                    other.doing(self.reach.doing)
                    with contextlib.suppress(Unreachable):  # it may come back before the lease runs out
                        other.renew(lease)

        thread = threading.Thread(target=beat, name="dock lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            other.close()

    def snapshot(self, folder: Path) -> int:
        """Have every process write its part into a folder that all of them see; returns the bytes. Each file is whole
        or absent; restore one with `Service(snapshot=…)`."""
        requests = [(address, {"op": "snapshot", "folder": str(folder)}, ()) for address in self.layout.addresses]
        return sum(reply["bytes"] for reply, _ in self.reach.ask_all(requests, wait=600.0))

    def status(self) -> list[dict[str, Any]]:
        """Of every process: rows, bytes held and moved, duplicates, leases, who is connected and doing what."""
        return [self.reach.ask(address, {"op": "status"})[0] for address in self.layout.addresses]

    def close(self) -> None:
        """Hang up; leases that only this process holds end."""
        self.reach.close()

    def __enter__(self) -> DockClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _home(self, consumer: str) -> Address:
        return self.layout.addresses[self.layout.consumer(consumer).home]

    def _gather(self, ids: Tensor, request: dict[str, Any]) -> tuple[Batch, Tensor]:
        """Rows from the warehouses that have them, in the order of `ids`."""
        if not len(ids):
            return Batch(ids), ids
        numbers = ids.to("cpu", torch.int64).numpy()
        shares = list(self.layout.split(numbers))
        replies = self.reach.ask_all([(self.layout.addresses[number], request | {"ids": numbers[places].tobytes()}, ())
                                      for number, places in shares])
        parts = [unpack(reply["rows"], reply["columns"], data) for reply, data in replies]
        turns = [torch.frombuffer(bytearray(reply["turns"]), dtype=torch.int64) for reply, _ in replies
                 if reply.get("turns")]
        filled = [part for part in parts if len(part)] or parts[:1]
        ids = torch.cat([part.ids for part in filled])
        order = order_of(numbers, ids.numpy())
        turn = torch.cat(turns)[torch.from_numpy(order)] if turns else torch.empty(0, dtype=torch.int64)
        if len(filled) == 1 and bool((numpy.diff(order) == 1).all()):
            return filled[0], turn
        starts = numpy.cumsum([0, *map(len, filled)])
        gaps = numpy.searchsorted(starts, order, side="right") - 1  # one place between two parcels that nobody has
        bases = [int(start) + gap for gap, start in enumerate(starts[:-1])]
        parcels = [RecordBatch(part, base, 0) for part, base in zip(filled, bases)]
        spans = spans_of(order + gaps, bases, parcels)
        return gather(ids.numpy()[order], filled[0].columns, spans), turn

    def _await_rows(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer. With an TimedOut comes what those say who owe the missing columns."""

        def ask(consumer: str, ids: list[int]) -> list[str]:
            try:
                question = {"op": "where", "consumer": consumer, "ids": ids}
                return self.reach.ask(self._home(consumer), question)[0]["fates"]
            except DockError as trouble:
                return [f"unknown: {trouble}"]

        try:
            return self.reach.ask(self._home(request["consumer"]), request, wait=request["wait"])[0]
        except TimedOut as error:
            if not error.report["known"]:
                error.report["producers"] = self._producers()
            raise TimedOut(explain(str(error), error.report, self.layout, ask), error.report) from None

    def _producers(self) -> list[str]:
        """Who is connected, and what each is doing."""
        found: dict[str, str] = {}
        for address in self.layout.addresses:
            try:
                for who, doing, ago in self.reach.ask(address, {"op": "status"})[0]["persons"]:
                    if who != self.who and (doing or who not in found):
                        found[who] = f"{who}, which {ago:.1f} s ago was {doing}" if doing else who
            except Unreachable as trouble:
                found[str(address)] = str(trouble)
        return list(found.values())

    def _again(self, address: Address) -> None:
        """A process came back from a snapshot, which may be older than our last commits."""
        for request in list(self.commits):
            if self._home(request["consumer"]) == address:
                try:
                    self.reach.ask(address, request)
                except DockError as error:
                    _log.warning("%s: a commit made before the dock was restored no longer stands: %s", self.who, error)


def _column(value: Tensor | int, rows: int) -> Ids:
    return numpy.full(rows, value, numpy.int64) if isinstance(value, int) else value.to("cpu", torch.int64).numpy()
