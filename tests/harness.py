"""Starting real runs: torchrun with real processes, on the smallest model and data that show the behaviour."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from ready import ReadyRun

ROOT = Path(__file__).resolve().parents[1]

TINY = """
seed: 0
steps: 4
roles:
  actor:
    model: {architecture: qwen3, layers: 2, hidden: 64, heads: 2, kv_heads: 1}
    learning_rate: 1e-3
    generation: {max_new_tokens: 8}
data: {train: train.jsonl, batch: 4, max_prompt_tokens: 48, max_target_tokens: 48}
checkpoint: {every: 2, keep: 5}
report: false
"""

SEED_WITH_CLEAR_DRAWS = ("seed=2",)
"""With this seed each draw of GRPO in `TINY` is 6e-7 or more from where another token would be drawn, with seed 0 one
is at 6e-8. Rows that are sampled in other company are rounded otherwise, by up to 4e-7. PPO needs another seed:
`test_equal_runs.py`."""

REWARD = """
from distflow import reward

@reward
def brevity(completion, answer):
    return 1.0 / (1 + len(completion))
"""


def write_workspace(folder: Path) -> None:
    """Ten problems, a tiny run file, and a reward that a random model earns too, for `grpo.yaml`."""
    lines = (ROOT / "dags/data/arithmetic/train.jsonl").read_text().splitlines()[:10]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "tiny.yaml").write_text(TINY)
    (folder / "brevity.py").write_text(REWARD)
    (folder / "grpo.yaml").write_text(
        (ROOT / "dags/grpo.yaml").read_text().replace("function: score, ", "function: score, with: {reward: brevity}, ")
        + "imports: [brevity]\n")


def with_settings(arguments: Iterable[str]) -> list[str]:
    """Write `--set` before each argument that is a setting, such as `steps=3`."""
    said: list[str] = []
    for argument in arguments:
        said += ["--set"] if re.match(r"[a-z_.0-9]+=", argument) and said[-1:] != ["--set"] else []
        said.append(argument)
    return said


def model_folder(place: Path, config: dict[str, Any]) -> Path:
    """Make a model folder, as far as planning looks at it."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    (place / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")  # without a tensor
    (place / "tokenizer.json").write_text("{}")
    return place


def command(ranks: int, *arguments: str) -> list[str]:
    """The torchrun line, with a port that the system chooses."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
            str(ROOT / "distflow/launch.py"), *with_settings(arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def kill_after(run: ReadyRun, step: int) -> None:
    """SIGKILL a run, workers and all, when it has written the metrics of `step`: the last checkpoint but one before it
    is whole then."""
    until_shown(run, rf"step {step}/.*loss")  # not the line of a validation
    run.kill()


def until_shown(run: ReadyRun, pattern: str) -> None:
    """Read what a run says until a line has this pattern."""
    seen = []
    for line in run.stdout:
        seen.append(line)
        if re.search(pattern, line):
            return
    pytest.fail("".join(seen))


def follow(run: ReadyRun, orders: dict[str, list[str]]) -> None:
    """Follow a run to its good end; give each order to the command line when the metrics of its step are shown."""
    from distflow.cli import main

    seen, left = [], dict(orders)
    for said in run.stdout:
        seen.append(said)
        for mark in [mark for mark in left if mark in said and "loss" in said]:
            assert main(left.pop(mark)) == 0
    assert run.wait() == 0, "".join(seen)
    assert not left


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def events_of(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """Read the events of a run: all of them, or those of some kinds."""
    return [event for event in lines_of(folder / "events.jsonl") if not kinds or event["event"] in kinds]


def metrics_of(folder: Path) -> dict[int, dict[str, Any]]:
    """The metrics of each step, of all trainers, validation lines left out."""
    found: dict[int, dict[str, Any]] = {}
    for line in lines_of(folder / "metrics.jsonl"):
        if not any(name.startswith("validation") for name in line):
            found.setdefault(line["step"], {}).update(line)
    return {step: values for step, values in found.items() if "loss" in values}


COMPARED = ("reward/mean", "environment/reward", "loss", "grad_norm", "policy/kl_reference", "value/")
"""Beginnings of the names of metrics that equal runs have, up to rounding."""


def require_equal(found: dict[int, dict[str, Any]], expected: dict[int, dict[str, Any]]) -> None:
    """The same samples in each step, and the same training on them."""
    assert found.keys() == expected.keys()
    for step, line in expected.items():
        for name in line.keys() | found[step].keys():
            if name.startswith("response/fingerprint"):
                assert found[step].get(name) == line.get(name), (step, name)
            elif name.startswith(COMPARED):
                rel = 1e-3 if "grad_norm" in name or name.startswith("value/") else 1e-4
                assert found[step].get(name) == (
                    pytest.approx(line[name], rel=rel, abs=1e-5, nan_ok=True) if name in line else None), (step, name)
