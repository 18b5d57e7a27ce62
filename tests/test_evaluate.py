"""`distflow evaluate` and `distflow export` on real runs, as a user calls them."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
import torch
import yaml
from harness import ROOT, environment, lines_of

from distflow.cli import main
from distflow.cli.evaluate import subject

GRPO = ("--dag", "grpo.yaml", "--run-file", "tiny.yaml")
VALIDATED = ("--set", "validation={data: {heldout: train.jsonl}, every: 2, reward: brevity}")


@pytest.fixture
def distflow(workspace, ready):
    def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess:
        line = "-m", "distflow.cli", *arguments
        done = ready.run(0, line, workspace, {**environment(), "PYTHONPATH": str(ROOT)})
        assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
        return done

    return run


def results(done: subprocess.CompletedProcess) -> list[dict]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_run_is_evaluated_as_it_validated_itself(launch, workspace, distflow):
    """Greedy answers earn what the last validation said, on one and on two ranks; the user's own reward is found. A
    problem with an empty field is left out, as validation leaves it out."""
    launch(1, *GRPO, *VALIDATED, "--set", "steps=2", "--name", "run")
    accuracy = json.loads((workspace / "runs/run/summary.json").read_text())["accuracy_after"]
    empty = (workspace / "train.jsonl").read_text() + json.dumps({"question": "", "answer": "1"})
    (workspace / "again.jsonl").write_text(empty)
    for options in ((), ("--ranks", "2", "--data", "again=again.jsonl")):
        found, = results(distflow("evaluate", "runs/run", "--json", *options))
        assert found["problems"] == 10
        assert found["figures"]["mean@1"]["value"] == pytest.approx(accuracy, abs=1e-6)
    assert found["data"] == "again"
    samples = lines_of(workspace / found["folder"] / "samples.jsonl")
    assert len({row["questions"] for row in samples}) == 10


def test_a_run_that_converses_is_evaluated_with_its_environment(launch, workspace, distflow):
    launch(1, "--dag", "grpo_tools.yaml", "--run-file", "tiny.yaml", "--set", "steps=1", "--name", "run")
    done, = results(distflow("evaluate", "runs/run", "--json", "--data", "some=train.jsonl"))
    assert done["figures"].keys() == {"mean@1", "pass@1"}
    samples = lines_of(workspace / done["folder"] / "samples.jsonl")
    assert len(samples) == done["problems"] == 10
    assert [row for row in samples if not {"turns", "environment_rewards"} <= row.keys()] == []


def test_several_samples_give_pass_at_k(launch, workspace, distflow):
    launch(1, *GRPO, *VALIDATED, "--set", "steps=1", "--name", "run")
    done = distflow("evaluate", "runs/run", "--samples", "3", "--set", "nodes.tally.with.threshold=0.1")
    table, _, behind = done.stdout.partition("heldout: 10 problems")[2].partition("  ranges")
    table = table.splitlines()[1:]
    shown = {line.split()[0]: float(line.split()[1]) for line in table}
    assert shown["pass@1"] <= shown["pass@2"] <= shown["pass@3"]
    assert {"pass@1", "pass@2", "pass@3", "mean@3"} == set(shown)
    assert "pass@k counts answers that earn 0.1 or more, and the best earned " in behind
    last = (workspace / "runs/evaluate-heldout-1/metrics.jsonl").read_text().splitlines()[-1]
    assert torch.tensor(json.loads(last)["reward/max"]) >= float(behind.split("threshold=")[1])


def test_a_run_that_has_not_finished_is_exported_first(launch, workspace, distflow):
    """An export leaves all that the run has written, which may be going on."""
    launch(1, *GRPO, *VALIDATED, "--set", "steps=4", "--name", "run")
    run = workspace / "runs/run"
    final = (run / "model/model.safetensors").read_bytes()
    shutil.rmtree(run / "model")
    before = {path: path.stat().st_ino for path in run.rglob("*") if path.is_file()}
    assert "distflow export runs/run" in distflow("evaluate", "runs/run", code=2).stderr
    distflow("export", "runs/run", "elsewhere")
    assert (workspace / "elsewhere/model/model.safetensors").read_bytes() == final
    assert {path: path.stat().st_ino for path in run.rglob("*") if path.is_file()} == before
    distflow("export", "runs/run")
    assert (run / "model/model.safetensors").read_bytes() == final


def test_a_role_is_evaluated_with_the_settings_that_it_has_from_another_and_by_its_runs_reward(tmp_path):
    """As training sees it: a copy has the settings of what it copies, and `score` may stand at any role."""
    roles = {"actor": {"trained": True, "copy_of": None}, "reviser": {"trained": True, "copy_of": "actor"}}
    nodes = {"judge": {"role": "judge", "type": "COMPUTE", "function": "score", "with": {"reward": "length"}}}
    settings = {"dtype": "bfloat16", "generation": {"temperature": 0.6}}
    for name, content in {"dag": {"roles": roles, "nodes": nodes}, "run": {"roles": {"actor": settings}}}.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    (tmp_path / "launch.json").write_text('{"search": []}')
    (tmp_path / "model-reviser").mkdir()
    found = subject(str(tmp_path), "reviser", None)
    assert found.role == {"model": str(tmp_path / "model-reviser"), **settings}
    assert found.reward == {"reward": "length"}


def test_a_model_folder_is_evaluated_by_the_reward_and_on_the_problems_of_the_run_file(tmp_path):
    """Not by `math`, which would say another figure without a word."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "some.jsonl").write_text("")
    run = {"validation": {"data": {"test": "some.jsonl"}, "reward": {"mine:exact": 1.0}}}
    (tmp_path / "my_run.yaml").write_text(yaml.safe_dump(run))
    found = subject(str(tmp_path), None, str(tmp_path / "my_run.yaml"))
    assert found.reward == {"reward": {"mine:exact": 1.0}}
    assert found.validation == {"test": str(tmp_path / "some.jsonl")}
    assert found.search == [str(tmp_path)]
    assert subject(str(tmp_path), None, None).reward == {}


@pytest.mark.parametrize(("arguments", "expected"), [
    (("nowhere",), "neither the folder of a run"), ((".",), "Instead:  model"),
    ((".", "--samples", "0"), "--samples and --ranks must be at least 1"),
    (("model",), "has no validation data. Name the problems:  --data test.jsonl"),
    (("model", "--data", "tset.jsonl"), "there is no data `tset.jsonl`"),
])
def test_mistakes_are_answered_before_anything_runs(workspace, monkeypatch, capsys, arguments, expected):
    monkeypatch.chdir(workspace)
    (workspace / "model").mkdir()
    (workspace / "model/config.json").write_text("{}")
    assert main(["evaluate", *arguments]) == 2
    assert expected in capsys.readouterr().err
    assert not (workspace / "runs").exists()
