"""Why a run is slow, stuck or dead, or its reward fell: said from its files, also of real runs."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from harness import until_shown

from distflow.cli import main
from distflow.recovery.checkpoint_files import complete_checkpoints
from distflow.telemetry import timeline
from distflow.telemetry.run_reader import RunReader
from distflow.telemetry.timeline import Span
from distflow.telemetry.why import Segment, critical_path, dead, explain, stuck


def span(rank: int, name: str, phase: str, start: float, end: float, role: str = "trainer", step: int = 1) -> Span:
    return Span(rank, "one", role, 0, "", name, step, start, end - start, {"phase": phase, "node": ""})


def test_a_path_leads_to_the_rank_that_others_wait_for():
    """Rank 1 samples longer; rank 0 trains longer."""
    spans = [span(0, "a", "generating", 0, 2), span(0, "wait", "waiting", 2, 5.5), span(0, "b", "training", 5.5, 9),
             span(0, "ending the run", "ending", 9, 99),
             span(1, "a", "generating", 0, 5), span(1, "wait", "waiting", 5, 5.5), span(1, "b", "training", 5.5, 7),
             span(1, "finishing", "waiting", 7, 9)]
    assert critical_path(spans, 1) == [Segment(1, "a", "generating", 5), Segment(0, "wait", "waiting", 0.5),
                                       Segment(0, "b", "training", 3.5)]


@pytest.mark.parametrize("seed", range(20))
def test_every_path_is_as_long_as_its_step(seed):
    draw, spans = random.Random(seed), []
    for rank in range(4):
        now = 0.0
        for _ in range(30):
            took = draw.uniform(0.01, 1.0)
            spans.append(span(rank, "x", draw.choice(["waiting", "generating", "training"]), now, now + took))
            now += took
    path = critical_path(spans, 1)
    assert sum(part.seconds for part in path) == pytest.approx(max(each.end for each in spans), abs=0.02)


def run_folder(folder: Path, rewards: list[float]) -> Path:
    (folder / "launch.json").write_text('{"search": [], "torchrun": ""}')
    (folder / "metrics.jsonl").write_text("".join(json.dumps(
        {"step": step, "seconds": 1.0 + (step == 9), "seconds/a": 0.5 + (step == 9), "reward/mean": reward,
         "reward/math": 0.4 * reward + 0.001 * (step % 3), "response/length": 40.0 + step % 5 + 90 * (reward < 0.5)})
        + "\n" for step, reward in enumerate(rewards, 1)))
    return folder


def test_what_changed_with_a_reward_is_named(tmp_path):
    folder = run_folder(tmp_path, [0.8 + 0.01 * (step % 4) for step in range(30)] + [0.2] * 20)
    (folder / "summary.json").write_text("{}")
    (folder / "events.jsonl").write_text("".join(json.dumps({"time": 1.0, "rank": 0, **event}) + "\n" for event in (
        {"step": 0, "event": "preflight", "doubts": [
            "4 questions are in both sets", {"text": "odd", "kind": "texts_cut", "share": 0.1, "change": ""},
            {"text": "torn"}]},
        {"step": 31, "event": "settings_changed", "settings": {"steps": ["30", "50"]}})))
    (folder / "samples.jsonl").write_text(json.dumps(
        {"step": 40, "questions": "How many?", "completions": "so many words", "environment_rewards": 0.1}) + "\n")
    said = list(explain(folder, complete_checkpoints))
    assert any(line.startswith("`reward/mean` leapt from 0.815 to 0.2, since step 31; detector `reward_changed`")
               for line in said)
    assert "  reward/math: 0.327 → 0.0811" in said
    assert "  response/length: 42 → 132" in said
    assert "  step 31: settings changed steps: 30 → 50" in said
    at = said.index("Noted before its start:")
    assert said[at + 1 : at + 4] == ["  4 questions are in both sets", "  odd", "  {'text': 'torn'}"]
    assert '    "so many words"' in said
    said = list(explain(folder, complete_checkpoints, 9))
    assert said[0] == "Step 9 took 2.00 s; the median is 1.00 s."


def test_a_fall_is_told_by_part_source_and_prompt(tmp_path):
    """Code falls at step 31 and mathematics does not."""
    folder = run_folder(tmp_path, [0.8 + 0.01 * (step % 4) for step in range(30)] + [0.4] * 20)
    (folder / "summary.json").write_text("{}")
    (folder / "run.yaml").write_text("data: {columns: [source, level]}\n")
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(
        {**line, "reward/code": 0.9 + 0.001 * (line["step"] % 3) - 0.7 * (line["step"] > 25), "gradient/kept": 0.0,
         "mismatch/logprob_mean": 1e-7, "gradient/moved": 0.3}) + "\n"
        for line in metrics))
    (folder / "samples.jsonl").write_text("".join(json.dumps(
        {"step": step, "row": row, "source": source, "level": f"{step} {row}", "questions": f"{source} {step % 3}",
         "completions": "x", "rewards": 0.1 if step > 30 and source == "mbpp" else 0.8}) + "\n"
        for step in range(1, 51) for row, source in enumerate(["gsm8k", "mbpp"])))
    said = list(explain(folder, complete_checkpoints))
    assert any(line.startswith("  reward/code: 0.78") for line in said)
    assert "No reading confirms a cause. Usual ones: a policy does not change so fast" in "".join(said)
    assert ("  Not the cause, as it is right in all steps until then: the sampler has the trained weights and their "
            "numbers; gradients are set to zero") in said
    assert [line for line in said if line.startswith("  source ")] == [
        "  source `mbpp`: 0.800 → 0.100 (30 samples before, 20 since)"]
    assert not [line for line in said if line.startswith("  level ")], "nearly every sample has another one"
    prompts = [line for line in said if line.startswith("  prompt ")]
    assert len(prompts) == 3
    assert all(line.startswith('  prompt "mbpp ') and "0.800 → 0.100 (10 samples before" in line for line in prompts)


def test_the_last_row_is_named_with_its_tools(tmp_path):
    folder = run_folder(tmp_path, [0.5] * 9)
    (folder / "summary.json").write_text("{}")
    (folder / "samples.jsonl").write_text(json.dumps({"step": 9, "row": 6, "questions": "What is in the shop?"}) + "\n")
    (folder / "trajectories").mkdir()
    (folder / "trajectories/rank0.jsonl").write_text("".join(json.dumps(
        {"step": 9, "row": 6, "turn": turn, "text": f"look {turn}"}) + "\n" for turn in (1, 2)))
    (folder / "timeline").mkdir()
    parts = [("rows", 5, 0, 500), ("rows", 6, 0, 100), ("tools", 6, 100, 400, 1), ("rows", 6, 500, 200),
             ("tools", 6, 700, 1200, 2)]
    spans = [["", "computing node `rollout`", 9, 0, 2_000_000, {"phase": "generating", "node": "rollout"}],
             *([track, f"row {row}", 9, 1000 * start, 1000 * took, {"turn": turn[0]} if turn else {"tokens": 3}]
               for track, row, start, took, *turn in parts)]
    (folder / "timeline/rank0.jsonl").write_text(json.dumps(
        {"steps": [9, 9], "role": "trainer", "attempt": 0, "rank": 0, "host": "one", "pid": 7, "base": 0, "time": 0,
         "now": None, "spans": spans}) + "\n")
    said = list(explain(folder, complete_checkpoints, 9))
    at = next(index for index, line in enumerate(said) if line.startswith("The last of its 2 rows"))
    assert said[at] == ("The last of its 2 rows was row 6, on rank 0: 1.90 s from its first token to its end; the "
                        "median is 1.20 s.")
    assert said[at + 1 : at + 4] == [
        "  2 turns; its environment took 1.60 s of that (median of the rows 0.80 s), most in turn 2: 1.20 s",
        '    the model had said: "look 2"', '  its prompt: "What is in the shop?"']


def test_ranks_that_all_wait_for_long_are_named(tmp_path):
    """Each waits for what no rank computes; usually it comes in 20 ms."""
    folder = tmp_path / "timeline"
    folder.mkdir()
    now = int(1e6 * time.time())
    wait = ["", "waiting for prompts", 3, 0, 20_000, {"phase": "waiting", "node": ""}]
    (folder / "rank0.jsonl").write_text(json.dumps(
        {"steps": [3, 3], "role": "trainer", "attempt": 0, "rank": 0, "host": "elsewhere", "pid": 7, "base": now,
         "time": 0, "now": ["waiting for prompts", "waiting", "", 4, -60_000_000], "spans": [wait]}) + "\n")
    said = list(stuck(tmp_path, 3))
    assert "waiting for prompts, step 4, for 60." in said[1]
    assert said[2].startswith("Rank 0 waits much longer than usual, and no rank computes so long: ")
    assert said[3] == "Its stacks:  py-spy dump --pid 7   on elsewhere"
    assert len(said) == 4


def test_mistakes_are_told(tmp_path, capsys):
    assert main(["why", str(tmp_path)]) == 2
    assert "distflow why runs/grpo-1" in capsys.readouterr().err
    run_folder(tmp_path, [0.5] * 3)
    assert main(["why", str(tmp_path), "--step", "7"]) == 2
    assert "the run has steps 1 to 3" in capsys.readouterr().err


def test_a_run_that_was_killed_is_told_from_one_that_has_ended(launch, workspace, capsys):
    launch(2, "--dag", "grpo.yaml", "--name", "whole", "steps=4", "preflight=false")
    assert main(["why", str(workspace / "runs/whole")]) == 0
    said = capsys.readouterr().out
    assert "Nothing is wrong with its learning in 4 steps" in said
    assert "\nStep " in said
    assert "critical path" in said
    assert "training    update" in said
    (workspace / "runs/whole/summary.json").unlink()
    assert main(["why", str(workspace / "runs/whole")]) == 0
    said = capsys.readouterr().out
    assert "is not running, and has not finished" in said
    assert "distflow resume" in said


def test_a_run_that_was_told_to_end_has_no_failure_as_its_cause(tmp_path):
    """Failures that it has survived are not what ended it; one after its resumption is."""
    failure = {"event": "failure", "rank": 1, "time": 0, "group": "rollout 0", "failed_step": 3, "phase": "generating",
               "what": "it was ended by SIGKILL", "verdict": "starts again"}
    rows = [{"time": 0.0, "step": 4, "rank": 0, **event} for event in (
        failure, {"event": "worker_started"}, {"event": "run_stopped", "after_step": 4}, {"event": "worker_ended"})]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = "\n".join(dead(RunReader(tmp_path), complete_checkpoints))
    assert "It was told to end (Ctrl-C or SIGTERM), and did so after step 4." in said
    assert "SIGKILL" not in said
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[1], rows[0]]))
    said = "\n".join(dead(RunReader(tmp_path), complete_checkpoints))
    assert "told to end" not in said
    assert "it was ended by SIGKILL" in said


def test_only_a_complete_checkpoint_is_one_to_go_on_from(tmp_path, capsys):
    """A run may die while it writes its first one."""
    folder = run_folder(tmp_path, [])
    written = folder / "checkpoints/step-00000004.0.partial"
    written.mkdir(parents=True)
    assert main(["why", str(folder)]) == 0
    assert "It has no checkpoint to go on from" in capsys.readouterr().out
    (written / "progress.json").write_text('{"files": {}}')
    written.rename(written.with_name("step-00000004"))
    assert main(["why", str(folder)]) == 0
    assert f"Go on from the newest checkpoint:  distflow resume {folder}" in capsys.readouterr().out


def test_the_rank_that_others_wait_for_is_named_while_they_wait(workspace, begin, capsys):
    """A worker is stopped, as a debugger or a machine in trouble would do."""
    run = begin(2, "--dag", "grpo.yaml", "--run-file", "tiny.yaml", "--name", "stuck", "steps=1000")
    folder = workspace / "runs/stuck"
    until_shown(run, "step 10/")
    while 1 not in (ranks := timeline.newest(folder)):  # ten steps may take less than a second
        run.stdout.readline()
    victim = ranks[1].pid
    os.kill(victim, signal.SIGSTOP)
    # Its last line grows old by itself: nothing else can be waited for.
    while True:
        said = list(explain(folder, complete_checkpoints))
        if all(any(part in line for line in said) for part in ("no sign of it", "Collectives: ")):
            break
    text = "\n".join(said)
    assert f"Waiting for rank 1 on {os.uname().nodename} (process {victim}): rank 0." in text
    assert "distflow inject RUN kill --rank 1" in text
    assert "Collectives: rank 1 has not " in text
    assert ", where rank 0 waits for " in text
    assert "Where it stands:" in text or "pip install py-spy" in text
