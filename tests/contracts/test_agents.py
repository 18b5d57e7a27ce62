"""Commands of agents that a DAG names, checked before anything runs."""

from __future__ import annotations

import json
import sys

import pytest

from distflow.config.load import load
from distflow.contracts.agents import filled_words
from distflow.errors import InvalidInput
from planners import plan

DAG = """name: talk
roles:
  actor: {trained: true}
nodes:
  rollout:   {role: actor, type: MODEL_INFERENCE, function: run_agent, with: {group_size: 2, WITH}}
  advantage: {role: actor, type: COMPUTE, function: group_advantage, dependencies: [rollout],
              reads: {rewards: environment_rewards}}
  update:    {role: actor, type: MODEL_TRAIN, function: policy_update, dependencies: [advantage]}
"""


@pytest.fixture
def checked(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    (workspace / "solve.py").touch()

    def check(settings: str, *sets: str, ranks: int = 2):
        (workspace / "talk.yaml").write_text(DAG.replace("WITH", settings))
        return plan(load("talk.yaml", "tiny.yaml", list(sets)), ranks)

    return check


def test_a_node_reads_what_its_command_names_and_its_prompts_are_the_agents(checked):
    rollout, _, update = checked('agent: "python solve.py --task {questions} {answers} {questions}"').tasks
    assert [(read.parameter, read.form) for read in rollout.reads] == [
        ("prompts", "Ragged"), ("row", "Tensor"), ("questions", "list[str]"), ("answers", "list[str]")]
    assert {(read.name, read.producer) for read in update.reads} >= {("prompts", "rollout"), ("responses", "rollout")}


def test_no_shell_reads_the_columns():
    assert filled_words("python 'my solve.py' --task={questions} {{x}}", {"questions": "a; rm -rf '$HOME' {y}"}) == \
        [sys.executable, "my solve.py", "--task=a; rm -rf '$HOME' {y}", "{x}"]


@pytest.mark.parametrize(("command", "says"), [
    ("python solve.py", ["it names no column", "python solve.py {questions}"]),
    ("python solv.py {questions}", ["runs `solv.py`, which is not a file", "where the run is started"]),
    ("solve.py {questions}", ["starts `solve.py`, which is no program", "agent: python solve.py"]),
    ("python solve.py {questions", ["cannot be read: expected '}'", "{{ }}"]),
    ("python solve.py '{questions}", ["cannot be read: No closing quotation"]),
    ("python solve.py {questions!r}", ["{questions} is not the name of a column"]),
    ("{questions} solve.py", ["its program is a column"]),
    ("", ["it is empty"]),
    ("bash -c 'python solve.py {questions}'", ["puts the text of a column into code", "python solve.py {questions}"]),
    ("python {questions}", ["has a column as the first argument", "--question={questions}"]),
    ("python solve.py {prompts}", ["names the column `prompts`, which is no text"]),
    ("python solve.py {solutions}", ["reads column `solutions`, which no node writes"])])
def test_mistakes_are_found_with_their_lines(checked, command, says):
    with pytest.raises(InvalidInput) as error:
        checked(f"agent: {json.dumps(command)}")
    assert [mistake.where.line for mistake in error.value.mistakes] == [5]
    for part in says:
        assert part in str(error.value)


@pytest.mark.parametrize(("settings", "says"), [
    ("max_turns: 3", "`run_agent` needs the setting `agent`"),
    ("agent: 3", "must be a command, not 3"),
    ('agent: "python solve.py {questions}", seconds: 0', "above 0"),
    ('agent: "python solve.py {questions}", second: 9', "Did you mean `seconds`?")])
def test_settings_are_checked(checked, settings, says):
    with pytest.raises(InvalidInput) as error:
        checked(settings)
    assert says in str(error.value)
    assert error.value.mistakes[0].where.line == 5


PLAN_THEN_ACT = """name: talk
roles:
  actor: {trained: true}
nodes:
  first:     {role: actor, type: MODEL_INFERENCE, function: generate,
              writes: {responses: plan, rollout_logprobs: plan_logprobs, versions: plan_versions, completions: plans}}
  second:    {role: actor, type: MODEL_INFERENCE, function: run_agent, dependencies: [first],
              with: {agent: "python solve.py {plans}", group_size: 2}WRITES}
  advantage: {role: actor, type: COMPUTE, function: group_advantage, dependencies: [second],
              reads: {rewards: environment_rewards}}
  update:    {role: actor, type: MODEL_TRAIN, function: policy_update, dependencies: [advantage],
              reads: {READS}}
"""
OF_PLAN = "responses: plan, rollout_logprobs: plan_logprobs, versions: plan_versions"


@pytest.mark.parametrize(("writes", "reads", "hint"), [
    ("", OF_PLAN, "second: {…, writes: {prompts: second_prompts}}"),
    (", writes: {prompts: second_prompts}", "", "update: {…, reads: {prompts: second_prompts}}")])
def test_responses_are_trained_behind_the_prompts_that_they_were_sampled_after(checked, workspace, writes, reads, hint):
    (workspace / "plan.yaml").write_text(PLAN_THEN_ACT.replace("WRITES", writes).replace("READS", reads))
    with pytest.raises(InvalidInput) as error:
        plan(load("plan.yaml", "tiny.yaml"), 1)
    assert "whose tokens were sampled after the prompts of" in str(error.value)
    assert hint in str(error.value)


def test_what_the_agent_said_is_trained_behind_its_own_prompts(checked, workspace):
    (workspace / "plan.yaml").write_text(PLAN_THEN_ACT.replace("WRITES", "").replace("READS", ""))
    update = plan(load("plan.yaml", "tiny.yaml"), 1).tasks[-1]
    assert {(read.name, read.producer) for read in update.reads} >= {("prompts", "second"), ("responses", "second")}
