"""What the README says is tried as it stands there."""

from __future__ import annotations

import importlib
import re

import pytest
import torch
import yaml
from harness import ROOT, metrics_of

import distflow
from distflow.config.load import load
from distflow.config.models import ROLLOUTS, TRAINERS
from distflow.config.run import Parallel, RoleRun
from distflow.contracts import decorators
from distflow.recovery import detectors, hooks
from planners import plan

TEXT = (ROOT / "README.md").read_text()


def block(language: str, containing: str) -> str:
    return next(body for body in re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL) if containing in body)


def test_the_custom_function_runs_and_is_short(launch, workspace):
    source = block("python", "def rloo_advantage")
    assert len(source.strip().splitlines()) < 15
    (workspace / "my_rloo.py").write_text(source)
    line = block("yaml", "my_rloo:rloo_advantage").rstrip("\n")
    dag = re.sub(r"  advantage: .*", line, (workspace / "grpo.yaml").read_text())
    assert line in dag
    (workspace / "mine.yaml").write_text(dag)
    launch(1, "--dag", "mine.yaml", "--run-file", "tiny.yaml", "--name", "mine", "--set", "steps=2")
    metrics = metrics_of(workspace / "runs/mine")
    assert metrics[1]["grad_norm"] > 0


def test_the_run_file_is_right_but_for_its_paths(workspace):
    model = workspace / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, '
                                       '"vocab_size": 300, "num_attention_heads": 2, "intermediate_size": 128}')
    for name in ("model.safetensors", "tokenizer.json"):
        (model / name).touch()
    text = block("yaml", "my_run.yaml").replace("path/to/Qwen3-0.6B", str(model))
    text = re.sub(r"path/to/\S+?\.jsonl", str(workspace / "train.jsonl"), text)
    (workspace / "my_run.yaml").write_text(text)
    assert plan(load("grpo", str(workspace / "my_run.yaml")), 8).ranks == 8


def test_the_lines_about_engines_are_a_run_files(workspace):
    said = yaml.safe_load(block("yaml", "rollout: vllm"))
    role = RoleRun(**said["roles"]["actor"])
    assert (role.engine, role.rollout, role.swap) == ("fsdp", "vllm", True)
    assert {name: Parallel(**split).tp for name, split in said["layouts"].items()} == {"update": 2, "rollout": 2}
    named = set(re.findall(r"^\| `(?:engine|rollout): (\w+)` ", TEXT, re.MULTILINE))
    assert named == {*TRAINERS, *ROLLOUTS}


def test_every_file_of_the_map_is_there():
    table = TEXT.partition("| where | what |")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"`([\w./]+)`", cell)]
    assert len(names) > 10
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_the_table_of_algorithms_counts_their_lines():
    rows = re.findall(r"^\| `(\w+)`[^|]* \| (\d+) \|", TEXT, re.MULTILINE)
    counted = {dag: sum(bool(line.strip()) and not line.lstrip().startswith("#")
                        for line in (ROOT / f"dags/{dag}.yaml").read_text().splitlines()) for dag, _ in rows}
    assert {dag: int(lines) for dag, lines in rows} == counted
    assert len(rows) >= 15


@pytest.fixture
def run_block(monkeypatch):
    """Execute a Python block with the public names; what it registers goes afterwards. Returns its names."""
    monkeypatch.setattr(decorators, "REWARDS", {})  # another test may have loaded an example of the same name
    monkeypatch.setattr(detectors, "OF_STEPS", dict(detectors.OF_STEPS))
    monkeypatch.setattr(hooks, "HOOKS", {when: list(each) for when, each in hooks.HOOKS.items()})

    def run(containing: str) -> dict:
        names = {name: getattr(distflow, name) for name in distflow._HOMES} | {"re": re}
        exec(block("python", containing), names)
        return names

    return run


def test_the_loss_is_that_of_the_example_and_its_line_is_right(run_block, workspace, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples/soft_clip"))
    mine, example = run_block("def soft_clip")["soft_clip"], importlib.import_module("soft_clip").soft_clip
    given = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(mine(*given), example(*given))
    text = (ROOT / "examples/soft_clip/soft_clip.yaml").read_text().partition("  update:")[0]
    (workspace / "mine.yaml").write_text(text + block("yaml", "soft_clip:soft_clip"))
    made = plan(load(str(workspace / "mine.yaml"), str(workspace / "tiny.yaml")), 1)
    assert made.tasks[-1].settings["loss_settings"] == {"sharpness": 5.0}


def test_the_reward_pays_for_what_is_near(run_block):
    reward = run_block("def near_miss")["near_miss"]
    said = {"12": 1.0, "it is 10": 0.8, "#### 25": 0.0, "none": 0.0}
    assert {text: reward(text, "7 + 5 = 12 #### 12") for text in said} == said


def test_the_hook_is_called_and_the_detector_warns(run_block, capsys):
    names = run_block("def long_answers")
    failure = hooks.Failure(1, "lost its mind", "training", 3)
    hooks.call("on_failure", "trainer", hooks.HookContext("trainer", 1, 0, failure))
    assert capsys.readouterr().out == "rank 1 failed in step 3: lost its mind\n"
    steps = [detectors.StepReport(number, {"response/length": length}) for number, length in ((1, 900.0), (2, 1100.0))]
    assert detectors.OF_STEPS["long_answers"] is names["long_answers"]
    assert names["long_answers"](steps[:1]) is None
    assert names["long_answers"](steps, restart=True).restart


def test_every_benchmark_that_is_named_has_recorded_results():
    named = set(re.findall(r"benchmarks/(\w+)\.py", TEXT))
    assert {"end_to_end_vs_trl", "modes"} <= named
    assert [name for name in sorted(named) if not (ROOT / f"benchmarks/results/{name}.txt").is_file()] == []


@pytest.mark.parametrize("section", ["# distflow", "## Failures", "## Mixed hardware", "## Engines and layouts",
                                     "## What it does not do yet"])
def test_what_is_said_of_gpus_says_that_none_was_tried(section):
    text = re.split(r"^#+ ", TEXT.partition(f"{section}\n")[2], flags=re.MULTILINE)[0]
    assert "GPU" in text
    assert re.search(r"run on (a GPU|GPUs)|tried on a GPU|ran on\s+CPUs|have not run", text)
