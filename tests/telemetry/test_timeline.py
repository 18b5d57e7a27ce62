"""What each rank did when: written as it happens, read by one clock, and shown by Perfetto or a collector."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from distflow.cli import main
from distflow.telemetry import timeline
from distflow.telemetry.timeline import Timeline


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def opened(folder: Path, rank: int = 0, role: str = "trainer") -> Timeline:
    made = Timeline()
    made.begin(role=role, attempt=0)
    made.open(folder / "timeline" / f"rank{rank}.jsonl", rank)
    return made


def write_lines(folder: Path, rank: int, host: str, base: float, spans: list[list[Any]]) -> None:
    """Write what a rank on a machine with another clock would; times and `base` in seconds."""
    (folder / "timeline").mkdir(exist_ok=True)
    micro = [[track, name, step, round(1e6 * start), round(1e6 * took), facts]
             for track, name, step, start, took, facts in spans]
    line = {"role": "trainer", "attempt": 0, "rank": rank, "host": host, "pid": 7, "base": round(1e6 * base),
            "time": 0, "now": None, "spans": micro}
    (folder / "timeline" / f"rank{rank}.jsonl").write_text(json.dumps(line) + "\n")


def test_each_activity_ends_where_the_next_begins(folder):
    mine = opened(folder)
    mine.enter("computing node `a`", "generating", 1, "a")
    with mine.span("transfers", "a → b", columns=["x"]) as facts:
        facts["bytes"] = 12
    mine.enter("computing node `b`", "training", 1, "b")
    mine.enter("waiting for prompts", "waiting", 2)
    mine.close()
    run = timeline.read(folder)
    a, b, wait = (span for span in run.spans if span.track == timeline.MAIN)
    assert [span.label for span in (a, b, wait)] == ["a", "b", "waiting for prompts"]
    assert [span.step for span in (a, b, wait)] == [1, 1, 2]
    assert a.end == pytest.approx(b.start, abs=2e-6)
    assert b.end == pytest.approx(wait.start, abs=2e-6)
    transfer, = (span for span in run.spans if span.track == "transfers")
    assert (transfer.name, transfer.step, transfer.facts) == ("a → b", 1, {"columns": ["x"], "bytes": 12})
    assert a.start <= transfer.start <= transfer.end <= a.end
    assert {span.name for span in timeline.read(folder, range(2, 3)).spans} == {"waiting for prompts"}


def test_a_file_does_not_grow_for_ever_and_torn_lines_are_passed_over(folder, monkeypatch):
    monkeypatch.setattr(timeline, "_LARGEST", 2000)
    mine = opened(folder)
    for step in range(1, 60):
        mine.enter("sampling", "generating", step)
        mine.write()
    mine.close()
    with (folder / "timeline/rank0.jsonl").open("a") as file:
        file.write('{"role": "tra')
    files = sorted((folder / "timeline").iterdir())
    assert [file.name for file in files] == ["rank0.jsonl", "rank0.older.jsonl"]
    assert all(file.stat().st_size < 3000 for file in files)
    steps = timeline.read(folder).steps()
    assert steps == [*range(steps[0], 60)]


@pytest.mark.parametrize("ahead", [0.0, 37.5, -4.0])
def test_clocks_of_two_machines_are_aligned_by_their_collectives(folder, ahead):
    """Rank 1's machine is `ahead`; both leave the collectives of steps 1 and 2 at once."""
    finishing = timeline.FINISHING
    write_lines(folder, 0, "one", 1000.0, [["", finishing, 1, 10.00, 0.50, {}], ["", finishing, 2, 20.49, 0.02, {}]])
    write_lines(folder, 1, "two", 1000.0 + ahead - 300.0, [["", finishing, 1, 310.48, 0.02, {}],
                                                           ["", finishing, 2, 320.00, 0.51, {}]])
    run = timeline.read(folder)
    assert run.offsets["one"] == 0.0
    assert run.offsets["two"] == pytest.approx(-ahead, abs=0.02)
    ends = {(span.rank, span.step): span.end for span in run.spans}
    assert ends[0, 1] == pytest.approx(ends[1, 1], abs=0.03)


def test_a_rollout_on_another_machine_pulls_nothing_before_it_is_published(folder):
    write_lines(folder, 0, "one", 1000.0, [["weights", "publish", 1, 5.0, 0.2, {"version": 3}]])
    write_lines(folder, 1, "two", 990.0, [["weights", "pull", 1, 5.1, 0.3, {"version": 3}]])
    run = timeline.read(folder)
    publish, pull = sorted(run.spans, key=lambda span: span.rank)
    assert pull.end >= publish.start
    assert run.offsets["two"] == pytest.approx(9.6)


def trace_of(folder: Path) -> list[dict[str, Any]]:
    with gzip.open(folder / "trace.json.gz") as file:
        return json.load(file)["traceEvents"]


def test_a_trace_has_a_process_for_each_rank_and_no_thread_with_two_things_at_once(folder, capsys):
    rows = [["rows", f"row {row}", 1, 0.1 * row, 1.0, {"tokens": 5}] for row in range(5)]
    write_lines(folder, 0, "one", 1000.0, [["", "computing node `a`", 1, 0.0, 2.0, {"phase": "training"}], *rows,
                                           ["weights", "publish", 1, 2.0, 0.1, {"version": 3}]])
    write_lines(folder, 1, "one", 1000.0, [["weights", "pull", 1, 2.05, 0.2, {"version": 3}]])
    failure = {"time": 1001.0, "step": 1, "rank": 1, "event": "failure", "what": "killed"}
    (folder / "events.jsonl").write_text(json.dumps(failure) + "\n")
    assert main(["report", "--trace", str(folder)]) == 0
    assert "8 spans of steps 1 to 1" in capsys.readouterr().out
    events = trace_of(folder)
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0 · trainer · one", "rank 1 · trainer · one"}
    slices = [event for event in events if event["ph"] == "X"]
    for thread in {(each["pid"], each["tid"]) for each in slices}:
        own = sorted((each["ts"], each["dur"]) for each in slices if (each["pid"], each["tid"]) == thread)
        assert all(start + took <= after for (start, took), (after, _) in zip(own, own[1:])), thread
    assert min(each["ts"] for each in slices) == 0
    assert [(event["ph"], event["pid"]) for event in events if event["name"] == "weights"] == [("s", 0), ("f", 1)]
    mark, = (event for event in events if event["ph"] == "i")
    assert (mark["name"], mark["ts"], mark["args"]["what"]) == ("failure", 1e6, "killed")


def test_mistakes_are_told(folder, capsys):
    assert main(["report", "--trace", str(folder)]) == 2
    assert "has no timeline" in capsys.readouterr().err
    write_lines(folder, 0, "one", 1000.0, [["", "sampling", 4, 0.0, 2.0, {}]])
    assert main(["report", "--trace", str(folder), "--steps", "9"]) == 2
    assert "--steps 9:9: the run has steps 4 to 4" in capsys.readouterr().err
    for steps in ("3:x", "7:2", "0:2"):
        with pytest.raises(SystemExit) as ended:
            main(["report", "--trace", str(folder), "--steps", steps])
        assert ended.value.code == 2
        assert f"argument --steps: `{steps}` names no steps" in capsys.readouterr().err


@pytest.mark.parametrize("mode", [(), ("mode=async", "groups.rollout=1")], ids=["sync", "async"])
def test_a_run_says_where_all_its_time_goes(launch, workspace, mode):
    settings = [part for setting in ("steps=6", *mode) for part in ("--set", setting)]
    launch(2, "--dag", "grpo.yaml", "--run-file", "tiny.yaml", *settings)
    folder, = (workspace / "runs").iterdir()
    run = timeline.read(folder)
    assert run.offsets == dict.fromkeys(run.offsets, 0.0)
    assert len(run.ranks) == 2
    for rank in run.ranks:
        main_track = sorted((span for span in run.spans if span.rank == rank and not span.track), key=lambda s: s.start)
        gaps = [after.start - before.end for before, after in zip(main_track, main_track[1:])]
        assert max(map(abs, gaps)) < 1e-3
    assert "update" in {span.label for span in run.spans if (span.rank, span.step, span.track) == (0, 3, "")}
    assert {"rows"} <= {span.track for span in run.spans}
    if mode:
        assert {"publish", "pull", "load", "put samples"} <= {span.name for span in run.spans}


@pytest.mark.parametrize("mode", [(), ("mode=async", "groups.rollout=1")], ids=["sync", "async"])
def test_profiled_steps_have_a_trace_for_each_rank_that_trains(launch, workspace, mode):
    settings = [part for setting in ("steps=3", *mode) for part in ("--set", setting)]
    launch(2, "--dag", "grpo.yaml", "--run-file", "tiny.yaml", "--profile", "2", *settings)
    folder, = (workspace / "runs").iterdir()
    trainers = [0] if mode else [0, 1]
    assert sorted(file.name for file in (folder / "profile").iterdir()) == [f"rank{n}-step2.json.gz" for n in trainers]
    for file in (folder / "profile").iterdir():
        names = {event["name"] for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
        assert {"node update", "aten::mm"} <= names
