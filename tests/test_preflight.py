"""Whole runs: one records what it has proved, and one whose proof fails ends before its first step."""

from __future__ import annotations

from pathlib import Path

from harness import events_of

RUN = ("--dag", "grpo.yaml", "--run-file", "tiny.yaml", "steps=1", "checkpoint.every=0")
RAISES = """
from distflow import reward

@reward
def brevity(completion, answer):
    raise RuntimeError("no compiler")
"""


def preflight_of(run: Path) -> dict:
    found = events_of(run)
    (event,) = [event for event in found if event["event"] == "preflight"]
    return event


def test_a_run_records_what_it_has_proved(launch, workspace):
    done = launch(2, *RUN, "--name", "proved")
    event = preflight_of(workspace / "runs/proved")
    assert event["proved"] == {"data": 10, "rewards": 10, "tokens": 10, "models": 6}
    assert event["rank"] == event["step"] == 0
    assert sum(event["seconds"].values()) < 5
    (doubt,) = [doubt for doubt in event["doubts"] if "brevity" in doubt["text"]]
    assert "pays an empty answer no less than the answer of each of the first 3 records" in doubt["text"]
    assert (doubt["kind"], doubt["share"], doubt["change"]) == ("wrong_paid", 1.0, "A model learns from it to say "
                                                                "nothing.")
    assert f"note: {doubt['text']}" in done.stdout
    detected = [each["what"] for each in events_of(workspace / "runs/proved")
                if each["event"] == "reward_against_answers"]
    assert any("brevity" in what for what in detected)


def test_a_run_without_preflight_says_so(launch, workspace):
    (workspace / "brevity.py").write_text(RAISES)
    launch(1, *RUN, "--name", "unproved", "preflight=false", "nodes.reward.with.patience=2")
    assert preflight_of(workspace / "runs/unproved")["proved"] == {}


def test_a_reward_that_always_raises_ends_the_start_before_torch_is_loaded(launch, workspace):
    (workspace / "brevity.py").write_text(RAISES)
    done = launch(2, *RUN, code=1)
    said = done.stdout + done.stderr
    assert "brevity.py:5: reward `brevity` raised RuntimeError: no compiler, at brevity.py, line 6, in brevity:  " \
        'raise RuntimeError("no compiler")' in said
    assert "--set preflight=false" in said
    assert "loading torch" not in said
    assert not (workspace / "runs").exists()


def test_targets_that_are_all_cut_end_the_start_in_the_first_worker(launch, workspace):
    done = launch(2, "--dag", "sft", "--run-file", "tiny.yaml", "data.max_target_tokens=2", code=1)
    assert "each of the first 10 records has a target of more than 2 tokens" in done.stdout + done.stderr
    assert not (workspace / "runs").exists()
