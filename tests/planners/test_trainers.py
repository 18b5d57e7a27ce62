"""Trained roles cut out of the trainer onto ranks of their own."""

from __future__ import annotations

import pytest
import yaml
from harness import ROOT

from distflow.config.load import load
from distflow.errors import InvalidInput
from distflow.plan import KEEP
from planners import plan

APART = "groups={rollout: 2, trainers: {critic: 1}}"


def planned(dag="ppo.yaml", ranks=4, *overrides):
    return plan(load(dag, None, ["mode=async", *overrides], None), ranks)


def waits(made):
    """Return (group, node, other group, node there) for each wait of a trainer for another one within a step."""
    trainers = [group for group in made.groups if group.kind == "trainer"]
    runs = {task.node: group.name for group in trainers for task in group.plan.chain(0)}
    return {(group.name, task.node, runs[move.producer], move.producer) for group in trainers
            for task in group.plan.chain(0) for move in task.transfers
            if runs.get(move.producer, group.name) != group.name}


def test_a_critic_trains_apart():
    made = planned("ppo.yaml", 5, "groups={rollout: 2, trainers: {critic: 2}}")
    trainer, rollout, critic = made.groups
    assert [(group.name, group.first, group.last) for group in made.groups] == [
        ("trainer", 0, 0), ("rollout", 1, 2), ("trainer critic", 3, 4)]
    assert [task.node for task in critic.plan.chain(0)] == ["values", "critic"]
    assert [task.node for task in trainer.plan.chain(0)] == ["reference", "advantage", "update"]
    assert trainer.plan.early, "the reference need not wait for the critic"
    assert [(move.producer, move.columns) for move in critic.plan.dock] == [("values", ("values",))]
    assert ("advantage", ("returns",)) in [(move.producer, move.columns) for move in trainer.plan.dock]
    assert KEEP in critic.plan.task("reward").writes, "it drops the same rows"
    kinds = {(task.node, move.producer): move.kind for task in made.tasks for move in task.transfers}
    assert kinds["critic", "advantage"] == kinds["advantage", "values"] == kinds["values", "rollout"] == "dock"
    assert kinds["critic", "values"] == "local"
    assert any(item.name.startswith("critic") for item in critic.plan.memory)
    assert not any(item.name.startswith("critic") for item in trainer.plan.memory)


def test_whoever_waits_waits_for_a_node_that_stands_earlier_in_the_chain():
    """So nobody waits in a circle, in any mode and with any layouts."""
    for mode in ("sync", "async", "semi_sync"):
        made = planned("ppo.yaml", 6, f"mode={mode}", "groups={rollout: 2, trainers: {critic: 2}}")
        chain = [task.node for task in made.tasks]
        found = waits(made)
        assert {each[::2] for each in found} == {("trainer", "trainer critic"), ("trainer critic", "trainer")}
        assert all(chain.index(producer) < chain.index(node) for _, node, _, producer in found)


def test_in_mode_sync_the_first_ranks_sample_too():
    trainer, critic = planned("ppo.yaml", 3, "mode=sync", "groups.trainers={critic: 1}").groups
    assert [task.node for task in trainer.plan.chain(0)] == ["rollout", "reward", "reference", "advantage", "update"]
    assert {task.node: task.awaited for task in critic.plan.tasks if task.arrives} == {
        "rollout": False, "reward": False, "advantage": True}, "a step of it begins with the samples"
    assert any("rollout" in item.name for item in trainer.plan.memory)
    assert "of 2 none is left to sample" in refused("mode=sync", "groups.trainers={critic: 2}", ranks=2)


def refused(*overrides, dag="ppo.yaml", ranks=5):
    with pytest.raises(InvalidInput) as error:
        planned(dag, ranks, *overrides)
    return str(error.value)


@pytest.mark.parametrize(("overrides", "said", "hint"), [
    (("groups.trainers={critc: 1}",), "`groups.trainers` names `critc`, which is not a role", "Did you mean `critic`?"),
    (("groups.trainers={reference: 1}",), "no node trains it", "groups: {inference: {reference: 1}}"),
    (("groups.trainers={actor: 1}",), "node `rollout` samples with it", "Take `actor` out of  groups.trainers"),
    (("groups.trainers={critic: 1}", "on_stale=drop"), "ranks that train one role take prompts step by step",
     "on_stale: wait, or no  groups.trainers"),
    (("groups.trainers={critic: 4}",), "at least 2 ranks beside the 4 of groups.trainers", "--ranks 6"),
])
def test_what_cannot_train_apart_is_refused(overrides, said, hint):
    text = refused(*overrides)
    assert said in text
    assert hint in text


@pytest.mark.parametrize(("function", "after", "said"), [
    ("supervised_update", "rollout", "node `clone` trains on nothing that the first trainer writes"),
    ("policy_update", "advantage", "no other trainer reads what its nodes write (clone)")])
def test_a_role_that_nothing_keeps_in_step_is_refused(tmp_path, function, after, said):
    """Its checkpoints would be of other steps."""
    dag = yaml.safe_load((ROOT / "dags/ppo.yaml").read_text())
    dag["roles"]["cloned"] = {"copy_of": "actor", "trained": True}
    dag["nodes"]["clone"] = {"role": "cloned", "type": "MODEL_TRAIN", "function": function,
                             "dependencies": [after]}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(dag, sort_keys=False))
    text = refused("groups.trainers={cloned: 1}", dag=tmp_path / "mine.yaml")
    assert said in text
    assert "Take `cloned` out of  groups.trainers" in text


def test_too_few_ranks_of_a_role_are_no_matter_of_the_launcher():
    text = refused("groups.trainers={critic: 2}", "layouts={values: {dp: 4}}", ranks=6)
    assert "Give its role more ranks:  groups: {trainers: {critic: 4}}" in text


def test_a_filter_that_draws_again_is_refused(tmp_path):
    dag = yaml.safe_load((ROOT / "dags/ppo.yaml").read_text())
    dag["nodes"]["filter"] = {"role": "actor", "type": "COMPUTE", "function": "informative_groups",
                              "dependencies": ["reward"], "with": {"max_draws": 2}}
    for node in ("values", "reference"):
        dag["nodes"][node]["dependencies"] = ["filter"]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(dag, sort_keys=False))
    assert "node `filter` drops rows of a step" in refused("groups.trainers={critic: 1}", dag=tmp_path / "mine.yaml")
