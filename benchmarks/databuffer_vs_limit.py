"""How near is a redistribution to a plain copy of the same bytes through shared memory?

Sides, on the same number of real ranks, from ranks 0 … 3 to ranks 4 and 5, so that every row moves: the databuffer,
with ids, balance and everything that it does; the same bytes copied into shared memory and out again, which is how
memory is shared plainly (`copy-through`, the limit of the claim); only into it (`copy`, all that can be asked of
memory); and the databuffer where the layout stays. Rows as in `rows.py`, verified; all memory is warm.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.databuffer_vs_peers import verify  # noqa: E402 - needs the path above
from benchmarks.gloo_ranks import Host  # noqa: E402
from benchmarks.ratio import Spread, conclude, interleaved, options, parsed, ratios  # noqa: E402
from benchmarks.rows import PADDED, RAGGED, Case  # noqa: E402

SIDES = ("databuffer", "copy-through", "copy", "same-layout")
GOAL, SAME_LAYOUT = 0.6, 1.0
"""Of the copy's speed; milliseconds where the layout stays."""


def measure(case: Case, repeats: int) -> list[dict[str, float]]:
    """Milliseconds of each side, repeat by repeat; two first rounds, which warm the memory, are not among them."""
    hosts = {side: Host(side) for side in SIDES}
    try:
        for host in hosts.values():
            host.prepare(asdict(case))
            host.make()
            for warm in (1, 2):
                host.round(warm)
        found = interleaved({side: lambda repeat, side=side: 1000 * hosts[side].round(repeat + 3)[
            "own" if side == "same-layout" else "seconds"] for side in hosts}, repeats)
        arrived = hosts["databuffer"].check(repeats + 2, True)
        verify("databuffer", case, repeats + 2, arrived["ids"], arrived["wrong"])
        return found
    finally:
        for host in hosts.values():
            host.close()


def show(case: Case, pairs: list[dict[str, float]]) -> Spread:
    """Print a case's figures; the limit's time over the databuffer's."""
    near = ratios(pairs, "copy-through", "databuffer", lambda value: value)
    nearest = ratios(pairs, "copy", "databuffer", lambda value: value)
    times = ", ".join(f"{side} {Spread.of([pair[side] for pair in pairs])} ms" for side in SIDES)
    print(f"{case.name}: {case.nbytes / 2**20:.0f} MiB; {times}; {near} of the speed of a copy "
          f"through, {nearest} of a copy into shared memory (load {os.getloadavg()[0]:.1f})", flush=True)
    return near


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__, repeats=15)
    parser.add_argument("--sizes", type=float, nargs="+", metavar="MIB", help="of padded rows; default 40 160 640, "
                        "with --quick 40")
    given = parsed(parser, arguments)
    sizes = given.sizes or ([40] if given.quick else [40, 160, 640])
    results = {}
    for size in sorted(sizes):
        for form in (PADDED, RAGGED):
            case = Case(size, 4, 2, 4, form)
            pairs = measure(case, given.repeats)
            results[case] = show(case, pairs), Spread.of([pair["same-layout"] for pair in pairs])
    same = max((spread for _, spread in results.values()), key=lambda spread: spread.median)
    print(f"where the layout stays: at most {same} ms (goal: under {SAME_LAYOUT:g})")
    goal_size = 160 if 160 in sizes else max(sizes)
    near = min((near for case, (near, _) in results.items() if case.mib == goal_size), key=lambda near: near.median)
    conclude(f"redistribution at {goal_size:g} MiB, of the speed of a plain copy through shared memory", near, GOAL,
             unit="of the copy's speed", holds=same.median < SAME_LAYOUT)


if __name__ == "__main__":
    main()
