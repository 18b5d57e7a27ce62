"""The run's folder: a free name, valid lines, and after a resume nothing twice."""

import json
import math
import re
import shlex
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.event_file_writer import AtomicCounter

from distflow.errors import InvalidInput
from distflow.plan import Layout, Plan
from distflow.telemetry.run_folder import (
    RunFolder,
    agent,
    choose,
    of_torchrun,
    provenance,
    read_plan,
    reload_run,
)
from distflow.telemetry.run_reader import RunReader

PLAN = Plan("grpo", "sync", 1, (), Layout(1))


class Resolved:
    """Of a spec, what the folder asks for."""

    def resolved(self):
        return {"dag": {"name": "größe"}, "run": {"steps": 3}}


def lines_of(path: Path) -> list[dict]:
    """Each line by a strict reader: NaN is not JSON."""
    text = path.read_bytes().decode()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=pytest.fail) for line in text.split("\n")[:-1]]


def test_names_count_up_and_choosing_makes_nothing(tmp_path):
    output = tmp_path / "deep/runs"
    assert choose(str(output), "grpo", None) == output / "grpo-1"
    assert not output.exists()
    (output / "grpo-1").mkdir(parents=True)
    (output / "grpo-2").write_text("a file is in the way too")
    assert choose(str(output), "grpo", None) == output / "grpo-3"
    assert choose(str(output), "sft", None) == output / "sft-1"
    assert choose(str(output), "grpo", "mine") == output / "mine"


def test_a_taken_name_is_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(InvalidInput, match="a run named `mine` exists") as error:
        choose(str(tmp_path), "grpo", "mine")
    assert f"distflow resume {tmp_path / 'mine'}" in str(error.value)


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="file is not a folder"):
        choose(str(tmp_path / "file/runs"), "grpo", None)
    with pytest.raises(InvalidInput, match=r"/proc is not writable \(No such file or directory\)"):
        choose("/proc/runs", "grpo", None)  # a folder that lets root write, by its permissions
    choose(str(tmp_path / "runs"), "grpo", None)
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "what was tried is gone"


def test_what_is_needed_to_repeat_a_run(tmp_path):
    folder = tmp_path / "runs/a"
    with RunFolder.created(folder, Resolved(), PLAN, ["/some/where"], agent()):
        assert folder.exists()
    assert {path.name for path in folder.iterdir()} == {"dag.yaml", "run.yaml", "launch.json", "plan.json"}
    assert json.loads((folder / "launch.json").read_text()) == {"search": ["/some/where"], "torchrun": agent()}
    assert of_torchrun(str(tmp_path / "runs")) == folder
    (folder / "launch.json").write_text(json.dumps({"search": [], "torchrun": "none machine 1 2"}))
    assert of_torchrun(str(tmp_path / "runs")) is None, "the folder of another torchrun"
    assert json.loads((folder / "plan.json").read_text())["digest"] == PLAN.digest


def test_a_name_that_another_run_took_meanwhile(tmp_path):
    def create(name):
        with RunFolder.created(tmp_path / name, Resolved(), PLAN, []):
            pass

    create("a")
    with pytest.raises(InvalidInput, match="a run named `a` exists"):
        create("a")
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="cannot be made"):
        create("file/a")


@pytest.mark.parametrize("before", [[], ["runs"], ["runs/other"]])
def test_a_start_that_fails_takes_away_what_it_made(tmp_path, before):
    for name in before:
        (tmp_path / name).mkdir(parents=True)
    there = sorted(tmp_path.rglob("*"))

    def start():
        with RunFolder.created(tmp_path / "runs/a", Resolved(), PLAN, []):
            (tmp_path / "runs/a/tensorboard").mkdir()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start()
    assert sorted(tmp_path.rglob("*")) == there


def test_an_unfinished_folder_is_removed_if_this_torchrun_has_left_it(tmp_path):
    folder = tmp_path / "a"
    for owner, removed in (("torchrun 1", True), ("torchrun 2", False)):
        folder.mkdir()
        (folder / "launch.json").write_text(json.dumps({"search": [], "torchrun": owner}))
        assert not RunFolder.is_made(folder)
        RunFolder.remove_unfinished(folder, "torchrun 1")
        assert folder.exists() is not removed


def test_lines_are_valid_whatever_they_hold(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_metrics(1, {"loss": math.nan, "grad_norm": math.inf, "reward/mean": 0.5})
    samples = [{"completions": "two\u2028lines, half \ud83d a pair, größer, \x85\r\n", "rewards": math.nan},
               {"completions": "", "tokens": [1, -math.inf]}]
    folder.write_samples(1, samples)
    folder.close({"steps": 1, "accuracy_after": math.nan, "notes": {"heldout": [0.5, math.nan]}})
    assert lines_of(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": None, "grad_norm": None, "reward/mean": 0.5}]
    assert lines_of(tmp_path / "samples.jsonl") == [{"step": 1, **samples[0], "rewards": None},
                                                    {"step": 1, "completions": "", "tokens": [1, None]}]
    assert "größer" in (tmp_path / "samples.jsonl").read_text(encoding="utf-8")
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert summary["notes"] == {"heldout": [0.5, None]}
    assert summary["accuracy_after"] is None


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step": 2, "loss": 9}', '{"step": 2}\n{"step"', "\n", "7\n",
                                  "[]\n"])
def test_a_resumed_run_forgets_what_it_will_do_again(tmp_path, torn):
    """Whole lines of steps up to the checkpoint stay, odd text and all; a line without its end goes."""
    first = RunFolder(tmp_path)
    for step in (1, 2, 3):
        first.write_metrics(step, {"loss": float(step)})
        first.write_samples(step, [{"completions": "a\u2028b\x85c"}])
    first.close({})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    again = RunFolder(tmp_path, resumed_at=2)
    again.write_metrics(3, {"loss": 30.0})
    again.close({})
    assert [line for line in lines_of(tmp_path / "metrics.jsonl") if line != {"step": 2}] == [
        {"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": 30.0}]
    assert [line["step"] for line in lines_of(tmp_path / "samples.jsonl")] == [1, 2]
    assert {path.suffix for path in tmp_path.iterdir()} == {".jsonl", ".json", ""}


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path, monkeypatch):
    # Files of one second are read by this number, as text: a process that has written nine would have 10 before 9.
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer._global_uid", AtomicCounter(0))
    first = RunFolder(tmp_path)
    for step in (1, 2, 3):
        first.write_metrics(step, {"loss": float(step)})
    first.close({})
    again = RunFolder(tmp_path, resumed_at=2)
    again.write_metrics(3, {"loss": 30.0})
    again.close({})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in events] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_the_summary_counts_the_steps_before_a_resume_too(tmp_path):
    first = RunFolder(tmp_path)
    first.write_metrics(0, {"validation/heldout": 0.25})
    first.write_step(1, {"tokens": 30.0, "samples": 4.0, "seconds": 2.0})
    first.close({})
    again = RunFolder(tmp_path, resumed_at=1)
    again.write_step(2, {"tokens": 10.0, "samples": 4.0, "seconds": 2.0})
    again.write_metrics(2, {"validation/heldout": 0.75})
    again.close({"seed": 7})
    summary = json.loads((tmp_path / "summary.json").read_text())
    _, one, two, _ = lines_of(tmp_path / "metrics.jsonl")
    assert [(line["tokens_total"], line["samples_total"]) for line in (one, two)] == [(30.0, 4.0), (40.0, 8.0)]
    assert summary.pop("wall_seconds") >= two["wall_seconds"] >= one["wall_seconds"] > 0
    made_by = {name: summary.pop(name) for name in ("command", "host", "versions", "git_commit")}
    assert made_by["host"] == socket.gethostname()
    assert made_by["command"] == shlex.join(sys.argv)
    assert made_by["versions"]["torch"] == torch.__version__
    assert summary == {"steps": 2, "accuracy_before": 0.25, "accuracy_after": 0.75,
                       "accuracy": {"heldout": [{"step": 0, "accuracy": 0.25}, {"step": 2, "accuracy": 0.75}]},
                       "seconds_in_steps": 4.0, "tokens_per_second": 10.0, "seed": 7}


def test_a_run_that_goes_on_has_not_come_to_its_end(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "summary.json").write_text("{}")
    folder = RunFolder(tmp_path, resumed_at=3)
    assert not (tmp_path / "summary.json").exists()
    folder.close({})
    assert (tmp_path / "summary.json").exists()


def test_the_commit_is_that_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance()["git_commit"] is None
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    (tmp_path / "file").write_text("one")
    for line in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *line], check=True)
    commit = provenance()["git_commit"]
    assert re.fullmatch("[0-9a-f]{40}", commit)
    (tmp_path / "file").write_text("two")
    assert provenance()["git_commit"] == f"{commit}-dirty"


def test_tensorboard_shows_validation_and_reward_first_and_samples_as_text(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_metrics(1, {"advantages/std": 1.0, "data/imbalance": 0.0, "loss": 0.1, "reward/mean": 0.5})
    folder.write_metrics(1, {"validation/heldout": 0.25, "staleness/tokens/0": 30.0, "staleness/tokens/2": 90.0})
    folder.write_samples(1, [{"row": 8, "questions": "3 + 4?", "completions": "7\n#### 7", "rewards": 1.0}, {"row": 9}])
    folder.close({})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    tags = sorted(events.Tags()["scalars"])
    assert tags == ["1_validation/heldout", "2_reward/mean", "advantages/std", "data/imbalance", "loss"]
    (text,) = events.Tensors("samples/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert "row 8  rewards 1.0" in shown
    assert "**completions**\n\n    7\n    #### 7" in shown
    assert "row 9" in shown
    ages = events.Histograms("staleness/tokens")[0].histogram_value
    assert list(zip(ages.bucket_limit, ages.bucket)) == [(0.5, 30.0), (1.5, 0.0), (2.5, 90.0)]


@pytest.mark.parametrize("text", [None, "", '{"ranks": ', "[2]", "{}"])
def test_a_plan_that_cannot_be_read_says_how_to_go_on(tmp_path, text):
    (tmp_path / "launch.json").write_text("{}")
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    with pytest.raises(InvalidInput, match="plan.json is missing or damaged") as error:
        read_plan(tmp_path)
    assert f"distflow resume {tmp_path} --ranks N" in str(error.value)


def test_a_run_that_is_not_there_is_named_by_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("first", "grpo-1"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "launch.json").write_text('{"search": []}')
    for given, meant in (("runs/frist", "first"), ("first", "first"), ("runs/grpo-2", "grpo-1")):
        for look in (reload_run, partial(RunReader.of, usage="distflow why runs/grpo-1")):
            with pytest.raises(InvalidInput) as error:
                look(Path(given))
            assert str(error.value) == (f"there is no run folder `{given}`.\nDid you mean `runs/{meant}`? "
                                        "Runs in runs: first, grpo-1.")
