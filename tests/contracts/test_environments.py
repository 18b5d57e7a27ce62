"""Environments and templates that a DAG names, checked before anything runs."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from harness import ROOT

from distflow.config.extras import pip_line
from distflow.config.load import load
from distflow.contracts.environments import load_environment
from distflow.errors import InvalidInput
from planners import plan

MODULE = '''
from distflow import Turn, environment

@environment(safe=True)
class Maze:
    """A maze."""
    def __init__(self, question, answer: str, map, *, size: int, walls: bool = True): ...
    async def step(self, text): ...

@environment
class Mute:
    def __init__(self, question): ...

@environment
class Begun(Maze):
    def __init__(self, map, seed=""): ...
    def start(self): ...

@environment
class Again(Begun):
    def __init__(self, question): ...
'''
DAG = """name: talk
roles:
  actor: {trained: true}
nodes:
  rollout:   {role: actor, type: MODEL_INFERENCE, function: converse, reads: {READS},
              with: {group_size: 2, WITH}}
  advantage: {role: actor, type: COMPUTE, function: group_advantage, dependencies: [rollout],
              reads: {rewards: environment_rewards}}
  update:    {role: actor, type: MODEL_TRAIN, function: policy_update, dependencies: [advantage]}
imports: [mazes_of_mine]
"""
RUN = """steps: 1
roles: {actor: {model: {architecture: qwen3}}}
data: {train: train.jsonl, columns: [map]}
"""


@pytest.fixture
def checked(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    (workspace / "mazes_of_mine.py").write_text(MODULE)
    (workspace / "run.yaml").write_text(RUN)

    def check(settings: str, reads: str = ""):
        (workspace / "talk.yaml").write_text(DAG.replace("WITH", settings).replace("READS", reads))
        return plan(load("talk.yaml", "run.yaml"), 2)

    return check


@pytest.mark.parametrize("name", ["Maze", "mazes_of_mine:Maze"])
def test_a_node_reads_what_its_environment_wants(checked, name):
    task = checked(f"environment: {name}, environment_settings: {{size: 3}}").tasks[0]
    assert [(read.parameter, read.name, read.form) for read in task.reads] == [
        ("prompts", "prompts", "Ragged"), ("row", "row", "Tensor"), ("questions", "questions", "list[str]"),
        ("answers", "answers", "list[str]"), ("map", "map", "list[str]")]
    assert "mazes_of_mine" not in sys.modules


@pytest.mark.parametrize("name", ["Begun", "Again"])
def test_what_an_environment_begins_with_is_in_the_prompts_of_later_nodes(checked, name):
    found = {task.node: task for task in checked(f"environment: {name}").tasks}
    assert found["rollout"].writes[-1] == "prompts"
    assert [read.producer for read in found["update"].reads if read.name == "prompts"] == ["rollout"]
    assert "seed" not in [read.name for read in found["rollout"].reads]


def test_a_shipped_one_without_its_package(checked, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "gymnasium" else found(name))
    with pytest.raises(InvalidInput) as error:
        checked("environment: Gymnasium, environment_settings: {id: Blackjack-v1}")
    mistake, = error.value.mistakes
    assert mistake.where.line == 6
    assert "environment `Gymnasium` needs the package `gymnasium`, which is not installed" in mistake.what
    assert mistake.hint == pip_line("gymnasium")


def test_a_column_may_be_another_one(checked):
    task = checked("environment: Maze, environment_settings: {size: 3}", "map: questions").tasks[0]
    assert ("map", "questions") in [(read.parameter, read.name) for read in task.reads]


@pytest.mark.parametrize(("settings", "line", "says"), [
    ("environment: Maize, environment_settings: {size: 3}", 6, ["no environment `Maize`", "Did you mean `Maze`?"]),
    ("environment: mazes_of_mine:Maize", 6, ["no environment `mazes_of_mine:Maize`", "Did you mean"]),
    ("environment: Maze", 6, ["environment `Maze` needs the setting `size`", "environment_settings: {size: …}"]),
    ("environment: Maze, environment_settings: {size: 3, wals: false}", 6, ["no setting `wals`", "`walls`"]),
    ("environment: Maze, environment_settings: {size: large}", 6, ["`size` of environment `Maze` must be a whole"]),
    ("environment: Mute", 11, ["environment `Mute` has no method `step`", "def step(self, text: str) -> Turn"]),
    ("max_turns: 3", 5, ["`converse` needs the setting `environment`"]),
    ("environment: Calculator, max_turns: 0", 6, ["above 0"]),
])
def test_mistakes_are_found_with_their_lines(checked, settings, line, says):
    with pytest.raises(InvalidInput) as error:
        checked(settings)
    assert [mistake.where.line for mistake in error.value.mistakes] == [line]
    for part in says:
        assert part in str(error.value)


def test_a_column_that_is_not_there_is_said(checked, workspace):
    (workspace / "run.yaml").write_text(RUN.replace(", columns: [map]", ""))
    with pytest.raises(InvalidInput, match="reads column `map`, which no node writes"):
        checked("environment: Maze, environment_settings: {size: 3}")


def test_the_shipped_ones_are_found_by_name_alone(checked):
    assert load_environment("Calculator").__name__ == "Calculator"
    assert checked("environment: Calculator").tasks[0].reads[-1].name == "answers"
    with pytest.raises(InvalidInput, match="there is no environment `Nothing`"):
        load_environment("Nothing")


@pytest.mark.parametrize(("template", "says"), [
    ("{questions} {completions.upper}", "{completions.upper} is not the name of a column"),
    ("{questions", "expected '}'"), ("{}", "is not the name of a column"), ("Check it.", "it names no column"),
    ("{questions!r}", "is not the name of a column"),
    ("{solutions}", "reads column `solutions`, which no node writes")])
def test_templates(checked, workspace, template, says):
    text = (ROOT / "dags/solver_reviser.yaml").read_text()
    (workspace / "pair.yaml").write_text(text.replace("{questions} {completions} Again:", template))
    with pytest.raises(InvalidInput) as error:
        plan(load("pair.yaml", "tiny.yaml"), 1)
    assert says in str(error.value)
    assert len(error.value.mistakes) == 1
