"""The page of the 671B run says what planning says."""

import json
import re
from pathlib import Path

import pytest
from harness import model_folder

from distflow.config.load import load_for_planning
from distflow.options import without_lacks
from planners import plan

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/large_mixture.md").read_text(encoding="utf-8")
CONFIG = json.loads((ROOT / "tests/config/configurations/deepseek_v3.json").read_text(encoding="utf-8"))["config"]


def test_large_mixture_has_the_memory_that_its_page_says(tmp_path, engines):
    run, cluster = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    model_folder(tmp_path / "DeepSeek-V3", CONFIG)
    for name, text in (("run.yaml", run), ("cluster.yaml", cluster), ("math.jsonl", "")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    spec = load_for_planning("grpo", str(tmp_path / "run.yaml"), [], str(tmp_path / "cluster.yaml"))
    assert [note for note in without_lacks(spec) if "engine: megatron" in note and "model_type: deepseek_v3" in note]
    made = plan(spec, 384)
    assert made.task("rollout").layout.dp == 6
    assert made.task("update").layout.dp == 16
    found = {item.name: item.bytes / 1024**3 for item in made.memory}
    said = dict(re.findall(r"^\| ([^|]+?) \| ([\d.]+) \| \w+ \| plan \|$", PAGE, flags=re.MULTILINE))
    assert {line: float(value) for line, value in said.items()} == {
        "weights, gradients, optimizer": pytest.approx(found["actor: training state"], abs=0.05),
        "activations of six micro-batches": pytest.approx(found["actor: activations"], abs=0.05),
        "reference: swapped weights": pytest.approx(found["reference: swapped weights"], abs=0.05),
        "vLLM: weights and cache": pytest.approx(found["actor: rollout engine"], abs=0.05),
        "at its fullest": pytest.approx(found["actor: training state"] + found["actor: activations"], abs=0.05)}
