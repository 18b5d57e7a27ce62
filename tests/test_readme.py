"""What the README says is tried as it stands there."""

from __future__ import annotations

import re

from harness import ROOT, metrics_of

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


def test_every_file_of_the_map_is_there():
    for row in re.findall(r"^\| (`.*?) \|", TEXT, re.MULTILINE):
        for name in re.findall(r"`([\w./]+)`", row):
            assert (ROOT / name).exists(), name
