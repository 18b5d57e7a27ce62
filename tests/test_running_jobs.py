"""What can be done to a job while it runs: break a worker, scale rollouts down, ask what it has cost, be told."""

import json

import pytest
from harness import events_of, follow, lines_of, metrics_of

from distflow.cli import main
from distflow.config.load import load
from distflow.telemetry.run_folder import RunFolder
from planners import plan

HOOKS = '''
import json
from distflow import hook

def note(moment, when):
    with open("hooks.jsonl", "a") as file:
        file.write(json.dumps([when, moment.group, moment.failure and moment.failure.step]) + "\\n")

@hook(when="on_failure")
def failed(moment):
    note(moment, "on_failure")
    raise ValueError("a hook that fails harms nobody")

@hook(when="before_restart", role="rollout")
def before(moment):
    note(moment, "before_restart")

@hook(when="after_restart", role="trainer")
def after(moment):
    note(moment, "after_restart")

@hook(when="on_join")
def joined(moment):
    note(moment, "on_join")
'''


def test_a_job_is_broken_scaled_and_goes_on(begin, workspace, capfd):
    (workspace / "hooks.py").write_text(HOOKS)
    dag = (workspace / "grpo.yaml").read_text()
    (workspace / "hooked.yaml").write_text(dag.replace("imports: [brevity]", "imports: [brevity, hooks]"))
    run = workspace / "runs/job"
    orders = {"step 4/": ["inject", str(run), "kill", "--rank", "0"], "step 9/": ["scale", str(run), "rollout=1"],
              "step 25/": ["scale", str(run), "rollout=2"]}
    follow(begin(3, "--dag", "hooked.yaml", "--run-file", "tiny.yaml", "--name", "job", "mode=async", "steps=60"),
           orders)
    assert sorted(metrics_of(run)) == list(range(1, 61))
    failure, = events_of(run, "failure")
    assert (failure["group"], failure["verdict"]) == ("trainer", "starts again")
    assert [event["rank"] for event in events_of(run, "worker_scaled_down")] == [2]
    assert [event["rank"] for event in events_of(run, "hook_failed")] == [0]
    told = lines_of(workspace / "hooks.jsonl")
    for when in ("on_failure", "after_restart"):
        assert [when, "trainer", failure["failed_step"]] in told
    assert {unit for when, unit, _ in told if when == "on_join"} == {"trainer", "rollout 0", "rollout 1"}
    assert not [each for each in told if each[0] == "before_restart"], "no rollout has failed"
    capfd.readouterr()
    assert main(["faults", str(run), "--window", "5"]) == 0
    assert "effective training time:" in capfd.readouterr().out


@pytest.mark.parametrize(("line", "said"), [
    (["faults", "nowhere"], "there is no run folder `nowhere`"),
    (["inject", "nowhere", "kill"], "there is no run folder `nowhere`"),
    (["scale", "nowhere", "rollout=1"], "there is no run folder `nowhere`"),
    (["scale", "nowhere", "rollouts=1"], "Write  rollout=2"),
    (["scale", "sync", "rollout=1"], "mode=async"),
    (["scale", "apart", "rollout=3"], "supervisors for 2 rollouts, so give 1 to 2"),
    (["scale", "apart", "rollout=0"], "supervisors for 2 rollouts, so give 1 to 2"),
    (["scale", "both", "rollout=0"], "give 1 to 2. To have the ranks that train validate, stop the job, and  distflow "
                                     "resume both --set groups.rollout=0"),
    (["scale", "both", "rollout=3"], "supervisors for 2 rollouts, so give 1 to 2"),
    (["scale", "blind", "rollout=3"], "supervisors for 2 rollouts, so give 0 to 2"),
    (["inject", "apart", "kill", "--rank", "7"], "rank 7 has had no worker"),
    (["inject", "apart", "kill", "--rank", "1"], "has ended"),
    (["faults", "apart", "--window", "0"], "--window 0 is no time"),
])
def test_what_cannot_be_done_is_said(tmp_path, monkeypatch, capsys, line, said):
    monkeypatch.chdir(tmp_path)
    settings = {"sync": ["mode=sync"], "apart": ["mode=async"], "both": ["mode=semi_sync"],
                "blind": ["mode=semi_sync", "validation=null"]}
    for name, overrides in settings.items():
        spec = load("grpo.yaml", None, ["groups.rollout=2", *overrides])
        with RunFolder.created(tmp_path / name, spec, plan(spec, 3), []):
            pass
        (tmp_path / name / "events.jsonl").write_text(
            json.dumps({"time": 1.0, "step": 1, "rank": 1, "event": "worker_ended", "attempt": 0}) + "\n")
    assert main(line) == 2
    assert said in capsys.readouterr().err
