"""Rows from one data-parallel size to another: distflow's databuffer beside verl's driver.

The same rows (`rows.py`: seven columns of a reinforcement-learning batch, and an id each) go from `P` producers to `C`
consumers by either contender, each in processes of its own that stay from repeat to repeat, one contender at a time:

- databuffer  distflow's: `start` with the rows, `take` in the other layout, on real gloo ranks.
- verl        0.9.1: RayWorkerGroup → DataProto in the driver → RayWorkerGroup, as its trainer does. Always padded.

Time runs from rows in the producers' memory to tensors in every consumer's, by the slowest. Our ranks begin at one
moment; with Ray the driver's first call is the begin, since all others wait for it. A first round, not measured, warms
pools and connections. In every round the ids are compared with what was sent: each row once. In the first and the last
round all contents are compared too. None of this is timed.

Layouts: 4→2, 2→4 and 8→2 go from ranks 0 … P - 1 to ranks 0 … C - 1 of the same processes, so for the contenders that
look where a row is, some rows may stay. 4→4 goes from ranks 0 … 3 to ranks 4 … 7: every row moves; with `@2` from one
machine to another, as far as the databuffer knows, and without the peer, whose two groups are always separate processes
of one. Who gets which rows is each contender's choice (databuffer: balanced by tokens; verl: even, contiguous shares),
since each does what its users get.

Memory is the growth of the resident set over what a process had without any rows, with the rows that it produces, at
its peak in a round; a page that several processes map counts in equal parts. The goal is for all processes together,
relative to the rows, unpadded, before and after.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks.contender import Contender, await_calm
from benchmarks.peer_environment import peer_python
from benchmarks.ratio import Spread, conclude, interleaved, options, parsed, ratios
from benchmarks.rows import PADDED, RAGGED, Case
from distflow.data.row_copies import COPIES

OURS, PEER = "databuffer", "verl"
GOALS = {PADDED: 20.0, RAGGED: 40.0}
"""Over verl, which carries ragged rows padded."""
CLOSE = 1.2
"""Of the rows, before and after: what all processes may hold."""
GOAL_MIB = 160
LARGE = 256
"""MiB of a case after which all contenders start afresh: what they keep of it would leave too little for the next."""
LAYOUTS = ("4-2", "2-4", "4-4", "8-2", "4-4@2")


@dataclass(frozen=True)
class Round:
    """One redistribution: seconds, and bytes of all processes together."""

    seconds: float
    memory: int


@dataclass(frozen=True)
class Goal:
    """One claim, what was measured of it, and what it should be."""

    claim: str
    measured: Spread
    unit: str
    goal: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        return self.measured.median >= self.goal if self.at_least else self.measured.median <= self.goal


Results = dict[Case, list[dict[str, Round]]]


def cases(given: argparse.Namespace) -> Iterator[Case]:
    for layout in given.layouts:
        ranks, _, machines = layout.partition("@")
        producers, consumers = map(int, ranks.split("-"))
        first = producers if producers == consumers else 0
        for size in given.sizes:
            for form in (PADDED, RAGGED):
                yield Case(size, producers, consumers, first, form, *given.tokens, int(machines or 1))


def enter(stack: ExitStack, given: argparse.Namespace) -> dict[str, Contender]:
    """Start the contenders' processes; return them by name. They end with the stack."""
    entered = {}
    store = 512 + 6 * round(max(given.sizes))  # MiB for Ray's objects: with less, they would go to disk
    commands = {OURS: [sys.executable, "benchmarks/gloo_ranks.py"],
                PEER: [given.peer_python, "benchmarks/peers/verl_dataproto.py", store]}
    for name, command in commands.items():
        if command[0]:
            entered[name] = Contender(name, command)
            stack.callback(entered[name].close)
    return entered


def leave(entered: dict[str, Contender]) -> dict[str, Contender]:
    """End the contenders, all at once, as they began."""
    for contender in entered.values():
        contender.begin_close()
    for contender in entered.values():
        contender.close()
    return {}


def measure(contender: Contender, case: Case, repeats: int, repeat: int) -> Round:
    """Repeat -1 is the first round, which nobody measures."""
    number = repeat + 1
    contender.forget_peaks()
    seconds = contender.ask("round", repeat=number)
    memory = contender.peak()
    found = contender.ask("check", repeat=number, contents=repeat in (-1, repeats - 1))
    verify(contender.name, case, number, found["ids"], found["wrong"])
    return Round(seconds, memory)


def verify(name: str, case: Case, repeat: int, ids: Sequence[Sequence[int]], wrong: Sequence[str]) -> None:
    """Compare what consumers have with what producers sent.

    Raises:
        SystemExit: a row is missing, came twice, is of another repeat, or its contents are not its own.
    """
    expected = range(case.first_id(repeat), case.first_id(repeat + 1))
    arrived = sorted(row for part in ids for row in part)
    if arrived != list(expected):
        lost, strange = sorted(set(expected) - set(arrived)), sorted(set(arrived) - set(expected))
        raise SystemExit(f"{name}, {case.name}, repeat {repeat}: {len(arrived)} rows arrived of {len(expected)}; "
                         f"lost {lost[:5]}, never sent {strange[:5]}, the others more than once")
    if wrong:
        raise SystemExit(f"{name}, {case.name}, repeat {repeat}: {wrong[0]}")


def run(case: Case, entered: dict[str, Contender], repeats: int) -> list[dict[str, Round]]:
    entered = entered if case.machines == 1 else {OURS: entered[OURS]}
    for contender in entered.values():
        contender.order("prepare", case=asdict(case))  # all at once: starting takes most of a short run
    for contender in entered.values():
        contender.answer()
    await_calm(list(entered.values()))
    for contender in entered.values():
        contender.measure_baseline()
        contender.ask("make")
        measure(contender, case, repeats, -1)
    return interleaved({name: partial(measure, contender, case, repeats) for name, contender in entered.items()},
                       repeats)


def show(case: Case, pairs: Sequence[dict[str, Round]]) -> None:
    print(f"\n{case.name}: {case.rows} rows, {case.nbytes / 2**20:.0f} MiB without padding (load "
          f"{os.getloadavg()[0]:.1f})")
    for name in pairs[0]:
        print(f"{name:11} ms {Spread.of([1000 * pair[name].seconds for pair in pairs])}, memory of the rows "
              f"{held(case, pairs, name)}"
              + (f", {times_ratio(pairs)} times as long as the databuffer" if name != OURS else ""), flush=True)


def times_ratio(pairs: Sequence[dict[str, Round]]) -> Spread:
    """Return how many times as long as the databuffer the peer takes."""
    return ratios(pairs, PEER, OURS, lambda part: part.seconds)


def held(case: Case, pairs: Sequence[dict[str, Round]], name: str) -> Spread:
    """Return the memory of all processes, relative to all rows before and after."""
    return Spread.of([pair[name].memory / (2 * case.nbytes) for pair in pairs])


def goals(results: Results) -> Iterator[Goal]:
    """Yield what was to be shown, in the layout that shows it least: the speed first, if the peer is there."""
    size = GOAL_MIB if any(case.mib == GOAL_MIB for case in results) else max(case.mib for case in results)
    for form, goal in GOALS.items():
        chosen = {case: pairs for case, pairs in results.items() if case.mib == size and case.form == form}
        found = [(case, times_ratio(pairs)) for case, pairs in chosen.items() if PEER in pairs[0]]
        if found:
            case, worst = min(found, key=lambda each: each[1].median)
            yield Goal(f"redistribution at {case.name}, databuffer over {PEER}", worst, "x", goal)
        case, worst = max(((case, held(case, pairs, OURS)) for case, pairs in chosen.items()),
                          key=lambda each: each[1].median)
        yield Goal(f"peak memory of all the databuffer's processes at {case.name}", worst, "of the rows", CLOSE,
                   at_least=False)


def judge(results: Results, left_out: str) -> None:
    """Print every goal, and the first as the last line; it holds if the others do."""
    found = list(goals(results))
    print()
    for goal in found:
        print(f"{'met    ' if goal.met else 'NOT met'}  {goal.claim}: {goal.measured} {goal.unit}, "
              f"goal {'at least' if goal.at_least else 'at most'} {goal.goal:g}")
    if left_out:
        print(f"left out: {left_out}")
    first = found[0]
    conclude(first.claim, first.measured, first.goal, unit=first.unit, at_least=first.at_least,
             holds=all(goal.met for goal in found))


def options_here() -> argparse.ArgumentParser:
    parser = options(__doc__)
    parser.add_argument("--sizes", type=float, nargs="+", metavar="MIB", help="of padded rows; default 40 160 640, "
                        "with --quick 40")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, help="default: all, with --quick 4-2")
    parser.add_argument("--tokens", type=int, nargs=2, default=(512, 2048), metavar=("PROMPT", "RESPONSE"),
                        help="the longest that there may be; default 512 2048")
    parser.add_argument("--peer-python", type=Path, help="with verl; default: that of .venv-peers, made if missing; "
                        "with --quick it is left out then")
    return parser


def complete_flags(given: argparse.Namespace) -> tuple[argparse.Namespace, str]:
    """Return the flags with their defaults filled in, and what `--quick` leaves out."""
    left_out = []
    if given.quick:
        left_out.append("every size and layout that the tables do not show")
    given.sizes = sorted(given.sizes or ([40] if given.quick else [40, 160, 640]))
    given.layouts = given.layouts or (["4-2"] if given.quick else list(LAYOUTS))
    given.peer_python = given.peer_python or peer_python(".venv-peers", "dataflow.txt", install=not given.quick)
    if not given.peer_python:
        left_out.append("verl, which is not installed (a run without --quick installs it)")
    return given, "; ".join(left_out)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_here()
    given, left_out = complete_flags(parsed(parser, arguments))
    print(COPIES, flush=True)
    results: Results = {}
    with ExitStack() as stack:
        entered: dict[str, Contender] = {}
        for case in cases(given):
            entered = entered or enter(stack, given)
            results[case] = run(case, entered, given.repeats)
            show(case, results[case])
            if case.mib > LARGE:
                entered = leave(entered)
        leave(entered)
    judge(results, left_out)


if __name__ == "__main__":
    main()
