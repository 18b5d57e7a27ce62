"""`distflow plan --fit` prints lines of a run file, and counts a run that has taken more memory than planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from distflow.cli import main
from distflow.config.load import load
from distflow.telemetry.run_folder import RunFolder
from planners import plan
from planners.memory import GIB, needed

MODEL = "{architecture: qwen3, layers: 28, hidden: 2048, heads: 16, kv_heads: 8}"
SIZES = [f"roles.actor.model={MODEL}", "roles.actor.dtype=bfloat16", "data.batch=64", "data.max_prompt_tokens=512",
         "roles.actor.generation.max_new_tokens=1024"]
CLUSTER = {"name": "mine", "devices": {"big": {"tflops": {"bfloat16": 900}, "memory_gib": 64, "memory_gb_s": 4000}},
           "machines": {"host": {"device": "big", "devices": 2, "inside": {"gb_s": 400}}}}


@pytest.fixture
def fitted(tmp_path, monkeypatch, capsys):
    """Prints what fits, and returns it with the lines for the run file."""
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    sizes = [word for each in SIZES for word in ("--set", each)]

    def run(*more: str) -> tuple[str, dict]:
        assert main(["plan", "--fit", "grpo", "--cluster", "cluster.yaml", *sizes, *more]) == 0
        printed = capsys.readouterr().out
        return printed, yaml.safe_load(printed.partition("write into the run file\n")[2])
    return run


def ran(name: str, peaks: list[float]) -> float:
    """Make the folder of a run with these peaks of memory, GiB; return what its plan says."""
    made = plan(load("grpo", None, SIZES, "cluster.yaml"), 2)
    with RunFolder.created(Path("runs", name), load("grpo", None, SIZES, "cluster.yaml"), made, []):
        pass
    lines = [{"step": step, "loss": 0.0, "seconds": 1.0, **({"memory/gpu_reserved_gib": peak} if peak else {})}
             for step, peak in enumerate(peaks, 1)]
    Path("runs", name, "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return needed(made.memory) / GIB


def test_the_lines_that_are_printed_are_a_run_files(fitted):
    printed, lines = fitted()
    said = [f"roles.actor.{key}={json.dumps(value)}" for key, value in lines["roles"]["actor"].items()]
    assert needed(plan(load("grpo", None, [*SIZES, *said]), 2).memory) <= 0.9 * 64 * GIB
    assert "grpo on 2 × big, mode sync (predictions" in printed
    assert "of 57.6 GiB" in printed


def test_a_runs_peak_changes_what_fits(fitted):
    peak = 1.5 * (expected := ran("planned", [1.0]))
    ran("run", [10.0, peak, 30.0])
    printed, lines = fitted("--from", "runs/run")
    assert f"runs/run took {peak:.1f} GiB at its fullest in 3 steps, and its plan said {expected:.1f}: memory is " \
        "counted 1.50 times" in printed
    ran("full", [2 * expected])
    assert fitted("--from", "runs/full")[1] != lines


def test_a_run_that_has_taken_less_does_not_lower_the_plan(fitted):
    """Its rows may have been short; those of the plan are as long as they may be."""
    expected = ran("small", [1.0, 0.5])
    printed, lines = fitted("--from", "runs/small")
    assert expected > 1.0
    assert f"its plan said {expected:.1f}: memory is counted as planned" in printed
    assert lines == fitted()[1]


@pytest.mark.parametrize(("arguments", "says"), [
    (("--margin", "1"), "--margin 1 is no share of a device's memory"),
    (("--from", "runs/none"), "runs/none has no plan.json, so it is not the folder of a run"),
    (("--from", "runs/run"), "it ran without GPUs, where memory is not measured")])
def test_what_cannot_be_is_refused(fitted, capsys, arguments, says):
    ran("run", [0.0, 0.0])
    assert main(["plan", "--fit", "grpo", "--cluster", "cluster.yaml", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--fit", "--place"])
def test_without_a_cluster_file_it_says_how_to_get_one(option, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "grpo", option]) == 2
    said = capsys.readouterr().err
    assert "  distflow probe --out cluster.yaml\nThen add to this command:  --cluster cluster.yaml\n" in said
