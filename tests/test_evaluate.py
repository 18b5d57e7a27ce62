"""`distflow evaluate` and `distflow export` on real runs, as a user calls them."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from harness import ROOT, environment

from distflow import cli
from distflow.cli import evaluate
from distflow.cli.evaluate import EvaluationSubject, subject

GRPO = ("--dag", "grpo.yaml", "--run-file", "tiny.yaml")
VALIDATED = ("--set", "validation={data: {heldout: train.jsonl}, every: 2, reward: brevity}")


def distflow(workspace, *arguments: str, code: int = 0) -> subprocess.CompletedProcess:
    done = subprocess.run([sys.executable, "-m", "distflow.cli", *arguments], cwd=workspace, capture_output=True,
                          text=True, env={**environment(), "PYTHONPATH": str(ROOT)}, timeout=200, check=False)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def results(done: subprocess.CompletedProcess) -> list[dict]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_run_is_evaluated_as_it_validated_itself(launch, workspace):
    """Greedy answers earn what the last validation said, on one and on two ranks; the user's own reward is found."""
    launch(1, *GRPO, *VALIDATED, "--set", "steps=2", "--name", "run")
    accuracy = json.loads((workspace / "runs/run/summary.json").read_text())["accuracy_after"]
    one, = results(distflow(workspace, "evaluate", "runs/run", "--json"))
    assert one["problems"] == 10
    assert one["figures"]["mean@1"]["value"] == pytest.approx(accuracy, abs=1e-6)
    two, = results(distflow(workspace, "evaluate", "runs/run", "--json", "--ranks", "2", "--data", "again=train.jsonl"))
    assert two["data"] == "again"
    assert two["figures"]["mean@1"]["value"] == pytest.approx(accuracy, abs=1e-6)
    samples = [json.loads(line) for line in (workspace / two["folder"] / "samples.jsonl").read_text().splitlines()]
    assert len({row["questions"] for row in samples}) == 10


def test_a_run_that_converses_is_evaluated_with_its_environment(launch, workspace):
    launch(1, "--dag", "grpo_tools.yaml", "--run-file", "tiny.yaml", "--set", "steps=1", "--name", "run")
    done, = results(distflow(workspace, "evaluate", "runs/run", "--json", "--data", "some=train.jsonl"))
    assert done["figures"].keys() == {"mean@1", "pass@1"}
    samples = [json.loads(line) for line in (workspace / done["folder"] / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == done["problems"] == 10
    assert [row for row in samples if not {"turns", "environment_rewards"} <= row.keys()] == []


def test_several_samples_give_pass_at_k(launch, workspace):
    launch(1, *GRPO, *VALIDATED, "--set", "steps=1", "--name", "run")
    done = distflow(workspace, "evaluate", "runs/run", "--samples", "3", "--set", "nodes.tally.with.threshold=0.1")
    table = done.stdout.partition("heldout: 10 problems")[2].splitlines()[1:-1]
    shown = {line.split()[0]: float(line.split()[1]) for line in table}
    assert shown["pass@1"] <= shown["pass@2"] <= shown["pass@3"]
    assert {"pass@1", "pass@2", "pass@3", "mean@3"} == set(shown)


def test_a_run_that_has_not_finished_is_exported_first(launch, workspace):
    """An export leaves all that the run has written, which may be going on."""
    launch(1, *GRPO, *VALIDATED, "--set", "steps=4", "--name", "run")
    final = (workspace / "runs/run/model/model.safetensors").read_bytes()
    with (workspace / "runs/run/metrics.jsonl").open("a") as lines:
        lines.write('{"step": 5}\n')
    before = {path: path.stat().st_ino for path in (workspace / "runs/run").rglob("*") if path.is_file()}
    for path in (workspace / "runs/run/model").iterdir():
        path.unlink()
    (workspace / "runs/run/model").rmdir()
    refused = distflow(workspace, "evaluate", "runs/run", code=2)
    assert "distflow export runs/run" in refused.stderr
    distflow(workspace, "export", "runs/run")
    assert (workspace / "runs/run/model/model.safetensors").read_bytes() == final
    distflow(workspace, "export", "runs/run", "elsewhere")
    assert (workspace / "elsewhere/model/model.safetensors").read_bytes() == final
    assert "steps: 4" in (workspace / "runs/run/run.yaml").read_text()
    after = {path: path.stat().st_ino for path in (workspace / "runs/run").rglob("*") if path.is_file()}
    models = workspace / "runs/run/model"
    assert {path: inode for path, inode in after.items() if models not in path.parents} == \
        {path: inode for path, inode in before.items() if models not in path.parents}
    assert (workspace / "runs/run/metrics.jsonl").read_text().endswith('{"step": 5}\n')


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


def test_the_rewards_of_all_problems_have_more_time_than_those_of_a_training_step(workspace, monkeypatch):
    seen = {}

    def torchrun(ranks, arguments, quiet):
        seen.update(yaml.safe_load(Path(arguments[1]).read_text())["nodes"]["reward"]["with"])
        return 0

    monkeypatch.setattr(evaluate, "torchrun", torchrun)
    options = argparse.Namespace(samples=4, seed=0, ranks=1, output="runs", overrides=[], json=True)
    what = EvaluationSubject({}, reward={"reward": "code", "limit": 60.0})
    evaluate._answer(options, what, str(workspace / "train.jsonl"), 500, Path("runs/evaluate-1"))
    assert seen == {"reward": "code", "limit": 150_000.0}


def test_problems_with_an_empty_field_are_left_out_and_counted(workspace, monkeypatch, capsys):
    """As validation leaves them out; another problem in the place of each would count twice."""
    asked = ["1 + 1?", "", "2 + 2?", None]
    lines = [json.dumps({"problem": question, "answer": number}) for number, question in enumerate(asked)]
    (workspace / "some.jsonl").write_text("\n".join(lines))
    seen = []

    def torchrun(ranks, arguments, quiet):
        data = yaml.safe_load(Path(arguments[3]).read_text())["data"]
        seen.extend([data["batch"], Path(data["train"]).read_text().splitlines()])
        folder = Path("runs", arguments[5])
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("{\"step\": 0}\n")
        return 0

    (workspace / "model").mkdir()
    (workspace / "model/config.json").write_text("{}")
    monkeypatch.chdir(workspace)
    monkeypatch.setattr(evaluate, "torchrun", torchrun)
    command = ["evaluate", "model", "--data", "some.jsonl", "--ranks", "1", "--set", "data.question=problem"]
    assert cli.main(command) == 0
    assert seen == [2, [lines[0], lines[2]]]
    assert "some: 2 problems (2 with an empty field left out), answers in" in capsys.readouterr().out
    assert cli.main([*command, "--set", "data.strict=true"]) == 2
    assert "some.jsonl:2: field `problem` must be text that is not empty" in capsys.readouterr().err
    assert cli.main([*command, "--set", "data.strict=perhaps"]) == 2
    assert "`data.strict` cannot be 'perhaps'" in capsys.readouterr().err
    assert len(seen) == 2, "nothing has run"


@pytest.mark.parametrize(("arguments", "expected"), [
    (("nowhere",), "neither the folder of a run"),
    ((".", "--samples", "0"), "--samples and --ranks must be at least 1"),
    (("model",), "has no validation data. Name the problems:  --data test.jsonl"),
    (("model", "--data", "tset.jsonl"), "there is no data `tset.jsonl`"),
])
def test_mistakes_are_answered_before_anything_runs(workspace, arguments, expected):
    (workspace / "model").mkdir()
    (workspace / "model/config.json").write_text("{}")
    assert expected in distflow(workspace, "evaluate", *arguments, code=2).stderr
    assert not (workspace / "runs").exists()
