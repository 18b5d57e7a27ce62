"""docs/metrics.md lists what runs write."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator

import pytest
from harness import ROOT

from distflow.telemetry.metrics import RESERVED
from workers.validation import LAG

RETURNED = {"gradient/share_of_layer/NAME", LAG}
"""What small runs write only if one layer has most of the gradient, or newer weights answered a validation."""
TAKEN_OUT = {"NAMENAME", "problems/NAME", "squares/NAME"}
"""What is only computed with: of the last two, validation makes its intervals."""
OWNERS = {"metrics", "self.metrics", "current()"}
ENDS = {"extremes_of": ("_min", "_max"), "spread_of": ("/mean", "/std", "/min", "/max"),
        **dict.fromkeys(("add", "mean", "mean_of", "maximum", "minimum", "deviation_of"), ("",))}


def listed() -> dict[str, re.Pattern]:
    """By name at the beginning of a line, a pattern in which a word in capitals is any name."""
    lines = (ROOT / "docs/metrics.md").read_text().splitlines()
    rows = [line.partition(": ")[0] for line in lines if line.startswith("- `")]
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(names) == len(set(names)), "a metric is listed twice"
    return {name: re.compile(re.sub(r"[A-Z]{2,}", ".+", re.escape(name))) for name in names}


def reported() -> Iterator[str]:
    """The names that the source reports; NAME stands for what only a run knows."""
    for path in (path for folder in ("workers", "distflow") for path in sorted((ROOT / folder).rglob("*.py"))):
        for call in (item for item in ast.walk(ast.parse(path.read_text())) if isinstance(item, ast.Call)):
            method = call.func
            if not (isinstance(method, ast.Attribute) and method.attr in ENDS and ast.unparse(method.value) in OWNERS):
                continue
            if isinstance(call.args[0], ast.Constant):
                yield from (call.args[0].value + end for end in ENDS[method.attr])
            elif isinstance(call.args[0], ast.JoinedStr) and path.name != "metrics.py":
                parts = (part.value if isinstance(part, ast.Constant) else "NAME" for part in call.args[0].values)
                yield "".join(parts)


@pytest.fixture(scope="module")
def names_in_source():
    found = set(reported()) - TAKEN_OUT | RETURNED
    assert len(found) > 50, "the source reports by other calls than this test knows"
    return found


def test_what_the_source_reports_is_listed(names_in_source):
    patterns = listed().values()
    assert [name for name in sorted(names_in_source) if not any(each.fullmatch(name) for each in patterns)] == []


def test_names_that_are_listed_are_not_for_users(names_in_source):
    firsts = {name.partition("/")[0] for name in (*listed(), *names_in_source)}
    assert {first for first in firsts if not re.search(r"[A-Z]{2,}", first)} <= RESERVED


def test_what_small_runs_write_is_listed_and_what_is_listed_is_written(launch, workspace, names_in_source):
    (workspace / "ppo.yaml").write_text((ROOT / "dags/ppo.yaml").read_text().replace(
        "function: score, ", "function: score, with: {reward: brevity}, ") + "imports: [brevity]\n")
    run, written = ("--run-file", "tiny.yaml", "--set", "steps=3", "--name"), set()
    launch(2, "--dag", "grpo.yaml", *run, "grpo", "--set", "validation.data.heldout=train.jsonl",
           "--set", "layouts.reward.dp=1")
    launch(1, "--dag", "ppo.yaml", *run, "ppo")
    launch(2, "--dag", "grpo.yaml", *run, "async", "--set", "mode=async")
    for name in ("grpo", "ppo", "async"):
        lines = map(json.loads, (workspace / f"runs/{name}/metrics.jsonl").read_text().splitlines())
        written |= {name for line in lines for name in line} - {"step"}
    patterns = listed()
    assert [name for name in sorted(written) if not any(each.fullmatch(name) for each in patterns.values())] == []
    assert [name for name, each in patterns.items()
            if not any(each.fullmatch(known) for known in written | names_in_source)] == []
    assert {"reward/std", "reward/zero_std_groups", "advantages/std", "response/length_max", "response/truncated",
            "policy/clip_ratio_low", "policy/clip_ratio_high", "prompt/length", "epoch", "tokens_total",
            "samples_total", "tokens_per_second_per_device", "all_tokens_per_second_per_device"} <= written
    sample = json.loads((workspace / "runs/async/samples.jsonl").read_text().splitlines()[-1])
    assert sample.keys() == {"step", "row", "group", "questions", "answers", "completions", "length", "rewards",
                             "reward_parts", "advantage", "tokens"}
    assert sample["reward_parts"] == {"brevity": pytest.approx(sample["rewards"])}
    assert sample["group"] == sample["row"] // 8
    summary = json.loads((workspace / "runs/grpo/summary.json").read_text())
    assert [each["step"] for each in summary["accuracy"]["heldout"]] == [0, 3]
    assert "--name grpo" in summary["command"]
    assert summary["wall_seconds"] > summary["seconds_in_steps"]
