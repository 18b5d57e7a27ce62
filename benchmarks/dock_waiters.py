"""What ranks that wait for a step cost the rollouts that fill it: prompts per second with 1, 16 and 128 waiting ranks.

One process of the dock, one process whose threads wait as the ranks of a trainer do, each for its share of the step,
and here one rollout that again and again leases a prompt, puts its samples and commits. The seconds are those from the
first prompt to the last, so the ranks wait all the time. Numbers of waiting ranks take turns. Beside the prompts per
second stand the seconds of the processor that a thousand prompts cost the dock's process: other load changes them less.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402 - needs the path above

from benchmarks.ratio import Spread, add_size, conclude, interleaved, options, parsed, ratios  # noqa: E402
from distflow.data.batch import Batch, Ragged  # noqa: E402
from distflow.dock import Consumer, DockClient  # noqa: E402
from distflow.dock.process import ShardProcess, start  # noqa: E402

GOAL, WAITING, TOKENS = 0.9, (1, 16, 128), 64
_WAIT, _MOMENT = 300.0, 0.05


def consumers(prompts: int, samples: int) -> tuple[Consumer, ...]:
    rows = prompts * samples
    return (Consumer("rollout", ("order",), ("tokens",), samples, rows),
            Consumer("trainer", ("tokens",), (), samples, rows, seconds=3600.0))


def processor_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


class Waiting:
    """Process of ranks that wait for a step; `share` asks for it, in a thread each."""

    def __init__(self, child: ShardProcess, token: bytes, ranks: int, rows: int, step: int):
        numbers = map(str, (child.address[1], token.hex(), ranks, rows, step))
        self.process = subprocess.Popen([sys.executable, __file__, "--wait", *numbers])

    def end(self) -> None:
        if self.process.wait():
            raise SystemExit("the ranks that waited did not get every row once")


def wait(port: int, token: bytes, ranks: int, rows: int, step: int) -> None:
    """Wait as `ranks` ranks, and check that together they get every row once."""
    got: list[int] = []

    def share(rank: int) -> None:
        with DockClient([("127.0.0.1", port)], token, f"trainer {rank}") as dock:
            dock.report_activity(f"waiting for step {step}")  # sent with the request
            got.extend(dock.lease("trainer", rows, wait=_WAIT, step=step, share=rank, shares=ranks).ids.tolist())

    threads = [threading.Thread(target=share, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if sorted(got) != list(range(step * rows, (step + 1) * rows)):
        raise SystemExit(1)


class Rollout:
    """A dock, and the rollout that fills its steps."""

    def __init__(self, given: Namespace):
        self.prompts, self.samples, self.step = given.prompts, given.samples, 0
        self.token = secrets.token_bytes(32)
        self.child = start(self.token)
        self.dock = DockClient([self.child.address], self.token, "rollout", timeout=_WAIT)
        self.dock.configure(consumers(self.prompts, self.samples))

    def fill(self, ranks: int) -> tuple[float, float]:
        """Fill a step for which so many ranks wait; return prompts per second, and the dock's processor seconds."""
        rows, step = self.prompts * self.samples, self.step
        self.step += 1
        ids = torch.arange(step * rows, (step + 1) * rows)
        self.dock.put(Batch(ids, {"order": torch.zeros(rows, dtype=torch.uint8)}))
        waiting = Waiting(self.child, self.token, ranks, rows, step)
        while sum(f"waiting for step {step}" == client[1] for client in self.dock.status()[0]["clients"]) < ranks:
            time.sleep(_MOMENT)
        began, busy = time.perf_counter(), processor_seconds(self.child.process.pid)
        for _ in range(self.prompts):
            lease = self.dock.lease("rollout", self.samples)
            tokens = lease.ids.repeat_interleave(TOKENS)
            self.dock.put(Batch(lease.ids, {"tokens": Ragged(tokens, torch.full((self.samples,), TOKENS))}))
            self.dock.commit(lease)
        seconds, busy = time.perf_counter() - began, processor_seconds(self.child.process.pid) - busy
        waiting.end()
        return self.prompts / seconds, 1000 * busy / self.prompts

    def close(self) -> None:
        self.dock.close()
        self.child.stop()


def main() -> None:
    if sys.argv[1:2] == ["--wait"]:
        port, token, *numbers = sys.argv[2:]
        wait(int(port), bytes.fromhex(token), *map(int, numbers))
        return
    parser = options(__doc__)
    add_size(parser, "prompts", 128, 64, "prompts of a step")
    add_size(parser, "samples", 16, 16, "samples of a prompt")
    given = parsed(parser)
    rollout = Rollout(given)
    rollout.fill(1)  # connections, allocators and caches
    pairs = interleaved({str(ranks): lambda _, ranks=ranks: rollout.fill(ranks) for ranks in WAITING},
                        given.repeats)
    rollout.close()
    for ranks in WAITING:
        rate, busy = (Spread.of(values) for values in zip(*(pair[str(ranks)] for pair in pairs), strict=True))
        print(f"{ranks:4} waiting: {rate} prompts/s of {given.samples} samples; the dock's process {busy} s a thousand")
    conclude(f"prompts per second that a rollout puts, with {WAITING[-1]} ranks waiting for their step over one",
             ratios(pairs, str(WAITING[-1]), str(WAITING[0]), lambda measured: measured[0]), GOAL)


if __name__ == "__main__":
    main()
