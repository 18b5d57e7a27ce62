"""Lines that no worker has written whole, and clocks that jump: each verb that reads a run's files passes over them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from distflow.cli import main
from distflow.recovery.checkpoint_files import complete_checkpoints
from distflow.telemetry import timeline, timings
from distflow.telemetry.ettr import account, read
from distflow.telemetry.report import read_run, write_report
from distflow.telemetry.run_folder import RunFolder, forget_after
from distflow.telemetry.run_reader import RunReader
from distflow.telemetry.why import explain

HUGE = 10**400
VALUES: list[Any] = [None, True, -1, 2**63, HUGE, 1e308, float("nan"), "text", "\ud83d", [], [1], {}, {"a": {}}]
TORN = [b"", b"{", b'{"step": 1, "se', b"\0" * 512, b'{"step": 2}{"step": 3}', b"null", b"[]", b"7", b'"x"',
        b"\xff\xfe{", b'{"step": 1e999, "seconds": 1e999}', b"[" * 100_000, b'{"a":' * 100_000,
        b'{"step": ' + b"9" * 5000 + b"}"]
"""What a crash, a full disk or another program leaves in a file of JSON lines."""
METRICS = {"step": 1, "seconds": 1.0, "reward/mean": 0.5, "environment/reward": 0.5, "validation/held": 0.5,
           "validation_low/held": 0.4, "validation_high/held": 0.6, "wall_seconds": 3.0, "tokens_total": 5.0}
SAMPLE = {"step": 1, "row": 0, "questions": "q", "completions": "c", "rewards": 0.5, "set": "validation/held"}
EVENTS: list[dict[str, Any]] = [{"time": 1e3 + number, "step": 1, "rank": 0, **event} for number, event in enumerate((
    {"event": "worker_started", "attempt": 0, "pid": 1},
    {"event": "worker_ready", "attempt": 0, "pid": 1, "host": "one", "began": 5,
     "seconds": {"connect": 1.0, "load": 1.0}},
    {"event": "failure", "group": "trainer", "ranks": [0, 0], "attempt": 0, "phase": "training", "failed_step": 1,
     "what": "killed", "verdict": "starts again", "seen_after": 0.5, "details": "Traceback"},
    {"event": "settings_changed", "settings": {"steps": ["1", "2"]}}, {"event": "run_stopped", "after_step": 3},
    {"event": "worker ended", "attempt": 0, "status": 1}, {"event": "validation_asked", "of_step": 1},
    {"event": "reward_slow", "reward": "a", "what": "slow"}))]
SPANS = [["", "finishing the step", 1, 10, 20, {"phase": "waiting", "node": ""}],
         ["weights", "publish", 1, 10, 20, {"version": 3}], ["rows", "row 5", 1, 10, 20, {"tokens": 3}],
         ["prompts", "prompt 5", 1, 10, 20, {"rows": 1}], ["tools", "row 5", 1, 10, 20, {"turn": 1}]]
RANK = {"steps": [1, 1], "role": "trainer", "attempt": 0, "rank": 0, "host": "one", "pid": 1, "every": 1.0,
        "base": 10**15, "time": 10**6, "memory": 5, "now": ["a", "training", "", 1, 10], "spans": SPANS,
        "collectives": "", "dropped": 1}
TIMES = {"plan": "p", "step": 1, "rank": 0, "seconds": 1.0, "nodes": {"a": [1.0, 1, 1, 1]}}


def spoiled(line: dict[str, Any]) -> list[bytes]:
    """The line with each of its values missing or another, spans and their parts among them."""
    found = [{key: value for key, value in line.items() if key != name} for name in line]
    found += [{**line, name: value} for name in line for value in VALUES]
    for index, span in enumerate(line.get("spans", ())):
        found += [{**line, "spans": [[*span[:part], value, *span[part + 1 :]]]}
                  for part in range(len(SPANS[index])) for value in VALUES]
        found += [{**line, "spans": [[*span[:5], {name: value}]]} for name in span[5] for value in VALUES]
    return [json.dumps(each).encode() for each in found]


def write(file: Path, *lines: dict[str, Any]) -> None:
    """Write lines among others that are torn or foreign."""
    file.parent.mkdir(exist_ok=True)
    whole = [json.dumps(line).encode() for line in lines]
    others = [*TORN, *(each for line in lines for each in spoiled(line))]
    file.write_bytes(b"\n".join([*others, *whole, *others, b'{"step": 1, "torn']))


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "run"
    write(folder / "metrics.jsonl", METRICS, {**METRICS, "step": 2})
    for name in ("samples", "validation"):
        write(folder / f"{name}.jsonl", SAMPLE, {**SAMPLE, "step": 2})
    write(folder / "events.jsonl", *EVENTS)
    write(folder / "timeline/rank0.jsonl", RANK)
    write(folder / "times.jsonl", TIMES)
    write(folder / "trajectories/rank0.jsonl", {"step": 1, "row": 5, "turn": 1, "text": "said"})
    (folder / "launch.json").write_text('{"search": [], "torchrun": ""}')
    (folder / "run.yaml").write_text("steps: 4\ndata: {columns: [questions]}\n")
    return folder


@pytest.mark.parametrize("arguments", [
    ["watch", "--once"], ["why"], ["why", "--step", "1"], ["faults"], ["report", "--trace"], ["inject", "stop"]],
    ids=lambda arguments: " ".join(arguments))
def test_torn_and_foreign_lines_are_passed_over(folder, arguments, capsys):
    code = main([arguments[0], str(folder), *arguments[1:]])
    said = capsys.readouterr()
    assert code == (2 if arguments[0] == "inject" else 0), said
    assert len(said.out) < 100_000
    if arguments[0] == "faults":
        assert "killed → starts again" in said.out


@pytest.mark.parametrize("arguments", [["watch", "--once"], ["why"], ["report"]], ids=lambda each: each[0])
def test_documents_of_a_run_that_stand_for_too_much_or_are_foreign_are_passed_over(folder, arguments, capsys):
    lists = "".join(f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 9)}]\n" for number in range(1, 12))
    for name in ("dag.yaml", "run.yaml"):
        (folder / name).write_text(f"a0: &a0 [x]\n{lists}")
    (folder / "plan.json").write_text('{"tasks": [{"node": 1, "reads": "x"}, 5]}')
    assert main([arguments[0], str(folder), *arguments[1:]]) == 0, capsys.readouterr()


def test_torn_and_foreign_lines_are_not_in_reports(folder, tmp_path):
    found = read_run(folder)
    assert 0.5 in found["metrics"]["reward/mean"][1]
    assert write_report([folder], tmp_path / "report.html")


def test_torn_and_foreign_lines_are_not_in_what_a_resumed_run_reads(folder):
    reader = RunReader(folder)
    assert {1, 2} <= {line["step"] for line in reader.steps()}
    assert (1, 0) in {(each.step, each.rank) for each in timings.read(folder / "times.jsonl")}
    forget_after(folder / "samples.jsonl", 1)
    assert {row["step"] for row in reader.rows("samples")} <= {0, 1}
    resumed = RunFolder(folder, resumed_at=1, loggers={})
    resumed.write_step(2, {"seconds": 1.0, "tokens": 3.0})
    resumed.close({})
    assert reader.summary["steps"] == 2


def clocked(*times: float) -> list[dict[str, Any]]:
    kinds = ("worker_started", "worker_ready", "failure", "worker_started", "worker_ready", "worker_caught_up",
             "run_ended")
    attempts = (0, 0, 0, 1, 1, 1, 1)
    more = {"failure": {key: value for key, value in EVENTS[2].items() if key not in ("time", "event")}}
    return [{"step": 1, "rank": 0, "attempt": attempt, "seconds": {"connect": 1.0, "load": 1.0}, **more.get(kind, {}),
             "event": kind, "time": moment} for kind, attempt, moment in zip(kinds, attempts, times)]


@pytest.mark.parametrize("times", [
    [5000, 5010, 5020, 5021, 1430, 1431, 1440], [5000, 5010, 5020, 5021, 5030 + 3e7, 5031 + 3e7, 5040 + 3e7],
    [5000, 5010, 5020 + 3e7, 5021, 5030, 5031, 5040]], ids=["back", "a year ahead", "ahead and back"])
def test_a_clock_that_jumps_does_not_blow_up_faults(folder, capsys, times):
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in clocked(*times)))
    assert main(["faults", str(folder)]) == 0
    said = capsys.readouterr().out
    assert len(said) < 2000
    costs = account(read(folder))
    (found,) = costs.recoveries
    assert 0.0 <= costs.ettr <= 1.0
    assert min(found.start, found.connect, found.first) >= 0.0
    if max(times) < 1e5:
        assert costs.total < 60.0, "the hour by which the clock was set back is none of the run's"


@pytest.mark.parametrize("jump", [-3600.0, 3600.0, 3e7])
def test_a_clock_that_is_set_hides_no_silence_and_makes_none(folder, jump):
    """The file's time is of the clock as it is now, its line of the clock as it was when the process began."""
    file, now = folder / "timeline/rank0.jsonl", time.time()
    base = round(1e6 * (now - jump)) - 10**6
    file.write_text(json.dumps({**RANK, "base": base}) + "\n")
    os.utime(file, (now, now))
    assert timeline.newest(folder)[0].silence(now + 5) == 0
    assert timeline.newest(folder)[0].silence(now + 100) == pytest.approx(100, abs=1)
    assert list(explain(folder, complete_checkpoints))
