"""Policies of the user's that decide how many rollouts there are, on growing files and in a whole run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import metrics_of

from distflow.errors import InvalidInput
from distflow.recovery import autoscaler
from distflow.recovery.autoscaler import _RecentSteps, scaling

POLICY = '''
import time
from pathlib import Path
from distflow import scaling

@scaling(every=4)
def fewer_and_then_more(steps, rollouts):
    assert [step["step"] for step in steps] == list(range(int(steps[0]["step"]), int(steps[0]["step"]) + 4))
    assert all(step["waiting/samples"] < step["seconds"] and step["dock/ready"] >= 0 for step in steps)
    if steps[-1]["step"] == 4:
        return 0
    scaled_down = "worker_scaled_down" in Path("runs/job/events.jsonl").read_text()
    return 9 if scaled_down and rollouts == 1 else None

@scaling(every=20)
def never_answers(steps, rollouts):
    time.sleep(600)
'''


def test_a_policy_changes_the_rollouts_and_one_that_hangs_holds_up_nobody(launch, workspace):
    (workspace / "policy.py").write_text(POLICY)
    dag = (workspace / "grpo.yaml").read_text()
    (workspace / "scaled.yaml").write_text(dag.replace("imports: [brevity]", "imports: [brevity, policy]"))
    done = launch(3, "--dag", "scaled.yaml", "--run-file", "tiny.yaml", "--name", "job", "--set", "mode=async",
                  "--set", "groups.rollout=2", "--set", "steps=80")
    run = workspace / "runs/job"
    assert sorted(metrics_of(run)) == list(range(1, 81))
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    scaled = [(event["policy"], event["after_step"], event["before"], event["rollouts"]) for event in events
              if event["event"] == "scaled"]
    again = scaled[-1][1]
    assert scaled == [("fewer_and_then_more", 4, 2, 1), ("fewer_and_then_more", again, 1, 2)], "within what there are"
    assert [event["rank"] for event in events if event["event"] == "worker_scaled_down"] == [2]
    assert "step 4: `fewer_and_then_more` wants 1 of 2 rollouts instead of 2" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_job_that_begins_forgets_how_many_rollouts_another_had(tmp_path):
    autoscaler.write(tmp_path, 1)
    assert autoscaler.read(tmp_path, 3) == 1
    autoscaler.forget(tmp_path)
    autoscaler.forget(tmp_path / "nowhere")
    assert autoscaler.read(tmp_path, 3) == 3


def test_a_rollout_that_rests_takes_the_place_of_one_that_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(autoscaler, "_POLL_FILE", -1.0)
    left_out: list[int] = []
    rollouts = [autoscaler.RolloutScale(tmp_path, place, lambda: left_out) for place in range(3)]
    autoscaler.write(tmp_path, 1)
    assert [each.should_run() for each in rollouts] == [True, False, False]
    left_out.append(0)
    assert [each.should_run() for each in rollouts[1:]] == [True, False]
    left_out.append(1)
    assert rollouts[2].should_run()


def lines(*steps: int) -> str:
    return "".join(json.dumps({"step": step, "seconds": 1.0}) + "\n" for step in steps)


def test_each_step_is_seen_once_while_the_file_grows_and_is_replaced(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    done = _RecentSteps(file, 3)
    assert [*done.new()] == []
    file.write_text(lines(1, 2) + '{"step": 2, "validation/held": 0.5}\n{"step": 3, "sec')
    assert [*done.new()] == [1, 2]
    with file.open("a") as more:
        more.write('onds": 1.0}\n' + lines(4))
    assert [(step, [each["step"] for each in done.steps]) for step in done.new()] == [(3, [1, 2, 3]), (4, [2, 3, 4])]
    (tmp_path / "new").write_text(lines(1, 2, 3))  # the trainer starts again, and does step 4 once more
    (tmp_path / "new").replace(file)
    assert [*done.new()] == []
    with file.open("a") as more:
        more.write(lines(4, 5))
    assert [*done.new()] == [5]
    assert [each["step"] for each in done.steps] == [3, 4, 5]


@pytest.mark.parametrize("every", [0, -1, 2.0, True])
def test_a_policy_is_asked_after_a_number_of_steps(every):
    with pytest.raises(InvalidInput, match="give a number of steps"):
        scaling(every=every)
