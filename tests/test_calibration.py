"""Runs teach the cost model: `distflow plan --from RUN`, with real runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from harness import lines_of

from distflow.cli import main

CLUSTER = """
name: here
devices: {core: {tflops: {float32: 0.05}, memory_gib: 4, memory_gb_s: 10}}
machines: {here: {device: core, devices: 1}, there: {device: core, devices: 1}}
links: {zone: {gb_s: 1, latency_us: 50}}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Where the runs of this module lie."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def run(launch, workspace, made, monkeypatch):
    """A run of six steps on two ranks, made once; this process stands where it was started."""
    monkeypatch.chdir(workspace)
    monkeypatch.syspath_prepend(str(workspace))
    (workspace / "here.yaml").write_text(CLUSTER)
    if not (made / "run").exists():
        launch(2, "--dag", "grpo.yaml", "--run-file", "tiny.yaml", "--name", "run", "--set", "steps=6",
               "--cluster", "here.yaml")
        _level(workspace / "runs/run")
        shutil.copytree(workspace / "runs/run", made / "run")
    shutil.copytree(made / "run", workspace / "runs/run", dirs_exist_ok=True)
    return Path("runs/run")


def test_every_rank_says_what_each_node_took(run):
    lines = lines_of(run / "times.jsonl")
    assert sorted((line["step"], line["rank"]) for line in lines) == [(step, rank) for step in range(1, 7)
                                                                      for rank in range(2)]
    for step in (line for line in lines_of(run / "metrics.jsonl") if "seconds" in line):
        mine = [line["nodes"]["update"] for line in lines if line["step"] == step["step"]]
        seconds, rows, prompt, read, response, longest = zip(*mine)
        assert max(seconds) == pytest.approx(step["seconds/update"], abs=1e-4)
        assert (sum(rows), sum(response), max(longest)) == (32, step["tokens"], 8)
        assert sum(prompt) == 8 * sum(read) > sum(rows)


def test_a_plan_learns_from_a_run_and_is_a_run_file(run, capsys):
    assert main(["plan", "--from", str(run), "--out", "placed.yaml", "--explain"]) == 0
    printed = capsys.readouterr().out
    assert "runs/run: seconds measured, and predicted before and after calibration" in printed
    for line in (line.split() for line in printed.partition("after calibration")[2].splitlines() if line):
        if line[0] in ("rollout", "reference", "update"):
            assert abs(float(line[-1].strip("(%)"))) < 40  # of the very run that it has learned from
    assert main(["plan", "grpo.yaml", "--run", "placed.yaml", "--set", "steps=6"]) == 0


def _level(run: Path) -> None:
    """The ranks of a busy computer differ; this is about what is made of their times. Each has the longer one's."""
    lines = lines_of(run / "times.jsonl")
    for line in lines:
        of_step = [each for each in lines if each["step"] == line["step"]]
        for node, taken in line["nodes"].items():
            taken[0] = max(each["nodes"][node][0] for each in of_step)
    (run / "times.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _slow(run: Path, times: float) -> None:
    """As if rank 1 had taken so many times longer to sample, and the others had waited for it elsewhere."""
    lines = lines_of(run / "times.jsonl")
    for line in lines:
        for node, taken in line["nodes"].items():
            taken[0] *= times if line["rank"] == 1 or node != "rollout" else 1
        line["seconds"] *= times
    (run / "times.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_plan_from_a_run_is_compared_with_its_placement(run, capsys):
    """The run's devices are of two types, of which one turns out to be slow."""
    unlike = CLUSTER.replace("there: {device: core,", "there: {device: other,").replace(
        "devices: {core:", "devices: {other: {tflops: {float32: 0.05}, memory_gib: 4, memory_gb_s: 10}, core:")
    Path("unlike.yaml").write_text(unlike)
    _slow(run, 5.0)
    assert main(["plan", "--from", str(run), "--cluster", "unlike.yaml", "--out", "placed.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "runs/run: an iteration takes" in printed
    assert "(both predicted): " in printed
    assert "  distflow resume runs/run --ranks 2 --set 'mode=\"sync\"'" in printed
    here, there = yaml.safe_load(Path("placed.yaml").read_text())["layouts"]["rollout"]["rows"]
    assert here > 2 * there


def test_a_run_that_goes_on_is_read_as_far_as_it_has_come(run, capsys):
    lines = (run / "times.jsonl").read_text().splitlines(keepends=True)
    (run / "times.jsonl").write_text("".join(lines[:-2]) + lines[-2][:30])
    (run / "summary.json").unlink()
    assert main(["plan", "--from", str(run)]) == 0
    assert "best plan found" in capsys.readouterr().out


def test_a_run_of_other_machines_calibrates_a_plan_here(run, capsys):
    """Its data is not here: a note, of a plan from it and of the run file that says it."""
    settings = yaml.safe_load((run / "run.yaml").read_text())
    settings["data"]["train"] = {"/cluster/train.jsonl": 1.0}
    (run / "run.yaml").write_text(yaml.safe_dump(settings))
    note = "note: there is no data `/cluster/train.jsonl`: a run on this machine would be refused"
    for command in (["--from", str(run), "--out", "placed.yaml"], [str(run / "dag.yaml"), "--run", "placed.yaml"]):
        assert main(["plan", *command]) == 0
        assert capsys.readouterr().out.count(note) == 1


def _early(run: Path) -> None:
    lines = (run / "times.jsonl").read_text().splitlines(keepends=True)
    (run / "times.jsonl").write_text("".join(lines[:8]))


def _unmeasured(run: Path) -> None:
    (run / "times.jsonl").unlink()


def _async(run: Path) -> None:
    said = json.loads((run / "plan.json").read_text())
    (run / "plan.json").write_text(json.dumps({**said, "mode": "async"}))


def _homeless(run: Path) -> None:
    (run / "cluster.yaml").unlink()


@pytest.mark.parametrize(("change", "arguments", "says"), [
    (None, ("--from", "runs/none"), "runs/none has no plan.json, so it is not the folder of a run"),
    (None, ("rloo", "--from", "runs/run"), "runs/run is a run of another DAG, `grpo`: these nodes differ: "),
    (None, ("--from", "runs/run", "--cluster", "h200"), "runs/run has 2 ranks, and the cluster has 64 devices"),
    (_early, ("--from", "runs/run"), "runs/run has measured 2 whole steps after the first ones by"),
    (_unmeasured, ("--from", "runs/run"), "runs/run has measured 0 whole steps"),
    (_async, ("--from", "runs/run"), "runs/run is a run in mode async"),
    (_homeless, ("--from", "runs/run"), "add  --cluster machines.yaml"),
])
def test_bad_input(run, capsys, change, arguments, says):
    if change:
        change(run)
    assert main(["plan", *arguments]) == 2
    assert says in capsys.readouterr().err
