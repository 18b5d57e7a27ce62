"""SIMULATION of the ranks, not of the store: what the control plane costs at 64 to 10,000 ranks.

The project's own code runs for each rank in a thread, or where nothing waits one after the other, against a real
TCPStore in a process of its own. Nothing is trained; no weights move. Counted for each rank are the operations on the
store; of the store's process the CPU seconds. Half of the ranks train; a machine has eight.

    start     all that `join_run` asks of the store: the ranks agree on the plan, the folder, the device and the token
    join      a machine's part of a rendezvous round, where machines come and go: some by the second that it waits
    step      what a rank publishes of its activity in a step of ten nodes
    version   a trainer rank's part of making a version the newest, and a rollout's of finding its sources
    meeting   a trainer rank's part of beginning an attempt of publishing
    restart   a rank's failure or that of others, the next attempt, and a look whether all are done
    second    what heartbeats and looks cost a rank in each second of a run

Beside them stand the CPU and memory that a rank needs to know where the rows of all go. Power: the slope of the
logarithms over the number of ranks; 0 is constant.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.ratio import Spread, conclude, options, parsed
from benchmarks.runs import ROOT
from distflow.recovery import supervisor
from distflow.recovery.membership import HEARTBEAT_SECONDS, Membership, Rendezvous, _report_losses
from distflow.recovery.rank_status import RankStatus
from distflow.recovery.restarts import Attempt, Failure, RestartCoordinator, RestartGroup
from distflow.recovery.store import RunStore
from distflow.store.interface import Store, poll_interval
from distflow.store.tcp import TCPStoreClient
from distflow.telemetry.heartbeat import Silence
from distflow.weights import directory as directories
from distflow.weights.directory import Directory, HeldChunks, SourceEntry
from distflow.weights.manifest import ManifestDigest, key
from distflow.weights.publisher import Publisher

SIZES, QUICK = (64, 256, 1024, 4096, 10_000), (16, 64)
LOCAL, NODES, LIMIT, SAMPLED = 8, 10, 3000.0, 64
PARTS = ("start", "join", "step", "version", "meeting", "restart", "second")


class CountedTCP(TCPStoreClient):
    """A rank's client. In this process's first thread, where ranks take turns, all share one connection."""

    shared: Any = None

    def __init__(self, port: int):
        Store.__init__(self, f"127.0.0.1:{port}", LIMIT)
        self.host, self.port, self.server = "127.0.0.1", port, None
        self.operations: Counter[str] = Counter()  # which a part of the store (`below`) counts too
        self.local = threading.local()

    def _call(self, function, wait=0.0):
        self.operations["all"] += 1
        return super()._call(function, wait)

    def _helper(self):
        if threading.current_thread() is not threading.main_thread():
            return super()._helper()
        if CountedTCP.shared is None or CountedTCP.shared.address != self.address:
            CountedTCP.shared = super()._helper()
        return CountedTCP.shared


@dataclass
class StoreProcess:
    """A store's process, and how a rank becomes its client."""

    process: subprocess.Popen
    client: Callable[[], Any]

    @property
    def cpu(self) -> float:
        user, system = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def tcp_store() -> Iterator[StoreProcess]:
    code = ("from distflow.store.tcp import store_on\nstore = store_on('127.0.0.1')\nprint(store.port, flush=True)\n"
            "input()")
    process = subprocess.Popen([sys.executable, "-c", code], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               env=os.environ | {"PYTHONPATH": str(ROOT)})
    port = int(process.stdout.readline())
    try:
        yield StoreProcess(process, lambda: CountedTCP(port))
    finally:
        process.kill()
        process.communicate()


@dataclass
class Cost:
    """Of one part: of a rank in the middle, and of the one that has most; and of the store's process for all."""

    operations: float
    most: float
    seconds: float


@dataclass
class Part:
    """Measures what ranks do on a store. `scale`: what stands for all, where only some ranks were measured."""

    kept: StoreProcess
    clients: Sequence[Any]
    scale: float = 1.0
    cost: Cost = field(default_factory=lambda: Cost(0, 0, 0))

    def __enter__(self) -> Part:
        for client in self.clients:
            client.operations.clear()
        self.before = self.kept.cpu
        return self

    def __exit__(self, *_: object) -> None:
        seconds = self.kept.cpu - self.before
        operations = [client.operations["all"] for client in self.clients]
        self.cost = Cost(statistics.mean(operations), max(operations), seconds * self.scale)



def together(ranks: Sequence[Any], work: Callable[[int, Any], object]) -> None:
    """Call `work(number, client)` in a thread for each rank."""
    failed: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number, ranks[number])
        except BaseException as error:  # noqa: BLE001 - a rank that fails ends the measurement
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not failed:
            thread.join(1.0)
    if failed:
        raise failed[0]


def start(ranks: int, number: int, client: Store) -> None:
    store = RunStore(LIMIT, client)
    store.rank, store.ranks, store.present = number, ranks, range(ranks)
    first = number == 0
    store.agree("plan", "a digest", "")
    store.broadcast("folder", "runs/grpo" if first else None)
    store.broadcast("resume", "yes" if first else None)
    store.agree("device", "cuda", "")
    store.broadcast("token", "f" * 64 if first else None)
    store.agree("DISTFLOW_TOKEN", "a checksum", "")
    shard = json.dumps(["10.0.0.1", 29400] if number % LOCAL == 0 else None)
    store.gather("dock", shard, range(ranks // 2))
    store.broadcast("dock met", "yes" if first else None)


def machine(client: Store, number: int, machines: int, silence: float = LIMIT) -> Membership:
    return Membership(client.below("machines"), f"run host-{number:05} 1 1", LOCAL, machines, machines,
                      machines // 2, False, silence, 20)


class FakePublisher(Publisher):
    """A trainer rank's publisher without memory and connections."""

    def __init__(self, client: Store, rank: int, ranks: int):
        self.rank, self.ranks = rank, ranks
        self.directory = Directory(client.below("weights/actor"), SourceEntry(f"trainer-{rank}", ("10.0.0.1", 1), rank))


def meet(ranks: int, attempts: dict[int, str], number: int, client: Store) -> None:
    attempts[number] = FakePublisher(client, number, ranks)._agree_on_attempt(LIMIT)


def fake_relay(client: Store, number: int) -> Directory:
    """Return a rollout's view of the weights, without memory and connections."""
    machine = f"{number // LOCAL:016x}"
    return Directory(client.below("weights/actor"), SourceEntry(f"rollout {number}", ("10.0.0.2", 1), machine=machine))


def publish(ranks: int, attempt: str, version: int, number: int, client: Store) -> None:
    made = FakePublisher(client, number, ranks)
    made.attempt, made.held = attempt, []
    made._withdraw()
    held = HeldChunks(version, key(version, attempt), 1, 1)
    made.directory.update(held=(held,))
    made._publish_part(version, ManifestDigest("f" * 32, 1, 1))


def pull(ranks: int, attempt: str, version: int, number: int, client: Store) -> None:
    """Ask the store what a pull asks that finds its source at once, by the rank that its machine has elected."""
    mine = fake_relay(client, number)
    mine.update()
    sought = key(version, attempt)
    assert mine.newest() == sought
    head = mine.newest_versions()[0]
    assert head.key == sought
    assert mine.elect(sought, mine.holders(range(ranks)))
    mine.update(held=(HeldChunks(version, sought, 0, 1),))
    mine.holders(range(ranks))
    mine.update(source="another")
    mine.update(held=(HeldChunks(version, sought, 1, 1),), source="", pulling="")


def restart(ranks: int, number: int, client: Store) -> None:
    group = RestartGroup("trainer", range(ranks), "trainer")
    restarts = RestartCoordinator(client, group, number, 3)
    failure = Failure(number, "it was killed", "training", 7, 7, symptom=number != ranks // 2, outside=True)
    attempt = restarts.next(Attempt(), failure)
    restarts.mark_done(attempt)
    restarts.all_done(attempt)


def step(client: Store, number: int, ranks: int) -> None:
    status = RankStatus(client, number, ranks)
    for node in range(NODES):
        status.set(f"waiting for rows of node {node}")
        status.set(f"computing node {node}", "training", str(node))
    for part in ("finishing", "taking the snapshot", "publishing the weights", "validating and saving"):
        status.set(part)


def second(kept: StoreProcess, clients: Sequence[Any], ranks: int) -> Cost:
    """Measure a supervisor's looks, a machine's heartbeat, a holder's heartbeat and a rollout's looks for a new
    version, each as often as in a second."""
    machines, few = ranks // LOCAL, clients[:SAMPLED]
    seen = {number: Silence() for number in range(machines)}
    attempt, group = Attempt(), RestartGroup("trainer", range(ranks), "trainer")
    costs = list[tuple[float, Cost]]()

    def measured(rate: float, look: Callable[[int, Any], object]) -> None:
        with Part(kept, few, ranks / len(few)) as part:
            for number, client in enumerate(few):
                look(number, client)
        costs.append((rate, part.cost))

    def supervise(number: int, client: Any) -> None:
        RestartCoordinator(client, group, number, 3).is_superseded(attempt)
        mine = machine(client, number // LOCAL, machines)
        mine.is_superseded(0)
        mine.holds(0, number // LOCAL)

    def beat(number: int, client: Any) -> None:
        mine = machine(client, number, machines)
        mine.is_superseded(0)
        mine.holds(0, number)
        mine.send_heartbeat(0, number, 1)
        _report_losses(mine, Rendezvous(0, number, machines), seen, set())

    def hold(number: int, client: Any) -> None:
        client.below("weights/actor/weights").put(f"holder/{number + 1}", "x" * 180)

    def look(number: int, client: Any) -> None:
        mine = Directory(client.below("weights/actor"), SourceEntry("x", ("x", 1)))
        mine.newest()
        mine.store.wait(["next/of another"], 0.001)

    measured(1 / poll_interval(supervisor._POLL, ranks), supervise)
    few = clients[: min(SAMPLED, machines)]
    measured(1 / HEARTBEAT_SECONDS / LOCAL, beat)
    few, interval = clients[:SAMPLED], poll_interval(directories.HEARTBEAT_SECONDS, ranks // 2)
    measured(1 / interval, hold)
    measured(0.5 / interval, look)
    total = [sum(rate * getattr(cost, name) for rate, cost in costs)
             for name in ("operations", "most", "seconds")]
    return Cost(*total)


def measure(kept: StoreProcess, ranks: int) -> dict[str, Cost]:
    os.environ |= {"WORLD_SIZE": str(ranks), "RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"}
    clients, machines, training = [kept.client() for _ in range(ranks)], ranks // LOCAL, ranks // 2
    found: dict[str, Cost] = {}

    def part(name: str, members: Sequence[Any], work: Callable[[int, Any], object]) -> None:
        with Part(kept, members) as counted:
            together(members, work)
        found[name] = counted.cost

    part("start", clients, lambda number, client: start(ranks, number, client))
    with contextlib.redirect_stdout(None):  # they say that they wait
        part("join", clients[:machines], lambda number, client: machine(client, number, machines).join())
    with Part(kept, clients[:SAMPLED], ranks / SAMPLED) as counted:
        for number, client in enumerate(clients[:SAMPLED]):
            step(client, number, ranks)
            client.get("")  # the store has all of it
    found["step"] = counted.cost
    attempts: dict[int, str] = {}
    part("meeting", clients[:training], lambda number, client: meet(training, attempts, number, client))
    found["version"] = version(kept, clients, training, attempts[0])
    part("restart", clients[:training], lambda number, client: restart(training, number, client))
    found["second"] = second(kept, clients, ranks)
    return found


def version(kept: StoreProcess, clients: Sequence[Any], training: int, attempt: str) -> Cost:
    trainers, rollouts, number = clients[:training], clients[training:], 1
    for rank, client in enumerate(trainers):
        publish(training, attempt, number, rank, client)
    for rank, client in enumerate(rollouts):  # the version before: all have it
        fake_relay(client, rank).update(held=(HeldChunks(number, key(number, attempt), 1, 1),))
    with Part(kept, trainers) as published:
        for rank, client in enumerate(trainers):
            publish(training, attempt, number + 1, rank, client)
    few = rollouts[:SAMPLED]
    with Part(kept, few, len(rollouts) / len(few)) as pulled:
        for rank, client in enumerate(few):
            pull(training, attempt, number + 1, rank, client)
    one, other = published.cost, pulled.cost
    return Cost((one.operations + other.operations) / 2, max(one.most, other.most), one.seconds + other.seconds)


def growth_exponent(values: dict[int, float]) -> float:
    """Return the slope of the logarithms, by least squares."""
    found = [(math.log(ranks), math.log(value)) for ranks, value in values.items() if value > 0]
    if len(found) < 2:
        return 0.0
    return statistics.linear_regression(*zip(*found)).slope


def routing(ranks: int) -> tuple[float, float, float, float]:
    """CPU seconds of a rank that learns where the rows of all go, after the first step: median, least and most; and the
    MiB that it needs, all notices included; in a process of its own."""
    said = subprocess.run([sys.executable, "-m", "benchmarks.routing", str(ranks)], check=True, capture_output=True,
                          text=True, cwd=ROOT).stdout.split()
    return float(said[0]), float(said[1]), float(said[2]), float(said[3]) / 1024


def table(found: dict[int, dict[str, Cost]]) -> Iterator[str]:
    yield "SIMULATION\n  part     ranks  operations of a rank (most)  store CPU s, of all   power of these"
    for part in PARTS:
        costs = {ranks: cost[part] for ranks, cost in found.items()}
        powers = [growth_exponent({ranks: getattr(cost, what) for ranks, cost in costs.items()})
                  for what in ("operations", "seconds")]
        for ranks, cost in costs.items():
            last = "  ".join(f"{each:.2f}" for each in powers) if ranks == max(costs) else ""
            yield f"  {part:8} {ranks:5}  {cost.operations:12.2f} ({cost.most:8.1f})  {cost.seconds:19.2f}   {last}"


def measured(sizes: Sequence[int]) -> dict[int, dict[str, Cost]]:
    found = {}
    for ranks in sizes:
        with tcp_store() as kept:
            found[ranks] = measure(kept, ranks)
        print(f"{ranks:,} ranks are measured", file=sys.stderr, flush=True)
    print("\n".join(table(found)), flush=True)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__, repeats=None)
    parser.add_argument("--most", type=int, default=SIZES[-1], help="ranks")
    given = parsed(parser, arguments)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    threading.stack_size(256 * 1024)
    sys.setswitchinterval(1.0)  # ten thousand threads that take turns by force would do little else
    sizes = [size for size in (QUICK if given.quick else SIZES) if size <= given.most]
    found = measured(sizes)
    for ranks in sizes:
        middle, least, most, memory = routing(ranks)
        times = f"{1000 * middle:,.0f} ({1000 * least:,.0f} to {1000 * most:,.0f})"
        print(f"  routing at {ranks:6,} ranks: {times} ms of CPU, {memory:,.0f} MiB more")
    starts = sum(found[sizes[-1]][part].seconds for part in ("start", "join", "meeting"))
    print(f"  start of {sizes[-1]:,} ranks: {starts:.1f} s of the store's CPU (goal: under 60 s)")
    powers = [growth_exponent({ranks: cost[part].operations for ranks, cost in found.items()}) for part in PARTS
              if part != "join"]
    conclude(f"SIMULATION: power of the growth of a rank's operations on the store, {sizes[0]} to {sizes[-1]:,} ranks",
             Spread(max(powers), min(powers), max(powers)), 0.05, unit="power", holds=starts < 60.0, at_least=False)


if __name__ == "__main__":
    main()
