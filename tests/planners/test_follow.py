"""Roles that follow the one that they copy: what is refused, with its line, and what they take of memory."""

import pytest
from harness import ROOT

from distflow.config.load import load_for_planning
from distflow.errors import InvalidInput
from distflow.plan import Layout
from planners import plan

DAG = """name: mine
roles:
  actor: {trained: true}
  reference:
    copy_of: actor
    follow: {every: 2, mix: 0.5}
nodes:
  rollout: {role: actor, type: MODEL_INFERENCE, function: generate, with: {group_size: 2}}
  reward: {role: reward, type: COMPUTE, function: score, dependencies: [rollout]}
  reference: {role: reference, type: MODEL_INFERENCE, function: logprobs, dependencies: [rollout]}
  advantage: {role: actor, type: COMPUTE, function: group_advantage, dependencies: [reward]}
  update: {role: actor, type: MODEL_TRAIN, function: policy_update, dependencies: [advantage, reference],
           with: {kl: 0.1}}
"""
SAMPLED = """  other: {role: reference, type: MODEL_INFERENCE, function: generate, dependencies: [rollout],
          with: {group_size: 2},
          writes: {responses: theirs, completions: a, rollout_logprobs: c, finished: d, versions: e}}
"""


@pytest.fixture
def planned(tmp_path):
    """`planned(ranks, *overrides, replace=(old, new))`: the plan of the DAG above."""
    def make(ranks=2, *overrides, replace=("", "")):
        (tmp_path / "mine.yaml").write_text(DAG.replace(replace[0], replace[1], 1) if replace[0] else DAG)
        return plan(load_for_planning(str(tmp_path / "mine.yaml"), None, [*overrides]), ranks)

    return make


@pytest.mark.parametrize(("replace", "line", "what"), [
    (("copy_of: actor\n    ", ""), 5, "follows no role"),
    (("copy_of: actor", "trained: true\n    copy_of: actor"), 7, "is trained, and would follow `actor` too"),
    (("actor: {trained: true}", "actor: {trained: true}\n  base: {copy_of: actor}"), 7, "`base`, which is not trained"),
    (("copy_of: actor", "copy_of: actor\n    head: value"), 7, "another output layer"),
    (("mix: 0.5", "mix: 1.5"), 6, "1"),
    (("every: 2", "every: 0"), 6, "0"),
    (("every: 2, ", ""), 6, "every"),
], ids=["no copy", "trained", "frozen", "head", "mix", "every", "missing"])
def test_what_cannot_follow_is_refused_with_its_line(planned, replace, line, what):
    if "base" in replace[1]:
        with pytest.raises(InvalidInput) as error:
            planned(replace=("actor: {trained: true}\n  reference:\n    copy_of: actor",
                             "actor: {trained: true}\n  base: {copy_of: actor}\n  reference:\n    copy_of: base"))
    else:
        with pytest.raises(InvalidInput) as error:
            planned(replace=replace)
    found = [each for each in error.value.mistakes if each.where and each.where.line == line]
    assert any(what in str(each) for each in found), str(error.value)


@pytest.mark.parametrize(("ranks", "overrides", "what", "line"), [
    (2, ["roles.actor.lora={rank: 4}"], "of which adapters alone are trained", "--set roles.actor.lora"),
    (2, ["roles.reference.model={architecture: qwen3, layers: 1}"], "starts from another model",
     "--set roles.reference.model"),
    (3, ["mode=async", "groups.inference={reference: 1}"], "whose weights these have", "--set groups.inference"),
    (3, ["mode=async", "groups.inference={reference: rollout}", "groups.rollout=1"], "whose weights these have",
     "--set groups.inference"),
    (2, ["layouts={update: {tp: 2}, reference: {tp: 1}}"], "splits the two otherwise", "--set layouts"),
    (2, ["layouts.rollout.dp=1", "layouts.reference.tp=2"], "splits the two otherwise", "--set layouts.reference.tp"),
    (2, ["layouts.update.tp=2", "roles.reference.dtype=float32"], "splits the two otherwise",
     "--set layouts.update.tp"),
    (2, ["roles.reference.replicas=2"], "it has replicas: 2, the other 1", "--set roles.reference.replicas"),
    (2, ["roles.actor.engine=megatron"], "is one, which it cannot do", "--set roles.actor.engine"),
    (2, ["roles.actor.engine=megatron", "roles.reference.engine=fsdp"], "role `actor` wants `engine: megatron` and has",
     "--set roles.actor.engine"),
    (2, ["roles.reference.engine=megatron"], "role `reference` wants `engine: megatron` and has",
     "--set roles.reference.engine"),
], ids=["lora", "model", "own ranks", "rollout ranks", "layout", "its size", "the size of the other", "replicas",
        "megatron", "an actor in megatron", "a reference in megatron"])
def test_what_lies_elsewhere_is_refused_with_its_line(planned, ranks, overrides, what, line):
    with pytest.raises(InvalidInput) as error:
        planned(ranks, *overrides)
    assert any(what in str(each) and line in str(each) for each in error.value.mistakes), str(error.value)


def test_layouts_first_gives_a_role_and_what_follows_it_the_same_ranks(tmp_path):
    dag = (ROOT / "dags/ppo.yaml").read_text()
    target = "target: {copy_of: critic, head: value, follow: {every: 1, mix: 0.1}}"
    dag = dag.replace("trained: true, head: value}", "trained: true, head: value}\n  " + target)
    (tmp_path / "target.yaml").write_text(dag.replace("values:    {role: critic,", "values:    {role: target,"))
    spec = load_for_planning(str(tmp_path / "target.yaml"), None, [])
    assert plan(spec, 2).layout_of("target", False) == plan(spec, 2).layout_of("critic", False)
    spec = load_for_planning(str(tmp_path / "target.yaml"), None, ["layouts={critic: {first: 1}}"])
    assert plan(spec, 2).layout_of("target", False) == plan(spec, 2).layout_of("critic", False) == Layout(1, 1)
    spec = load_for_planning(str(tmp_path / "target.yaml"), None, ["layouts={critic: {first: 2}, values: {first: 1}}"])
    with pytest.raises(InvalidInput, match="or with one that follows the other"):
        plan(spec, 3)


def test_one_that_samples_follows_in_mode_sync_alone(planned):
    more = ("  reward: {role", SAMPLED + "  reward: {role")
    planned(2, replace=more)
    with pytest.raises(InvalidInput, match="node `other` samples with it on other ranks"):
        planned(2, "mode=async", replace=more)


def test_its_weights_are_kept_in_float32_and_in_snapshots(planned):
    frozen, following = (planned(2, "roles.actor.dtype=bfloat16", replace=replace)
                         for replace in (("    follow: {every: 2, mix: 0.5}\n", ""), ("", "")))
    before = {item.name: item.bytes for item in frozen.memory}
    after = {item.name: item.bytes for item in following.memory}
    assert after["reference: following weights"] == 2 * before["reference: weights"]
    assert after["reference: weights while computing"] == before["reference: weights while computing"]
    kept = {item.name: item.bytes for item in following.host_memory}
    assert kept["reference: snapshots, each rank"] == 2 * after["reference: following weights"]
    assert "reference: snapshots, each rank" not in {item.name for item in frozen.host_memory}


def test_a_run_that_ends_before_says_so(planned):
    assert any("it stays as it is" in note for note in planned(2, "roles.reference.follow.every=64", "steps=10").notes)
    assert not any("it stays as it is" in note for note in planned(2, "steps=10").notes)
