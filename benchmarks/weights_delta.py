"""Deltas of bfloat16 weights against the version before: how many bytes, and how fast they are made and applied.

A share of the elements changes by one bit of its mantissa, as after a step whose update is about as small as bfloat16
can show. One run of chunks (16 MiB) at a time, as pulls ask for them; seconds are CPU seconds of one thread, over
memory that has been used before. A copy of the same bytes takes turns with them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402 - needs the path above

from benchmarks.ratio import Spread, conclude, interleaved, options, parsed  # noqa: E402
from distflow.weights.delta import decode, encode  # noqa: E402

RUN = 16 << 20
SHARES = (0.01, 0.03)
GOAL, LARGEST = 1.0, 0.05


class Version:
    """Two versions of a run of chunks, and the delta between them."""

    def __init__(self, share: float):
        made = np.random.default_rng(0)
        old = made.integers(0, 1 << 16, RUN // 2, dtype=np.uint16)
        new = np.where(made.random(len(old)) < share, old ^ 1, old)
        self.old, self.new, self.into = old.view(np.uint8), new.view(np.uint8), np.zeros(RUN, np.uint8)
        self.delta = self.encoded()

    def encoded(self) -> tuple[int, np.ndarray]:
        skips, words = encode(self.old, self.new) or (np.empty(0, np.uint8), np.empty(0, np.uint16))
        return len(skips), np.concatenate([skips, words.view(np.uint8)])

    def decoded(self) -> None:
        decode(self.old, *self.delta, self.into)

    def right(self) -> bool:
        return bool((self.into == self.new).all())


def speed(does: Callable[[], object]) -> float:
    """GB of weights per second."""
    begin = time.process_time()
    for _ in range(4):
        does()
    return 4 * RUN / (time.process_time() - begin) / 1e9


def main(arguments: list[str] | None = None) -> None:
    given = parsed(options(__doc__), arguments)
    slowest, largest = [], 0.0
    for share in SHARES:
        version = Version(share)
        pairs = interleaved({"made": lambda _, v=version: speed(v.encoded),
                             "applied": lambda _, v=version: speed(v.decoded),
                             "copied": lambda _, v=version: speed(lambda: np.copyto(v.into, v.new))}, given.repeats)
        version.decoded()
        if not version.right():
            raise SystemExit("a delta did not make the new version of the old one")
        largest = max(largest, len(version.delta[1]) / RUN)
        print(f"{share:.0%} of the elements changed: {len(version.delta[1]) / RUN:.2%} of the bytes; GB/s of one "
              "thread: " + ", ".join(f"{side} {Spread.of([pair[side] for pair in pairs])}" for side in pairs[0]))
        slowest.append([min(pair["made"], pair["applied"]) for pair in pairs])
    conclude(f"GB/s of one thread for deltas of weights of which 1 to 3% changed; they have {largest:.1%} of the bytes "
             f"at most (goal {LARGEST:.0%})", Spread.of([min(each) for each in zip(*slowest)]), GOAL, unit="GB/s",
             holds=largest <= LARGEST)


if __name__ == "__main__":
    main()
