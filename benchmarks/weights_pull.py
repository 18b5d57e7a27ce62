"""One pull of weights between two processes against the raw transport, in the same run.

A trainer process publishes one new version after the other, untimed, and a rollout process pulls each: the time is from
the call to verified weights in its memory, with everything that belongs to it: the store, finding a source, the proof
of the token, the lease, the manifest, requests, checksums. The raw transport moves as many bytes from the same memory
to the same memory, and nothing else: one connection that is open already, no header, no checksum.

    memory  one copy out of the other process's memory: a transport that copies can do no better
    ucx     messages of 1 MiB from worker to worker; left out where `ucxx` is not installed
    tcp     sendall on one side, recv_into on the other

A pull by memory does not copy: it ends when all bytes have been read for their checksums where they lie, in the
publisher's memory, which the rollout then has mapped and locked. So it may be faster than the raw copy.

All memory has been used before. Repeats of all sides take turns.

Then two ranks pull as those of a split model do (`tp: 2`) what a trainer on another machine has: bytes that came over
the network, over those of the ranks' slices. On one machine a rank pulls all for both. On two each pulls its own.

Last, two trainers with half of the weights each and two rollouts, each on a machine by name: from updated shards to
whole weights on both rollouts, by publishing and pulls, and as by NCCL (RobustRL, Figure 17): gathered on the first
trainer, which broadcasts them. Both by TCP, the latter in gloo's collectives.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.group import Served, on_ranks, timed
from benchmarks.ratio import Spread, conclude, interleaved, options, parsed, ratios
from distflow.config.models import missing_transport
from distflow.data.exchange import gather_values
from distflow.rpc.shared_memory import MemoryAddress
from distflow.store.interface import Store
from distflow.store.tcp import TCPStoreClient, store_on
from distflow.weights.publisher import Publisher
from distflow.weights.puller import Puller
from distflow.weights.shard_slice import Reads, ShardSlice, Split
from distflow.weights.sources import SourceClient, SourceConnections
from distflow.weights.transport import transports
from distflow.weights.transport.memory import LockedMemory
from workers.engines.embedded import build_model
from workers.engines.tensor_parallel import ROW_PARALLEL

TRANSPORTS = [way for way in ("memory", "ucx", "tcp") if not missing_transport(way)]
GOAL, MIB = 0.8, 1 << 20
TRAINER, ROLLOUT = range(2)
_TENSOR = _PART = 16 * MIB


class Trainer:
    """The process that has the weights."""

    def __init__(self, store: Store, token: bytes):
        self.publisher, self.version = Publisher(store, token, rank=0, ranks=1), 0
        self.server = socket.create_server(("127.0.0.1", 0))

    def make(self, mib: int) -> None:
        """Tensors of so many MiB together, published twice: both buffers have been used then."""
        self.tensors = {f"layers.{number}.weight": torch.full((_TENSOR // 4,), self.version, dtype=torch.int32)
                        for number in range(mib * MIB // _TENSOR)}
        self.publisher.buffers.spare.clear()
        for _ in range(3):
            self.publish()

    def publish(self) -> None:
        for tensor in self.tensors.values():
            tensor += 1
        self.version += 1
        self.publisher.publish(self.version, self.tensors)

    def open(self, said: dict[str, Any]) -> dict[str, Any]:
        """Return what the raw transports need to know."""
        if "worker" in said:
            self.source_end = transports("ucx", self.publisher.buffers)["ucx"].source_end(said)
            return self.source_end.reply
        return {"port": self.server.getsockname()[1]}

    def accept(self) -> None:
        self.sock = self.server.accept()[0]

    def lend(self) -> dict[str, Any]:
        return {"address": list(self.publisher.buffers.address_of(self.memory))}

    def send(self, way: str) -> None:
        """Send all of the weights, when the other side has said that it is ready."""
        self.sock.recv(1)
        if way == "tcp":
            self.sock.sendall(memoryview(self.memory))
        for begin in range(0, len(self.memory) if way == "ucx" else 0, _PART):
            self.source_end.end.move(self.source_end.end.endpoint.tag_send, self.memory[begin : begin + _PART],
                                     lambda _: None)

    def close(self) -> None:
        self.publisher.close()

    @property
    def memory(self) -> numpy.ndarray:
        return self.publisher.held[-1].memory[0]


class Rollout:
    """The process that wants them."""

    def __init__(self, store: Store, token: bytes):
        self.puller = Puller(store, token, "rollout")
        self.locked_memory = LockedMemory(self.puller.buffers)
        self.connections = {way: self._connections(token, way) for way in TRANSPORTS}

    def pull(self, way: str) -> float:
        self.puller.connections = self.connections[way]
        begun = time.perf_counter()
        weights = self.puller.pull()
        seconds = time.perf_counter() - begun
        name, first = next(weights.tensors())
        if int(first[0]) != weights.version or int(first[-1]) != weights.version:
            raise SystemExit(f"version {weights.version} has {first[0]} and {first[-1]} in {name}")
        return seconds

    def _connections(self, token: bytes, way: str) -> SourceConnections:
        """Return connections as the puller makes them, for one of the transports."""
        ways = transports(way, self.puller.buffers)
        return SourceConnections(lambda entry, head: SourceClient(entry, head, "rollout", token, ways, way,
                                                                  self.puller.deadline))

    def close(self) -> None:
        self.puller.close()

    def trim(self) -> None:
        self.puller.buffers.spare.clear()

    def begin(self) -> dict[str, Any]:
        self.puller_end = transports("ucx", self.puller.buffers)["ucx"].puller_end({}, 60.0)
        return self.puller_end.hello

    def connect(self, port: int, reply: dict[str, Any] | None) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        if reply is not None:
            self.puller_end.connect(reply)

    def raw(self, way: str, size: int, lent: dict[str, Any]) -> float:
        """Into the staging memory that the next pull that moves bytes will use."""
        target = self.puller.buffers.take(size)
        source = self.locked_memory.open(MemoryAddress(*lent["address"]))[:size] if way == "memory" else None
        view = memoryview(target)
        if source is not None:
            source[::4096].max()  # its pages are mapped, as those of a source that was pulled from before
        begun, filled = time.perf_counter(), 0
        if source is not None:
            view[:] = memoryview(source)
        else:
            self.sock.sendall(b"x")
        for begin in range(0, size if way == "ucx" else 0, _PART):
            self.puller_end.end.move(self.puller_end.end.endpoint.tag_recv, target[begin : begin + _PART],
                                     lambda _: None)
        while way == "tcp" and filled < size:
            filled += self.sock.recv_into(view[filled:])
        return time.perf_counter() - begun


def process(kind: type[Trainer] | type[Rollout], port: int, token: bytes) -> Trainer | Rollout:
    return kind(TCPStoreClient("127.0.0.1", port, 60.0), token)


class Pair(Served):
    """Both processes."""

    def __init__(self) -> None:
        self.store, token = store_on("127.0.0.1"), secrets.token_bytes(32)
        super().__init__(process, [(kind, self.store.port, token) for kind in (Trainer, Rollout)])
        port = self.ask(TRAINER, "open", {})["port"]
        reply = self.ask(TRAINER, "open", self.ask(ROLLOUT, "begin")) if "ucx" in TRANSPORTS else None
        self.order(TRAINER, "accept")
        self.ask(ROLLOUT, "connect", port, reply)
        self.answer(TRAINER)

    def pull(self, way: str) -> float:
        self.ask(TRAINER, "publish")
        return self.ask(ROLLOUT, "pull", way)

    def raw(self, way: str, size: int) -> float:
        lent = self.ask(TRAINER, "lend")
        if way != "memory":
            self.order(TRAINER, "send", way)
        seconds = self.ask(ROLLOUT, "raw", way, size, lent)
        if way != "memory":
            self.answer(TRAINER)
        return seconds


def measure(pair: Pair, mib: int, repeats: int) -> dict[str, Spread]:
    """Raw seconds over those of a pull, by transport."""
    size = mib * MIB
    pair.ask(ROLLOUT, "trim")
    pair.ask(TRAINER, "make", mib)
    sides: dict[str, Any] = {}
    for way in TRANSPORTS:
        sides[f"raw {way}"] = lambda _, way=way: pair.raw(way, size)
        sides[way] = lambda _, way=way: pair.pull(way)
    for way in 2 * TRANSPORTS:  # connections, and both buffers of either side
        pair.pull(way)
        pair.raw(way, size)
    runs = interleaved(sides, repeats)
    rates = {side: Spread.of([size / run[side] / 1e9 for run in runs]) for side in sides}
    print(f"{mib} MiB, GB/s (load {os.getloadavg()[0]:.1f})")
    found = {way: Spread.of([run[f"raw {way}"] / run[way] for run in runs]) for way in TRANSPORTS}
    for way in TRANSPORTS:
        print(f"  {way}: a pull {rates[way]}, raw {rates[f'raw {way}']}; a pull has {found[way]} of raw", flush=True)
    return found


def pull_split(port: int, token: bytes, machines: list[str], repeats: int) -> tuple[int, list[list[tuple[float, int]]]]:
    """Publish on the first rank; pull on the others, which are one rollout, slices and all in turns. Return the bytes
    that they read, and of each repeat seconds and bytes received, of slices and of all."""
    rank, store, split = dist.get_rank(), TCPStoreClient("127.0.0.1", port, 60.0).below(machines[-1]), Split(
        2, ROW_PARALLEL)
    os.environ["DISTFLOW_MACHINE"] = machines[rank]
    model = build_model(8192, 0, layers=8, hidden=512, heads=8, kv_heads=4)
    tensors = {name: parameter.data for name, parameter in model.named_parameters()}
    pieces = [piece for name, tensor in tensors.items()
              for piece in split.pieces(ShardSlice.whole(name, tuple(tensor.shape), tensor.dtype), tensor)]
    boxes = [{each.name: [(each.start, each.size)] for part, each, _ in pieces if part in (one, 2)} for one in range(2)]
    reads = Reads.on_machine(machines[rank], [*zip(machines[1:], boxes)], torch.float32) if rank else Reads()
    own = sum(each.nbytes for part, each, _ in pieces if part in (rank - 1, 2)) if rank else 0
    publisher = Publisher(store, token, rank=0, ranks=1) if rank == 0 else None
    pullers = [Puller(store, token, f"{number} {rank}", reads=each) for number, each in enumerate((reads, Reads()))] \
        if rank else []
    found: list[list[tuple[float, int]]] = []
    for version in range(2 * (repeats + 1)):  # the first two make connections and buffers
        if publisher:
            publisher.publish(version, {name: tensor + version for name, tensor in tensors.items()}, torch.float32,
                              {"": 1}, split)
        dist.barrier()
        begun, moved = time.perf_counter(), 0
        if pullers:
            chunks = pullers[version % 2].pull().chunks
            moved = chunks.moved if len(chunks.mapped) < len(chunks.parts) else 0
        dist.barrier()
        pair = time.perf_counter() - begun, sum(gather_values(moved))
        found = [*found[:-1], [*found[-1], pair]] if version % 2 else [*found, [pair]]
    for each in filter(None, (*pullers, publisher)):
        each.close()
    return sum(gather_values(own)), found[1:]


def measure_split(repeats: int) -> None:
    store = store_on("127.0.0.1")
    for name, machines in {"one machine": ["a", "b", "b"], "two machines": ["a", "b", "c"]}.items():
        read, runs = on_ranks(3, pull_split, store.port, secrets.token_bytes(32), machines, repeats)
        slices, whole = zip(*runs)
        print(f"a rollout of two ranks on {name}: {max(size for _, size in slices) / read:.3f} of the slices received, "
              f"{max(size for _, size in whole) / read:.3f} where all is pulled; seconds over those of all: "
              f"{Spread.of([less[0] / more[0] for less, more in runs])}", flush=True)


def spread_weights(port: int, token: bytes, mib: int, repeats: int) -> list[dict[str, float]]:
    """Return by repeat the seconds until both rollouts have what both trainers hold, by pulls and by a broadcast."""
    rank, store = dist.get_rank(), TCPStoreClient("127.0.0.1", port, 60.0).below(f"spread {mib}")
    trainers, receivers, mesh = dist.new_group([0, 1]), dist.new_group([0, 2, 3]), DeviceMesh("cpu", [0, 1])
    os.environ["DISTFLOW_MACHINE"] = f"machine {rank}"
    names, trains = [f"layers.{number}.weight" for number in range(mib * MIB // _TENSOR)], rank < 2
    halves = {name: torch.zeros(_TENSOR // 8) for name in names} if trains else {}
    wholes = {} if rank == 1 else {name: torch.zeros(_TENSOR // 4) for name in names}
    publisher = Publisher(store, token, rank=rank, ranks=2) if trains else None
    puller = None if trains else Puller(store, token, f"rollout {rank}")
    pulled = dict[str, torch.Tensor]()

    def pull() -> None:
        if publisher:
            publisher.publish(version, {name: DTensor.from_local(half, mesh, [Shard(0)]) for name, half in
                                        halves.items()})
        dist.barrier()
        if puller:
            pulled.update(puller.pull().tensors())

    def broadcast() -> None:
        for name in names:
            if trains:
                dist.gather(halves[name], [*wholes[name].chunk(2)] if rank == 0 else None, 0, group=trainers)
            if rank != 1:
                dist.broadcast(wholes[name], 0, group=receivers)

    found = []
    for version in range(1, repeats + 3):  # the first two make connections and buffers
        for half in halves.values():
            half.fill_(version)
        found.append({"pulls": timed(pull), "broadcast": timed(broadcast)})
        for each in () if trains else (pulled, wholes):
            if any({*each[name][::4095].tolist()} != {version} for name in names):
                raise SystemExit(f"rollout {rank} has not got version {version}")
        pulled.clear()
    for each in filter(None, (puller, publisher)):
        each.close()
    return found[2:]


def measure_spread(repeats: int, sizes: list[int]) -> None:
    store = store_on("127.0.0.1")
    for mib in sizes:
        runs = on_ranks(4, spread_weights, store.port, secrets.token_bytes(32), mib, repeats)
        print(f"{mib} MiB from two trainers to two rollouts: pulls {Spread.of([run['pulls'] for run in runs])} s, "
              f"gathered and broadcast {Spread.of([run['broadcast'] for run in runs])} s, "
              f"{ratios(runs, 'broadcast', 'pulls', float)} of the pulls", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--mib", type=int, nargs="+", help="multiples of 16; default 64 512 2048, with --quick 64 256")
    given = parsed(parser, arguments)
    sizes = given.mib or ([64, 256] if given.quick else [64, 512, 2048])
    if any(mib < 16 or mib % 16 for mib in sizes):
        parser.error("--mib: multiples of 16")
    pair = Pair()
    if missing := missing_transport("ucx"):
        print(f"ucx is left out: {missing}")
    found = {(mib, way): spread for mib in sizes for way, spread in measure(pair, mib, given.repeats).items()}
    pair.close()
    measure_split(given.repeats)
    measure_spread(given.repeats, sizes[:2])
    worst = min(found, key=lambda case: found[case].median)
    print(f"the least of all is {worst[1]} at {worst[0]} MiB")
    conclude("a pull's rate, verified, over that of the raw transport: the least of all sizes and transports",
             found[worst], GOAL, unit="of raw")


if __name__ == "__main__":
    main()
