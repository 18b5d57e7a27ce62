"""Weights from one trainer to many rollouts over links of equal rate: with relays, and from the trainer alone.

Every process is on a machine of its own, a network namespace whose link is shaped (`machines.py`). All rollouts are
told at once that a version is there; the time is that of the last one to have it whole and verified, over the time that
a single rollout takes, in the same round. With relays each rollout serves the chunks that it has to the next one. The
other side is the same program, but rollouts take from the trainer only: its link carries everything.

At the end one more rollout joins, and pulls: the trainer's bytes stay what they were.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402 - needs the path above

from benchmarks.machines import NoMachines, address, enter, machines  # noqa: E402
from benchmarks.ratio import Spread, conclude, interleaved, options, parsed  # noqa: E402
from distflow.store.tcp import TCPStoreClient, store_on  # noqa: E402
from distflow.weights import puller  # noqa: E402
from distflow.weights.publisher import Publisher  # noqa: E402
from distflow.weights.puller import Puller  # noqa: E402

MIB, PORT = 1 << 20, 29400
GOALS = {8: 1.6, 16: 2.5}


def started(machine: str, kind: type[Any], *given: Any) -> Connection:
    """Make `kind(*given)` in a process on a machine; return the line by which its methods are asked."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.weights_relay"])
    ours, theirs = context.Pipe()
    context.Process(target=_answer, args=(theirs, machine, kind, given), daemon=True).start()
    theirs.close()
    ours.recv()
    return ours


def _answer(line: Connection, machine: str, kind: type[Any], given: tuple[Any, ...]) -> None:
    enter(machine)
    one = kind(*given)
    line.send(True)
    with contextlib.suppress(EOFError):
        while True:
            do, asked = line.recv()
            line.send(getattr(one, do)(*asked))


def ask(lines: Sequence[Connection], do: str, *given: Any) -> list[Any]:
    """Call a method of each object at once; return what each has returned."""
    for line in lines:
        line.send((do, given))
    return [line.recv() for line in lines]


class Trainer:
    """On the first machine, with the store."""

    def __init__(self, token: bytes, mib: int):
        self.store = store_on(address(0), PORT)
        self.publisher = Publisher(TCPStoreClient(address(0), PORT, 60.0), token, rank=0,
                                   ranks=1, host=address(0), transport="tcp")
        self.tensors, self.version = {"weight": torch.zeros(mib * MIB // 4, dtype=torch.int32)}, 0

    def publish(self) -> int:
        self.version += 1
        self.tensors["weight"] += 1
        self.publisher.publish(self.version, self.tensors)
        return self.version

    def sent(self) -> int:
        return self.publisher.sent


def timed_pull(rollout: Puller, version: int) -> float:
    """Pull a version that `Trainer` has published. Return seconds until it is here; end if it is not what it was."""
    begun = time.monotonic()
    weights = rollout.pull(least=version)
    seconds = time.monotonic() - begun
    whole = next(weights.tensors())[1]
    if weights.version != version or int(whole.min()) != version or int(whole.max()) != version:
        raise SystemExit(f"version {version} came as {int(whole.min())} to {int(whole.max())}")
    return seconds


class Rollout:
    def __init__(self, token: bytes, host: str):
        store = TCPStoreClient(address(0), PORT, 60.0)
        self.puller = Puller(store, token, f"rollout-{host}", host=host, transport="tcp", deadline=30.0)

    def pull(self, version: int, relays: bool) -> float:
        """Return the seconds until it is here. Without relays only trainer ranks are seen."""
        puller.order_sources = _ORDERED if relays else _trainers
        puller.ChunkPuller._successor = _SUCCESSOR if relays else lambda *_: None
        return timed_pull(self.puller, version)


_ORDERED, _SUCCESSOR = puller.order_sources, puller.ChunkPuller._successor


def _trainers(*given: Any) -> Sequence[Any]:
    return [entry for entry in _ORDERED(*given) if entry.rank >= 0]


class Fleet:
    """A trainer and rollouts, each on its machine."""

    def __init__(self, names: list[str], mib: int):
        token = secrets.token_bytes(32)
        self.trainer = [started(names[0], Trainer, token, mib)]
        self.rollouts = [started(name, Rollout, token, address(number)) for number, name in enumerate(names) if number]

    def update(self, count: int, relays: bool) -> float:
        """Return the seconds until the first `count` rollouts have a new version."""
        return max(ask(self.rollouts[:count], "pull", self.publish(), relays))

    def publish(self) -> int:
        return ask(self.trainer, "publish")[0]

    def sent(self) -> int:
        return ask(self.trainer, "sent")[0]

    def join_late(self, count: int) -> tuple[int, int]:
        """Return the trainer's bytes before and after a rollout joins that has nothing yet; it is the last one."""
        self.update(count, True)
        version, before = self.publish(), self.sent()
        ask(self.rollouts[:count], "pull", version, True)
        first = self.sent()
        ask(self.rollouts[-1:], "pull", version, True)
        return first - before, self.sent() - before


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--rollouts", type=int, nargs="+", help="default 8 16, with --quick 4")
    parser.add_argument("--mib", type=int, help="of weights; default 32, with --quick 8")
    parser.add_argument("--megabit", type=float, default=200.0, help="rate of each machine's link, in Mbit/s")
    given = parsed(parser, arguments)
    counts = sorted(given.rollouts or ([4] if given.quick else [8, 16]))
    try:
        run(counts, given.mib or (8 if given.quick else 32), given)
    except NoMachines as error:
        print(f"skipped: this system cannot make machines of network namespaces: {error}")


def run(counts: list[int], mib: int, given: argparse.Namespace) -> None:
    bound = mib * MIB * 8 / (given.megabit * 1e6)
    sides: dict[str, tuple[int, bool]] = {"one": (1, True)}
    sides |= {f"{count} with relays": (count, True) for count in counts}
    sides |= {f"{count} from the trainer alone": (count, False) for count in counts}
    with ExitStack() as stack:
        names = stack.enter_context(machines(max(counts) + 2, given.megabit))
        fleet = Fleet(names, mib)
        fleet.update(max(counts), True)  # memory, and connections
        rounds = interleaved({side: lambda _, what=what: fleet.update(*what) for side, what in sides.items()},
                             given.repeats)
        once, after = fleet.join_late(max(counts))
    print(f"{mib} MiB over links of {given.megabit:g} Mbit/s: the link's bound is {bound:.2f} s "
          f"(load {os.getloadavg()[0]:.1f})")
    found = {side: Spread.of([seconds[side] / seconds["one"] for seconds in rounds]) for side in sides}
    for side in sides:
        print(f"  {side}: {Spread.of([seconds[side] for seconds in rounds])} s, {found[side]} of one")
    print(f"the trainer sent {once / MIB:.0f} MiB for a version, and {after / MIB:.0f} MiB when another rollout had "
          "joined late", flush=True)
    for count in counts:
        conclude(f"{count} rollouts have new weights in how many times what one takes, and a late one costs the "
                 "trainer nothing", found[f"{count} with relays"], GOALS.get(count, 2.5), unit="x", at_least=False,
                 holds=after == once == mib * MIB)


if __name__ == "__main__":
    main()
