"""Roles that are only read, cut out of the trainer onto ranks of their own."""

from __future__ import annotations

import pytest
import yaml
from harness import ROOT
from planning import refused

from distflow.config.live_changes import groups_of
from distflow.config.load import load
from distflow.errors import InvalidInput
from distflow.plan import INFERENCE, ROLLOUT, SAMPLING, TRAINER, Layout
from planners import plan

ALONE = "groups.inference={reference: 1}"


def planned(dag="grpo.yaml", ranks=4, *overrides):
    spec = load(dag, None, ["mode=async", *overrides], None)
    return spec, plan(spec, ranks)


@pytest.fixture
def dag_of(tmp_path, monkeypatch):
    """`dag_of(nodes, roles)`: that of GRPO with further ones, whose functions are `seen` and `mixed`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "apart.py").write_text(
        "from distflow import node\n\n"
        "@node(type='MODEL_INFERENCE', writes='{role}_seen', row_wise=True)\n"
        "def seen(engine, responses: Ragged, first: Tensor = None) -> Tensor: 'Looks at each row.'\n\n"
        "@node(type='MODEL_INFERENCE', writes='{role}_mixed')\n"
        "def mixed(engine, responses: Ragged) -> Tensor: 'Compares rows.'\n\n"
        "@node(writes='used')\n"
        "def use(judge_seen: Tensor = None, teacher_seen: Tensor = None, judge_last: Tensor = None, "
        "judge_mixed: Tensor = None) -> Tensor: 'Reads all.'\n")

    def make(nodes, roles):
        shown = yaml.safe_load((ROOT / "dags/grpo.yaml").read_text())
        shown["imports"] = ["apart"]
        shown["roles"] |= {role: {"copy_of": "actor"} for role in roles}
        shown["nodes"] |= nodes | {"use": {"role": "actor", "type": "COMPUTE", "function": "use",
                                           "dependencies": [*nodes]}}
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(shown, sort_keys=False))
        return tmp_path / "mine.yaml"

    return make


def seen(role, *dependencies, function="seen", **more):
    return {"role": role, "type": "MODEL_INFERENCE", "function": function, "dependencies": ["rollout", *dependencies],
            **more}


def test_a_reference_has_the_last_ranks_and_the_trainer_only_what_it_writes():
    _, made = planned("grpo.yaml", 5, "groups.inference={reference: 2}", "groups.rollout=2")
    assert [[task.node for task in made.chain(rank)] for rank in range(5)] == [
        ["advantage", "update"], *2 * [["rollout", "reward"]], *2 * [["reference"]]]
    assert [(group.name, group.kind, group.ranks) for group in made.groups] == [
        ("trainer", TRAINER, range(1)), ("rollout", ROLLOUT, range(1, 3)),
        ("inference reference", INFERENCE, range(3, 5))]
    assert [made.group_of(rank)[1] for rank in (3, 4)] == [0, 1], "each has the whole model, and restarts alone"
    trainer, rollout, reference = (group.plan for group in made.groups)
    assert [[move.producer for move in each.dock] for each in (rollout, reference, trainer)] == [
        ["rollout", "reward"], ["reference"], ["rollout", "reward", "reference"]]
    weights = [any(item.name == "reference: weights" for item in each.memory) for each in (trainer, rollout, reference)]
    assert weights == [False, False, True]
    assert trainer.early is None


@pytest.mark.parametrize("size", ["tp", "dp"])
def test_a_model_may_be_split_or_sharded_over_its_ranks(size):
    _, made = planned("grpo.yaml", 6, "groups.inference={reference: 4}", "groups.rollout=1",
                      f"layouts.reference.{size}=2")
    group = made.groups[2]
    assert (group.first, group.replicas, group.plan.ranks) == (2, 2, 2)
    task, = group.plan.chain(0)
    assert getattr(task.layout, size) == 2
    assert made.groups[0].plan.layout_of("actor", samples=False).tp == 1
    whole = planned("grpo.yaml", 3, ALONE)[1].groups[2].plan
    one, other = (next(item.bytes for item in each.memory if item.name == "reference: weights")
                  for each in (whole, group.plan))
    assert one == 2 * other


def test_what_stays_with_the_trainer_may_read_what_others_write_ahead(dag_of):
    """`reads` of a teacher in the trainer: fused, once the judge's rows are there too."""
    dag = dag_of({"judge": seen("judge"), "teacher": seen("teacher", "judge", reads={"first": "judge_seen"})},
                 ["judge", "teacher"])
    _, made = planned(dag, 4, "groups.inference={judge: 1}")
    early = made.groups[0].plan.early
    assert [task.node for task in early.chain(0)] == ["reference", "teacher"]
    assert {task.node: task.writes for task in early.tasks if task.arrives}["judge"] == ("judge_seen",)


def test_groups_that_read_each_other_have_an_order(dag_of):
    dag = dag_of({"teacher": seen("teacher", "judge", reads={"first": "judge_seen"}), "judge": seen("judge")},
                 ["judge", "teacher"])
    _, made = planned(dag, 5, "groups.inference={teacher: 1, judge: 1}")
    assert [group.name for group in made.groups[2:]] == ["inference judge", "inference teacher"]
    brought = {task.node: task.writes for task in made.groups[3].plan.tasks if task.writes and task.arrives}
    assert brought == {"rollout": ("responses",), "judge": ("judge_seen",)}


def test_what_rollouts_have_dropped_is_not_computed(dag_of):
    """By a filter that it waits for itself or through another role; a filter of the trainer is refused."""
    nodes = {"judge": seen("judge", "reward"), "teacher": seen("teacher", "judge", reads={"first": "judge_seen"})}
    dag = dag_of(nodes, ["judge", "teacher"])
    _, made = planned(dag, 5, "groups.inference={judge: 1, teacher: 1}")
    judge, teacher = ({task.node: task.writes for task in group.plan.tasks if task.writes and task.arrives}
                      for group in made.groups[2:])
    assert judge == {"rollout": ("responses",), "reward": ("keep",)}
    assert teacher == judge | {"judge": ("judge_seen",)}
    with pytest.raises(InvalidInput, match="node `judge` waits for node `reward`, which drops rows"):
        planned(dag, 5, "groups.inference={judge: 1}", "layouts.reward.dp=1")
    with pytest.raises(InvalidInput, match="node `judge` waits for node `reward`, which drops rows"):
        planned(dag, 5, "groups.inference={judge: rollout}")


CIRCLE = {"judge": seen("judge"), "teacher": seen("teacher", "judge", reads={"first": "judge_seen"}),
          "last": seen("judge", "teacher", reads={"first": "teacher_seen"}, writes={"judge_seen": "judge_last"})}
REFUSED = {
    "a role that is trained": ("ppo.yaml", {"critic": 1}, "it is trained"),
    "no role": ("grpo.yaml", {"refrence": 1}, "Did you mean `reference`"),
    "a role without a node": (({}, ["judge"]), {"judge": 1}, "no node computes with its model"),
    "results that nobody reads": (({"judge": seen("judge", function="mixed", writes={"judge_mixed": "idle"})},
                                   ["judge"]), {"judge": 1}, "nothing reads what its nodes write"),
    "rows that are compared": (({"judge": seen("judge", function="mixed")}, ["judge"]), {"judge": 1},
                               "function `mixed` is not marked as one that looks at each row by itself"),
    "the trainer's results": (({"judge": seen("judge", "advantage")}, ["judge"]), {"judge": 1},
                              "node `judge` waits for node `advantage`, which runs in the trainer"),
    "a circle": ((CIRCLE, ["judge", "teacher"]), {"judge": 1, "teacher": 1}, "each would wait for the other's ranks"),
    "too few ranks": ("grpo.yaml", {"reference": 4}, "Start 6 ranks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_have_ranks_of_its_own_is_refused_with_the_reason(case, dag_of):
    dag, inference, said = REFUSED[case]
    with pytest.raises(InvalidInput) as error:
        planned(dag if isinstance(dag, str) else dag_of(*dag), 5, f"groups.inference={yaml.safe_dump(inference)}")
    assert said in str(error.value)
    assert "groups.inference" in str(error.value) or "--ranks" in str(error.value)


def test_ranks_that_sample_may_compute_what_a_frozen_model_says():
    _, made = planned("grpo.yaml", 3, "groups.inference={reference: rollout}", "groups.rollout=2")
    assert [[task.node for task in made.chain(rank)] for rank in range(3)] == [
        ["advantage", "update"], *2 * [["rollout", "reward", "reference"]]]
    trainer, rollout = (group.plan for group in made.groups)
    assert [(move.producer, move.columns) for move in rollout.dock][-1] == ("reference", ("reference_logprobs",))
    assert trainer.early is None
    held = {item.name: item.phase for item in rollout.memory}
    assert held["reference: activations"] == held["actor: rollout cache"] == SAMPLING, "at the same time"
    assert not any(item.name.startswith("reference") for item in trainer.memory)


ON_ROLLOUTS_REFUSED = {
    "trainers that sample": ("grpo.yaml", "reference", ("mode=semi_sync",), "ranks that train sample too"),
    "a layout": ("grpo.yaml", "reference", ("layouts.reference.dp=2",), "Leave `reference` out of `layouts`"),
    "a trained role": ("ppo.yaml", "critic", (), "it is trained"),
    "a role that is not there": ("grpo.yaml", "refrence", (), "Did you mean `reference`"),
    "rows that are compared": (({"judge": seen("judge", function="mixed")}, ["judge"]), "judge", (), "`row_wise`"),
}


@pytest.mark.parametrize("case", ON_ROLLOUTS_REFUSED)
def test_what_ranks_that_sample_cannot_compute_is_refused_with_the_reason(case, dag_of):
    dag, role, more, said = ON_ROLLOUTS_REFUSED[case]
    with refused(said, mistakes=1):
        planned(dag if isinstance(dag, str) else dag_of(*dag), 4, f"groups.inference={{{role}: rollout}}", *more)


def test_a_frozen_role_that_samples_is_not_read_beside_its_samples(dag_of):
    """Its engine that samples gives no log-probabilities."""
    nodes = {"again": {"role": "judge", "type": "MODEL_INFERENCE", "function": "generate", "dependencies": ["rollout"],
                       "writes": {name: f"again_{name}" for name in (
                           "responses", "rollout_logprobs", "versions", "completions", "finished")},
                       "with": {"group_size": 1}},
             "judge": seen("judge")}
    with pytest.raises(InvalidInput, match="it samples, with an engine that does not infer"):
        planned(dag_of(nodes, ["judge"]), 4, "groups.inference={judge: rollout}")


def test_only_what_ranks_that_sample_read_restarts_them():
    rate, micro = ("roles", "actor", "learning_rate"), ("roles", "actor", "micro_batch_tokens")
    run = load("grpo", None, ["mode=async"]).run
    assert groups_of(micro, run, {"actor", "reference"}) == (TRAINER, ROLLOUT)
    assert groups_of(rate, run, {"actor", "reference"}) == (TRAINER,)
    assert groups_of(micro, run, {"reference"}) == (TRAINER,)
    drawn = ("roles", "actor", "generation", "top_p")
    assert [groups_of(drawn, load("grpo", None, [f"mode={mode}"]).run) for mode in ("sync", "async", "semi_sync")] == [
        (TRAINER,), (ROLLOUT,), (TRAINER, ROLLOUT)]


@pytest.mark.parametrize("value", ["0", "1.5", "true"])
def test_ranks_that_infer_are_a_number_or_those_that_sample(value):
    with refused("is neither a number of ranks, as 1, nor `rollout`", mistakes=1):
        planned("grpo.yaml", 3, f"groups.inference={{reference: {value}}}")


def test_the_first_rank_of_a_split_rollout_has_the_frozen_model(engines):
    split = ("roles.actor.rollout=vllm", "layouts.rollout.tp=2", "groups.rollout=4")
    _, made = planned("grpo.yaml", 6, *split, "groups.inference={reference: rollout}")
    group = made.groups[1]
    assert (group.replicas, group.plan.ranks) == (2, 2)
    assert "reference" in [task.node for task in group.plan.chain(0)]
    assert group.plan.layout_of("reference", samples=False).active_ranks == [0]
    assert group.plan.layout_of("actor", samples=True) == Layout(1, tp=2)
    whole, = (item.bytes for item in group.plan.memory if item.name == "reference: weights")
    assert whole == 2 * next(item.bytes for item in group.plan.memory if item.name == "actor: rollout weights")


@pytest.mark.parametrize(("more", "wants"), [
    (("roles.reference.replicas=2",), "replicas: 1"), (("roles.actor.replicas=2",), "replicas: 1"),
    (("roles.reference.engine=megatron",), "engine: fsdp")])
def test_engines_that_need_all_ranks_of_a_split_rollout_are_refused(engines, more, wants):
    split = ("roles.actor.rollout=vllm", "layouts.rollout.tp=2", "groups.rollout=2")
    with pytest.raises(InvalidInput, match=f"the first of 2 ranks .* needs  {wants}") as error:
        planned("grpo.yaml", 4, *split, "groups.inference={reference: rollout}", *more)
    assert f"roles.reference.{wants}" in error.value.mistakes[0].hint


def chains(made) -> dict[str, list[str]]:
    """The nodes with a model that each group runs itself, sorted."""
    return {group.name: sorted(task.node for task in group.plan.chain(0) if task.type != "COMPUTE")
            for group in made.groups}


BESIDE = "groups={rollout: 1, inference: {reference: 2, judge: reference}}"


def test_frozen_roles_may_have_ranks_together(dag_of):
    dag = dag_of({"judged": seen("judge")}, ["judge"])
    group = planned(dag, 4, BESIDE)[1].groups[2]
    assert chains(planned(dag, 4, BESIDE)[1])["inference reference"] == ["judged", "reference"]
    assert (group.first, group.replicas, group.plan.ranks) == (2, 2, 1)
    assert {item.name.partition(":")[0] for item in group.plan.memory} == {"reference", "judge"}
    assert {move.producer for move in group.plan.dock} == {"reference", "judged"}
    for odd in ("{reference: {dp: 2}, judged: {dp: 1}}", "{reference: {dp: 2, rows: [2, 1]}, judged: {dp: 2}}"):
        with pytest.raises(InvalidInput, match="`layouts` lays them out differently"):
            planned(dag, 4, BESIDE, f"layouts={odd}")


@pytest.mark.parametrize(("named", "asked", "layout"), [
    ("reference", "{tp: 2}", Layout(1, tp=2)), ("judged", "{tp: 2}", Layout(1, tp=2)),
    ("reference", "{dp: 2}", Layout(2)), ("judged", "{dp: 2, rows: [2, 1]}", Layout(2, rows=(2, 1)))])
def test_all_nodes_of_such_ranks_are_laid_out_alike(dag_of, named, asked, layout):
    """A rank puts for the same rows what all of them write."""
    dag = dag_of({"judged": seen("judge")}, ["judge"])
    group = planned(dag, 4, BESIDE, f"layouts={{{named}: {asked}}}")[1].groups[2]
    assert {task.node: task.layout for task in group.plan.chain(0)} == {"reference": layout, "judged": layout}
    assert (group.replicas, group.plan.ranks) == (1, 2)


def test_a_role_whose_engine_cannot_be_split_as_another_is_not_on_its_ranks(dag_of, engines):
    dag = dag_of({"judged": seen("judge")}, ["judge"])
    with pytest.raises(InvalidInput, match="node `reference` wants pp 2 of `engine: fsdp`"):
        planned(dag, 4, BESIDE, "layouts.judged.pp=2", "roles.judge.engine=megatron")


def test_ranks_of_a_frozen_role_are_the_last_of_the_trainer_where_there_are_no_samplers(dag_of):
    _, made = planned("ppo.yaml", 4, "mode=sync", ALONE)
    _, same = planned("ppo.yaml", 4, "mode=sync", "layouts={reference: {first: 3}}")
    assert (made.tasks, made.models, made.notes) == (same.tasks, same.models, same.notes)
    assert made.task("reference").layout == Layout(1, 3)
    compares = dag_of({"judged": seen("judge", function="mixed")}, ["judge"])
    _, made = planned(compares, 6, "mode=sync", "groups.inference={reference: 1, judge: 2}")
    assert [made.task(node).layout for node in ("update", "reference", "judged")] == [
        Layout(3), Layout(1, 3), Layout(2, 4)]
    _, made = planned(compares, 6, "mode=sync", "groups.inference={reference: judge, judge: 2}")
    assert made.task("reference").layout == made.task("judged").layout == Layout(2, 4)


@pytest.mark.parametrize(("ranks", "overrides", "said"), [
    (1, (), "Start 2 ranks or more"), (4, ("layouts.rollout.dp=4",), "Start 5 ranks"),
    (4, ("layouts={reference: {first: 1}}",), "gives ranks 3 to 3 to roles of their own, and `layouts` has node "
                                              "`reference` begin at 1"),
    (4, ("layouts={critic: {first: 3}}",), "has node `critic` begin at 3"),
    (4, ("groups.inference={critic: 1}",), "it is trained"),
    (4, ("groups.inference={reference: judge}",), "which has none of its own"),
    (4, ("groups.inference={judge: 1}",), "which is not a role with a model in DAG `ppo`")])
def test_ranks_that_a_frozen_role_cannot_have_without_samplers_are_refused(ranks, overrides, said):
    with refused(said):
        planned("ppo.yaml", ranks, "mode=sync", ALONE, *overrides)


@pytest.mark.parametrize(("groups", "says", "remedy"), [
    ("{inference: {reference: judge}}", "role `reference` is to be on the ranks of `judge`, which has none of its own",
     "Ranks: rollout"),
    ("{inference: {reference: reference}}", "which has none of its own", "inference: {reference: 1}"),
    ("{inference: {reference: critic}}", "which has none of its own", "inference: {reference: 1}"),
    ("{inference: {reference: rollouts}}", "to be on the ranks of `rollouts`", "Did you mean `rollout`?"),
    ("{inference: {critic: 1}}", "role `critic` cannot have ranks that only infer: it is trained",
     "layouts: {values: {first: N}}")])
def test_a_role_is_beside_one_with_ranks_of_its_own(groups, says, remedy):
    with pytest.raises(InvalidInput) as error:
        planned("ppo.yaml", 4, "mode=async", f"groups={groups}")
    mistake = next(each for each in error.value.mistakes if says in each.what)
    assert remedy in mistake.hint


def test_a_fault_of_ranks_that_only_infer_needs_some():
    with refused("the run has no `groups.inference`"):
        planned("grpo.yaml", 5, "faults=[{kind: kill, group: inference, step: 1}]")


@pytest.mark.parametrize(("overrides", "said"), [
    (("layouts.reference.rows=[2]",), "take prompts as they get free"),
    (("layouts.reference={dp: 2, tp: 2}",), "either shard a model (dp) or split it"),
    (("layouts.reference.dp=2",), "Instead:  groups: {inference: {reference: 2}}"),
    (("roles.actor.lora={rank: 4}",), "under the adapters of `actor`, which the ranks that train have anyway"),
    (("faults=[{kind: kill, group: inference, rank: 0, step: 1}]",), "It has 4 to 4")])
def test_settings_that_such_ranks_cannot_have_are_refused(overrides, said):
    with refused(said):
        planned("grpo.yaml", 5, ALONE, *overrides)
