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

One client alone is also measured in copies: what put, list and get take together, over one `memcpy` of the rows' bytes.
Its rows lie in the two storage shards in turns, so none of them is beside the one before it: the worst case.

With each storage shard that is added, what goes through the busiest one should fall in proportion (MindSpeed RL, Fig.
9): that is counted in bytes, not timed, since on few cores all storage shards share what one can do.

`--leases`: leases, each with its commit, of 1, 4 and 16 consumers, which have an index each, in two processes in turns.
Leases per second of these processes' own time tell what an index can serve; by the clock the one client has its part.
"""

from __future__ import annotations

import multiprocessing
import secrets
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.contender import Contender, await_calm, serve
from benchmarks.peer_environment import peer_python
from benchmarks.ratio import Spread, conclude, interleaved, least, options, parsed, ratios
from distflow.data.batch import Batch, Ragged
from distflow.data.row_copies import COPIES
from distflow.dock import Consumer, DockClient, StorageShardServer
from distflow.dock.process import ShardProcess, start

GOAL, BUSIEST_GOAL, CLIENTS, SHARD_COUNTS = 2.0, 1.05, (1, 2, 4, 8), (1, 2, 4, 8)
COPIES_GOAL, SHAPES, WARM = 8.0, ((1024, 2048), (2048, 1024), (4096, 512)), 3
"""Rows and tokens of each, all of 24 MiB; rounds of which no time is taken."""
CONSUMERS, LEASED, LEASES_GOAL = (1, 4, 16), 8, 0.8
"""Numbers of consumers, rows of a lease, and the least share of one consumer's rate."""
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


def client(line: Connection, addresses: list[tuple[str, int]], token: bytes, number: int) -> None:
    """Run one of the dock's clients: rounds until there are no more."""
    torch.set_num_threads(1)
    with DockClient(addresses, token, f"client {number}", timeout=_WAIT) as dock:
        dock.status()
        line.send("ready")
        while (job := line.recv()) is not None:
            first, cycles, rows, mean = job
            parts = [batch_of(torch.arange(first + cycle * rows, first + (cycle + 1) * rows), mean)
                     for cycle in range(cycles)]
            line.send("made")
            line.recv()
            for part in parts:
                dock.put(part)
                lease = dock.lease("update", rows, wait=_WAIT)
                got = dock.fetch(lease)
                if not (torch.equal(got.ids, lease.ids) and
                        torch.equal(got["tokens"].lengths, lengths_of(lease.ids, mean))):
                    raise SystemExit(f"client {number} got other rows than it leased")
                dock.commit(lease)
            line.send(time.perf_counter())


class Driver:
    """The dock's side: two storage shards and the clients, as processes."""

    def __init__(self) -> None:
        self.token = secrets.token_bytes(32)
        self.children = [start(self.token) for _ in range(2)]
        self.addresses = [child.address for child in self.children]
        with DockClient(self.addresses, self.token, "driver", timeout=_WAIT) as dock:
            dock.configure((Consumer("update", _COLUMNS),))
        self.clients: list[tuple[Any, Connection]] = []
        self.next = 0

    def round(self, clients: int, cycles: int, rows: int, mean: int) -> float:
        """Return the seconds for every client's `cycles`."""
        while len(self.clients) < clients:
            self._start()
        lines = [line for _, line in self.clients[:clients]]
        for line in lines:
            line.send((self.next, cycles, rows, mean))
            self.next += cycles * rows
        for line in lines:
            line.recv()
        begin = time.perf_counter()
        for line in lines:
            line.send("go")
        return max(line.recv() for line in lines) - begin

    def close(self) -> None:
        for process, line in self.clients:
            line.send(None)
            process.join()
        for child in self.children:
            child.stop()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=client, args=(theirs, self.addresses, self.token, len(self.clients)))
        process.start()
        theirs.close()
        ours.recv()
        self.clients.append((process, ours))


def contest(given: Namespace) -> list[Spread]:
    """Samples per second of both sides, and their ratio for each number of clients."""
    python = given.peer_python or peer_python(".venv-dataflow", "dataflow.txt")
    sides = {"dock": Contender("the dock", [sys.executable, __file__, "--serve"]),
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
            print(f"{clients} client{'s' if clients > 1 else ' '}  samples/s: {each}  ratio {results[-1]}", flush=True)
        return results
    finally:
        for side in sides.values():
            side.close()


def busiest(shards: int, rows: int, mean: int) -> tuple[float, float]:
    """Return the bytes through the busiest storage shard over the even share of the rows, and all bytes over those of
    the rows."""
    token = secrets.token_bytes(32)
    services = [StorageShardServer(token) for _ in range(shards)]
    batch = batch_of(torch.arange(rows), mean)
    with DockClient([service.start() for service in services], token, "counter") as dock:
        dock.configure((Consumer("update", _COLUMNS),))
        dock.put(batch)
        lease = dock.lease("update", rows, wait=_WAIT)
        dock.fetch(lease)
        dock.commit(lease)
        through = [part["received"] + part["sent"] for part in dock.status()]
    for service in services:
        service.close()
    payload = 2 * int(8 * rows + sum(12 * length + 16 for length in batch["tokens"].lengths.tolist()) + 4 * rows)
    return max(through) * shards / payload, sum(through) / payload


def time_in_copies(rows: int, mean: int, rounds: int) -> Spread:
    """Return what put, list and get of one client take, over a copy of the rows' bytes from warm memory to warm
    memory."""
    token = secrets.token_bytes(32)
    children = [start(token) for _ in range(2)]
    found = []
    with DockClient([child.address for child in children], token, "alone", timeout=_WAIT) as dock:
        dock.configure((Consumer("update", _COLUMNS),))
        for number in range(WARM + rounds):
            part = batch_of(torch.arange(number * rows, (number + 1) * rows), mean)
            source, copied = torch.ones(2, 12 * len(part["tokens"].values), dtype=torch.uint8)
            begin = time.perf_counter()
            copied.copy_(source)
            copy = time.perf_counter() - begin
            del source, copied
            begin = time.perf_counter()
            dock.put(part)
            lease = dock.lease("update", rows, wait=_WAIT)
            got = dock.fetch(lease)
            found.append((time.perf_counter() - begin) / copy)
            if not (torch.equal(got.ids, part.ids) and torch.equal(got["tokens"].values, part["tokens"].values)):
                raise SystemExit("one client alone got other rows than it put")
            dock.commit(lease)
            del got
    for child in children:
        child.stop()
    return Spread.of(found[WARM:])


def show_copies(rounds: int) -> list[Spread]:
    """Print what one client takes in copies, for each shape of rows, and return it."""
    found = []
    for rows, mean in SHAPES:
        found.append(time_in_copies(rows, mean, rounds))
        print(f"one client, {rows} rows of {mean} tokens: {found[-1]} copies of their bytes", flush=True)
    return found


def lease_rates(consumers: int, count: int) -> tuple[float, float]:
    """Return leases per second of the shards' processor time, and by the clock, of `count` leases in all."""
    token = secrets.token_bytes(32)
    children = [start(token) for _ in range(2)]
    names, each = [f"consumer {number}" for number in range(consumers)], count // consumers
    with DockClient([child.address for child in children], token, "alone", timeout=_WAIT) as dock:
        dock.configure(tuple(Consumer(name, _COLUMNS, home=number % 2) for number, name in enumerate(names)))
        dock.put(batch_of(torch.arange((1 + each) * LEASED), 1))
        for name in names:  # which waits until its index has the rows
            dock.commit(dock.lease(name, LEASED, least=LEASED, wait=_WAIT))
        processor, begin = _processor_seconds(children), time.perf_counter()
        for _ in range(each):
            for name in names:
                lease = dock.lease(name, LEASED, wait=_WAIT)
                if len(lease.ids) != LEASED:
                    raise SystemExit(f"{name} got {len(lease.ids)} of {LEASED} rows")
                dock.commit(lease)
        seconds, processor = time.perf_counter() - begin, _processor_seconds(children) - processor
    for child in children:
        child.stop()
    return each * consumers / processor, each * consumers / seconds


def _processor_seconds(children: Sequence[ShardProcess]) -> float:
    times = [psutil.Process(child.process.pid).cpu_times() for child in children]
    return sum(each.user + each.system for each in times)


def show_leases(given: Namespace) -> None:
    """Print the rates of leases, for each number of consumers in turns, and the claim that more cost no more."""
    pairs = interleaved({str(consumers): lambda _, consumers=consumers: lease_rates(consumers, 256 * given.cycles)
                         for consumers in CONSUMERS}, given.repeats)
    for consumers in CONSUMERS:
        own, clock = (Spread.of([pair[str(consumers)][place] for pair in pairs]) for place in range(2))
        print(f"{consumers} consumer{'s' * (consumers > 1)}  leases of {LEASED} rows per second of the shards' time: "
              f"{own}  by the clock: {clock}", flush=True)
    own = [{name: pair[name][0] for name in pair} for pair in pairs]
    conclude(f"leases per second of the shards' time, {CONSUMERS[-1]} consumers over one",
             ratios(own, str(CONSUMERS[-1]), str(CONSUMERS[0]), float), LEASES_GOAL)


def show_shards(given: Namespace) -> bool:
    """Print how the load divides; True if the busiest storage shard stays near the even share."""
    good = True
    for shards in SHARD_COUNTS:
        share, total = busiest(shards, given.rows * 16, given.tokens)
        good &= share <= BUSIEST_GOAL
        print(f"{shards} storage shards  bytes through the busiest: {share:.3f} of an even share of the rows' bytes, "
              f"through all: {total:.3f}", flush=True)
    return good


def main() -> None:
    if sys.argv[1:] == ["--serve"]:
        driver = Driver()
        serve(driver)
        driver.close()
        return
    parser = options(__doc__)
    parser.add_argument("--peer-python", type=Path, help="with TransferQueue; default: that of .venv-dataflow, made "
                        "if missing")
    parser.add_argument("--alone", action="store_true", help="without TransferQueue: what needs no other package")
    parser.add_argument("--rows", type=int, default=64, help="of each put and get")
    parser.add_argument("--tokens", type=int, default=512, help="of a row on average")
    parser.add_argument("--cycles", type=int, help="put → list → get, by each client in a round; default 16, quick 4")
    parser.add_argument("--leases", action="store_true", help="leases of many consumers alone")
    given = parsed(parser)
    given.cycles = given.cycles or (4 if given.quick else 16)
    given.clients = (1, 2) if given.quick else CLIENTS
    if given.leases:
        show_leases(given)
        return
    print(COPIES, flush=True)
    even = show_shards(given)
    copies = show_copies(given.cycles)
    conclude("put, list and get of one client, over a copy of its rows' bytes, the worst of three shapes",
             max(copies, key=lambda spread: spread.median), COPIES_GOAL, unit="copies", at_least=False)
    if given.alone:
        return
    results = contest(given)
    if not even:
        print(f"the busiest storage shard carries more than {BUSIEST_GOAL} of an even share")
    conclude("put, list, get: samples per second, transfer dock over TransferQueue 0.1.11, at the number of clients "
             "where the ratio is lowest", least(results), GOAL, holds=even)


if __name__ == "__main__":
    main()
