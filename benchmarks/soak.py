"""A long run with a fault every few seconds: does anything grow, and is anything left behind?

One trainer and two rollouts in mode async, on the embedded model. In turn, as the seed draws, a worker is killed or
stopped by `distflow inject`. Memory and descriptors are those of what outlives workers: the supervisors, and the
process of the samples. Torchrun is told to end when the time is over; then processes, shared memory and temporary files
of the run are looked for, and every step must stand in its metrics once.
Run by hand:  python -m benchmarks.soak --minutes 30
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
import uuid
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.ratio import Spread, add_size, conclude, options, parsed
from benchmarks.runs import ROOT, environment, run_command, steps_of
from distflow.cli import main as distflow
from distflow.telemetry.ettr import read
from distflow.telemetry.processes import parent

RANKS, LOOK, GRACE = 3, 2.0, 60.0
GOAL = 1.1
MARK = "DISTFLOW_SOAK"
SETTINGS = ("mode=async", "groups.rollout=2", "steps=1000000", "validation=null", "data.batch=4",
            "nodes.rollout.with.group_size=4", "checkpoint={every: 10, keep: 2}",
            "roles.actor.generation.max_new_tokens=8",
            "robust={restarts: 1000000, detectors: {frozen: {seconds: 8}, no_tokens: {seconds: 8, answer: 4}}}")


@dataclass
class Course:
    """What was seen of a process that lives as long as the run."""

    what: str
    mib: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """Memory in the last quarter of the time over that in the second one; the first is for warming up."""
        quarter = max(len(self.mib) // 4, 1)
        return statistics.median(self.mib[-quarter:]) / statistics.median(self.mib[quarter : 2 * quarter] or self.mib)

    @property
    def leaks(self) -> bool:
        """Whether the fewest descriptors of the last quarter are more than the most of the one before."""
        quarter = max(len(self.descriptors) // 4, 1)
        return len(self.descriptors) > 8 and \
            min(self.descriptors[-quarter:]) > max(self.descriptors[-2 * quarter : -quarter])


def of_run(mark: str) -> Iterator[int]:
    """Yield the processes that have this run's mark in their environment."""
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (place / "environ").read_bytes() and int(place.name) != os.getpid():
                yield int(place.name)


def look(mark: str, torchrun: int, courses: dict[int, Course]) -> None:
    """Take one sample of the supervisors, which torchrun has started, and of the dock."""
    for process in of_run(mark):
        with contextlib.suppress(OSError):
            dock = b"dock.child" in Path(f"/proc/{process}/cmdline").read_bytes()
            if dock or parent(process) == torchrun:
                course = courses.setdefault(process, Course("dock" if dock else "supervisor"))
                pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
                course.mib.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
                course.descriptors.append(len(os.listdir(f"/proc/{process}/fd")))


def inject(folder: Path, draw: random.Random) -> str:
    """Break one worker; what was done, or nothing where that worker was not ready."""
    kind, rank = draw.choice(("kill", "kill", "stop")), draw.randrange(RANKS)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        done = distflow(["inject", str(folder), kind, "--rank", str(rank)]) == 0
    return f"{kind} rank {rank}" if done else ""


def soak(scratch: Path, given: Namespace) -> tuple[dict[int, Course], Counter, list[str]]:
    """Run for so long: what was seen, the faults, and what is wrong."""
    mark, temporary = f"{MARK}={uuid.uuid4().hex}", scratch / "tmp"
    temporary.mkdir()
    shared = set(os.listdir("/dev/shm"))
    command = run_command("grpo.yaml", "embedded.yaml", "soak", RANKS, (f"output={scratch}", *SETTINGS))
    courses: dict[int, Course] = {}
    faults: Counter = Counter()
    draw = random.Random(0)
    with (scratch / "output").open("w") as output:
        run = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output,
                               env=environment(TMPDIR=str(temporary)) | dict([mark.split("=")]))
    end = time.monotonic() + 60 * given.minutes
    due, step = time.monotonic() + given.every, 0
    while time.monotonic() < end and run.poll() is None:
        look(mark, run.pid, courses)
        # two failures in one step are a mistake in a program, and end a run
        ready = time.monotonic() > due and len(steps_of(scratch / "soak")) > step + 1
        if ready and (what := inject(scratch / "soak", draw)):
            faults[what.partition(" ")[0]] += 1
            due, step = time.monotonic() + given.every, len(steps_of(scratch / "soak"))
        time.sleep(LOOK)
    early = run.poll() is not None
    run.send_signal(signal.SIGTERM)
    run.wait(GRACE)
    trouble = [f"the run ended by itself: {(scratch / 'output').read_text()[-3000:]}"] if early else []
    return courses, faults, [*trouble, *leftovers(mark, shared, temporary)]


def leftovers(mark: str, shared: set[str], temporary: Path) -> list[str]:
    """Return what is there of a run that has ended, a moment later."""
    until = time.monotonic() + GRACE / 2
    while (living := list(of_run(mark))) and time.monotonic() < until:
        time.sleep(LOOK / 10)
    found = [f"process {process} lives on" for process in living]
    found += [f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - shared
              if name.startswith(("distflow", "dock", "weights"))]
    return found + [f"temporary file {path}" for path in temporary.rglob("*") if path.is_file()]


def flags(arguments: list[str] | None) -> Namespace:
    parser = options(__doc__, repeats=None)
    add_size(parser, "minutes", 30.0, 0.7, "of the run")
    add_size(parser, "every", 20.0, 8.0, "seconds between two faults")
    return parsed(parser, arguments)


def main(arguments: list[str] | None = None) -> None:
    given = flags(arguments)
    with tempfile.TemporaryDirectory(prefix="soak-") as place:
        scratch = Path(place)
        courses, faults, wrong = soak(scratch, given)
        steps = [step["step"] for step in steps_of(scratch / "soak")]
        events = Counter(event["event"] for event in read(scratch / "soak"))
    if steps != list(range(1, len(steps) + 1)):
        wrong.append("a step is missing, or was counted twice")
    for process, course in courses.items():
        print(f"{course.what} {process}: {Spread.of(course.mib)} MiB, {course.mib[-1]:.1f} at the end, "
              f"{Spread.of(course.descriptors)} descriptors")
        wrong += [f"the descriptors of {course.what} {process} grow"] if course.leaks else []
    print(f"{given.minutes:g} minutes: {len(steps)} steps, each once; faults: {dict(faults)}; "
          f"failures seen {events['failure']}, checkpoints written {events['checkpoint_written']}")
    print("\n".join(wrong) or "nothing is left of it: no process, shared memory or temporary file")
    conclude(f"memory of what outlives workers, at the end of {given.minutes:g} minutes over that before, with "
             f"{faults.total()} faults", Spread.of([course.growth for course in courses.values()]), GOAL,
             holds=not wrong and bool(faults), at_least=False)


if __name__ == "__main__":
    main()
