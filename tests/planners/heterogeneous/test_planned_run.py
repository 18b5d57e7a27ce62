"""A placement on mixed hardware becomes a run, if ranks can stand so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.heterogeneous import that_run
from distflow.config.load import load
from distflow.config.spec import Spec
from distflow.config.yaml_source import dump
from distflow.errors import InvalidInput
from distflow.plan import SHARES_OUTERMOST, STAGES_OUTERMOST, Layout, Plan
from planners import plan
from planners.heterogeneous.layouts import CostedProblem, cut_of
from planners.heterogeneous.planned_run import machines_in_order, planned_run, ranks_of
from planners.heterogeneous.problem import Placement, Problem, Replicas, Strategy
from planners.heterogeneous.runnable import (
    ByRanks,
    as_ranks_run,
    refusal,
    run_freedom,
    search_runnable,
)
from planners.heterogeneous.search import groupings, search
from planners.heterogeneous.workload import problem_of
from planners.planner import roles_on_rollouts

CLUSTER = {
    "name": "mixed", "links": {"zone": {"gb_s": 10, "latency_us": 20}},
    "devices": {"new": {"tflops": {"float32": 60}, "memory_gib": 80, "memory_gb_s": 3000},
                "old": {"tflops": {"float32": 20}, "memory_gib": 40, "memory_gb_s": 1000}},
    "machines": {"quick": {"device": "new", "devices": 2, "inside": {"gb_s": 50}},
                 "slow": {"device": "old", "devices": 2, "inside": {"gb_s": 50}}}}
MODEL = ["roles.actor.model={architecture: qwen3, layers: 4, hidden: 512, heads: 8, kv_heads: 4}", "data.batch=48"]

CANNOT = "the ranks of a machine, of a share or of a group would not follow each other"


@pytest.fixture
def spec_of(tmp_path):
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    return lambda *more, dag="grpo": load(dag, None, [*MODEL, *more], str(tmp_path / "cluster.yaml"))


def limited_to_runs(spec: Spec, *only: tuple[tuple[int, ...], ...]) -> tuple[CostedProblem, CostedProblem]:
    """Return all plans of a run's problem, and those in the groups and splits that runs have, or in `only` some groups.
    """
    problem = problem_of(spec)
    freedom = run_freedom(spec, problem)
    freedom = replace(freedom, groupings=only or freedom.groupings)
    return CostedProblem(problem), CostedProblem(replace(problem, freedom=freedom))


def runnable(spec: Spec, *only: tuple[tuple[int, ...], ...]) -> Placement:
    *_, last = search_runnable(spec, *limited_to_runs(spec, *only), budget=400)
    assert last.placement
    return last.placement


@dataclass
class Said:
    """Placement of a problem that a test changes."""

    problem: Problem
    placement: Placement


@pytest.fixture
def obey(spec_of):
    """`obey(*settings, change=…, only=…)`: the chain by the best runnable plan, of `only` some groups, which `change`
    may spoil."""
    def run(*more: str, change: Callable[[Said], Any] = lambda said: None, dag: str = "grpo",
            only: tuple[tuple[tuple[int, ...], ...], ...] = ()) -> Plan:
        spec = spec_of(*more, dag=dag)
        change(said := Said(problem_of(spec), runnable(spec, *only)))
        if why := refusal(spec, said.problem, said.placement):
            raise InvalidInput(why)
        return plan(own := planned_run(spec, said.problem, said.placement), own.run.ranks)

    return run


def layouts(found: Plan) -> dict[str, Layout]:
    return {task.node: task.layout for task in found.tasks}


def place(said: Said, nodes: str, *shares: tuple[int, int, str], tp: int = 1, pp: int = 1,
          layers: tuple[int, ...] = ()) -> None:
    """Give tasks such shares: how many, the rows of each, and the machine of each of its stages."""
    names, made = [each.name for each in said.problem.hardware.device_groups], [*said.placement.layouts]
    for number, task in enumerate(said.problem.tasks):
        if task.name in nodes.split():
            strategy = made[number].strategy._replace(dp=sum(count for count, *_ in shares), tp=tp, pp=pp)
            kinds = tuple(Replicas(tuple(map(names.index, stages.split())), count) for count, _, stages in shares)
            made[number] = made[number]._replace(strategy=strategy, arrangement=kinds, layers=layers or (task.layers,),
                                                 rows=tuple(rows for _, rows, _ in shares))
    said.placement = replace(said.placement, layouts=tuple(made))


def group(said: Said, **ranks: list[int]) -> None:
    """Give the tasks that a key names (`_` between them) as many devices together as there are such ranks."""
    names = [task.name for task in said.problem.tasks]
    groups = sorted((tuple(sorted(map(names.index, tasks.split("_")))), said.problem.hardware.subset(each))
                    for tasks, each in ranks.items())
    said.placement = replace(said.placement, grouping=tuple(tasks for tasks, _ in groups),
                             subsets=tuple(subset for _, subset in groups))


def together(said: Said, ranks: list[int]) -> str:
    """Give all tasks the same ranks; return their names."""
    names = [task.name for task in said.problem.tasks]
    group(said, **{"_".join(names): ranks})
    return " ".join(names)


def test_shares_have_rows_by_the_speed_of_their_devices(obey):
    found = layouts(obey())
    for node in ("rollout", "reference", "update"):
        rows = found[node].rows
        assert found[node].dp == len(rows) == 4, node
        assert rows[0] == rows[1] > 2 * rows[2] == 2 * rows[3] > 0, node
    assert found["reward"] == found["advantage"] == found["rollout"], "what runs no model stays where the rows are"


@pytest.mark.parametrize("mode", ["async", "semi_sync"])
def test_groups_are_those_that_train_first_and_those_that_sample(obey, mode):
    found = obey(f"mode={mode}", only=(((0,), (1, 2)),))
    trainer, rollout = found.groups
    assert (trainer.ranks.start, rollout.ranks.stop) == (0, 4)
    assert [task.node for task in rollout.plan.chain(0) if task.type != "COMPUTE"] == ["rollout"]
    rows = layouts(trainer.plan)["update"].rows
    assert len(rows) in (0, len(trainer.ranks))


def test_a_part_of_a_machine_that_trains_is_its_first_one(obey, tmp_path):
    device = {"tflops": {"float32": 60}, "memory_gib": 80, "memory_gb_s": 5}  # which trains slowly
    machines = {"one": {"device": "new", "devices": 4, "inside": {"gb_s": 50}}}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER | {"devices": {"new": device}, "machines": machines}))
    trainer, rollout = obey("mode=async").groups
    assert (trainer.ranks, rollout.ranks) == (range(3), range(3, 4))


def test_models_are_split_as_the_plan_says(obey):
    found = layouts(obey(change=lambda said: place(said, "reference update", (1, 300, "quick"), (1, 84, "slow"), tp=2)))
    assert found["update"] == found["reference"] == Layout(2, tp=2, rows=(25, 7))
    assert found["rollout"].tp == 1


def test_micro_batches_are_as_large_as_the_plan_says(spec_of, tmp_path):
    """A pipeline is filled by more of them; the setting is in tokens, at the longest row."""
    spec = spec_of()
    problem, found = problem_of(spec), runnable(spec)
    update, longest = problem.tasks[-1], problem.tasks[-1].tokens
    *others, layout = found.layouts
    for rows, tokens in ((2, 2 * longest), (layout.strategy.micro, update.micro_tokens)):
        small = layout._replace(strategy=layout.strategy._replace(micro=rows))
        own = planned_run(spec, problem, replace(found, layouts=(*others, small)))
        assert own.run.roles["actor"].micro_batch_tokens == tokens


def two_by_two(said: Said) -> None:
    """Ranks 0 and 1 train, 2 and 3 sample, with one model."""
    group(said, reference_update=[0, 1], rollout=[2, 3])
    place(said, "reference update", (2, 192, "quick"))
    place(said, "rollout", (1, 384, "slow"), tp=2)


@pytest.fixture
def vllm(engines):
    """It need not be there to be planned for."""
    return "roles.actor.rollout=vllm"


def test_a_model_that_samples_apart_is_split_as_the_plan_says(obey, vllm):
    rollout = obey("mode=async", vllm, change=two_by_two).groups[1]
    assert (rollout.replicas, rollout.plan.ranks) == (1, 2)
    assert rollout.plan.layout_of("actor", samples=True) == Layout(1, tp=2)
    trainer = obey("mode=semi_sync", vllm, change=two_by_two).groups[0].plan
    assert trainer.layout_of("actor", samples=True) == Layout(1, tp=2)


@pytest.mark.parametrize("node", ["reference", "update"])
def test_a_device_that_the_plan_leaves_idle_in_a_task_has_no_rows_of_it(obey, node):
    """It holds its shard of the model, and takes part where all ranks gather a layer."""
    assert layouts(obey(change=lambda said: place(said, node, (2, 192, "quick"))))[node].rows == (1, 1, 0, 0)


def three_groups(said: Said) -> None:
    """The reference on `quick`, a rank each that trains and that samples on `slow`."""
    group(said, rollout=[3], reference=[0, 1], update=[2])
    place(said, "rollout update", (1, 384, "slow"))
    place(said, "reference", (2, 192, "quick"))


def test_a_model_that_is_only_read_has_the_ranks_of_its_group(obey):
    made = obey("mode=async", change=three_groups)
    assert [(group.name, group.ranks) for group in made.groups] == [
        ("trainer", range(1)), ("rollout", range(1, 2)), ("inference reference", range(2, 4))]
    assert (made.groups[2].replicas, layouts(made.groups[2].plan)["reference"].dp) == (1, 2), "sharded, as it is costed"


def unequal(said: Said) -> None:
    three_groups(said)
    place(said, "reference", (1, 300, "quick"), (1, 84, "quick"))


def test_ranks_that_only_infer_may_have_unequal_shares(obey):
    *_, reference = obey("mode=async", change=unequal).groups
    assert reference.plan.task("reference").layout == reference.plan.source == Layout(2, rows=(25, 7))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_best_plan_that_runs_may_train_the_critic_apart(obey, spec_of, mode):
    tasks = problem_of(spec_of(dag="ppo")).tasks
    critic = tuple(number for number, task in enumerate(tasks) if task.role == "critic")
    others = tuple(number for number in range(len(tasks)) if number not in critic)
    made = obey(f"mode={mode}", dag="ppo", only=((others, critic) if mode == "sync" else (
        others[:1], others[1:], critic),))
    trainer = made.groups[0].plan if made.groups else made
    found = layouts(trainer)
    assert found["values"].first == found["critic"].first == found["update"].last + 1
    assert found["critic"].last == trainer.ranks - 1


@pytest.mark.parametrize(("mode", "groups", "first"), [
    ("async", [["rollout", "update"], ["reference", "values", "critic"]], 2),
    ("sync", [["rollout", "update"], ["reference", "values", "critic"]], 2),
    ("async", [["update"], ["rollout"], ["reference", "values", "critic"]], 2)])
def test_frozen_roles_may_be_on_the_ranks_that_train_another(obey, mode, groups, first):
    def beside(said: Said) -> None:
        parts = [("quick", [0, 1]), ("slow", [2, 3])] if len(groups) == 2 else \
            [("quick", [0, 1]), ("slow", [3]), ("slow", [2])]
        group(said, **{"_".join(tasks): ranks for tasks, (_, ranks) in zip(groups, parts)})
        for tasks, (kind, ranks) in zip(groups, parts):
            place(said, " ".join(tasks), (len(ranks), 384 // len(ranks), kind))

    made = obey(f"mode={mode}", dag="ppo", change=beside)
    assert [group.name for group in made.groups] == ["trainer", "rollout"] * (len(groups) == 3)
    found = layouts(made.groups[0].plan if made.groups else made)
    assert {(found[node].first, found[node].dp) for node in groups[-1]} == {(first, 4 - first - len(groups) // 3)}
    assert found["update"].first == 0


def test_the_best_plan_that_runs_may_have_ranks_that_sample_compute_a_frozen_role(obey, spec_of):
    assert roles_on_rollouts(spec_of("mode=async")) == ["reference"]
    assert roles_on_rollouts(spec_of("mode=semi_sync")) == roles_on_rollouts(spec_of("mode=sync")) == []
    only = (((0, 1), (2,)),)
    made = obey("mode=async", only=only)
    assert [[task.node for task in group.plan.chain(0) if task.node in ("rollout", "reference", "update")]
            for group in made.groups] == [["update"], ["rollout", "reference"]]
    assert made.groups[1].plan.layout_of("reference", samples=False) == Layout(1)

    with pytest.raises(InvalidInput, match=CANNOT):
        obey("mode=async", change=lambda said: place(said, "reference", (1, 384, "quick"), tp=2), only=only)


def test_what_a_search_finds_counts_if_ranks_can_run_it(spec_of):
    spec = spec_of("mode=semi_sync")
    costed = CostedProblem(problem_of(spec))
    answers = [each.placement for each in search(costed.problem, 0, 2000, costed=costed) if each.placement]
    able = [each for each in answers if not refusal(spec, costed.problem, each)]
    assert 0 < len(able) < len(answers)
    slower, unable = replace(able[-1], seconds=2 * able[-1].seconds), [each for each in answers if each not in able]
    assert ByRanks(spec, costed).fastest([*unable, slower, able[-1]]) == able[-1]
    assert ByRanks(spec, costed).fastest(unable) is None


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_search_among_the_groups_and_splits_that_runs_have_finds_what_ranks_can_run(spec_of, mode):
    """A free search's plans are in groups that no run has, or sample with tp, which `rollout: hf` has not."""
    spec = spec_of(f"mode={mode}", dag="ppo")
    problem = problem_of(spec)
    freedom = run_freedom(spec, problem)
    assert [{tp for tp, _ in cuts} for cuts in freedom.cuts] == [{1}, *[{1, 2, 4}] * 4]
    assert 1 < len(freedom.groupings) < len(groupings(problem))
    answers = {each.placement for each in search(replace(problem, freedom=freedom), 0, 3000) if each.placement}
    why = [refusal(spec, problem, each) for each in answers]
    assert None in why
    costed = CostedProblem(problem)
    assert all(as_ranks_run(spec, costed, each).seconds == each.seconds for each in answers), "as it is predicted"
    assert all(not each or "follow each other" in each.what for each in why), "where devices stand is left to check"
    for group, layouts in ((group, each.layouts) for each in answers for group in each.grouping):
        splits = {(problem.tasks[task].memory_item, cut_of(layouts[task])) for task in group}
        assert len(splits) == len({memory_item for memory_item, _ in splits}), "tasks of an engine are split alike"


def test_runnable_says_why_the_launcher_refuses_every_plan(spec_of):
    spec = spec_of("mode=async", "roles.actor.replicas=5", dag="ppo")
    with pytest.raises(InvalidInput, match="of them because role `actor` wants 5 replicas, which do not divide"):
        list(search_runnable(spec, *limited_to_runs(spec)))
    assert that_run(spec, 300) is None


def many_kinds(tmp_path: Path) -> Spec:
    """Return a run of 7 replicas on 42 devices: most sizes of its groups are refused, few are not."""
    devices = {name: {"memory_gb_s": speed, "memory_gib": 80, "tflops": {"float32": tflops}}
               for name, speed, tflops in (("d0", 1000, 10), ("d1", 3000, 100), ("d2", 300, 60))}
    devices["d0"]["memory_gib"] = 40
    machines = {f"m{kind}": {"count": count, "device": f"d{kind}", "devices": each, "inside": {"gb_s": 50}}
                for kind, (count, each) in enumerate(((3, 2), (1, 6), (5, 6)))}
    cluster = CLUSTER | {"devices": devices, "machines": machines}
    (tmp_path / "many.yaml").write_text(yaml.safe_dump(cluster))
    return load("grpo_tools", None, [*MODEL, "mode=async", "roles.actor.replicas=7"], str(tmp_path / "many.yaml"))


def test_sizes_that_the_launcher_refuses_do_not_hide_other_sizes(tmp_path):
    spec = many_kinds(tmp_path)
    assert not refusal(spec, problem_of(spec), runnable(spec))


@pytest.fixture
def found_alone(spec_of):
    """`found_alone(*update)`: costs; all tasks in one group of all machines, of which they use `quick`, and `update`
    what is given; and what ranks can run of it, if nothing else is considered."""
    def find(*update: Replicas, more: tuple[str, ...] = ()) -> tuple[CostedProblem, Placement, Placement | None]:
        spec = spec_of(*more)
        costed, two = CostedProblem(problem_of(spec)), (Replicas((0,), 2),)
        layouts = [costed.costs.layout(task, Strategy(sum(kind.count for kind in kinds), micro=4), kinds)
                   for task, kinds in enumerate((two, two, update or two))]
        found = costed.placed(((0, 1, 2),), ((2, 2),), layouts)
        return costed, found, ByRanks(spec, costed).fastest([found])

    return find


def test_machines_that_no_task_uses_are_left_out(found_alone):
    _, found, made = found_alone()
    assert made == replace(found, subsets=((2, 0),))


SOME = Replicas((0,), 2), Replicas((1,), 1)


def test_devices_without_rows_of_an_engine_cost_it_nothing(found_alone):
    """The machine is in use by another task, so that it has ranks, but no part of the model."""
    _, found, made = found_alone(*SOME)
    assert made.subsets == ((2, 2),)
    assert made.layouts[1:] == found.layouts[1:]
    assert made.seconds == pytest.approx(found.seconds, rel=0.01)


def ppo_on_some(spec: Spec, values: tuple[Replicas, ...]) -> tuple[CostedProblem, Placement]:
    """All tasks of PPO in one group of all machines; `values` is where it is given, and all others on `quick`."""
    costed, quick = CostedProblem(problem_of(spec)), (Replicas((0,), 2),)
    layouts = [costed.costs.layout(task, Strategy(sum(kind.count for kind in kinds), micro=4), kinds)
               for task, each in enumerate(costed.problem.tasks)
               for kinds in [values if each.name == "values" else quick]]
    return costed, costed.placed((tuple(range(len(layouts))),), ((2, 2),), layouts)


def test_tasks_of_one_engine_have_it_where_any_of_them_has_rows(spec_of):
    """Among these ranks a task's weights are divided, whoever has its rows."""
    spec = spec_of(dag="ppo")
    costed, found = ppo_on_some(spec, SOME)
    names = [task.name for task in costed.problem.tasks]
    critic = names.index("critic")
    made = as_ranks_run(spec, costed, found)
    assert [task for task in range(1, len(names)) if made.layouts[task] != found.layouts[task]] == [critic]
    whole = costed.costs.layout(critic, Strategy(3, micro=4), SOME, (*found.layouts[critic].rows, 0))
    assert made.layouts[critic].seconds == whole.seconds > found.layouts[critic].seconds


def test_engines_that_want_all_ranks_cost_what_shares_without_rows_do(found_alone, engines):
    """Megatron sums gradients over all ranks of its group."""
    costed, found, made = found_alone(*SOME, more=("roles.actor.engine=megatron",))
    assert made.subsets == ((2, 2),)
    assert [layout.rows for layout in made.layouts] == [layout.rows for layout in found.layouts]
    assert made.layouts[1].strategy == found.layouts[1].strategy
    for task, idle in ((0, 2), (2, 1)):
        used = found.layouts[task]
        whole = costed.costs.layout(task, Strategy(4, micro=4), (*used.arrangement, Replicas((1,), idle)),
                                    (*used.rows, 0))
        assert made.layouts[task] == used._replace(seconds=whole.seconds, swap=whole.swap), task
    assert made.layouts[2].seconds > found.layouts[2].seconds


def test_frozen_models_behind_rollouts_are_whole_and_on_the_first_device_of_each(spec_of, vllm):
    """It computes what its rollout samples, and has less room for the cache."""
    spec = spec_of(vllm, "mode=async")
    costed, two = CostedProblem(problem_of(spec)), (Replicas((0,), 2),)
    halves, slow = (Replicas((0,), 1),), (Replicas((1,), 2),)
    layouts = [costed.costs.layout(task, Strategy(sum(kind.count for kind in kinds), tp, micro=4), kinds)
               for task, (tp, kinds) in enumerate(((2, halves), (1, two), (1, slow)))]
    found = costed.placed(((0, 1), (2,)), ((2, 0), (0, 2)), layouts)
    made = as_ranks_run(spec, costed, found)
    tasks = tuple(replace(task, engine="megatron") for task in costed.problem.tasks)  # which divides no frozen weights
    whole = CostedProblem(replace(costed.problem, tasks=tasks)).costs.layout(1, Strategy(1, micro=4), halves, (384,))
    assert made.layouts[1].seconds == whole.seconds != found.layouts[1].seconds, "one of two devices computes all rows"
    assert made.layouts[1].swap == 0.0 < found.layouts[1].swap, "it stays where it is"
    small = tuple(replace(each, memory=each.memory / 2000) for each in costed.problem.hardware.device_groups)
    tight = CostedProblem(replace(costed.problem, hardware=replace(costed.problem.hardware, device_groups=small)))
    assert tight.costs.layout(0, *found.layouts[0][:2]) is not None
    assert as_ranks_run(spec, tight, found) is None, "there is no room for both"


def test_a_machine_may_be_divided_where_groups_meet(obey, vllm, tmp_path):
    """Whichever of alike devices the plan names: what trains, samples and infers takes them in the order of ranks."""
    machines = {"quick": {**CLUSTER["machines"]["quick"], "count": 8}}
    devices = {"new": CLUSTER["devices"]["new"]}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER | {"machines": machines, "devices": devices}))

    def divided(said: Said, count: int = 14, tp: int = 1) -> None:
        group(said, rollout=[*range(14)], reference=[14], update=[15])
        place(said, "rollout", (count, 384 // count, "quick"), tp=tp)
        place(said, "reference update", (1, 384, "quick"))

    made = obey("mode=async", change=divided)
    assert [group.ranks for group in made.groups] == [range(1), range(1, 15), range(15, 16)]
    with pytest.raises(InvalidInput, match=CANNOT):
        obey("mode=async", vllm, change=partial(divided, count=7, tp=2))


def test_a_plan_whose_tasks_all_take_turns_runs_in_mode_sync(obey):
    made = obey("mode=async", change=lambda said: place(said, together(said, [0, 1, 2, 3]), (2, 96, "quick"),
                                                        (2, 96, "slow")))
    assert (made.mode, made.groups) == ("sync", ())


def with_training(said: Said, **ranks: list[int]) -> None:
    three_groups(said)
    group(said, **ranks)
    place(said, "rollout update", (2, 192, "slow"))


def test_a_group_may_sample_and_train_beside_one_that_infers(obey):
    """In mode sync, whatever the plan was made for."""
    made = obey("mode=async", change=partial(with_training, rollout_update=[2, 3], reference=[0, 1]))
    assert made.mode == "sync"
    assert layouts(made)["reference"].active_ranks == [2, 3]
    assert layouts(made)["update"].active_ranks == [0, 1]


def test_what_a_plan_says_is_a_run_file(spec_of, tmp_path):
    spec = spec_of()
    own = planned_run(spec, problem_of(spec), runnable(spec))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(own.resolved()["run"]))
    again = load("grpo", str(tmp_path / "run.yaml"))
    assert again.run.ranks == 4
    assert plan(again, 4).digest == plan(own, 4).digest


def apart(said: Said) -> None:
    group(said, rollout=[0, 1], reference_update=[2, 3])


def left_out(said: Said) -> None:
    together(said, [0, 1, 3])


def mixed(said: Said) -> None:
    with_training(said, rollout_reference=[2, 3], update=[0, 1])


def staged(said: Said) -> None:
    place(said, "update", (2, 192, "slow quick"), pp=2, layers=(2, 2))


def by_stages(said: Said) -> None:
    place(said, "reference update", (1, 192, "quick quick"), (1, 192, "slow slow"), pp=2, layers=(2, 2))


def torn(said: Said) -> None:
    two_by_two(said)
    group(said, reference_update=[1, 2], rollout=[0, 3])
    place(said, "reference update", (1, 192, "quick"), (1, 192, "slow"))


@pytest.mark.parametrize(("change", "says", "mode"), [
    (apart, CANNOT, "sync"), (left_out, CANNOT, "sync"), (staged, CANNOT, "sync"), (torn, CANNOT, "async"),
    (mixed, CANNOT, "semi_sync"),
    (by_stages, "node `reference` wants pp 2 of `engine: fsdp`, which it cannot do", "sync"),
])
def test_what_ranks_cannot_do_is_refused(obey, change, says, mode, vllm):
    with pytest.raises(InvalidInput, match=says):
        obey(f"mode={mode}", *[vllm] * (change is torn), change=change)


@pytest.mark.parametrize(("shares", "order", "layers"), [
    ([(2, 192, "quick slow")], STAGES_OUTERMOST, (3, 1)),
    ([(1, 300, "quick quick"), (1, 84, "slow slow")], SHARES_OUTERMOST, (2, 2))])
def test_a_pipeline_may_have_a_stage_or_a_share_on_each_machine(obey, engines, shares, order, layers):
    found = layouts(obey("roles.actor.engine=megatron", "roles.reference={engine: megatron}", change=lambda said: place(
        said, "reference update", *shares, pp=2, layers=layers)))
    assert (found["update"].pp, found["update"].order) == (2, order)
    assert found["update"].layers == found["reference"].layers == (() if layers == (2, 2) else layers)
    assert found["advantage"].rows == found["rollout"].rows


def order_of(spec: Spec, change: Callable[[Said], Any]) -> str:
    change(said := Said(problem_of(spec), runnable(spec)))
    return machines_in_order(said.problem, said.placement)


def test_machines_that_train_come_first_wherever_the_cluster_file_has_them(obey, spec_of):
    """Ranks 0 and 1 are those of `slow`, the second machine."""
    def on_the_slow(said: Said) -> None:
        apart(said)
        place(said, "reference update", (2, 192, "slow"))
        place(said, "rollout", (2, 192, "quick"))

    trainer, rollout = obey("mode=async", change=on_the_slow).groups
    assert (trainer.ranks, rollout.ranks) == (range(2), range(2, 4))
    assert order_of(spec_of("mode=async"), on_the_slow) == "1 slow, 1 quick"


def test_the_order_of_machines_names_one_that_stands_between_others(spec_of, tmp_path):
    """Two of eight alike machines train; the rest follows in the order of the cluster file."""
    machines = {"slow": CLUSTER["machines"]["slow"], "quick": {**CLUSTER["machines"]["quick"], "count": 8}}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER | {"machines": machines}, sort_keys=False))

    def between(said: Said) -> None:
        group(said, reference_update=[2, 3, 4, 5], rollout=[0, 1, *range(6, 18)])

    assert order_of(spec_of("mode=async"), between) == "2 quick, 1 slow, 6 quick"


def test_nodes_of_one_engine_split_it_alike(obey):
    with pytest.raises(InvalidInput, match="the same engine of role `critic`, but split its model differently"):
        obey(dag="ppo", change=lambda said: place(said, "critic", (1, 192, "quick"), (1, 192, "slow"), tp=2))


def test_machines_that_a_plan_leaves_out_have_no_ranks(obey):
    found = obey(change=lambda said: place(said, together(said, [2, 3]), (2, 192, "slow")))
    assert found.ranks == 2
    assert {layout.dp for layout in layouts(found).values()} == {2}


def test_the_best_plan_leaves_out_what_is_too_far(spec_of, tmp_path):
    said = yaml.safe_load(yaml.safe_dump(CLUSTER))
    said["links"]["world"] = {"gb_s": 1e-4, "latency_us": 1e6}
    said["machines"]["slow"]["zone"], said["zones"] = "far", {"far": "overseas"}
    (tmp_path / "cluster.yaml").write_text(dump(said))
    spec = spec_of()
    found = runnable(spec)
    assert found.subsets == ((2, 0),)
    assert ranks_of(problem_of(spec), found.subsets) == [[0, 1]]


def test_a_hand_written_run_may_say_rows_too():
    found = plan(load("grpo", None, ["layouts.update.rows=[30, 10]"]), 2)
    assert layouts(found)["update"] == Layout(2, rows=(3, 1))
    assert [move.kind for task in found.tasks for move in task.transfers if task.node == "update"][0] == "all_to_all"
    assert layouts(plan(load("grpo", None, ["layouts.update.rows=[7, 7]"]), 2))["update"] == Layout(2)
    with pytest.raises(InvalidInput, match="says the rows of 3 shares, and 2 ranks make 2") as error:
        plan(load("grpo", None, ["layouts.update.rows=[3, 1, 1]"]), 2)
    assert "or divide rows evenly:  --set layouts={}" in str(error.value)
    with pytest.raises(InvalidInput, match="in mode async ranks that sample take prompts as they get free"):
        plan(load("grpo", None, ["mode=async", "layouts.rollout.rows=[3, 1]"]), 3)
    with pytest.raises(InvalidInput, match="no share has rows"):
        plan(load("grpo", None, ["layouts.update.rows=[0, 0]"]), 2)


@pytest.mark.parametrize(("dag", "mode", "cluster"), [
    *((dag, mode, name) for dag, mode in (("grpo", "async"), ("ppo", "sync")) for name in (
        "h200", "h200_a100", "a100_l40s_l4", "multi_zone")),
    *((path.stem, "sync", "") for path in sorted(Path("dags").glob("*.yaml")))])
def test_shipped_dags_and_clusters_have_a_plan_that_runs(tmp_path, dag, mode, cluster):
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    own_run = Path(f"dags/runs/embedded_{dag}.yaml")
    spec = load(dag, str(own_run) if own_run.exists() else None, [f"mode={mode}"],
                cluster or str(tmp_path / "cluster.yaml"))
    found = runnable(spec)
    ranks = sum(map(sum, found.subsets))
    assert plan(planned_run(spec, problem_of(spec), found), ranks).ranks == ranks
