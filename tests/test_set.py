"""Settings of a job that runs: one group starts again with them, nobody else, and nothing is lost."""

from __future__ import annotations

import json
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from operator import getitem

import pytest
import yaml
from harness import SEED_WITH_CLEAR_DRAWS, command, environment, metrics_of

from distflow.cli import main

STEPS = 24
COUNTED = '''
import json
from workers.engines.trainer import Trainer

before = Trainer._micro_batches

def counted(self, *arguments, **more):
    micros = before(self, *arguments, **more)
    with open("micros.jsonl", "a") as file:
        file.write(json.dumps([self.settings.micro_batch_tokens, len(micros)]) + "\\n")
    return micros

Trainer._micro_batches = counted
'''


def test_each_setting_restarts_the_group_that_it_concerns(launch, workspace):
    (workspace / "counted.py").write_text(COUNTED)
    dag = (workspace / "grpo.yaml").read_text()
    (workspace / "counted.yaml").write_text(dag.replace("imports: [brevity]", "imports: [brevity, counted]"))
    run, more = workspace / "runs/job", ("--run-file", "tiny.yaml", *SEED_WITH_CLEAR_DRAWS, "--set", f"steps={STEPS}")
    orders = {"step 3/": ["roles.actor.micro_batch_tokens=64"], "step 9/": ["roles.actor.generation.batch_rows=8"],
              "step 14/": ["roles.actor.learning_rate=5e-4", "checkpoint.every=4"]}
    process = subprocess.Popen(
        command(2, "--dag", "counted.yaml", *more, "--name", "job", "--set", "mode=async", "--set", "staleness=0"),
        cwd=workspace, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seen = []
    for line in process.stdout:
        seen.append(line)
        for mark in [mark for mark in orders if mark in line and "loss" in line]:
            assert main(["set", str(run), *orders.pop(mark)]) == 0
    assert process.wait() == 0, "".join(seen)
    launch(1, "--dag", "grpo.yaml", *more, "--name", "calm")
    ours, theirs = metrics_of(run), metrics_of(workspace / "runs/calm")
    assert sorted(ours) == list(range(1, STEPS + 1))
    for step in range(1, 15):
        assert ours[step]["response/fingerprint"] == theirs[step]["response/fingerprint"], step
        assert ours[step]["loss"] == pytest.approx(theirs[step]["loss"], abs=1e-5), step
    assert (ours[14]["learning_rate"], ours[STEPS]["learning_rate"]) == (1e-3, 5e-4)
    counts = {tokens: set() for tokens in (16384, 64)}
    for line in (workspace / "micros.jsonl").read_text().splitlines():
        tokens, count = json.loads(line)
        counts[tokens].add(count)
    assert max(counts[16384]) == 1
    assert max(counts[64]) > 1
    require_events(run)
    kept = yaml.safe_load((run / "run.yaml").read_text())
    assert kept["roles"]["actor"]["micro_batch_tokens"] == 64
    assert kept["checkpoint"]["every"] == 4


def require_events(run) -> None:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event for event in events if event["event"] == "failure"] == []
    changed = [(event["group"], event["settings"]) for event in events if event["event"] == "settings_changed"]
    assert [settings for unit, settings in changed if unit == "trainer"] == [
        {"roles.actor.micro_batch_tokens": [16384, 64]},
        {"roles.actor.learning_rate": [1e-3, 5e-4], "checkpoint.every": [2, 4]}]
    assert [settings for unit, settings in changed if unit == "rollout 0"] == [
        {"roles.actor.generation.batch_rows": [512, 8]}]
    ready = [event["rank"] for event in events if event["event"] == "worker_ready"]
    assert (ready.count(0), ready.count(1)) == (3, 2), "each change restarts one group"


@pytest.mark.parametrize(("settings", "said"), [
    (["roles.actor.micro_batch_token=64"], "Did you mean `micro_batch_tokens`?"),
    (["roles.actor.micro_batch_tokens=many"], "must be a whole number, not 'many'"),
    (["roles.actor.model=elsewhere"], "there is no model folder `elsewhere`"),
    (["mode=async"], "`mode` cannot change in a job that runs: the plan is made from it"),
    (["seed=3", "steps=9"], "2 mistakes"),
    (["steps=9"], "distflow resume RUN --set steps=N"),
    (["roles.actor.generation.temperature=0.5"], "were sampled with the old one"),
    (["nodes.update.with.kl=0.5"], "the plan is made from the DAG"),
    (["robust.restarts=3"], "the supervisors read it once"),
    (["wait_limit=3"], "it is read once, when the run starts"),
    (["roles={actor: {model: {architecture: qwen3, layers: 2, hidden: 64, heads: 2}}}"],
     "`roles` cannot change in a job that runs"),
    (["roles.reference.micro_batch_tokens=64"], "role `reference` has no settings of its own"),
])
def test_what_cannot_change_is_said_and_changes_nothing(launch, workspace, capsys, monkeypatch, settings, said):
    from distflow.config.load import load
    from distflow.telemetry.run_folder import RunFolder
    from planners import plan

    monkeypatch.chdir(workspace)
    spec = load("grpo.yaml", "tiny.yaml")
    with RunFolder.created(workspace / "run", spec, plan(spec, 2), []):
        pass
    before = (workspace / "run/run.yaml").read_text()
    assert main(["set", "run", *settings]) == 2
    assert said in capsys.readouterr().err
    assert (workspace / "run/run.yaml").read_text() == before
    assert not (workspace / "run/changes.jsonl").exists()


def test_a_run_that_has_ended_is_not_told_anything(workspace, capsys, monkeypatch):
    run = _begun(workspace, monkeypatch)
    (run / "summary.json").write_text("{}")
    assert main(["set", str(run), "samples=3"]) == 2
    said = capsys.readouterr()
    assert "has finished" in said.err
    assert f"distflow resume {run} --set steps=N --set samples=3" in said.err
    assert said.out == ""
    assert not (run / "changes.jsonl").exists()
    assert main(["set", str(run), "steps=9", "samples=3"]) == 2
    assert f"distflow resume {run} --set steps=9 --set samples=3" in capsys.readouterr().err


@pytest.mark.parametrize(("file", "said"), [("launch.json", "launch.json is damaged"), ("plan.json", "damaged")])
def test_half_a_file_of_a_run_is_named(workspace, capsys, monkeypatch, file, said):
    run = _begun(workspace, monkeypatch)
    (run / file).write_text((run / file).read_text()[:9])
    assert main(["set", str(run), "samples=3"]) == 2
    assert said in capsys.readouterr().err


def _begun(workspace, monkeypatch):
    """The folder of a run that has just begun."""
    from distflow.config.load import load
    from distflow.telemetry.run_folder import RunFolder
    from planners import plan

    monkeypatch.chdir(workspace)
    spec = load("grpo.yaml", "tiny.yaml")
    with RunFolder.created(workspace / "run", spec, plan(spec, 2), []):
        pass
    return workspace / "run"


def test_set_five_times_at_once_loses_no_change(workspace, capsys, monkeypatch):
    run = _begun(workspace, monkeypatch)
    settings = {"samples": 3, "checkpoint.every": 7, "checkpoint.keep": 9, "roles.actor.learning_rate": 5e-4,
                "roles.actor.micro_batch_tokens": 512}
    start = threading.Barrier(len(settings))

    def change(text: str) -> int:
        start.wait()
        return main(["set", str(run), text])

    with ThreadPoolExecutor(len(settings)) as threads:
        assert [*threads.map(change, [f"{key}={value}" for key, value in settings.items()])] == [0] * len(settings)
    kept = yaml.safe_load((run / "run.yaml").read_text())
    assert {key: reduce(getitem, key.split("."), kept) for key in settings} == settings
    changes = [json.loads(line) for line in (run / "changes.jsonl").read_text().splitlines()]
    assert {key: values[1] for change in changes for key, values in change["settings"].items()} == settings
    assert not [*run.glob("*.partial")]


def test_set_in_a_folder_that_cannot_be_written_is_refused(workspace, capsys, monkeypatch):
    run = _begun(workspace, monkeypatch)
    (run / "run.yaml.lock").mkdir()
    assert main(["set", str(run), "samples=3"]) == 2
    assert f"{run} cannot be written: Is a directory. The job goes on as it was." in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_refused(capsys):
    assert main(["set", "nowhere", "samples=3"]) == 2
    assert "there is no run folder `nowhere`" in capsys.readouterr().err
