"""Autoscaler: a user's policy decides from the metrics of the last steps how many rollouts there should be.

    @scaling(every=10)
    def keep_the_trainer_busy(steps: Sequence[Mapping[str, float]], rollouts: int) -> int | None:
        waits = sum(step["waiting/samples"] for step in steps) / sum(step["seconds"] for step in steps)
        return rollouts + 1 if waits > 0.2 else rollouts - 1 if steps[-1]["dock/ready"] > 500 else None

A policy stands in a module that the DAG imports. It gets the metrics of the last `every` steps, the newest last, and
the present target; it returns the new target, or None to keep it. Policies run in a process of their own: one that
raises is asked no more, and one that hangs holds up no rank.

The target is in `scale.json`; `distflow scale RUN rollout=N` writes it too. The supervisor of a rollout that is scaled
down ends its worker and waits; the worker's leases go back to the dock. A rollout can be scaled up again at any time,
and pulls the newest weights.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from distflow.errors import InvalidInput
from distflow.telemetry import events, files
from distflow.telemetry.run_reader import Tail

_FILE = "scale.json"
_POLL_FILE = 1.0  # seconds between two looks at scale.json


class RolloutScale:
    """The target as the rollout with number `index` sees it. `left_out`: returns the rollouts that are not started
    again; those after them move up."""

    def __init__(self, folder: Path, index: int, left_out: Callable[[], Collection[int]] = tuple):
        self.file, self.index, self.left_out = folder / _FILE, index, left_out
        self.looked, self.answer = 0.0, True

    def should_run(self) -> bool:
        if time.monotonic() - self.looked > _POLL_FILE:
            before = self.index - sum(each < self.index for each in self.left_out())
            self.looked = time.monotonic()
            with contextlib.suppress(OSError):  # its file system is away: it is looked at again
                self.answer = before < read(self.file.parent, before + 1)
        return self.answer


def read(folder: Path, default: int) -> int:
    """Return the target number of rollouts; `default` if there is none."""
    try:
        return int(json.loads((folder / _FILE).read_text())["rollout"])
    except FileNotFoundError:
        return default


def write(folder: Path, rollouts: int) -> None:
    files.write_atomically(folder / _FILE, json.dumps({"rollout": rollouts}))


def forget(folder: Path) -> None:
    """Remove the target, so that all rollouts of a job that begins have workers."""
    (folder / _FILE).unlink(missing_ok=True)


Steps = Sequence[Mapping[str, float]]
Policy = Callable[[Steps, int], int | None]
P = TypeVar("P", bound=Policy)
POLICIES: list[tuple[int, Policy]] = []
_POLL = 0.5  # seconds between two looks at the metrics


def scaling(*, every: int) -> Callable[[P], P]:
    """Register a policy that is asked after every so many steps. Raises InvalidInput: `every` is no number of steps."""
    if type(every) is not int or every < 1:
        raise InvalidInput(f"@scaling(every={every!r}): give a number of steps, as  @scaling(every=10)")

    def register(function: P) -> P:
        POLICIES.append((every, function))
        return function

    return register


def autoscale(folder: Path, least: int, most: int) -> None:
    """Ask all policies as the run's steps are done, for `least` to `most` rollouts; returns without policies."""
    done = _RecentSteps(folder / "metrics.jsonl", max((every for every, _ in POLICIES), default=0))
    while POLICIES:
        for step in done.new():
            for every, policy in POLICIES:
                if step % every == 0:
                    _ask(policy, folder, [*done.steps][-every:], least, most)
        time.sleep(_POLL)


def _ask(policy: Policy, folder: Path, steps: Steps, least: int, most: int) -> None:
    now, step = read(folder, most), steps[-1]["step"]
    target = policy(steps, now)
    if target is None or (target := max(least, min(most, int(target)))) == now:
        return
    write(folder, target)
    events.record("scaled", policy=policy.__name__, before=now, rollouts=target, after_step=step)
    print(f"step {step}: `{policy.__name__}` wants {target} of {most} rollouts instead of {now}", flush=True)


class _RecentSteps:
    """The last `count` steps of a growing metrics file. A worker that starts again repeats steps."""

    def __init__(self, file: Path, count: int):
        self.lines, self.steps, self.last = Tail(file), deque[Mapping[str, float]](maxlen=count), 0

    def new(self) -> Iterator[int]:
        """Yield each step that is new since the last call; `steps` ends with the one that is yielded."""
        for step in self.lines.new():
            if "seconds" in step and step["step"] > self.last:
                self.steps.append(step)
                self.last = step["step"]
                yield self.last
