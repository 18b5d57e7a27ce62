"""Rows from half of the machines to the other half: does the time stay flat as machines and rows grow together?

Machines are network namespaces with links of equal rate (`machines.py`), two ranks on each. The ranks of the first half
have rows, as rollout machines do; those of the second half get them, as trainers would. Rows per machine stay the
same, so each link carries the same number of bytes whatever the number of machines: that many bytes at the link's rate
are the bound. Sides: the databuffer, and our own gather and scatter by way of rank 0 (`rank0.py`), whose link carries
everything. Every row's id and contents are verified at the far end, as in `databuffer_vs_peers.py`.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.databuffer_vs_peers import verify  # noqa: E402 - needs the path above
from benchmarks.gloo_ranks import Host, work  # noqa: E402
from benchmarks.machines import NoMachines, enter, machines  # noqa: E402
from benchmarks.ratio import Spread, conclude, interleaved, options, parsed  # noqa: E402
from benchmarks.rows import Case  # noqa: E402

RANKS = 2
"""On each machine."""
WAYS = ("databuffer", "rank0")
GOAL, NEAR = 0.9, 1.25


class Ranks(Host):
    """The ranks of a case, on their machines."""

    def __init__(self, way: str, names: list[str]):
        super().__init__(way)
        self.names = names

    def start(self, case: dict[str, Any], rank: int, store: str, line: Connection) -> Any:
        machine = self.names[rank // RANKS]
        return self.context.Process(target=work_within, args=(machine, self.way, case, rank, store, line), daemon=True)


def work_within(machine: str, way: str, case: dict[str, Any], rank: int, store: str,
                line: Connection) -> None:
    enter(machine)
    work(way, case, rank, store, line)


def case_of(count: int, mib: float) -> Case:
    """`mib` MiB on each of the first half of `count` machines, for the other half."""
    half = count // 2 * RANKS
    return Case(mib * count / 2, half, half, half)


def measure(case: Case, hosts: dict[str, Ranks], repeats: int) -> list[dict[str, float]]:
    """Return the seconds of each side, repeat by repeat; a first round, which opens connections, is not among them."""
    def one(way: str, repeat: int) -> float:
        said = hosts[way].round(repeat + 1)
        found = hosts[way].check(repeat + 1, repeat in (-1, repeats - 1))
        verify(way, case, repeat + 1, found["ids"], found["wrong"])
        return said["seconds"]

    for way, host in hosts.items():
        host.prepare(asdict(case))
        host.make()
        one(way, -1)
    return interleaved({way: lambda repeat, way=way: one(way, repeat) for way in hosts}, repeats)


def run(count: int, given: argparse.Namespace) -> list[dict[str, float]]:
    """Return each side's seconds over the link bound."""
    case = case_of(count, given.mib)
    with ExitStack() as stack:
        names = stack.enter_context(machines(count, given.megabit))
        hosts = {way: Ranks(way, names) for way in WAYS}
        for host in hosts.values():
            stack.callback(host.close)
        pairs = measure(case, hosts, given.repeats)
    bound = case.nbytes / (count / 2) * 8 / (given.megabit * 1e6)
    found = [{way: seconds / bound for way, seconds in pair.items()} for pair in pairs]
    spreads = ", ".join(f"{way} {Spread.of([pair[way] for pair in found])}" for way in WAYS)
    print(f"{count} machines, {case.rows} rows of {case.nbytes / 2**20:.0f} MiB, link bound {bound:.2f} s, "
          f"times the bound: {spreads} (load {os.getloadavg()[0]:.1f})", flush=True)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--machines", type=int, nargs="+", help="even numbers; default 2 4 8, with --quick 2 4")
    parser.add_argument("--mib", type=float, help="of rows on each sending machine; default 48, with --quick 4")
    parser.add_argument("--megabit", type=float, default=200.0, help="rate of each machine's link, in Mbit/s")
    given = parsed(parser, arguments)
    given.machines = given.machines or ([2, 4] if given.quick else [2, 4, 8])
    if any(count < 2 or count % 2 for count in given.machines):
        parser.error("--machines: even numbers from 2 on, as one half sends to the other")
    given.mib = given.mib or (4 if given.quick else 48)
    try:
        results = {count: run(count, given) for count in sorted(given.machines)}
    except NoMachines as error:
        print(f"skipped: this system cannot make machines of network namespaces: {error}")
        return
    first, last = min(results), max(results)
    near = max(Spread.of([pair["databuffer"] for pair in pairs]).median for pairs in results.values())
    grown = Spread.of([pair["rank0"] for pair in results[last]]).median / Spread.of(
        [pair["rank0"] for pair in results[first]]).median
    print(f"databuffer: at most {near:.2f} times the link bound (goal {NEAR}); rank 0 takes {grown:.1f} times as long "
          f"with {last} machines as with {first}")
    linear = Spread.of([few["databuffer"] / many["databuffer"]
                        for few, many in zip(results[first], results[last], strict=True)])
    conclude(f"linearity from {first} to {last} machines, and within {NEAR} of the link bound", linear, GOAL,
             unit="of linear", holds=near <= NEAR)


if __name__ == "__main__":
    main()
