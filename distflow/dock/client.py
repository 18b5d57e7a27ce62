"""Client of the dock: put, lease, fetch and commit rows."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy
import torch
from torch import Tensor

from distflow.data.batch import Batch
from distflow.data.column_buffers import ReadRows, decode_batch, gather, rows_of
from distflow.data.columns import ColumnForm, Extents, encode, read_rows
from distflow.dock.directory import ShardDirectory
from distflow.dock.errors import DockError, TimedOut, error_from
from distflow.dock.index import Lease
from distflow.dock.selection import Consumer, DockLayout
from distflow.dock.slots import Ids
from distflow.dock.storage import read_ids, read_table
from distflow.dock.timeouts import explain
from distflow.rpc.connection import Address
from distflow.rpc.errors import RpcError, Unreachable
from distflow.rpc.pool import ConnectionPool, HeldReplies, Reply
from distflow.rpc.shared_heap import SharedHeap
from distflow.rpc.shared_payloads import LEAST


class DockClient:
    """Connections to all processes of a dock; for one thread at a time.

    Leases that are not renewed or committed end with the client. Each method raises `Unreachable` if a process of the
    dock does not answer, and `Refused` if the token is another run's.

    Args:
        addresses: of all shards by number. One is enough to find the others.
        token: the run's.
        who: name of this process in messages, as "rollout 3"; the host and process id are added.
        timeout: seconds without any answer after which a process of the dock counts as unreachable.
        attempt: of the group that this process restarts with, if that is all there is of the consumer. Requests of an
            attempt before the one that has rolled back last are refused.
        near: number of this machine's shard, of whose rows a lease for no step gets what there is first.
        directory: of the shards, if another process may take the place of one. Its `addresses` name it still.
    """

    def __init__(self, addresses: Sequence[Address], token: bytes, who: str, timeout: float = 10.0, attempt: int = 0,
                 directory: ShardDirectory | None = None, near: int | None = None):
        self.who = f"{who} ({socket.gethostname()}:{os.getpid()})"
        self.directory, self.near = directory, near
        self.pool = ConnectionPool(token, self.who, timeout, error_from, self._locate,
                                   directory.poll_seconds if directory else math.inf)
        self.epochs: dict[int, int] = {}  # of the shards' processes that rows were fetched from last, by number
        self.attempt = attempt
        self.known: DockLayout | None = None
        self.heap: SharedHeap | None = None  # of rows that were read
        self.addresses: list[Address] = [(host, port) for host, port in addresses]

    @property
    def layout(self) -> DockLayout:
        if self.known is None:
            reply, _ = self.pool.ask(self.addresses[0], {"op": "layout"})
            found = DockLayout.from_plain(reply["layout"])
            here = len(self.addresses) == len(found.addresses)  # then these are what `_locate` knows
            self.known = replace(found, addresses=tuple(self.addresses)) if here else found
        return self.known

    def configure(self, consumers: Sequence[Consumer], max_bytes: int | None = None) -> None:
        """Make one dock of the shards at `addresses`, each of which is to store `max_bytes`; once, by any process, and
        again when a shard was replaced."""
        self.known = DockLayout(tuple(self.addresses), tuple(consumers), max_bytes)
        for number, address in enumerate(self.addresses):
            self.pool.ask(address, {"op": "configure", "layout": self.known.to_plain(), "number": number})

    def report_activity(self, activity: str) -> None:
        """Set what this process is doing now; it is sent with the next request."""
        self.pool.activity = activity

    def put(self, batch: Batch, *, version: Tensor | int | None = None, turn: int | None = None,
            epochs: Mapping[int, int] = MappingProxyType({})) -> int:
        """Store rows, or columns of stored rows; return how many were new (a row that came again is dropped).

        Columns that are made together, and the rows of a group, must be put together. `turn` marks unfinished rows: the
        process that leases them next gets them from `fetch_saved` and goes on; each turn replaces the one before.

        Args:
            version: [rows] int64, or one number for all; None leaves what is known of a row.
            epochs: `self.epochs` after the fetch of what the columns were computed from. A shard whose process is
                another one by now stores none of them and raises `LeaseLost`: its rows may have other tokens.
        """
        rows, requests = rows_of(batch), []
        ids = batch.ids.to("cpu", torch.int64).numpy()
        versions = numpy.empty(0, numpy.int64) if version is None else _column(version, len(ids))
        for number, positions in self.layout.split(ids):
            schema, buffers = encode({name: (extents.select(positions), memories)
                                      for name, (extents, memories) in rows.items()})
            header = {"op": "put", "ids": ids[positions].tobytes(), "columns": schema, "turn": turn,
                      "versions": versions[positions if len(versions) else slice(0)].tobytes(),
                      "epoch": epochs.get(number)}
            requests.append((self.layout.addresses[number], header, buffers))
        return sum(reply["stored"] for reply, _ in self.pool.ask_all(requests))

    def lease(self, consumer: str, count: int, *, least: int | None = None, wait: float = 0.0, step: int | None = None,
              share: int = 0, shares: int = 1) -> Lease:
        """Lease as `try_lease` does. Raises `TimedOut`: it names the missing columns and those that write them."""
        lease = self.try_lease(consumer, count, least=least, wait=wait, step=step, share=share, shares=shares)
        if lease is None:
            raise self.timeout_error(consumer, count if least is None else least, wait)
        return lease

    def try_lease(self, consumer: str, count: int, *, least: int | None = None, wait: float = 0.0,
                  step: int | None = None, share: int = 0, shares: int = 1) -> Lease | None:
        """Lease up to `count` ready rows, at least `least` (by default all of them), for this process alone; return
        None if they did not come in `wait` seconds.

        The ranks of a group that work on one `step` each ask for their `share` of `shares`: the rows are drawn once and
        dealt. Asking again for a step that is not committed returns the same rows.
        """
        reply = self._ask_index({
            "op": "lease", "consumer": consumer, "count": count, "least": count if least is None else least,
            "wait": wait, "step": step, "share": share, "shares": shares, "request": secrets.randbits(62) + 1,
            "near": self.near if step is None else None}, wait)
        if reply["rows"] is None:
            return None
        table = read_table(reply["rows"])
        order = table[0].argsort()
        ids, tokens, versions, turns = (torch.from_numpy(values[order]) for values in table)
        return Lease(consumer, reply["lease"], step, reply["seconds"], ids, tokens, versions, turns,
                     _tensor(reply["all"]))

    def peek(self, consumer: str, count: int, *, least: int, step: int, wait: float = 0.0) -> tuple[Tensor, Tensor]:
        """Peek as `try_peek` does. Raises `TimedOut`: it names the missing columns and those that write them."""
        found = self.try_peek(consumer, count, least=least, step=step, wait=wait)
        if found is None:
            raise self.timeout_error(consumer, least, wait)
        return found

    def try_peek(self, consumer: str, count: int, *, least: int, step: int,
                 wait: float = 0.0) -> tuple[Tensor, Tensor] | None:
        """Return what a lease of all shares holds, or would hold: the rows' ids, ascending, and the tokens of each;
        None if there were not so many in `wait` seconds."""
        reply = self._ask_index({"op": "peek", "consumer": consumer, "count": count, "least": least, "wait": wait,
                                 "step": step}, wait)
        if reply["rows"] is None:
            return None
        ids, tokens = _tensor(reply["rows"]).reshape(2, -1)
        return ids, tokens

    def fetch(self, rows: Lease | Tensor, columns: Sequence[str] | None = None) -> Batch:
        """Fetch columns of leased rows (by default those that the consumer reads), or of rows by id, in their order.
        Raises `ColumnError`, which names a row or a column that is not there."""
        if isinstance(rows, Lease):
            columns = self.layout.consumer(rows.consumer).reads if columns is None else columns
            if not len(rows) and len(rows.all_ids):  # an empty share has columns too; only rows show their form
                return self.fetch(rows.all_ids[:1], columns).slice(0, 0)
            rows = rows.ids
        if columns is None:
            raise DockError("which columns? fetch(ids, columns=[…]); only a lease knows what its consumer reads")
        return self._gather(rows, {"op": "fetch", "columns": list(columns)})[0]

    def fetch_saved(self, rows: Lease | Tensor) -> tuple[Batch, Tensor]:
        """Fetch the rows that an earlier holder left unfinished, as it last saved them, and the turn of each."""
        return self._gather(rows.ids if isinstance(rows, Lease) else rows, {"op": "fetch_saved"})

    def require(self, consumer: str, step: int) -> None:
        """Let rows up to those of this step be leased whatever room there is: others wait for their results."""
        self._ask_index({"op": "require", "consumer": consumer, "step": step})

    def renew(self, lease: Lease) -> None:
        """Extend the lease by its `seconds`; raises `LeaseLost` if another holder has the rows."""
        self._ask_index({"op": "renew", "consumer": lease.consumer, "lease": lease.number})

    def commit(self, lease: Lease) -> bool:
        """Mark all shares of the lease as consumed; rows that all consumers have committed leave the dock.

        Safe to repeat, by any rank: only the first returns True. Train, commit, and only then publish or save weights.
        Raises `LeaseLost` if others were, or may have been, given the rows and train on them, and `DockError` if these
        are not the lease's rows; nothing was committed.
        """
        return self._ask_index({"op": "commit", "consumer": lease.consumer, "lease": lease.number, "step": lease.step,
                                "ids": lease.all_ids.numpy().tobytes()})["new"]

    def rollback(self, consumer: str, step: int) -> int:
        """Undo the commits from this step on; return how many rows are ready again. Each attempt of a group begins with
        it: the leases of the attempt before end, and what its processes still ask for is refused. Raises `DockError` if
        rows of such a step have left, or the consumer is not `can_roll_back`; nothing was rolled back."""
        return self._ask_index({"op": "rollback", "consumer": consumer, "step": step})["rows"]

    def release_before(self, consumer: str, step: int) -> None:
        """Make the commits of steps before this one final: their rows leave."""
        self._ask_index({"op": "release_before", "consumer": consumer, "step": step})

    def remove(self, ids: Tensor) -> None:
        """Remove rows of a dock that has no consumers; what was fetched of them stays."""
        rows = ids.numpy()
        self.pool.ask_all([(self.layout.addresses[number], {"op": "remove", "ids": rows[positions].tobytes()}, ())
                           for number, positions in self.layout.split(rows)])

    def status(self) -> list[dict[str, Any]]:
        """Return the figures of each process: rows, bytes moved, its indexes, its clients and their activity."""
        return [self.pool.ask(address, {"op": "status"})[0] for address in self.layout.addresses]

    def index_status(self) -> dict[str, Any]:
        """Return the figures of all consumers' indexes, and the clients of their processes; no others are asked."""
        homes = [self.layout.addresses[home] for home in self.layout.homes()]
        found = [reply for reply, _ in self.pool.ask_all([(home, {"op": "status"}, ()) for home in homes])]
        return {"indexes": {name: index for each in found for name, index in each["indexes"].items()},
                "clients": [client for each in found for client in each["clients"]]}

    def close(self) -> None:
        self.pool.close()

    def __enter__(self) -> DockClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _locate(self, address: Address) -> Address:
        """Return where the process is now that serves the shard which was at an address."""
        if self.directory is None or address not in self.addresses:
            return address
        return self.directory.locate(self.addresses.index(address)) or address

    def _ask_index(self, request: dict[str, Any], wait: float = 0.0) -> dict[str, Any]:
        home = self.layout.addresses[self.layout.home_of(request["consumer"])]
        return self.pool.ask(home, request | {"attempt": self.attempt}, wait=wait)[0]

    def _gather(self, ids: Tensor, request: dict[str, Any]) -> tuple[Batch, Tensor]:
        if not len(ids):
            return Batch(ids), ids
        numbers = ids.to("cpu", torch.int64).numpy()
        parted = [*self.layout.split(numbers)]
        addresses = [self.layout.addresses[shard] for shard, _ in parted]
        while True:
            replies = self.pool.ask_all([(address, request | {"ids": numbers[positions].tobytes()}, ())
                                         for address, (_, positions) in zip(addresses, parted)])
            in_place = [address for address, (reply, _) in zip(addresses, replies) if "in_place" in reply]
            with HeldReplies(self.pool, in_place) as held:
                found = self._merge_replies(numbers, addresses, [positions for _, positions in parted], replies)
            if held.valid:
                break
        self.epochs |= {shard: reply["epoch"] for (shard, _), (reply, _) in zip(parted, replies) if "epoch" in reply}
        return found

    def _merge_replies(self, ids: Ids, addresses: Sequence[Address], places: Sequence[Ids],
                       replies: Sequence[Reply]) -> tuple[Batch, Tensor]:
        """Return the rows of replies in the order of `ids`, and the turns of saved ones. `places`: the positions among
        `ids` that each process was asked for; of saved rows it may have fewer."""
        there = [positions if "ids" not in reply else positions[numpy.isin(ids[positions], read_ids(reply["ids"]))]
                 for positions, (reply, _) in zip(places, replies)]
        chosen = numpy.sort(numpy.concatenate(there))
        turns, parts = numpy.zeros(len(chosen), numpy.int64), []
        for address, positions, (reply, data) in zip(addresses, there, replies):
            positions = numpy.searchsorted(chosen, positions)
            if "turns" in reply:
                turns[positions] = read_ids(reply["turns"])
            if len(positions) == len(chosen) and "in_place" not in reply:
                return decode_batch(torch.from_numpy(ids[chosen]), reply["columns"], data), torch.from_numpy(turns)
            if len(positions):
                parts.append(self._locate_rows(address, positions, reply, data))
        return gather(torch.from_numpy(ids[chosen]), parts, self._allocate), torch.from_numpy(turns)

    def _locate_rows(self, address: Address, positions: Ids, reply: dict[str, Any], data: numpy.ndarray) -> ReadRows:
        """Return where the rows of a reply lie: in its payload, or in the memory of the process."""
        if "in_place" not in reply:
            return ReadRows(data, read_rows(len(positions), reply["columns"], data), positions)
        memory, numbers, columns, at = self.pool.memory_of(address), data.view(numpy.int64), {}, 0
        if memory is None:
            raise DockError(f"{address[0]}:{address[1]} holds rows in memory that this process does not share")
        for name, packed in reply["in_place"]:
            form = ColumnForm.unpack(packed)
            size = len(form.widths) * len(positions)
            begin, count = numbers[at : at + size], numbers[at + size : at + 2 * size]
            columns[name] = Extents(form, *(each.reshape(-1, len(positions)) for each in (begin, count)))
            at += 2 * size
        return ReadRows(memory, columns, positions)

    def _allocate(self, size: int) -> numpy.ndarray:
        """Return memory for rows that were read, [size] uint8: fresh memory costs many times what a copy does. A
        process forked from this one may change what it has of it."""
        if size >= LEAST:
            with contextlib.suppress(MemoryError):  # under `ulimit -v`
                self.heap = self.heap or SharedHeap()
                return self.heap.take(size)
        return numpy.empty(size, numpy.uint8)

    def timeout_error(self, consumer: str, least: int, wait: float = 0.0) -> TimedOut:
        """Return the error of a wait without rows; it also says what the writers of missing columns are doing."""

        def ask(consumer: str, ids: list[int]) -> list[str]:
            try:
                return self._ask_index({"op": "describe_rows", "consumer": consumer, "ids": ids})["lines"]
            except (DockError, RpcError) as error:
                return [f"unknown: {error}"]

        reply = self._ask_index({"op": "shortage", "consumer": consumer, "least": least, "wait": wait})
        report = reply["report"]
        if not report["known"]:
            report["producers"] = self._producers()
        return TimedOut(explain(reply["message"], report, self.layout, ask), report)

    def _producers(self) -> list[str]:
        found: dict[str, str] = {}
        for address in self.layout.addresses:
            try:
                for who, activity, ago in self.pool.ask(address, {"op": "status"})[0]["clients"]:
                    if who != self.who and (activity or who not in found):
                        found[who] = f"{who}, which {ago:.1f} s ago was {activity}" if activity else who
            except Unreachable as error:
                found[str(address)] = str(error)
        return list(found.values())


def _column(value: Tensor | int, rows: int) -> Ids:
    return numpy.full(rows, value, numpy.int64) if isinstance(value, int) else value.to("cpu", torch.int64).numpy()


def _tensor(data: bytes) -> Tensor:
    """Return [rows] int64 that may be changed."""
    return torch.from_numpy(read_ids(data).copy())
