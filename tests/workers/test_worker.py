"""The run folder after a start that fails, and after a resume that overrides settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from harness import metrics_of
from ranks import end_processes, run_ranks
from stores import hosted

from distflow.errors import EngineError, RankMissing
from workers import device
from workers.worker import _meet

SFT = ("--dag", "sft.yaml", "--run-file", "tiny.yaml")
BREAKS_RANK_1 = """
import os
import workers.train_context

def build_roles(*_, **__):
    raise RuntimeError("out of memory")

if os.environ["RANK"] == "1":
    workers.train_context.build_roles = build_roles
"""
DIES_AT_ONCE = """
import os, signal, time
from pathlib import Path
import workers.train_context
from distflow.recovery import hooks
from distflow.telemetry.run_folder import RunFolder

died, looked = Path("died"), Path("looked")
build, registered, describe = workers.train_context.build_roles, hooks.registered_mask, RunFolder.describe

def wait_until(condition):
    while not condition():
        time.sleep(0.01)

def build_roles(*given, **more):
    if not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    looked.touch()
    return build(*given, **more)

def registered_mask():
    if died.exists():
        wait_until(lambda: [*Path("runs").glob("*/launch.json")])
    return registered()

def describe_late(*given):
    if died.exists():
        wait_until(looked.exists)
    describe(*given)

if os.environ["RANK"] == "1":
    workers.train_context.build_roles, hooks.registered_mask = build_roles, registered_mask
else:
    RunFolder.describe = staticmethod(describe_late)
"""
"""The worker of rank 1 is killed in its first start. In the next one it comes while rank 0 is making the run folder."""


def _in_force(folder: Path) -> tuple[dict, dict, dict]:
    return (yaml.safe_load((folder / "run.yaml").read_text()), yaml.safe_load((folder / "dag.yaml").read_text()),
            json.loads((folder / "plan.json").read_text()))


def test_overrides_of_a_resume_are_kept_for_the_next_unless_it_cannot_start(launch, workspace):
    folder = workspace / "runs/on"
    launch(1, *SFT, "--name", "on", "--set", "steps=2")
    before = _in_force(folder)
    done = launch(1, "--resume", "runs/on", "--set", "roles.actor.model.layers=3", "--set", "steps=3", code=None)
    assert "cannot be loaded into role `actor`" in done.stderr
    assert _in_force(folder) == before
    more = "nodes.update.with={aggregate: seq_mean_token_sum}"
    launch(1, "--resume", "runs/on", "--set", "steps=4", "--set", more)
    run, dag, plan = _in_force(folder)
    assert run["steps"] == 4
    assert dag["nodes"]["update"]["with"] == {"aggregate": "seq_mean_token_sum"}
    assert plan["tasks"][0]["settings"] == {"aggregate": "seq_mean_token_sum"}
    assert plan["digest"] == json.loads((folder / "summary.json").read_text())["plan"]
    launch(1, "--resume", "runs/on", "--set", "data.batch=3")
    assert _in_force(folder)[0]["steps"] == 4
    assert set(metrics_of(folder)) == {1, 2, 3, 4}


def test_a_start_that_fails_on_one_rank_leaves_no_folder(launch, workspace):
    (workspace / "breaks.py").write_text(BREAKS_RANK_1)
    (workspace / "broken.yaml").write_text((workspace / "grpo.yaml").read_text().replace("[brevity]",
                                                                                         "[brevity, breaks]"))
    done = launch(2, "--dag", "broken.yaml", "--run-file", "tiny.yaml", code=None)
    assert done.returncode != 0
    assert "RuntimeError: out of memory" in done.stderr
    assert not (workspace / "runs").exists()


def test_a_worker_killed_in_its_first_start_leaves_the_folder_to_rank_0(launch, workspace):
    (workspace / "dies.py").write_text(DIES_AT_ONCE)
    (workspace / "dies.yaml").write_text((workspace / "grpo.yaml").read_text().replace("[brevity]", "[brevity, dies]"))
    launch(2, "--dag", "dies.yaml", "--run-file", "tiny.yaml", "--name", "again", "--set", "steps=1")
    events = [json.loads(line) for line in (workspace / "runs/again/events.jsonl").read_text().splitlines()]
    assert {event["attempt"] for event in events if event["event"] == "worker_ready"} == {1}
    assert (workspace / "runs/again/summary.json").is_file()


def test_ranks_whose_environments_differ_in_how_gloo_connects_reach_each_other(begin_apart):
    line = "--dag", "grpo.yaml", "--run-file", "tiny.yaml", "steps=1"
    for rank in begin_apart(line, line, variables=({"TORCH_GLOO_LAZY_INIT": "0"}, {"TORCH_GLOO_LAZY_INIT": "1"})):
        said = rank.stdout.read()
        assert rank.wait(120) == 0, said


def _import_the_launcher() -> None:
    import distflow.launch  # noqa: F401


def _meet_others() -> int:
    return torch.distributed.get_rank()


def test_importing_the_launcher_does_not_change_how_gloo_connects():
    """Else the next group of a process that has, and of one that has not, ends by SIGSEGV."""
    end_processes()
    run_ranks(1, _import_the_launcher)
    assert run_ranks(2, _meet_others) == [0, 1]


def test_gpus_are_counted_in_another_process(monkeypatch):
    """Otherwise the supervisor could not be forked into workers that use them."""
    asked = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: asked.append("here") or 3)
    assert device._gpus() == 3
    assert asked == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 / 0)
    with pytest.raises(EngineError, match="could not be counted"):
        device._gpus()


def test_the_first_rank_of_several_machines_is_not_at_loopback(monkeypatch):
    """As where a machine's own name is that in /etc/hosts, and the store of torchrun is there."""
    store = hosted()
    monkeypatch.delenv("DISTFLOW_HOST", raising=False)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.raises(EngineError, match=r"127.0.0.1 is this machine alone; .* export DISTFLOW_HOST="):
        _meet(store, 0, 0, 60.0)
    monkeypatch.setenv("DISTFLOW_HOST", "127.0.0.2")
    assert _meet(store, 0, 0, 60.0).host == "127.0.0.2"


def test_a_first_rank_that_has_ended_is_waited_for_as_long_as_others(monkeypatch):
    store = hosted()
    with pytest.raises(RankMissing, match="rank 2 has not come within 0.1 s"):
        _meet(store, 3, 2, 0.1)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    port = _meet(store, 2, 2, 60.0).port  # it is kept by nobody
    with pytest.raises(RankMissing, match=f"rank 2 is not reached at 127.0.0.1:{port} within 1 s") as error:
        _meet(store, 3, 2, 1.0)
    assert error.value.ranks == (2,)
