"""Settings of a job that runs: one group starts again with them, nobody else, and nothing is lost."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from operator import getitem

import pytest
import yaml
from harness import SEED_WITH_CLEAR_DRAWS, events_of, follow, lines_of, metrics_of

from distflow.cli import main

STEPS = 24
def test_each_setting_restarts_the_group_that_it_concerns(begin, workspace, run_once):
    run, more = workspace / "runs/job", ("--dag", "grpo.yaml", "--run-file", "tiny.yaml", *SEED_WITH_CLEAR_DRAWS,
                                         f"steps={STEPS}")
    orders = {"step 3/": ["roles.actor.micro_batch_tokens=64"], "step 9/": ["roles.actor.generation.batch_rows=8"],
              "step 14/": ["roles.actor.learning_rate=5e-4", "checkpoint.every=4"]}
    follow(begin(2, *more, "--name", "job", "mode=async", "staleness=0"),
           {mark: ["set", str(run), *settings] for mark, settings in orders.items()})
    ours, theirs = metrics_of(run), metrics_of(run_once(1, *more))
    assert sorted(ours) == list(range(1, STEPS + 1))
    for step in range(1, 15):
        assert ours[step]["response/fingerprint"] == theirs[step]["response/fingerprint"], step
        assert ours[step]["loss"] == pytest.approx(theirs[step]["loss"], abs=1e-5), step
    assert (ours[14]["learning_rate"], ours[STEPS]["learning_rate"]) == (1e-3, 5e-4)
    assert events_of(run, "failure") == []
    changed = {unit: [event["settings"] for event in events_of(run, "settings_changed") if event["group"] == unit]
               for unit in ("trainer", "rollout 0")}
    assert changed == {"trainer": [{"roles.actor.micro_batch_tokens": [16384, 64]},
                                   {"roles.actor.learning_rate": [1e-3, 5e-4], "checkpoint.every": [2, 4]}],
                       "rollout 0": [{"roles.actor.generation.batch_rows": [512, 8]}]}
    ready = [event["rank"] for event in events_of(run, "worker_ready")]
    assert (ready.count(0), ready.count(1)) == (3, 2), "each change restarts one group"
    kept = yaml.safe_load((run / "run.yaml").read_text())
    assert kept["roles"]["actor"]["micro_batch_tokens"] == 64
    assert kept["checkpoint"]["every"] == 4


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
def test_what_cannot_change_is_said_and_changes_nothing(begun, capsys, settings, said):
    before = (begun / "run.yaml").read_text()
    assert main(["set", "run", *settings]) == 2
    assert said in capsys.readouterr().err
    assert (begun / "run.yaml").read_text() == before
    assert not (begun / "changes.jsonl").exists()


def test_a_run_that_has_ended_is_not_told_anything(begun, capsys):
    (begun / "summary.json").write_text("{}")
    assert main(["set", str(begun), "samples=3"]) == 2
    said = capsys.readouterr()
    assert "has finished" in said.err
    assert f"distflow resume {begun} --set steps=N --set samples=3" in said.err
    assert said.out == ""
    assert not (begun / "changes.jsonl").exists()
    assert main(["set", str(begun), "steps=9", "samples=3"]) == 2
    assert f"distflow resume {begun} --set steps=9 --set samples=3" in capsys.readouterr().err


@pytest.mark.parametrize(("file", "said"), [("launch.json", "launch.json is damaged"), ("plan.json", "damaged")])
def test_half_a_file_of_a_run_is_named(begun, capsys, file, said):
    (begun / file).write_text((begun / file).read_text()[:9])
    assert main(["set", str(begun), "samples=3"]) == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def begun(workspace, monkeypatch):
    """The folder of a run that has just begun."""
    from distflow.config.load import load
    from distflow.telemetry.run_folder import RunFolder
    from planners import plan

    monkeypatch.chdir(workspace)
    spec = load("grpo.yaml", "tiny.yaml")
    with RunFolder.created(workspace / "run", spec, plan(spec, 2), []):
        pass
    return workspace / "run"


def test_set_five_times_at_once_loses_no_change(begun, capsys):
    settings = {"samples": 3, "checkpoint.every": 7, "checkpoint.keep": 9, "roles.actor.learning_rate": 5e-4,
                "roles.actor.micro_batch_tokens": 512}
    start = threading.Barrier(len(settings))

    def change(text: str) -> int:
        start.wait()
        return main(["set", str(begun), text])

    with ThreadPoolExecutor(len(settings)) as threads:
        assert [*threads.map(change, [f"{key}={value}" for key, value in settings.items()])] == [0] * len(settings)
    kept = yaml.safe_load((begun / "run.yaml").read_text())
    assert {key: reduce(getitem, key.split("."), kept) for key in settings} == settings
    changes = lines_of(begun / "changes.jsonl")
    assert {key: values[1] for change in changes for key, values in change["settings"].items()} == settings
    assert not [*begun.glob("*.partial")]


def test_set_in_a_folder_that_cannot_be_written_is_refused(begun, capsys):
    (begun / "run.yaml.lock").mkdir()
    assert main(["set", str(begun), "samples=3"]) == 2
    assert f"{begun} cannot be written: Is a directory. The job goes on as it was." in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_refused(capsys):
    assert main(["set", "nowhere", "samples=3"]) == 2
    assert "there is no run folder `nowhere`" in capsys.readouterr().err
