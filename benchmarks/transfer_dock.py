"""The transfer dock against TransferQueue 0.1.11: samples per second for put → list → get, with 1 to 8 clients.

Every client is a process of its own that, again and again, puts a batch of rows, asks which rows there are and gets
as many: ragged tokens (int64) and log-probabilities (float32), one reward and the id. Both sides store in two
processes: two storage shards here, SimpleStorage with two units there. Clients of one side start together; the time is
that of the last one to end. Repeats of the two sides take turns.

Choices, each of them the cheaper one for TransferQueue where it matters:
- Each of its clients has a partition of its own, so that `kv_list` lists that client's rows alone, and gets the keys
  that it put, which it knows. At the dock, clients lease from one pool: rows come from any client, and no two get one.
- Its rows are cleared between two rounds, untimed. The dock's clients commit what they got, and that is timed.
- Its tensors are jagged nested ones, which it carries as one buffer each; keys are made before the time begins.
Ids and lengths are verified at the far end, on both sides and in the time.

A third side makes TransferQueue's own calls to the dock (`distflow.dock.transfer_queue`), as its clients do.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from benchmarks.contender import Contender, await_calm, serve
from benchmarks.group import Served
from benchmarks.peer_environment import peer_python
from benchmarks.ratio import Spread, conclude, interleaved, least, options, parsed, ratios
from distflow.data.batch import Batch, Ragged
from distflow.data.row_copies import COPIES
from distflow.dock import Consumer, DockClient, transfer_queue
from distflow.dock.process import start

GOAL, CLIENTS = 2.0, (1, 2, 4, 8)
_COLUMNS = ("tokens", "logprobs", "rewards")
_WAIT = 60.0


def lengths_of(ids: torch.Tensor, mean: int) -> torch.Tensor:
    """[rows]: a length that follows from the id, `mean` on average, from nearly none to twice that."""
    return 1 + (ids * 2654435761 % (2 * mean - 1))


def batch_of(ids: torch.Tensor, mean: int) -> Batch:
    """Return the rows whose tokens are their own id."""
    lengths = lengths_of(ids, mean)
    values = ids.repeat_interleave(lengths)
    return Batch(ids, {"tokens": Ragged(values, lengths), "logprobs": Ragged(values.float(), lengths),
                       "rewards": ids.float()})


class Client:
    """One of the dock's clients: rounds of `make`, `cycles` and `clear`."""

    def __init__(self, number: int, addresses: list[tuple[str, int]], token: bytes):
        self.name = f"client {number}"
        self.dock = DockClient(addresses, token, self.name, timeout=_WAIT)
        self.dock.status()

    def make(self, first: int, cycles: int, rows: int, mean: int) -> None:
        self.mean = mean
        self.parts = [batch_of(torch.arange(first + cycle * rows, first + (cycle + 1) * rows), mean)
                      for cycle in range(cycles)]

    def cycles(self) -> float:
        """Return when the last one has ended."""
        for part in self.parts:
            self.dock.put(part)
            lease = self.dock.lease("update", len(part), wait=_WAIT)
            got = self.dock.fetch(lease)
            self.verify(torch.equal(got.ids, lease.ids) and
                        torch.equal(got["tokens"].lengths, lengths_of(lease.ids, self.mean)))
            self.dock.commit(lease)
        return time.perf_counter()

    def verify(self, same: bool) -> None:
        if not same:
            raise SystemExit(f"{self.name} got other rows than it asked for")

    def clear(self) -> None:
        """What was committed is gone."""

    def close(self) -> None:
        self.dock.close()


class KeyClient(Client):
    """The same by the key-value interface, in a partition of its own."""

    def __init__(self, number: int, address: str):
        os.environ[transfer_queue.ADDRESS] = address
        self.name = f"client {number}"
        transfer_queue.init()

    def make(self, first: int, cycles: int, rows: int, mean: int) -> None:
        super().make(first, cycles, rows, mean)
        self.parts = [part.to_tensordict() for part in self.parts]
        self.keys = [[str(row) for row in part["ids"].tolist()] for part in self.parts]

    def cycles(self) -> float:
        for names, part in zip(self.keys, self.parts):
            transfer_queue.kv_batch_put(names, self.name, part)
            there = transfer_queue.kv_list(self.name)[self.name]
            got = transfer_queue.kv_batch_get(names, self.name)
            self.verify(torch.equal(got["ids"], part["ids"]) and there.keys() >= {*names} and
                        torch.equal(got["tokens"].offsets().diff(), lengths_of(part["ids"], self.mean)))
        return time.perf_counter()

    def clear(self) -> None:
        transfer_queue.kv_clear(sum(self.keys, []), self.name)

    def close(self) -> None:
        transfer_queue.close()


class Driver:
    """The dock's side: two storage shards and the clients, as processes. `keys`: with those of the key-value interface.
    """

    def __init__(self, keys: bool) -> None:
        self.token, self.shards, self.next = secrets.token_bytes(32), [], 0
        self.clients, self.given = (Served(KeyClient), (transfer_queue.init(),)) if keys else (
            Served(Client), self._dock())

    def _dock(self) -> tuple[Any, ...]:
        self.shards = [start(self.token) for _ in range(2)]
        addresses = [shard.address for shard in self.shards]
        with DockClient(addresses, self.token, "driver", timeout=_WAIT) as dock:
            dock.configure((Consumer("update", _COLUMNS),))
        return addresses, self.token

    def round(self, clients: int, cycles: int, rows: int, mean: int) -> float:
        """Return the seconds for every client's `cycles`."""
        for number in range(len(self.clients.lines), clients):
            self.clients.add(number, *self.given)
        for number in range(clients):
            self.clients.order(number, "make", self.next, cycles, rows, mean)
            self.next += cycles * rows
        self.clients.answers()
        begin = time.perf_counter()
        seconds = max(self.clients.ask_all("cycles")) - begin
        self.clients.ask_all("clear")
        return seconds

    def close(self) -> None:
        self.clients.close()
        for shard in self.shards:
            shard.stop()
        transfer_queue.close()


def contest(given: Namespace) -> list[Spread]:
    """Samples per second of both sides, and their ratio for each number of clients."""
    python = given.peer_python or peer_python(".venv-dataflow", "dataflow.txt")
    sides = {"dock": Contender("the dock", [sys.executable, __file__, "--serve"]),
             "its keys": Contender("the dock's key-value interface", [sys.executable, __file__, "--serve", "keys"]),
             "transfer_queue": Contender("TransferQueue", [python, "benchmarks/peers/transfer_queue_clients.py"])}
    try:
        results = []
        for clients in given.clients:
            work = {"clients": clients, "cycles": given.cycles, "rows": given.rows, "mean": given.tokens}
            for side in sides.values():  # connections, allocators and caches, on both sides
                side.ask("round", **work | {"cycles": 2})
            await_calm(list(sides.values()))
            samples = clients * given.cycles * given.rows
            pairs = interleaved({name: lambda _, side=side, work=work, samples=samples:
                                 samples / side.ask("round", **work) for name, side in sides.items()}, given.repeats)
            results.append(ratios(pairs, "dock", "transfer_queue", float))
            each = "  ".join(f"{name} {Spread.of([pair[name] for pair in pairs])}" for name in sides)
            print(f"{clients} client{'s' if clients > 1 else ' '}  samples/s: {each}  ratio {results[-1]}, of its keys "
                  f"{ratios(pairs, 'its keys', 'transfer_queue', float)}", flush=True)
        return results
    finally:
        for side in sides.values():
            side.close()


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        driver = Driver(keys=sys.argv[2:] == ["keys"])
        serve(driver)
        driver.close()
        return
    parser = options(__doc__)
    parser.add_argument("--peer-python", type=Path, help="with TransferQueue; default: that of .venv-dataflow, made "
                        "if missing")
    parser.add_argument("--rows", type=int, default=64, help="of each put and get")
    parser.add_argument("--tokens", type=int, default=512, help="of a row on average")
    parser.add_argument("--cycles", type=int, help="put → list → get, by each client in a round; default 16, quick 4")
    given = parsed(parser)
    given.cycles = given.cycles or (4 if given.quick else 16)
    given.clients = (1, 2) if given.quick else CLIENTS
    print(COPIES, flush=True)
    results = contest(given)
    conclude("put, list, get: samples per second, transfer dock over TransferQueue 0.1.11, at the number of clients "
             "where the ratio is lowest", least(results), GOAL)


if __name__ == "__main__":
    main()
