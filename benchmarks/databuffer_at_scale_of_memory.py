"""With so much memory for each process, how large a batch of how long rows can be redistributed?

Four ranks hand their rows to each other (4→4 on the same ranks, every rank with a quarter before and after), ragged at
a mean fill of 40%. Sides: the databuffer; our own gather and scatter by way of rank 0 (`rank0.py`), ragged and padded;
and, where they are installed, verl through its driver. A size is carried if the process that holds most, its own rows
included, holds at most the limit beside what it holds without rows, as `contender.py` measures it; no limit is imposed
on it. The sizes tried are a quarter apart. The claim is over rank 0 that carries ragged rows as they are.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.contender import Contender  # noqa: E402 - needs the path above
from benchmarks.databuffer_vs_peers import OURS, SCRIPTS, measure  # noqa: E402
from benchmarks.ratio import Spread, conclude, options, parsed  # noqa: E402
from benchmarks.rows import RAGGED, Case  # noqa: E402

SIDES = (OURS, "rank0", "rank0-padded")
FACTOR, GOAL = 1.25, 4.0
BASE = "rank0"


def case_of(mib: float, context: int) -> Case:
    return Case(mib, 4, 4, 0, RAGGED, context // 4, context - context // 4)


def carried(contender: Contender, case: Case, limit: int) -> bool:
    """Return whether the busiest process stays within `limit` bytes."""
    contender.ask("prepare", case=asdict(case))
    contender.measure_baseline()
    contender.ask("make")
    measure(contender, case, 1, -1)
    return measure(contender, case, 1, 0).peak <= limit


def largest(contender: Contender, context: int, limit: int) -> int:
    """Return the rows of `context` tokens at most that this contender carries within `limit` bytes for each process."""
    mib, best = limit / 2**20 / 16, 0
    while carried(contender, case := case_of(mib, context), limit):
        best = case.rows
        mib *= FACTOR
        while case_of(mib, context).rows == best:  # rows come in eights
            mib *= FACTOR
    return best


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__, repeats=1)
    parser.add_argument("--limit", type=int, default=192, help="MiB for each process")
    parser.add_argument("--contexts", type=int, nargs="+", help="tokens; default 8192 16384 32768 65536, with --quick "
                        "8192")
    parser.add_argument("--peer-python", type=Path, help="with verl; without it verl is left out")
    given = parsed(parser, arguments)
    contexts = given.contexts or ([8192] if given.quick else [8192, 16384, 32768, 65536])
    sides = (*SIDES, "verl") if given.peer_python else SIDES
    found: dict[str, list[int]] = {}
    for side in sides:
        with ExitStack() as stack:
            python, argument = (given.peer_python, 2048) if side == "verl" else (sys.executable, side)
            contender = Contender(side, [python, f"benchmarks/{SCRIPTS[side]}", argument], {})
            stack.callback(contender.close)
            found[side] = [largest(contender, context, given.limit * 2**20) for context in contexts]
        rows = ", ".join(f"{count} of {context}" for context, count in zip(contexts, found[side]))
        print(f"{side:13} largest batch within {given.limit} MiB: {rows} tokens (load {os.getloadavg()[0]:.1f})",
              flush=True)
    for side in sides[1:]:
        print(f"databuffer over {side}: {Spread.of(rows_ratio(found, side))} x")
    conclude(f"largest batch within a limit of memory, {min(contexts)} to {max(contexts)} tokens, over gather and "
             "scatter by rank 0", Spread.of(rows_ratio(found, BASE)), GOAL)


def rows_ratio(found: dict[str, list[int]], side: str) -> list[float]:
    """Return how many times as many rows the databuffer carries, for each context.

    Raises:
        SystemExit: the side carries none; there is no such ratio.
    """
    if not all(found[side]):
        raise SystemExit(f"{side} carries not even the smallest batch that was tried: raise --limit")
    return [ours / theirs for ours, theirs in zip(found[OURS], found[side])]


if __name__ == "__main__":
    main()
