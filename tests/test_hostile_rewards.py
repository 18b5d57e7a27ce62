"""Whole runs with rewards that misbehave: the run goes on with the other samples and says so, or ends and says why."""

import json
import math
import socket

import pytest
from harness import events_of, metrics_of

FATES = ["fine", "sleeps", "raises", "nan", "forks", "eats", "network", "dies", "fine", "starts"]
HOSTILE = """
import os, socket, subprocess, sys, time
from distflow import reward

@reward(timeout=5.0, retries=0)
def hostile(completion, fate: str):
    if fate == "sleeps":
        time.sleep(600)
    if fate == "raises":
        raise RuntimeError("no licence")
    if fate == "nan":
        return float("nan")
    if fate == "forks":
        if not os.fork():
            time.sleep(600)
    if fate == "eats":
        return len([bytearray(1 << 26) for _ in range(64)])
    if fate == "network":
        socket.create_connection(("127.0.0.1", PORT)).recv(1)
    if fate == "dies":
        os._exit(1)
    if fate == "starts":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    return 1.0 / (1 + len(completion))

@reward(retries=0)
def broken(completion):
    raise RuntimeError("no compiler")
"""
ARGUMENTS = ("--dag", "grpo.yaml", "--run-file", "tiny.yaml", "data.columns=[fate]", "data.batch=10",
             "nodes.rollout.with.group_size=2", "checkpoint.every=0", "preflight=false")
RECIPE = "nodes.reward.with={reward: hostile, memory_gib: 1, workers: 4}"


@pytest.fixture
def hostile(workspace):
    """The workspace with a fate for each problem, and a server that accepts and never answers."""
    server = socket.create_server(("127.0.0.1", 0), backlog=64)
    (workspace / "brevity.py").write_text(HOSTILE.replace("PORT", str(server.getsockname()[1])))
    lines = (workspace / "train.jsonl").read_text().splitlines()
    records = [{**json.loads(line), "fate": fate} for line, fate in zip(lines, FATES)]
    (workspace / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    yield workspace
    server.close()


def test_the_run_goes_on_with_the_others(hostile, launch):
    done = launch(2, *ARGUMENTS, "--name", "hostile", "steps=2", RECIPE)
    metrics = metrics_of(hostile / "runs/hostile")
    assert set(metrics) == {1, 2}
    for step in metrics.values():
        assert step["reward/failed"] == 2 * (len(FATES) - FATES.count("fine"))
        assert step["reward/timeouts"] >= 2 * 2
        assert 0 < step["reward/mean"] == pytest.approx(step["reward/hostile"], rel=1e-6)
        assert math.isfinite(step["loss"])
    said = [line for line in (done.stdout + done.stderr).splitlines() if "samples left out: reward `hostile`" in line]
    assert 2 <= len(said) <= 4  # one for each step and rank
    events = events_of(hostile / "runs/hostile")
    events = [event for event in events if event["event"] == "reward_failed"]
    reasons = {event["reason"] for event in events}
    for part in ("took longer than 5 s", "raised RuntimeError: no licence", "returned nan", "raised MemoryError",
                 "its process ended with code 1", "left 1 processes running"):
        assert any(part in reason for reason in reasons), (part, reasons)
    assert {event["step"] for event in events} == {1, 2}
    assert any('raise RuntimeError("no licence")' in event["trace"] for event in events)


def test_a_reward_that_always_fails_ends_the_run_and_is_named(hostile, launch):
    done = launch(1, *ARGUMENTS, "--name", "broken", "steps=9", "nodes.reward.with={reward: broken, patience: 2}",
                  code=1)
    text = done.stdout + done.stderr
    assert "EVERY ONE of 20 samples left out: reward `broken` raised RuntimeError: no compiler" in text
    assert "no sample of 2 steps in a row has a reward on this rank" in text
    assert 'raise RuntimeError("no compiler")' in text


def test_a_source_without_a_reward_is_found_before_the_start(hostile, launch):
    recipe = "{by: fate, rewards: {fine: math, raises: math, nan: math, sleep: math}}"
    done = launch(1, *ARGUMENTS, "--name", "sources", f"nodes.reward.with.reward={recipe}", code=None)
    assert done.returncode != 0
    text = done.stdout + done.stderr
    assert "train.jsonl:2: field `fate` is 'sleeps', for which no reward is given" in text
    assert "Did you mean `sleep`? There are rewards for: fine, raises, nan, sleep." in text
    assert not (hostile / "runs").exists()
