"""Explains why a run is slow, stuck or dead, and what is wrong with its learning: from the files of its folder.

    stuck        what each rank does and for how long, who waits for whom, and the stacks of the one they wait for
    dead         the failure that ended it, and what went before
    slow         the critical path of a step: the chain of activities, across ranks, that made it as long as it was,
                 and the row that was sampled last, with its turns and tools

`why_learning` says what went wrong with its learning.
"""

from __future__ import annotations

import math
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import Any

from distflow.errors import InvalidInput, quoted
from distflow.telemetry import timeline
from distflow.telemetry.collectives import absent
from distflow.telemetry.run_reader import RunReader
from distflow.telemetry.timeline import MAIN, RankTimeline, Span
from distflow.telemetry.why_learning import learning, quoted_text

WAITING = "waiting"
_LATE = 5.0  # an activity is late after so many times its usual duration, and at least so many seconds
_AROUND = 3  # steps before and after one in which another group may have worked for it
_TINY = 1e-4  # seconds: less is no part of a path
_WARM = 2  # first steps that are no ordinary ones
_ADVICE = {
    "generating": "Sampling takes the time. Shorter answers (`roles.NAME.generation.max_new_tokens`), another engine "
                  "(`roles.NAME.rollout: vllm`), or `mode: async`, where training does not wait for the longest one.",
    "inference": "A frozen model takes the time. Give its node more ranks (`layouts.NODE`), or use `mode: async`, "
                 "which computes it while others sample.",
    "training": "Training takes the time. More ranks, a larger `roles.NAME.micro_batch_tokens`, or `recompute: false` "
                "where memory allows.",
    "computing": "A function without a model takes the time: see its node in `metrics.jsonl` (`seconds/NODE`), and "
                 "`reward/seconds` if it scores.",
    "tools": "Environments take the time. Start more of them at a time, or use `mode: async`, which samples other rows "
             "meanwhile.",
    "publishing": "Publishing weights takes the time: see `transport`.",
    "saving": "Snapshots take the time: `robust.snapshots: false` leaves them out.",
    "validating": "Validation and checkpoints take the time: a larger `validation.every` and `checkpoint.every`.",
    WAITING: "No rank computes: data moves, or ranks wait for another group. In mode async a trainer that waits for "
             "prompts wants more rollouts (`groups.rollout`), more `staleness`, or `on_stale: drop`.",
}


@dataclass(frozen=True)
class Segment:
    """Part of a critical path. rank: which computes then, or waits with all others."""

    rank: int
    label: str
    phase: str
    seconds: float


@dataclass(frozen=True)
class SampledChain:
    """A row's turns and what its environment answered, in order of time. id: of the row."""

    rank: int
    id: int
    spans: Sequence[Span]

    @property
    def seconds(self) -> float:
        """From its first token to its end."""
        return self.spans[-1].end - self.spans[0].start

    @property
    def tools(self) -> list[Span]:
        return [span for span in self.spans if span.track == timeline.TOOLS]


def explain(folder: Path, complete: Callable[[Path], Sequence[Path]], step: int | None = None) -> Iterator[str]:
    """Yield the explanation of a step, line by line; without `step`, of what goes on now, or why the run has ended, and
    of an ordinary step. `complete` returns the checkpoints in a folder from which a run can go on. Raises InvalidInput:
    it is no run's folder, or it has no such step."""
    reader = RunReader.of(folder, "distflow why runs/grpo-1")
    metrics = reader.timed_steps()
    if step is None:
        if reader.state == "is running":
            yield from stuck(folder, len(metrics))
        elif not reader.summary:
            yield from dead(reader, complete)
    elif step not in {line["step"] for line in metrics}:
        raise InvalidInput(f"--step {step}: the run has steps 1 to {len(metrics)}" if metrics else
                           f"--step {step}: no step of the run is done")
    if metrics:
        if step is None:
            yield from learning(reader)
        yield from slow(reader, metrics, _ordinary(metrics) if step is None else step)
    elif reader.summary:
        yield f"{folder.name} has finished, but metrics.jsonl has no whole line of a step: it was cut afterwards."


def _ordinary(metrics: Sequence[dict[str, Any]]) -> int:
    """Return the step of median duration."""
    timed = sorted(metrics[_WARM:] or metrics, key=lambda line: line["seconds"])
    return timed[len(timed) // 2]["step"]


def stuck(folder: Path, done: int) -> Iterator[str]:
    """Say what ranks do now, which of them the others wait for, and where it stands in its code."""
    ranks, now = timeline.newest(folder), time.time()
    usual = _usual_seconds(timeline.read(folder, range(max(1, done - 5), done + 1)).spans)
    yield f"{folder.name} is running; {done} steps are done."
    late: dict[int, float] = {}  # by rank, how much later than usual; without a sign it is later than all others
    waits: list[int] = []  # ranks that wait much longer than usual
    for number, rank in sorted(ranks.items()):
        if rank.doing is None:
            continue
        spent, silence = now - rank.doing.start, rank.silence(now)
        often = usual.get((rank.role, rank.doing.name))
        yield (f"  rank {number} ({rank.role}): {rank.doing.name}, step {rank.doing.step}, for {spent:.1f} s"
               f"{f', usually {often:.2f} s' if often is not None else ''}"
               f"{f'; no sign of it for {silence:.0f} s' if silence else ''}")
        ratio = spent / max(often or 0.0, 1e-3)
        if silence:
            late[number] = math.inf
        elif spent > _LATE and ratio > _LATE:
            if _phase(rank.doing) == WAITING:
                waits.append(number)
            else:
                late[number] = ratio
    if text := absent({number: rank.collectives for number, rank in ranks.items()}):
        yield f"Collectives: {text}."
    if late:
        yield from _culprit(ranks[max(late, key=lambda number: late[number])], ranks, late, now)
    elif waits:
        yield (f"Rank {', '.join(map(str, waits))} waits much longer than usual, and no rank computes so long: the run "
               "ends at `wait_limit` with an error that names what is missing.")
        yield from stacks(ranks[waits[0]])
    else:
        yield "No rank takes much longer than usual."


def _culprit(rank: RankTimeline, ranks: dict[int, RankTimeline], late: dict[int, float], now: float) -> Iterator[str]:
    """Say who waits for a rank. Ranks that are late themselves may wait for it inside a collective."""
    assert rank.doing is not None
    named = f"rank {rank.rank} on {rank.host} (process {rank.pid})"
    waiting = [number for number, other in sorted(ranks.items()) if other.doing and number != rank.rank
               and (_phase(other.doing) == WAITING or 0 < late.get(number, 0.0) < math.inf)]
    if waiting:
        yield f"Waiting for {named}: rank {', '.join(map(str, waiting))}."
    if rank.silence(now):
        yield (f"It gives no sign: it is stopped, its machine is gone, or it waits for a disk. Its supervisor restarts "
               f"it when detector `frozen` says so; at once:  distflow inject RUN kill --rank {rank.rank}")
    else:
        yield _ADVICE.get(_phase(rank.doing), "")
    yield from stacks(rank)


def stacks(rank: RankTimeline) -> Iterator[str]:
    """Yield the stacks of a rank's process, by py-spy, if both are here."""
    if rank.host != gethostname():
        yield f"Its stacks:  py-spy dump --pid {rank.pid}   on {rank.host}"
        return
    program = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if program is None:
        yield f"To see where it stands:  pip install py-spy;  py-spy dump --pid {rank.pid}"
        return
    done = subprocess.run([program, "dump", "--pid", str(rank.pid)], capture_output=True, text=True, check=False)
    yield "Where it stands:"
    yield from (f"  {line}" for line in (done.stdout or done.stderr).splitlines())


def dead(reader: RunReader, complete: Callable[[Path], Sequence[Path]]) -> Iterator[str]:
    """Say what ended a run that has neither finished nor is running, and how it can; `complete` as in `explain`."""
    ends = [event for event in reader.rows("events") if event["event"] in ("failure", "run_stopped", "worker_started")]
    failures = [event for event in ends if event["event"] == "failure"]
    yield f"{reader.folder.name} is not running, and has not finished."
    if ends and ends[-1]["event"] == "run_stopped":
        step, failures = ends[-1]["after_step"], []
        when = f"after step {step}" if step else "within a step"
        yield f"It was told to end (Ctrl-C or SIGTERM), and did so {when}."
    elif not failures:
        yield "It has no failure in events.jsonl: torchrun was ended with it, by SIGKILL or with its machine."
    for event in failures[-3:]:
        yield (f"  {time.strftime('%H:%M:%S', time.localtime(event['time']))}  rank {event['rank']} of group "
               f"`{event['group']}`, step {event['failed_step']}, {event['phase']}: {event['what']}")
        yield f"    then: {event['verdict']}"
    if failures and failures[-1].get("details"):
        yield "The traceback of the last failure:"
        yield from (f"  {line}" for line in failures[-1]["details"].splitlines())
    if complete(reader.folder / "checkpoints"):
        yield f"Go on from the newest checkpoint:  distflow resume {quoted(reader.folder)}"
    else:
        yield "It has no checkpoint to go on from: start it again under another --name."


def slow(reader: RunReader, metrics: Sequence[dict[str, Any]], step: int) -> Iterator[str]:
    """Say what made a step as long as it was, and what is unusual about it."""
    seconds = next(line["seconds"] for line in metrics if line["step"] == step)
    usual = statistics.median(line["seconds"] for line in metrics[_WARM:] or metrics)
    yield f"Step {step} took {seconds:.2f} s; the median is {usual:.2f} s."
    spans = timeline.read(reader.folder, range(step - _AROUND, step + _AROUND + 1)).spans
    path = critical_path(spans, step)
    if not path:
        yield "It has no timeline, which would say where the time went."
        return
    total = sum(part.seconds for part in path)
    parts: dict[tuple[int, str, str], float] = {}
    for part in path:
        key = part.rank, part.label, part.phase
        parts[key] = parts.get(key, 0.0) + part.seconds
    yield "Its critical path, with what follows it (snapshot, weights, validation), longest part first:"
    for (rank, label, phase), taken in sorted(parts.items(), key=lambda item: -item[1]):
        if taken >= 0.01 * total:
            yield f"  {taken:8.3f} s  {taken / total:4.0%}  rank {rank}  {phase:10}  {label}"
    yield from _last_row(reader, sampled_chains(spans, step), step)
    yield from _unusual(metrics, step)
    by_phase: dict[str, float] = {}
    for part in path:
        by_phase[part.phase] = by_phase.get(part.phase, 0.0) + part.seconds
    yield _ADVICE.get(max(by_phase, key=lambda phase: by_phase[phase]), "")


def _unusual(metrics: Sequence[dict[str, Any]], step: int) -> Iterator[str]:
    mine = next(line for line in metrics if line["step"] == step)
    for name in sorted(name for name in mine if name.startswith("seconds/") and isinstance(mine[name], float)):
        usual = statistics.median(line[name] for line in metrics if isinstance(line.get(name), float))
        if mine[name] > 1.5 * usual and mine[name] - usual > 0.05 * mine["seconds"]:
            yield f"  unusual: node `{name[8:]}` took {mine[name]:.2f} s, usually {usual:.2f} s"


def critical_path(spans: Sequence[Span], step: int) -> list[Segment]:
    """Return what the end of a step waited for, and what that waited for, back to its beginning; in order of time.
    Where a rank waits, the path goes to the rank that was the last to finish something meanwhile; what is left of the
    wait is movement of data, or of messages."""
    main = [span for span in spans if span.track == MAIN]
    trainer = [span for span in main if span.step == step and span.role == "trainer" and _phase(span) != "ending"]
    if not trainer:
        return []
    begin, last = min(span.start for span in trainer), max(trainer, key=lambda span: span.end)
    rank, now, path = last.rank, last.end, list[Segment]()
    while now - begin > _TINY:
        span = max((each for each in main if each.rank == rank and each.start < now - _TINY),
                   key=lambda each: each.start, default=None)
        if span is None or span.end < begin:
            path.append(Segment(rank, "nothing recorded", WAITING, now - begin))
            break
        start = max(span.start, begin)
        if _phase(span) == WAITING and (other := _finished_last(main, rank, start, now)) is not None:
            path.append(Segment(rank, span.label, WAITING, now - min(other.end, now)))
            rank, now = other.rank, min(other.end, now)
            if other.start >= now - _TINY:
                now = other.start
            else:
                path.append(Segment(rank, other.label, _phase(other), now - max(other.start, begin)))
                now = max(other.start, begin)
            continue
        path.append(Segment(rank, span.label, _phase(span), now - start))
        now = start
    return [part for part in reversed(path) if part.seconds > _TINY]


def sampled_chains(spans: Sequence[Span], step: int) -> list[SampledChain]:
    """Return the rows of a step that the timeline has, but for those of its validation. Ranks that sample for others
    say which prompts are of the step; else its rows are those of a node that samples."""
    rows = [span for span in spans if span.track in (timeline.ROWS, timeline.TOOLS)]
    prompts = [span for span in spans if span.track == timeline.PROMPTS and span.step == step
               and type(span.facts.get("rows")) is int and span.facts["rows"] > 0]
    nodes = [span for span in spans if span.track == MAIN and span.step == step and _phase(span) == "generating"]
    found: dict[tuple[int, int], list[Span]] = {}
    for span in rows:
        row = int(span.name.rpartition(" ")[2])
        around = [each for each in prompts if row // each.facts["rows"] == int(each.name.rpartition(" ")[2])] \
            if prompts else nodes
        if any(each.rank == span.rank and each.start <= span.start < each.end for each in around):
            found.setdefault((span.rank, row), []).append(span)
    return [SampledChain(rank, row, sorted(each, key=lambda span: span.start))
            for (rank, row), each in sorted(found.items())]


def _last_row(reader: RunReader, chains: Sequence[SampledChain], step: int) -> Iterator[str]:
    """Say which row of a step was sampled last, how long its turns and tools took, and what it was about."""
    last = max(chains, key=lambda chain: chain.spans[-1].end, default=None)
    if last is None or not last.seconds:
        return
    usual, tools = statistics.median(chain.seconds for chain in chains), last.tools
    yield (f"The last of its {len(chains)} rows was row {last.id}, on rank {last.rank}: {last.seconds:.2f} s from its "
           f"first token to its end; the median is {usual:.2f} s.")
    if tools:
        longest, total = max(tools, key=lambda span: span.seconds), sum(span.seconds for span in tools)
        every = statistics.median(sum(span.seconds for span in chain.tools) for chain in chains)
        yield (f"  {len(tools)} turn{'s' * (len(tools) > 1)}; its environment took {total:.2f} s of that (median of "
               f"the rows {every:.2f} s), most in turn {longest.facts.get('turn')}: {longest.seconds:.2f} s")
        place = [step, last.id, longest.facts.get("turn")]
        said = next((turn.get("text") for turn in reader.tail(f"trajectories/rank{last.rank}").new()
                     if [turn["step"], turn.get("row"), turn.get("turn")] == place), None)
        yield from [f"    the model had said: {quoted_text(said)}"] if said is not None else []
    asked = (row.get("questions") for row in reader.tail("samples").new()
             if row.get("step") == step and row.get("row") == last.id)
    yield from (f"  its prompt: {quoted_text(text)}" for text in asked)


def _phase(span: Span) -> str:
    return span.facts.get("phase") or WAITING


def _finished_last(main: Sequence[Span], rank: int, start: float, end: float) -> Span | None:
    """Return what another rank was the last to do, of what it finished, or still did, between two moments."""
    busy = [span for span in main if span.rank != rank and _phase(span) != WAITING and span.start < end - _TINY
            and span.end > start + _TINY]
    return max(busy, key=lambda span: min(span.end, end), default=None)


def _usual_seconds(spans: Sequence[Span]) -> dict[tuple[str, str], float]:
    """Return the median duration of each activity of a role."""
    found: dict[tuple[str, str], list[float]] = {}
    for span in (span for span in spans if span.track == MAIN):
        found.setdefault((span.role, span.name), []).append(span.seconds)
    return {key: statistics.median(each) for key, each in found.items()}
