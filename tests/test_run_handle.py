"""Runs that Python starts and reads."""

import os
import select
import subprocess
import sys
import textwrap

import pytest
from harness import environment

import distflow


@pytest.fixture
def here(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    return workspace


@pytest.mark.run
def test_a_run_is_started_and_read(here, capfd):
    started = distflow.run("grpo.yaml", "tiny.yaml", ranks=2, set={
        "steps": 3, "roles.actor.learning_rate": 1e-6, "validation": {"every": 2, "data": {"held": "train.jsonl"}}})
    assert started.running
    started.wait(300)
    assert not started.running
    assert list(started.metrics.index) == [0, 1, 2, 3], "a row for each step, also where a step was validated"
    assert started.metrics.loc[1:, "reward/mean"].notna().all()
    assert started.metrics.loc[3, "learning_rate"] == pytest.approx(1e-6)
    assert {"questions", "completions", "rewards"} <= set(started.samples.columns)
    assert set(started.validation["step"]) == {0, 2, 3}
    assert "worker_ready" in set(started.events["event"])
    assert started.summary["steps"] == 3
    assert started.report().stat().st_size > 1_000_000
    assert "step 3/3" in capfd.readouterr().out
    again = distflow.load(started.folder)
    assert again.metrics.equals(started.metrics)
    assert repr(again) == f"<run {started.folder}: has ended>"
    with pytest.raises(distflow.DistflowError, match="was not started by this process"):
        again.wait()


def test_mistakes_are_found_before_anything_starts(here):
    for arguments, words in (({"set": {"stepps": 3}}, "Did you mean `steps`"), ({"run": "tinny.yaml"}, "tinny.yaml"),
                             ({"set": {"roles.actor.learning_rate": "fast"}}, "learning_rate")):
        with pytest.raises(distflow.DistflowError, match=words):
            distflow.run("grpo.yaml", **{"run": "tiny.yaml", **arguments})
    with pytest.raises(distflow.DistflowError, match="there is no run folder"):
        distflow.load("runs/none")
    assert not (here / "runs").exists()


@pytest.mark.run
def test_a_run_is_stopped_after_its_step_and_one_that_fails_says_why(here):
    started = distflow.run("grpo.yaml", "tiny.yaml", set={"steps": 100_000}, quiet=True)
    with pytest.raises(TimeoutError, match="is still running after 0 s"):
        started.wait(0)
    while "loss" not in started.metrics.columns:
        assert started.running
    started.stop()
    assert started.summary == {}
    assert list((started.folder / "checkpoints").iterdir())
    (here / "brevity.py").write_text((here / "brevity.py").read_text() + "raise OSError('gone')\n")
    failing = distflow.run("grpo.yaml", "tiny.yaml", set={"steps": 2}, quiet=True)
    with pytest.raises(distflow.RunFailed, match="gone"):
        failing.wait()


@pytest.mark.run
def test_a_run_ends_with_the_script_that_has_started_it(here):
    script = textwrap.dedent("""
        import os, distflow
        started = distflow.run("grpo.yaml", "tiny.yaml", set={"steps": 100000})
        while "loss" not in started.metrics.columns:
            pass
        print("pid", started.process.pid, flush=True)
        os.kill(os.getpid(), 9)
        """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    pid = int(done.stdout.rpartition("pid ")[2])
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return  # it has ended already
    waiting = select.poll()
    waiting.register(process)
    assert waiting.poll(60_000)
    os.close(process)
