"""How many rollouts there should be, as a function of the user's decides from what the last steps have measured.

    @scaling(every=10)
    def keep_the_trainer_busy(steps: Sequence[Mapping[str, float]], rollouts: int) -> int | None:
        waits = sum(step["waiting/samples"] for step in steps) / sum(step["seconds"] for step in steps)
        return rollouts + 1 if waits > 0.2 else rollouts - 1 if steps[-1]["dock/ready"] > 500 else None

It stands in a module that the DAG imports. It gets the metrics of the last `every` steps, the newest last, and how many
rollouts there are to be now; it returns how many there should be, None for as many. It runs in a process of its own
beside the run: one that raises is asked no more, and one that hangs holds up nobody.

How many rollouts a running job has: `distflow scale RUN rollout=N` writes it down, and their seats read it.

A seat that is not wanted ends its worker and waits; what the worker had under way goes back to the dock. It can come
back at any time, with the newest weights of its neighbours.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from distflow.errors import InvalidInput
from distflow.telemetry.events import record

_FILE = "scale.json"
_LOOK = 1.0
"""Seconds between two looks at the file."""


class RolloutScale:
    """A rollout's view: it is the `place`-th one.

    Args:
        left_out: which rollouts are not started again; those behind them take their places.
    """

    def __init__(self, folder: Path, place: int, left_out: Callable[[], Collection[int]] = tuple):
        self.file, self.place, self.left_out = folder / _FILE, place, left_out
        self.looked, self.answer = 0.0, True

    def wanted(self) -> bool:
        """Whether this rollout is to work now."""
        if time.monotonic() - self.looked > _LOOK:
            before = self.place - sum(each < self.place for each in self.left_out())
            self.looked, self.answer = time.monotonic(), before < read(self.file.parent, before + 1)
        return self.answer


def read(folder: Path, default: int) -> int:
    """How many rollouts are wanted; `default` if nobody has said."""
    try:
        return int(json.loads((folder / _FILE).read_text())["rollout"])
    except FileNotFoundError:
        return default


def write(folder: Path, rollouts: int) -> None:
    """From now on so many are wanted."""
    partial = folder / f"{_FILE}.partial"
    partial.write_text(json.dumps({"rollout": rollouts}))
    partial.replace(folder / _FILE)


def forget(folder: Path) -> None:
    """A job that begins, perhaps on other ranks, has all its rollouts work."""
    (folder / _FILE).unlink(missing_ok=True)


Steps = Sequence[Mapping[str, float]]
Policy = Callable[[Steps, int], int | None]
POLICIES: list[tuple[int, Policy]] = []
_LOOK_scaling = 0.5
"""Seconds between two looks at the metrics."""


def scaling(*, every: int) -> Callable[[Policy], Policy]:
    """Register a function that is asked after every so many steps.

    Raises:
        InvalidInput: `every` is no number of steps.
    """
    if type(every) is not int or every < 1:
        raise InvalidInput(f"@scaling(every={every!r}): give a number of steps, as  @scaling(every=10)")

    def register(function: Policy) -> Policy:
        POLICIES.append((every, function))
        return function

    return register


def autoscale(folder: Path, least: int, most: int) -> None:
    """Ask all policies as the run's steps are done; for a process of its own, which is ended with the run.

    Args:
        least, most: of rollouts that the run can have.
    """
    done = _RecentSteps(folder / "metrics.jsonl", max((every for every, _ in POLICIES), default=0))
    while POLICIES:
        for step in done.new():
            for every, policy in POLICIES:
                if step % every == 0:
                    _ask(policy, folder, [*done.steps][-every:], least, most)
        time.sleep(_LOOK_scaling)


def _ask(policy: Policy, folder: Path, steps: Steps, least: int, most: int) -> None:
    now, step = read(folder, most), steps[-1]["step"]
    wanted = policy(steps, now)
    if wanted is None or (wanted := max(least, min(most, int(wanted)))) == now:
        return
    write(folder, wanted)
    record("scaled", policy=policy.__name__, before=now, rollouts=wanted, after_step=step)
    print(f"step {step}: `{policy.__name__}` wants {wanted} of {most} rollouts instead of {now}", flush=True)


class _RecentSteps:
    """The steps that are done, the last `count` of them, as a file of metrics grows. A worker that starts again writes
    another one, from which lines may have been dropped."""

    def __init__(self, file: Path, count: int):
        self.file, self.steps = file, deque[Mapping[str, float]](maxlen=count)
        self.inode = self.offset = self.last = 0

    def new(self) -> Iterator[int]:
        """Steps that were not there before, one by one; `steps` ends with the one that is given."""
        if not self.file.exists():
            return
        with self.file.open("rb") as lines:
            if (inode := os.fstat(lines.fileno()).st_ino) != self.inode:
                self.inode, self.offset = inode, 0
                self.steps.clear()
            lines.seek(self.offset)
            whole = lines.read().rpartition(b"\n")[0]
        self.offset += len(whole) + bool(whole)
        for step in map(json.loads, whole.splitlines()):
            if "seconds" in step:
                self.steps.append(step)
                if step["step"] > self.last:
                    self.last = step["step"]
                    yield self.last
