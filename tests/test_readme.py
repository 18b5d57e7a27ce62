"""What the README says is tried as it stands there."""

from __future__ import annotations

import re

import yaml
from harness import ROOT, metrics_of

from distflow.schema.engines import ROLLOUTS, TRAINERS
from distflow.schema.run import Parallel, RoleRun
from distflow.schema.spec import load
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
