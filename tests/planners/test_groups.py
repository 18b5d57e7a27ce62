"""The DAG cut between ranks that sample and ranks that train."""

import pytest
import yaml
from harness import ROOT

from distflow.cli.plan_text import describe
from distflow.config.load import load
from distflow.errors import InvalidInput
from distflow.plan import ROLLOUT, TRAINER, Layout
from planners import plan


def planned(dag="grpo.yaml", ranks=4, *overrides):
    spec = load(dag, None, ["mode=async", *overrides], None)
    return spec, plan(spec, ranks)


def refusal(*arguments):
    with pytest.raises(InvalidInput) as error:
        planned(*arguments)
    return str(error.value)


def nodes(made, rank):
    return [task.node for task in made.chain(rank)]


def test_each_rank_has_the_chain_of_its_group():
    _, made = planned()
    assert [nodes(made, rank) for rank in range(4)] == 2 * [["reference", "advantage", "update"]] + \
        2 * [["rollout", "reward"]]
    assert [(made.group_of(rank)[0].name, made.group_of(rank)[1]) for rank in range(4)] == \
        [(TRAINER, 0), (TRAINER, 0), (ROLLOUT, 0), (ROLLOUT, 1)]
    trainer, rollout = (group.plan for group in made.groups)
    assert (trainer.ranks, rollout.ranks) == (2, 1)
    assert {task.layout.dp for task in trainer.tasks} == {2}


def test_only_what_the_trainer_reads_crosses_and_what_people_look_at():
    _, made = planned()
    crossing = {move.producer: move.columns for move in made.groups[0].plan.dock}
    assert crossing == {"rollout": ("responses", "rollout_logprobs", "versions", "completions"),
                        "reward": ("rewards", "keep", "reward_parts")}
    docked = {(move.producer, task.node) for task in made.tasks for move in task.transfers if move.kind == "dock"}
    assert docked == {("rollout", "reference"), ("rollout", "update"), ("reward", "advantage")}


def test_a_function_of_the_whole_batch_can_be_kept_in_the_trainer():
    _, made = planned("grpo.yaml", 4, "layouts.reward.dp=1")
    assert nodes(made, 0)[:2] == ["reference", "reward"], "what need not wait for a whole step comes first"
    assert nodes(made, 3) == ["rollout"]


@pytest.mark.parametrize(("share", "ranks", "training"), [("0.5", 2, 1), ("0.75", 4, 1), ("0.25", 8, 6), ("3", 8, 5)])
def test_ranks_or_a_share_of_them_sample(share, ranks, training):
    _, made = planned("grpo.yaml", ranks, f"groups.rollout={share}")
    assert made.groups[0].plan.ranks == training
    assert made.groups[1].replicas == ranks - training


def test_a_rank_needs_memory_for_what_its_group_has():
    _, made = planned()
    trainer, rollout = ({item.name for item in group.plan.memory} for group in made.groups)
    assert rollout == {"actor: rollout weights", "actor: rollout cache", "actor: validation cache"}
    assert {"actor: training state", "reference: weights"} <= trainer


@pytest.mark.parametrize(("overrides", "share"), [
    ((), 1), (("mode=semi_sync",), 1), (("validation=null",), 0)])
def test_a_rollout_that_validates_has_a_second_cache_while_it_samples(overrides, share):
    _, made = planned("grpo.yaml", 4, *overrides)
    trainer, rollout = ({item.name: item.bytes for item in group.plan.memory} for group in made.groups)
    sampling, validating = rollout["actor: rollout cache"], rollout.get("actor: validation cache", 0)
    assert validating == sampling * share
    assert "actor: validation cache" not in trainer


def test_the_docks_samples_take_memory_of_the_machine_and_not_of_a_rank():
    _, made = planned("grpo.yaml", 4, "dock_gib=2.5")
    item, snapshots = made.host_memory
    assert (item.name, item.bytes) == ("dock: samples", 5 * 2**29)
    assert not any("dock" in each.name for each in made.memory)
    state, = (each.bytes for each in made.groups[0].plan.memory if each.name == "actor: training state")
    assert (snapshots.name, snapshots.bytes) == ("actor: snapshots, each rank", 2 * state * 3 // 4)
    assert not plan(load("grpo.yaml", None, ["robust.snapshots=false"], None), 4).host_memory


FUSED = {"grpo": ["reference"], "ppo": ["reference", "values"], "gspo": ["old"], "distill": ["teacher"],
         "pf_ppo": [], "online_dpo": [], "dapo": []}
"""What waits for a filter, or for pairs, waits for the whole step."""


@pytest.mark.parametrize("dag", FUSED)
def test_what_looks_at_each_row_alone_need_not_wait_for_the_step(dag):
    _, made = planned(f"{dag}.yaml")
    trainer = made.groups[0].plan
    ahead = [task.node for task in trainer.early.chain(0)] if trainer.early else []
    assert ahead == FUSED[dag]
    assert nodes(made, 0)[: len(ahead)] == ahead
    later = [task for task in trainer.tasks if not task.arrives]
    assert {move.kind for task in later for move in task.transfers if move.producer in ahead} <= {"all_to_all"}, \
        "its rows are dealt as they come, and are where they are needed only after a transfer"
    assert planned(f"{dag}.yaml", 4, "roles.actor.generation.batch_rows=1")[1].groups[0].plan.early is None


@pytest.mark.parametrize("marked", [False, True])
def test_only_a_function_that_says_so_is_given_some_of_a_steps_rows(tmp_path, marked):
    """Another may compare a row with all others (`Role.total`)."""
    (tmp_path / f"spread_{marked}.py").write_text(
        f"from distflow import node\n\n@node(type='MODEL_INFERENCE', writes='spread', row_wise={marked})\n"
        "def spread(engine, responses): ...\n")
    dag = (ROOT / "dags/grpo.yaml").read_text().replace("function: logprobs, ", f"function: spread_{marked}:spread, ")
    (tmp_path / "mine.yaml").write_text(dag.replace("kl: 0.001", "kl: 0.0"))
    early = planned(tmp_path / "mine.yaml")[1].groups[0].plan.early
    assert [task.node for task in early.chain(0)] == ["reference"] if marked else early is None


def test_what_a_sampling_node_drops_no_model_is_shown(tmp_path):
    """Though it looks at prompts as they come: `converse` has written `keep` by then."""
    old = "  old: {role: actor, type: MODEL_INFERENCE, function: logprobs, dependencies: [rollout]}\n"
    dag = (ROOT / "dags/grpo_tools.yaml").read_text().replace("[advantage]", "[advantage, old]")
    (tmp_path / "tools.yaml").write_text(dag + old)
    early = planned(tmp_path / "tools.yaml")[1].groups[0].plan.early
    assert [task.node for task in early.chain(0)] == ["old"]
    assert brought(early) == {"rollout": ("responses", "keep")}


@pytest.mark.parametrize(("settings", "fused"), [((), ["reference"]), (("layouts.reward.dp=1",), [])])
def test_only_a_filter_of_the_trainer_has_to_be_waited_for(tmp_path, settings, fused):
    shown = yaml.safe_load((ROOT / "dags/grpo.yaml").read_text())
    shown["nodes"]["reference"]["dependencies"] = ["rollout", "reward"]
    (tmp_path / "behind.yaml").write_text(yaml.safe_dump(shown))
    early = planned(tmp_path / "behind.yaml", 4, *settings)[1].groups[0].plan.early
    assert ([task.node for task in early.chain(0)] if early else []) == fused


def test_a_model_that_drops_rows_itself_waits_for_the_step(tmp_path):
    (tmp_path / "unfit.py").write_text(
        "from distflow import node\n\n@node(type='MODEL_INFERENCE', writes='fits', row_wise=True)\n"
        "def fits(engine, responses: Ragged) -> Tensor: ...\n")
    shown = yaml.safe_load((ROOT / "dags/grpo.yaml").read_text())
    shown["nodes"]["sift"] = {"role": "reference", "type": "MODEL_INFERENCE", "function": "unfit:fits",
                              "dependencies": ["rollout"], "writes": {"fits": "keep"}}
    (tmp_path / "sifted.yaml").write_text(yaml.safe_dump(shown))
    early = planned(tmp_path / "sifted.yaml")[1].groups[0].plan.early
    assert [task.node for task in early.chain(0)] == ["reference"]
    with pytest.raises(InvalidInput, match="node `sift` drops rows, which ranks that only infer cannot"):
        planned(tmp_path / "sifted.yaml", 4, "groups.inference={reference: 1}")


def brought(made):
    return {task.node: task.writes for task in made.tasks if task.arrives and task.writes}


def test_a_model_waits_for_the_step_that_trains_it(tmp_path):
    trained = "  a_first: {role: reference, type: MODEL_TRAIN, function: supervised_update, dependencies: [rollout]}\n"
    dag = (ROOT / "dags/grpo.yaml").read_text().replace("{copy_of: actor}", "{copy_of: actor, trained: true}")
    (tmp_path / "trained.yaml").write_text(dag + trained)
    _, made = planned(tmp_path / "trained.yaml")
    assert nodes(made, 0)[:2] == ["a_first", "reference"]
    assert made.groups[0].plan.early is None


def test_a_model_that_samples_may_be_split(engines):
    """Ranks 0 and 1 train, 2 and 3 are one rollout, 4 and 5 another."""
    _, made = planned("grpo.yaml", 6, "groups.rollout=0.6", "roles.actor.rollout=vllm", "layouts.rollout.tp=2")
    group = made.groups[1]
    assert (made.groups[0].plan.ranks, group.first, group.replicas, group.plan.ranks) == (2, 2, 2, 2)
    assert [made.group_of(rank)[1] for rank in range(2, 6)] == [0, 0, 1, 1]
    assert group.plan.layout_of("actor", samples=True).tp == 2
    assert made.groups[0].plan.layout_of("actor", samples=False).tp == 1
    whole = planned("grpo.yaml", 6, "roles.actor.rollout=vllm")[1].groups[1].plan
    assert rollout_weights(whole) == 2 * rollout_weights(group.plan)


def rollout_weights(made):
    return next(item.bytes for item in made.memory if item.name == "actor: rollout weights")


def test_those_that_train_hold_a_split_model_as_rollouts_do(engines):
    """To sample with it too."""
    split = ("roles.actor.rollout=vllm", "layouts.rollout.tp=2", "groups.rollout=2")
    trainer = planned("grpo.yaml", 6, "mode=semi_sync", *split)[1].groups[0].plan
    assert trainer.layout_of("actor", samples=True) == Layout(2, tp=2)
    assert {(task.layout.dp, task.layout.width) for task in trainer.tasks} == {(4, 1)}, "of rows"


@pytest.mark.parametrize(("ranks", "settings"), [(1, ()), (3, ()), (4, ("roles.actor.rollout=vllm",
                                                                        "layouts.rollout.tp=2"))])
def test_those_that_train_may_do_all_the_sampling(ranks, settings, engines):
    spec, made = planned("grpo.yaml", ranks, "groups.rollout=0", "mode=semi_sync", *settings)
    trainer, rollout = made.groups
    assert (trainer.ranks, rollout.ranks, made.rollouts) == (range(ranks), range(ranks, ranks), 0)
    assert all(made.group_of(rank)[0].name == TRAINER for rank in range(ranks))
    assert spec.run.trainer_validates
    assert trainer.plan.early is None, "all samples are there when they begin to train"
    assert "these ranks sample with `actor` too, until a step is there" in "\n".join(describe(made, spec))
    sampling = made.task("rollout").layout
    assert (sampling.first, sampling.dp * sampling.width) == (0, ranks)


@pytest.mark.parametrize(("mode", "settings", "noted"), [
    ("semi_sync", ("groups.rollout=0", "transport=tcp"), "transport"),
    ("semi_sync", ("transport=tcp",), ""),
    ("sync", ("staleness=3",), "staleness"), ("async", (), ""),
    ("sync", ("groups={rollout: 1, inference: {reference: 1}}",), "groups.rollout"),
    ("sync", ("groups.inference={reference: rollout}",), "groups.inference.reference")])
def test_plan_notes_a_setting_that_says_nothing(mode, settings, noted):
    _, made = planned("grpo.yaml", 2, f"mode={mode}", *settings)
    assert [note for note in made.notes if "changes nothing" in note and not noted] == []
    assert not noted or any(f"`{noted}` changes nothing" in note for note in made.notes)


def test_those_that_train_need_what_they_sample_with(tmp_path):
    """A teacher that only samples is nowhere but on ranks that sample."""
    shown = yaml.safe_load((ROOT / "dags/grpo.yaml").read_text())
    shown["roles"]["teacher"] = {}
    shown["nodes"]["rollout"]["role"] = "teacher"
    (tmp_path / "taught.yaml").write_text(yaml.safe_dump(shown))
    assert "role `teacher` of node `rollout` only samples" in refusal(tmp_path / "taught.yaml", 4, "mode=semi_sync")


def test_old_samples_are_kept_where_the_dag_corrects_for_them(tmp_path):
    shown = yaml.safe_load((ROOT / "dags/grpo.yaml").read_text())
    shown["nodes"] |= {
        "old": {"role": "actor", "type": "MODEL_INFERENCE", "function": "logprobs", "dependencies": ["rollout"]},
        "weigh": {"role": "actor", "type": "COMPUTE", "function": "truncated_importance", "dependencies": ["old"]}}
    shown["nodes"]["update"]["dependencies"].append("weigh")
    (tmp_path / "weighed.yaml").write_text(yaml.safe_dump(shown))
    _, made = planned(tmp_path / "weighed.yaml", 4, "on_stale=keep")
    assert not any(task.layout.early for task in made.groups[0].plan.tasks), "nobody knows which prompts come first"


REFUSED = {
    "old samples as if they were new": (("grpo.yaml", 4, "on_stale=keep"), "has no node that corrects for old weights"),
    "ages that nobody sees": (("online_dpo.yaml", 4, "on_stale=drop"), "reads `versions`"),
    "neither ranks nor a share": (("grpo.yaml", 4, "groups.rollout=1.5"), "neither a number of ranks"),
    "nobody samples": (("sft.yaml", 4), "no node of DAG `sft` does"),
    "nobody trains": (("evaluate.yaml", 4), "have ranks that train|ranks that train while others sample"),
    "one rank": (("grpo.yaml", 1), "here is 1.\nStart 2 ranks (--ranks 2), or let one rank do both (partial rollouts): "
                 " mode: semi_sync  with  groups: {rollout: 0}  , or  mode: sync"),
    "ranks of a role and none beside them": (("grpo.yaml", 1, "mode=semi_sync", "groups={rollout: 0, inference: "
                                              "{reference: 1}}"), "needs at least 1 rank beside the 1 of"),
    "a fault of nobody": (("grpo.yaml", 1, "mode=semi_sync", "groups.rollout=0",
                           "faults=[{kind: kill, group: rollout, step: 1}]"), "group `rollout` has no rank"),
    "one rank that would do both": (("grpo.yaml", 1, "mode=semi_sync"), "or  groups: {rollout: 0}, or  mode: sync"),
    "nobody samples where others train": (("grpo.yaml", 2, "groups.rollout=0"), "only in mode semi_sync"),
    "too few to share a model": (("grpo.yaml", 3, "roles.actor.rollout=vllm", "mode=semi_sync", "groups.rollout=0",
                                  "layouts.rollout.tp=2"), "Start a multiple of 2 ranks, 2 or more"),
    "nobody left to train": (("grpo.yaml", 2, "groups.rollout=2"), "leaves none to train"),
    "sampling that waits for the trainer": (("solver_reviser.yaml", 4, "layouts={ask: {dp: 2}}"),
                                            "which runs in the trainer"),
    "hybrid ranks that no model divides": (("grpo.yaml", 5, "roles.actor.rollout=vllm", "mode=semi_sync",
                                            "groups.rollout=2", "layouts.rollout.tp=2"),
                                           "Start a multiple of 2 ranks, 4 or more"),
    "a rollout too many for those that train": (("grpo.yaml", 8, "roles.actor.rollout=vllm", "mode=semi_sync",
                                                 "groups.rollout=3", "layouts.rollout.tp=2"),
                                                "Instead:  groups: {rollout: 2}"),
    "ranks that no model divides": (("grpo.yaml", 5, "roles.actor.rollout=vllm", "layouts.rollout.tp=2",
                                     "groups.rollout=3"), "Instead:  groups: {rollout: 2}"),
    "a share for each rollout": (("grpo.yaml", 6, "roles.actor.rollout=vllm", "groups.rollout=4",
                                  "layouts.rollout={tp: 2, dp: 2}"), "Leave `dp` out of it"),
    "a split model without ranks": (("grpo.yaml", 2, "roles.actor.rollout=vllm", "layouts.rollout.tp=2"),
                                    "Start at least 3 ranks"),
    "an engine that cannot be split": (("grpo.yaml", 4, "layouts.rollout.tp=2"), "`rollout: vllm` has tp"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_is_refused_with_what_to_write(case, engines):
    arguments, said = REFUSED[case]
    text = refusal(*arguments)
    assert any(part in text for part in said.split("|"))


@pytest.mark.parametrize("kind", ["MODEL_INFERENCE", "MODEL_TRAIN"])
def test_a_node_that_needs_weights_is_not_moved_to_rollouts(tmp_path, kind):
    """Of any head, and read by one that samples: ranks that only sample have no engine to infer or train with."""
    (tmp_path / f"asking_{kind}.py").write_text(
        f"from distflow import node\n\n@node(type='{kind}', head=None, writes='{{role}}_prompts')\n"
        "def asked(engine, completions: list[str], *, template: str) -> Ragged: ...\n")
    shown = yaml.safe_load((ROOT / "dags/solver_reviser.yaml").read_text())
    assert "ask" in nodes(planned("solver_reviser.yaml")[1], 3)
    shown["nodes"]["ask"] |= {"type": kind, "function": f"asking_{kind}:asked"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(shown))
    assert "samples, but needs node `ask`, which runs in the trainer" in refusal(tmp_path / "mine.yaml")


@pytest.mark.parametrize(("ranks", "settings", "said"), [
    (8, ("mode=async", "groups.rollout=4"), "4 ranks that sample could replace a whole parallel group that trains; 4 "),
    (9, ("mode=semi_sync", "groups.rollout=1", "layouts.update.tp=2"), "4 ranks that sample could"),
    (4, ("mode=sync",), "")])
def test_a_plan_says_how_many_should_sample_to_replace_those_that_train(ranks, settings, said):
    spec, made = planned("grpo.yaml", ranks, *settings)
    text = "\n".join(describe(made, spec))
    assert said in text
    assert ("with --store" in text) == bool(said)
