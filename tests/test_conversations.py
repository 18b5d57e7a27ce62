"""Whole runs with real processes: hostile environments, and two roles that answer in turn."""

from __future__ import annotations

from collections import Counter

import pytest
from harness import events_of, lines_of, metrics_of, require_equal

from distflow.telemetry.run_reader import RunReader

TOOLS = '''
import os, time
from distflow import Turn, environment

@environment(safe=True)
class Tool:
    """Counts letters; what becomes of a row depends on its question, on the turn and on `trouble`."""
    def __init__(self, question, *, trouble=True):
        self.trouble, self.turns, self.kind = trouble, 0, sum(question.encode()) % 5

    def step(self, text):
        self.turns += 1
        if self.trouble and self.turns == 2:
            if self.kind == 0:
                time.sleep(3600)
            if self.kind == 1:
                os._exit(1)
            if self.kind == 2:
                raise ValueError("no such letter")
        return Turn(f"{len(text)} letters", done=self.turns == 3, reward=1 / (1 + len(text)))
'''
DAG = """
name: tools
roles:
  actor: {trained: true}
nodes:
  rollout:   {role: actor, type: MODEL_INFERENCE, function: converse,
              with: {environment: Tool, environment_settings: {trouble: TROUBLE}, group_size: 4, max_turns: 4,
                     max_tokens: 80, step_seconds: 4.0}}
  advantage: {role: actor, type: COMPUTE, function: group_advantage, dependencies: [rollout],
              reads: {rewards: environment_rewards}}
  update:    {role: actor, type: MODEL_TRAIN, function: policy_update, dependencies: [advantage]}
imports: [tools]
"""


def tools_dag(trouble: bool) -> str:
    return DAG.replace("TROUBLE", str(trouble).lower())


@pytest.fixture
def tools(workspace):
    (workspace / "tools.py").write_text(TOOLS)

    def dag(trouble: bool) -> tuple[str, ...]:
        name = f"tools_{trouble}.yaml".lower()
        (workspace / name).write_text(tools_dag(trouble))
        return ("--dag", name, "--run-file", "tiny.yaml")

    return dag


def test_a_run_goes_on_with_hostile_environments_and_says_so(launch, workspace, tools):
    done = launch(2, *tools(True), "--name", "hostile", "steps=3", "data.batch=6")
    folder = workspace / "runs/hostile"
    metrics = lines_of(folder / "metrics.jsonl")
    failed = [line["environment/failed"] for line in metrics]
    assert len(failed) == 3
    assert all(("loss" in line) == (line["environment/failed"] < 6 * 4) for line in metrics)
    assert 0 < sum(failed) < 3 * 6 * 4
    reasons = {"took longer than 4 s", "its process ended with code 1", "ValueError: no such letter"}
    events = events_of(folder, "environment_failed")
    assert sum(event["count"] for event in events) == sum(failed)
    assert {event["reason"] for event in events} <= reasons
    assert 0 < done.stderr.count("trajectories failed and are left out") <= 6
    rows = [row for path in folder.glob("trajectories/rank*.jsonl") for row in lines_of(path)]
    assert {row["turn"] for row in rows} == {row["step"] for row in rows} == {1, 2, 3}
    assert {row["failed"] for row in rows if "failed" in row} <= reasons


ASYNC = ("mode=async", "groups.rollout=1", "staleness=0")


BRITTLE = '''
import zlib
from distflow import Ragged, Turn, environment, node
from distflow.telemetry.metrics import current

@environment(safe=True)
class Tool:
    """Fails for all samples of one question in five, and for a third of the others by what was said."""
    def __init__(self, question, *, trouble=True):
        self.whole, self.turns = sum(question.encode()) % 5 == 0, 0

    def step(self, text):
        self.turns += 1
        if self.turns == 2 and (self.whole or zlib.crc32(text.encode(errors="surrogatepass")) % 3 == 0):
            raise ValueError("no such letter")
        return Turn(f"{len(text)} letters", done=self.turns == 3, reward=1 / (1 + len(text)))

@node(type="MODEL_INFERENCE", writes="{role}_logprobs", row_wise=True)
def counted(engine, prompts: Ragged, responses: Ragged) -> Ragged:
    """Log-probabilities, and the number of rows that a model was shown for them."""
    current().add("shown", len(responses))
    return engine.logprobs(prompts, responses)
'''


@pytest.fixture
def watched(workspace, tools):
    """A run whose reference counts the conversations that it is shown, of which some have failed."""
    arguments = tools(True)
    (workspace / "tools.py").write_text(BRITTLE)
    (workspace / "tools_true.yaml").write_text(
        tools_dag(True).replace("trained: true}", "trained: true}\n  reference: {copy_of: actor}").replace(
            "[advantage]}", "[advantage, reference], with: {kl: 0.5}}\n"
            "  reference: {role: reference, type: MODEL_INFERENCE, function: counted, dependencies: [rollout]}"))
    return (*arguments, "steps=3", "data.batch=6", "roles.actor.generation.batch_rows=4",
            "roles.actor.model.kv_heads=2", "staleness=0", "samples=1000")


def test_models_look_at_prompts_that_are_done_and_not_at_rows_that_were_dropped(launch, workspace, watched):
    """Whichever ranks they are on, and if the trainer is killed while it looks at some: always the same rows."""
    killed = "faults=[{kind: kill, group: trainer, phase: inference, step: 2}]"
    sides = {"whole": (2, ("mode=async", "groups.rollout=1", "roles.actor.generation.batch_rows=1")),
             "fused": (3, ("mode=async", "groups.rollout=1", "layouts.reference.dp=1", "layouts.update.tp=2", killed)),
             "semi_sync": (2, ("mode=semi_sync", "groups.rollout=1")),
             "own ranks": (3, ("mode=async", "groups={rollout: 1, inference: {reference: 1}}")),
             "own ranks, sync": (3, ("mode=sync", "layouts.reference.first=1"))}
    for name, (ranks, settings) in sides.items():
        launch(ranks, *watched, "--name", name, *settings)
    whole, *others = (metrics_of(workspace / f"runs/{name}") for name in sides)
    assert len(whole) == 3
    for other in others:
        require_equal(other, whole)
    for step, other in ((step, other) for step in whole for other in others):
        assert other[step]["shown"] == other[step]["filter/rollout/kept"] == whole[step]["filter/rollout/kept"] > 0
    trained = {row["row"] for row in RunReader(workspace / "runs/whole").rows("samples")}
    asked = {row // 4 for row in trained}
    assert len(asked) < 18, "all samples of some prompts were dropped"
    assert len(trained) < 4 * len(asked), "and some of others"
    for name, steps in zip(("fused", "semi_sync"), others):
        assert sum(step["seconds/reference/hidden"] for step in steps.values()) > 0, name
    assert [event["group"] for event in events_of(workspace / "runs/fused", "failure")] == ["trainer"]


SLOW = '''
import asyncio
from pathlib import Path
from distflow import Turn, environment

@environment(safe=True)
class Tool:
    """Takes long for a question, and writes down each call."""
    def __init__(self, question):
        self.question = question

    async def step(self, text):
        with open("asked", "a") as file:
            file.write(f"{self.question}\\n")
        await asyncio.sleep(3 if self.question == Path("slow").read_text() else 0)
        return Turn("noted", done=True, reward=1 / (1 + len(text)))
'''


def test_calls_go_on_while_the_only_rank_trains(launch, workspace):
    """Nothing is asked twice, though the first step was trained on while answers for the second were missing."""
    (workspace / "tools.py").write_text(SLOW)
    (workspace / "tools.yaml").write_text(DAG.replace("environment_settings: {trouble: TROUBLE}, ", ""))
    tools = ("--dag", "tools.yaml", "--run-file", "tiny.yaml", "data.batch=2")
    (workspace / "slow").touch()
    launch(1, *tools, "--name", "sync", "steps=2", "samples=8")
    question = next(row["questions"] for row in RunReader(workspace / "runs/sync").rows("samples") if row["step"] == 2)
    (workspace / "slow").write_text(question)
    (workspace / "asked").unlink()
    launch(1, *tools, "--name", "alone", "mode=semi_sync", "groups.rollout=0", "steps=5")
    steps = metrics_of(workspace / "runs/alone")
    assert len(steps) == 5
    assert steps[1]["seconds"] < 3
    assert steps[2]["environment/resumed"] == 4
    asked = Counter((workspace / "asked").read_text().splitlines())
    assert {*asked.values()} == {4}, "once for each row of the group"


def test_an_environment_that_always_fails_ends_an_async_run(launch, workspace, tools):
    (workspace / "tools.py").write_text(TOOLS.replace('raise ValueError("no such letter")', "pass").replace(
        "self.turns += 1", 'raise ValueError("no letters at all")'))
    done = launch(2, *tools(False), "--name", "lost", "steps=9", "data.batch=4", *ASYNC, code=None)
    assert done.returncode != 0
    assert "environment `Tool` has failed for every trajectory of 3 steps in a row" in done.stderr
    assert "no letters at all" in done.stderr
