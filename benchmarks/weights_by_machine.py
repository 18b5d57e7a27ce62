"""Weights for machines of several ranks each: one rank of a machine pulls a version for all, or each for itself.

Every machine is a network namespace whose link is shaped (`machines.py`); the trainer has one of its own. All ranks are
told at once that a version is there; the time is that of the last one to have it whole and verified. Counted are the
pulls that took bytes from another machine, and the bytes in and out of each machine by its network device, over those
of the weights: the ideal is one pull for each machine, 1 into it, and at most 1 out of it. The other side is the same
program, whose processes do not know which machine they are on: they use memory of a source on their own machine when
they meet it.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machines import NoMachines, address, machines  # noqa: E402 - needs the path above
from benchmarks.ratio import Spread, add_size, conclude, interleaved, options, parsed  # noqa: E402
from benchmarks.weights_relay import MIB, PORT, Trainer, ask, started, timed_pull  # noqa: E402
from distflow.store.tcp import TCPStoreClient  # noqa: E402
from distflow.telemetry.events import current  # noqa: E402
from distflow.weights.puller import Puller  # noqa: E402

SIDES = {"by machine": True, "each rank for itself": False}


class Rank:
    """A rank that samples. Its name begins with that of its machine."""

    def __init__(self, token: bytes, host: str, name: str, events: str):
        current().open(Path(events), 0)
        self.puller = Puller(TCPStoreClient(address(0), PORT, 60.0), token, name, host=host, deadline=30.0)
        self.machine = self.puller.directory.mine.machine

    def know(self, machine: bool) -> None:
        """Say from now on which machine this is, or that it is none."""
        self.puller.directory.machine_text = ""
        self.puller.directory.update(machine=self.machine if machine else "")

    def pull(self, version: int) -> float:
        """Return seconds until it is here."""
        return timed_pull(self.puller, version)

    def moved(self) -> tuple[int, int]:
        """Return the bytes that have come into this machine, and gone out of it."""
        lines = Path("/proc/self/net/dev").read_text().splitlines()
        counts = next(line.split(":")[1].split() for line in lines if line.strip().startswith("port:"))
        return int(counts[0]), int(counts[8])


class Fleet:
    """A trainer, and machines of several ranks."""

    def __init__(self, names: list[str], ranks: int, mib: int, events: Path):
        self.events, token = events, secrets.token_bytes(32)
        self.trainer = started(names[0], Trainer, token, mib)
        self.ranks = [[started(name, Rank, token, address(number), f"{number}.{rank}", str(events))
                       for rank in range(ranks)] for number, name in enumerate(names) if number]

    def update(self, by_machine: bool) -> tuple[float, int, list[int], int]:
        """Return the seconds until all ranks have a new version, pulls from another machine, bytes into each machine,
        and out of the one, or the trainer's, that has sent most."""
        every = [line for lines in self.ranks for line in lines]
        ask(every, "know", by_machine)
        firsts = [lines[0] for lines in self.ranks]
        version, before = ask([self.trainer], "publish")[0], ask(firsts, "moved")
        sent = ask([self.trainer], "sent")[0]
        seconds = max(ask(every, "pull", version))
        moved = [(into - earlier[0], out - earlier[1]) for (into, out), earlier in zip(ask(firsts, "moved"), before)]
        most = max(ask([self.trainer], "sent")[0] - sent, *(out for _, out in moved))
        pulls = [event for event in map(json.loads, self.events.read_text().splitlines())
                 if event["event"] == "weights_pulled" and event["version"] == version]
        return seconds, sum(map(_crosses, pulls)), [into for into, _ in moved], most


def _crosses(pull: dict[str, Any]) -> bool:
    return any(source.split(".")[0] != pull["who"].split(".")[0] for source in pull["sources"])


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__)
    add_size(parser, "machines", 3, 2, "that sample")
    add_size(parser, "ranks", 4, 2, "of each of them")
    add_size(parser, "mib", 32, 8, "of weights")
    parser.add_argument("--megabit", type=float, default=200.0, help="rate of each machine's link, in Mbit/s")
    given = parsed(parser, arguments)
    try:
        run(given)
    except NoMachines as error:
        print(f"skipped: this system cannot make machines of network namespaces: {error}")


def run(given: argparse.Namespace) -> None:
    size = given.mib * MIB
    with ExitStack() as stack:
        names = stack.enter_context(machines(given.machines + 1, given.megabit))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        fleet = Fleet(names, given.ranks, given.mib, Path(folder) / "events.jsonl")
        for knows in SIDES.values():  # memory, and connections
            fleet.update(knows)
        rounds = interleaved({side: lambda _, knows=knows: fleet.update(knows) for side, knows in SIDES.items()},
                             given.repeats)
    print(f"{given.machines} machines of {given.ranks} ranks, {given.mib} MiB over links of {given.megabit:g} Mbit/s: "
          f"the link's bound is {size * 8 / given.megabit / 1e6:.2f} s (load {os.getloadavg()[0]:.1f})")
    pulls = {side: Spread.of([each[side][1] for each in rounds]) for side in SIDES}
    for side in SIDES:
        into = Spread.of([count / size for each in rounds for count in each[side][2]])
        out = Spread.of([each[side][3] / size for each in rounds])
        print(f"  {side}: {Spread.of([each[side][0] for each in rounds])} s, {pulls[side]} pulls from another machine; "
              f"the weights went {into} times into a machine, {out} times out of the one that sent most", flush=True)
    faster = statistics.median(each["each rank for itself"][0] / each["by machine"][0] for each in rounds)
    print(f"by machine it takes 1/{faster:.2f} of the time")
    conclude("pulls of a version that cross a link, for each machine", Spread(*(
        count / given.machines for count in (pulls["by machine"].median, pulls["by machine"].low,
                                             pulls["by machine"].high))), 1.0, unit="pulls", at_least=False,
             holds=pulls["by machine"].high == given.machines)


if __name__ == "__main__":
    main()
