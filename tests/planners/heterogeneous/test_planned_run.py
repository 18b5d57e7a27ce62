"""A plan for mixed hardware becomes a run; what ranks cannot do is refused, at its line of the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from benchmarks.heterogeneous import Cell, best_of, stream_rl, that_run
from distflow.config.load import load
from distflow.config.spec import Spec
from distflow.config.yaml_source import dump
from distflow.errors import InvalidInput
from distflow.plan import SHARES_OUTERMOST, STAGES_OUTERMOST, Layout, Plan
from planners import plan
from planners.heterogeneous.layouts import CostedProblem, cut_of
from planners.heterogeneous.placed_plan import PlacedPlan, ranks_of, written
from planners.heterogeneous.planned_run import machines_in_order, planned_run
from planners.heterogeneous.problem import Placement, Replicas, Strategy
from planners.heterogeneous.runnable import (
    ByRanks,
    EngineLayouts,
    as_ranks_run,
    refusal,
    run_freedom,
    run_groups,
    runnable,
    search_runnable,
)
from planners.heterogeneous.search import groupings, search
from planners.heterogeneous.workload import problem_of
from planners.planner import roles_apart, roles_on_rollouts

CLUSTER = {
    "name": "mixed", "links": {"inside": {"gb_s": 50}, "zone": {"gb_s": 10, "latency_us": 20}},
    "devices": {"new": {"tflops": {"float32": 60}, "memory_gib": 80, "memory_gb_s": 3000},
                "old": {"tflops": {"float32": 20}, "memory_gib": 40, "memory_gb_s": 1000}},
    "machines": {"quick": {"device": "new", "devices": 2}, "slow": {"device": "old", "devices": 2}}}
MODEL = ["roles.actor.model={architecture: qwen3, layers: 4, hidden: 512, heads: 8, kv_heads: 4}", "data.batch=48"]


@pytest.fixture
def spec_of(tmp_path: Path) -> Callable[..., Spec]:
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    return lambda *more, dag="grpo": load(dag, None, [*MODEL, *more], str(tmp_path / "cluster.yaml"))


def placed_plan(said: dict) -> PlacedPlan:
    return TypeAdapter(PlacedPlan).validate_python(said)


@pytest.fixture
def obey(spec_of: Callable) -> Callable[..., tuple[Plan, str]]:
    """`obey(*settings, change=…)`: the chain by the best runnable plan, which `change` may spoil."""
    def run(*more: str, change: Callable[[dict], Any] = lambda said: None, dag: str = "grpo") -> Plan:
        spec = spec_of(*more, dag=dag)
        costed = CostedProblem(problem_of(spec))
        found = runnable(spec, costed)
        said = asdict(written(costed.problem, found))
        change(said)
        return plan(own := planned_run(spec, placed_plan(said)), own.run.ranks)

    return run


def layouts(found: Plan) -> dict[str, Layout]:
    return {task.node: task.layout for task in found.tasks}


def test_shares_have_rows_by_the_speed_of_their_devices(obey: Callable) -> None:
    found = layouts(obey())
    for node in ("rollout", "reference", "update"):
        rows = found[node].rows
        assert found[node].dp == len(rows) == 4, node
        assert rows[0] == rows[1] > 2 * rows[2] == 2 * rows[3] > 0, node
    assert found["reward"] == found["advantage"] == found["rollout"], "what runs no model stays where the rows are"


@pytest.mark.parametrize("mode", ["async", "semi_sync"])
def test_groups_are_those_that_train_first_and_those_that_sample(obey: Callable, mode: str) -> None:
    found = obey(f"mode={mode}")
    trainer, rollout = found.groups
    assert (trainer.ranks.start, rollout.ranks.stop) == (0, 4)
    assert [task.node for task in rollout.plan.chain(0) if task.type != "COMPUTE"] == ["rollout"]
    rows = layouts(trainer.plan)["update"].rows
    assert len(rows) in (0, len(trainer.ranks))


def test_a_part_of_a_machine_that_trains_is_its_first_one(obey: Callable, tmp_path: Path) -> None:
    device = {"tflops": {"float32": 60}, "memory_gib": 80, "memory_gb_s": 5}  # which trains slowly
    machines = {"one": {"device": "new", "devices": 4}}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER | {"devices": {"new": device}, "machines": machines}))
    trainer, rollout = obey("mode=async").groups
    assert (trainer.ranks, rollout.ranks) == (range(3), range(3, 4))


def test_models_are_split_as_the_plan_says(obey: Callable) -> None:
    def split(said: dict) -> None:
        for node in ("reference", "update"):
            said["tasks"][node] |= {"dp": 2, "tp": 2, "shares": [{"count": 1, "rows": 300, "stages": ["quick"]},
                                                                 {"count": 1, "rows": 84, "stages": ["slow"]}]}

    found = layouts(obey(change=split))
    assert found["update"] == found["reference"] == Layout(2, tp=2, rows=(25, 7))
    assert found["rollout"].tp == 1


def test_micro_batches_are_as_large_as_the_plan_says(spec_of: Callable, tmp_path: Path) -> None:
    """A pipeline is filled by more of them; the setting is in tokens, at the longest row."""
    spec = spec_of()
    problem = problem_of(spec)
    costed = CostedProblem(problem)
    found = runnable(spec, costed)
    said = asdict(written(problem, found))
    update, longest = problem.tasks[-1], problem.tasks[-1].tokens
    best = said["tasks"]["update"]["micro_rows"]
    for rows, tokens in ((2, 2 * longest), (best, update.micro_tokens)):
        said["tasks"]["update"]["micro_rows"] = rows
        own = planned_run(spec, placed_plan(said))
        assert own.run.roles["actor"].micro_batch_tokens == tokens


def two_by_two(said: dict) -> None:
    """Ranks 0 and 1 train, 2 and 3 sample, with one model."""
    said["groups"] = [{"tasks": ["reference", "update"], "devices": {"quick": 2}, "ranks": [0, 1]},
                      {"tasks": ["rollout"], "devices": {"slow": 2}, "ranks": [2, 3]}]
    for node in ("reference", "update"):
        said["tasks"][node] |= {"dp": 2, "tp": 1, "shares": [{"count": 2, "rows": 192, "stages": ["quick"]}]}
    said["tasks"]["rollout"] |= {"dp": 1, "tp": 2, "shares": [{"count": 1, "rows": 384, "stages": ["slow"]}]}


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> str:
    """It need not be there to be planned for."""
    monkeypatch.setattr("distflow.config.models.installed", lambda engine: "0.32.0")
    return "roles.actor.rollout=vllm"


def test_a_model_that_samples_apart_is_split_as_the_plan_says(obey: Callable, vllm: str) -> None:
    rollout = obey("mode=async", vllm, change=two_by_two).groups[1]
    assert (rollout.replicas, rollout.plan.ranks) == (1, 2)
    assert rollout.plan.layout_of("actor", samples=True) == Layout(1, tp=2)
    trainer = obey("mode=semi_sync", vllm, change=two_by_two).groups[0].plan
    assert trainer.layout_of("actor", samples=True) == Layout(1, tp=2)


def test_a_split_over_machines_that_ranks_do_not_have_is_refused(obey: Callable, vllm: str) -> None:
    def elsewhere(said: dict) -> None:
        two_by_two(said)
        said["tasks"]["rollout"]["shares"][0]["stages"] = ["quick"]

    with pytest.raises(InvalidInput, match="shares whose stages are not at ranks that follow each other"):
        obey("mode=async", vllm, change=elsewhere)


@pytest.mark.parametrize("node", ["reference", "update"])
def test_a_device_that_the_plan_leaves_idle_in_a_task_has_no_rows_of_it(obey: Callable, node: str) -> None:
    """It holds its shard of the model, and takes part where all ranks gather a layer."""
    def idle(said: dict) -> None:
        said["tasks"][node] |= {"dp": 2, "shares": [{"count": 2, "rows": 192, "stages": ["quick"]}]}

    assert layouts(obey(change=idle))[node].rows == (1, 1, 0, 0)


def three_groups(said: dict) -> None:
    """The reference on `quick`, a rank each that trains and that samples on `slow`."""
    said["groups"] = [{"tasks": ["rollout"], "devices": {"slow": 1}, "ranks": [3]},
                      {"tasks": ["reference"], "devices": {"quick": 2}, "ranks": [0, 1]},
                      {"tasks": ["update"], "devices": {"slow": 1}, "ranks": [2]}]
    for name, machine, count in (("rollout", "slow", 1), ("reference", "quick", 2), ("update", "slow", 1)):
        said["tasks"][name] |= {"dp": count, "tp": 1, "shares": [{"count": count, "rows": 384 // count,
                                                                  "stages": [machine]}]}


def test_a_model_that_is_only_read_has_the_ranks_of_its_group(obey: Callable) -> None:
    made = obey("mode=async", change=three_groups)
    assert [(group.name, group.ranks) for group in made.groups] == [
        ("trainer", range(1)), ("rollout", range(1, 2)), ("inference reference", range(2, 4))]
    assert (made.groups[2].replicas, layouts(made.groups[2].plan)["reference"].dp) == (1, 2), "sharded, as it is costed"


def unequal(said: dict) -> None:
    three_groups(said)
    said["tasks"]["reference"]["shares"] = [{"count": 1, "rows": rows, "stages": ["quick"]} for rows in (300, 84)]


def test_ranks_that_only_infer_may_have_unequal_shares(obey: Callable) -> None:
    *_, reference = obey("mode=async", change=unequal).groups
    assert reference.plan.task("reference").layout == reference.plan.source == Layout(2, rows=(25, 7))


def test_the_best_plan_that_runs_has_shares_by_speed(spec_of: Callable) -> None:
    spec = spec_of("mode=async")
    groups, apart = ((0,), (1,), (2,)), ((1, 0), (1, 1), (0, 1))
    found = EngineLayouts(spec, CostedProblem(problem_of(spec))).placement(groups, apart)
    assert max(found.layouts[1].rows) > 2 * min(found.layouts[1].rows)


def test_the_best_plan_that_runs_may_have_such_a_group(obey: Callable, spec_of: Callable,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    assert roles_apart(spec_of("mode=async")) == ["reference"]
    assert roles_apart(spec_of("mode=async", dag="dapo")) == []
    assert roles_apart(spec_of("mode=sync", dag="ppo")) == ["critic", "reference"]
    monkeypatch.setattr("planners.heterogeneous.runnable.run_groups",
                        lambda *given: (each for each in run_groups(*given) if len(each[0]) == 3))
    made = obey("mode=async")
    assert [group.name for group in made.groups] == ["trainer", "rollout", "inference reference"]


@pytest.mark.parametrize(("mode", "names"), [("sync", ["trainer", "trainer critic"]),
                                             ("async", ["trainer", "rollout", "trainer critic"])])
def test_the_best_plan_that_runs_may_train_the_critic_apart(obey: Callable, monkeypatch: pytest.MonkeyPatch, mode: str,
                                                            names: list[str]) -> None:
    monkeypatch.setattr("planners.heterogeneous.runnable.run_groups", lambda problem, *_: (
        each for each in run_groups(problem, ["critic"]) if len(each[0]) == len(names)))
    made = obey(f"mode={mode}", dag="ppo")
    assert [group.name for group in made.groups] == names
    found = layouts(made)
    assert found["values"].first == found["critic"].first == made.groups[-1].first
    assert len(found["critic"].rows) in (0, len(made.groups[-1].ranks))


@pytest.mark.parametrize(("mode", "groups", "chains"), [
    ("async", [["rollout", "update"], ["reference", "values", "critic"]],
     {"trainer": ["rollout", "update"], "trainer critic": ["reference", "values", "critic"]}),
    ("sync", [["rollout", "update"], ["reference", "values", "critic"]],
     {"trainer": ["rollout", "update"], "trainer critic": ["reference", "values", "critic"]}),
    ("async", [["update"], ["rollout"], ["reference", "values", "critic"]],
     {"trainer": ["update"], "rollout": ["rollout"], "trainer critic": ["reference", "values", "critic"]})])
def test_frozen_roles_may_be_on_the_ranks_that_train_another(obey: Callable, mode: str, groups: list[list[str]],
                                                             chains: dict[str, list[str]]) -> None:
    def beside(said: dict) -> None:
        parts = [(["quick"], [0, 1]), (["slow"], [2, 3])] if len(groups) == 2 else \
            [(["quick"], [0]), (["quick"], [1]), (["slow"], [2, 3])]
        said["groups"] = [{"tasks": tasks, "devices": {kind: len(ranks)}, "ranks": ranks}
                          for tasks, ([kind], ranks) in zip(groups, parts)]
        for tasks, ([kind], ranks) in zip(groups, parts):
            for task in tasks:
                said["tasks"][task] |= {"dp": len(ranks), "tp": 1, "pp": 1, "shares": [
                    {"count": len(ranks), "rows": 384 // len(ranks), "stages": [kind]}]}

    made = obey(f"mode={mode}", dag="ppo", change=beside)
    assert {group.name: sorted(task.node for task in group.plan.chain(0) if task.type != "COMPUTE")
            for group in made.groups} == {name: sorted(nodes) for name, nodes in chains.items()}


def test_the_best_plan_that_runs_may_have_ranks_that_sample_compute_a_frozen_role(
        obey: Callable, spec_of: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    assert roles_on_rollouts(spec_of("mode=async")) == ["reference"]
    assert roles_on_rollouts(spec_of("mode=semi_sync")) == roles_on_rollouts(spec_of("mode=sync")) == []
    monkeypatch.setattr("planners.heterogeneous.runnable.run_groups", lambda *given: (
        each for each in run_groups(*given) if each[0] == ((0, 1), (2,)) and sum(map(sum, each[1])) == 4))
    made = obey("mode=async")
    assert [[task.node for task in group.plan.chain(0) if task.node in ("rollout", "reference", "update")]
            for group in made.groups] == [["update"], ["rollout", "reference"]]
    assert made.groups[1].plan.layout_of("reference", samples=False) == Layout(1)

    def split(said: dict) -> None:
        placed = said["tasks"]["reference"]
        placed |= {"tp": 2, "dp": 1, "shares": [placed["shares"][0] | {"count": 1}]}

    with pytest.raises(InvalidInput, match="splits its model over 2 ranks, and each rank that samples has its whole"):
        obey("mode=async", change=split)


def test_groups_that_cannot_be_faster_than_the_best_are_not_laid_out(spec_of: Callable, tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    machines = {name: {**machine, "count": 3} for name, machine in CLUSTER["machines"].items()}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER | {"machines": machines}))
    spec = spec_of("mode=async")
    costed, lay_out, tried = CostedProblem(problem_of(spec)), EngineLayouts.placement, []
    monkeypatch.setattr(EngineLayouts, "placement", lambda *given: tried.append(given) or lay_out(*given))
    found = runnable(spec, costed)
    every = [*run_groups(costed.problem, roles_apart(spec), roles_on_rollouts(spec))]
    layouts = EngineLayouts(spec, costed)
    assert 0 < len(tried) < len(every) / 2
    made = (as_ranks_run(spec, costed, each) for groups in every if (each := lay_out(layouts, *groups)))
    assert found.seconds == min(each.seconds for each in made if each)


def test_what_a_search_finds_counts_if_ranks_can_run_it(spec_of: Callable) -> None:
    spec = spec_of("mode=semi_sync")
    costed = CostedProblem(problem_of(spec))
    enumerated = runnable(spec, costed)
    answers = [each.placement for each in search(costed.problem, 0, 2000, costed=costed) if each.placement]
    made = [written(costed.problem, each) for each in answers]
    able = [each for each, plan_file in zip(answers, made) if not refusal(spec, plan_file)]
    assert 0 < len(able) < len(answers)
    faster, slower = (replace(able[-1], seconds=enumerated.seconds * times) for times in (0.9, 1.1))
    unable = [replace(each, seconds=1e-9) for each in answers if each not in able]
    assert runnable(spec, costed, [*unable, slower, faster]) == faster
    assert runnable(spec, costed, [*unable, slower]) == enumerated


def test_a_search_at_what_ranks_can_run_finds_better_plans(tmp_path: Path) -> None:
    """Ranks that sample take frozen models from the room of their cache, which the search alone does not count: what it
    takes for better hides what is."""
    spec = Cell("three zones", "grpo", "async", "8B").spec(tmp_path, "megatron")
    problem = problem_of(spec)
    costed, limited = CostedProblem(problem), replace(problem, freedom=run_freedom(spec, problem))
    ranks = ByRanks(spec, costed)
    *_, found = search(limited, 0, 4000, required=ranks)
    assert ranks.accepts(found.placement)
    assert found.placement == ranks.forms(found.placement)[0], "in the seconds that ranks take"
    afterwards = runnable(spec, costed, [each.placement for each in search(limited, 0, 4000) if each.placement])
    assert found.placement.seconds < 0.98 * afterwards.seconds


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_search_among_the_groups_and_splits_that_runs_have_finds_what_ranks_can_run(
        spec_of: Callable, mode: str) -> None:
    """A free search's plans are in groups that no run has, or sample with tp, which `rollout: hf` has not."""
    spec = spec_of(f"mode={mode}", dag="ppo")
    problem = problem_of(spec)
    freedom = run_freedom(spec, problem)
    assert [{tp for tp, _ in cuts} for cuts in freedom.cuts] == [{1}, *[{1, 2, 4}] * 4]
    assert 1 < len(freedom.groupings) < len(groupings(problem))
    answers = {each.placement for each in search(replace(problem, freedom=freedom), 0, 3000) if each.placement}
    why = [refusal(spec, written(problem, each)) for each in answers]
    assert None in why
    costed = CostedProblem(problem)
    assert all(as_ranks_run(spec, costed, each).seconds == each.seconds for each in answers), "as it is predicted"
    assert all(not each or "follow each other" in each.what for each in why), "where devices stand is left to check"
    for group, layouts in ((group, each.layouts) for each in answers for group in each.grouping):
        splits = {(problem.tasks[task].memory_item, cut_of(layouts[task])) for task in group}
        assert len(splits) == len({memory_item for memory_item, _ in splits}), "tasks of an engine are split alike"


def limited_to_runs(spec: Spec) -> tuple[CostedProblem, CostedProblem]:
    """Return all plans of a run's problem, and those in the groups and splits that runs have."""
    problem = problem_of(spec)
    return CostedProblem(problem), CostedProblem(replace(problem, freedom=run_freedom(spec, problem)))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PlacedPlan, Any]]:
    """All plans that the launcher is asked for, and its answers."""
    found = []

    def ask(spec: Spec, made: PlacedPlan) -> Any:
        found.append((made, refusal(spec, made)))
        return found[-1][1]

    monkeypatch.setattr("planners.heterogeneous.runnable.refusal", ask)
    return found


def test_where_the_launcher_refuses_every_plan_a_search_ends_and_says_why(
        spec_of: Callable, asked: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """One reason is counted once, whichever numbers it has; where it ends early, others were not tried."""
    monkeypatch.setattr("planners.heterogeneous.runnable._ALL_REFUSALS", 60)
    spec = spec_of("mode=async", "roles.actor.replicas=5", dag="ppo")
    costed, limited = limited_to_runs(spec)
    for find in (lambda: list(search_runnable(spec, costed, limited)), lambda: runnable(spec, costed)):
        asked.clear()
        with pytest.raises(InvalidInput, match="because role `actor` wants 5 replicas, which do not") as error:
            find()
        same = sum("role `actor` wants 5 replicas, which do not divide" in why.what for _, why in asked)
        ranks = {why.what for _, why in asked if "which do not divide" in why.what}
        assert len(ranks) > 1, "numbers of ranks"
        said = f"the launcher refuses the {len(asked)} plans that were tried, {same} of them because"
        assert said in str(error.value)
    assert limited.evaluations < 20_000, "of a budget of 40,000"


def sizes_of(made: PlacedPlan) -> tuple:
    return tuple((tuple(group.tasks), len(group.ranks)) for group in made.groups)


def test_of_a_grouping_and_sizes_that_the_launcher_always_refuses_a_search_asks_for_only_some_plans(
        asked: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are faster than what it accepts, all in one group, and each takes as long as planning a run."""
    monkeypatch.setattr("planners.heterogeneous.runnable._REFUSALS", 3)
    spec = load("solver_reviser", None, [*MODEL, "mode=async"], "h200_a100")
    *_, found = search_runnable(spec, *limited_to_runs(spec), budget=1000)
    assert len(found.placement.grouping) == 1
    most = Counter(sizes_of(made) for made, why in asked if why)
    assert max(most.values()) == 3


def many_kinds(tmp_path: Path) -> Spec:
    """Return a run of 7 replicas on 42 devices: most sizes of its groups are refused, few are not."""
    devices = {name: {"memory_gb_s": speed, "memory_gib": 80, "tflops": {"float32": tflops}}
               for name, speed, tflops in (("d0", 1000, 10), ("d1", 3000, 100), ("d2", 300, 60))}
    devices["d0"]["memory_gib"] = 40
    machines = {f"m{kind}": {"count": count, "device": f"d{kind}", "devices": each}
                for kind, (count, each) in enumerate(((3, 2), (1, 6), (5, 6)))}
    cluster = CLUSTER | {"devices": devices, "machines": machines}
    (tmp_path / "many.yaml").write_text(yaml.safe_dump(cluster))
    return load("grpo_tools", None, [*MODEL, "mode=async", "roles.actor.replicas=7"], str(tmp_path / "many.yaml"))


def test_what_the_launcher_refuses_for_its_sizes_does_not_hide_other_sizes(tmp_path: Path, asked: list) -> None:
    spec = many_kinds(tmp_path)
    costed = CostedProblem(problem_of(spec))
    found = runnable(spec, costed)
    refused = Counter(tuple(tuple(group.tasks) for group in made.groups) for made, why in asked if why)
    own = tuple(tuple(costed.problem.tasks[task].name for task in group) for group in found.grouping)
    assert refused[own] > 20, "of the same grouping"
    ranks = ByRanks(spec, costed)
    layouts = EngineLayouts(spec, costed)
    first = sorted(run_groups(costed.problem), key=lambda each: costed.ideal(*each))
    forms = (ranks.forms(placement) for each in first if (placement := layouts.placement(*each)))
    assert any(ranks.accepts(form) for each in forms for form in each), "a search asks for other sizes too"


def test_what_is_enumerated_ends_with_the_time_too(spec_of: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, lay_out, tried = spec_of("mode=async", dag="ppo"), EngineLayouts.placement, []
    monkeypatch.setattr(EngineLayouts, "placement", lambda *given: tried.append(given) or lay_out(*given))
    list(search_runnable(spec, *limited_to_runs(spec), stop=lambda: True))
    assert len(tried) == 1


def test_a_side_of_which_the_launcher_refuses_every_plan_has_none(spec_of: Callable) -> None:
    assert that_run(spec_of("mode=async", "roles.actor.replicas=5", dag="ppo"), 300) is None


def test_a_search_for_plans_that_run_begins_with_the_best_that_is_known(spec_of: Callable) -> None:
    spec = spec_of("mode=async", dag="ppo")
    costed, limited = limited_to_runs(spec)
    first, *_ = search_runnable(spec, costed, limited, budget=1)
    assert first.placement.seconds <= runnable(spec, costed).seconds
    *_, best = search_runnable(spec, costed, limited, budget=4000)
    known, *_ = search_runnable(spec, costed, limited, budget=1, found=[best.placement])
    assert known.placement == best.placement


def test_a_plan_whose_tasks_of_an_engine_are_split_unlike_is_made_one_that_runs(tmp_path: Path) -> None:
    spec = Cell("one zone", "ppo", "async", "8B").spec(tmp_path, "megatron")
    problem = problem_of(spec)
    costed, found = CostedProblem(problem), best_of(stream_rl(problem), 600)
    ranks = ByRanks(spec, costed)
    assert not any(map(ranks.accepts, ranks.forms(found))), "`values` and `critic` are split unlike"
    made = ranks.fastest([found])
    assert (made.grouping, made.subsets) == (found.grouping, found.subsets)
    assert runnable(spec, costed, [found]).seconds <= made.seconds


@pytest.fixture
def found_alone(spec_of: Callable, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """`found_alone(*update)`: costs; all tasks in one group of all machines, of which they use `quick`, and `update`
    what is given; and what ranks can run of it, if nothing else is considered."""
    def find(*update: Replicas, more: tuple[str, ...] = ()) -> tuple[CostedProblem, Placement, Placement | None]:
        spec = spec_of(*more)
        costed, two = CostedProblem(problem_of(spec)), (Replicas((0,), 2),)
        layouts = [costed.costs.layout(task, Strategy(sum(kind.count for kind in kinds), micro=4), kinds)
                   for task, kinds in enumerate((two, two, update or two))]
        found = costed.placed(((0, 1, 2),), ((2, 2),), layouts)
        monkeypatch.setattr("planners.heterogeneous.runnable.run_groups", lambda *given: iter(()))
        return costed, found, runnable(spec, costed, [found])

    return find


def test_machines_that_no_task_uses_are_left_out(found_alone: Callable) -> None:
    _, found, made = found_alone()
    assert made == replace(found, subsets=((2, 0),))


SOME = Replicas((0,), 2), Replicas((1,), 1)


def test_devices_without_rows_of_an_engine_cost_it_nothing(found_alone: Callable) -> None:
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


def test_tasks_of_one_engine_have_it_where_any_of_them_has_rows(spec_of: Callable) -> None:
    """Among these ranks a task's weights are divided, whoever has its rows."""
    spec = spec_of(dag="ppo")
    costed, found = ppo_on_some(spec, SOME)
    names = [task.name for task in costed.problem.tasks]
    critic = names.index("critic")
    made = as_ranks_run(spec, costed, found)
    assert [task for task in range(1, len(names)) if made.layouts[task] != found.layouts[task]] == [critic]
    whole = costed.costs.layout(critic, Strategy(3, micro=4), SOME, (*found.layouts[critic].rows, 0))
    assert made.layouts[critic].seconds == whole.seconds > found.layouts[critic].seconds


def test_engines_that_want_all_ranks_cost_what_shares_without_rows_do(found_alone: Callable,
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron sums gradients over all ranks of its group."""
    monkeypatch.setattr("distflow.config.models.installed", lambda engine: "0.16.1")
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


def test_frozen_models_behind_rollouts_are_whole_and_on_the_first_device_of_each(spec_of: Callable, vllm: str) -> None:
    """It computes what its rollout samples, and has less room for the cache."""
    spec = spec_of(vllm, "mode=async")
    costed, two = CostedProblem(problem_of(spec)), (Replicas((0,), 2),)
    halves, slow = (Replicas((0,), 1),), (Replicas((1,), 2),)
    layouts = [costed.costs.layout(task, Strategy(sum(kind.count for kind in kinds), tp, micro=4), kinds)
               for task, (tp, kinds) in enumerate(((2, halves), (1, two), (1, slow)))]
    found = costed.placed(((0, 1), (2,)), ((2, 0), (0, 2)), layouts)
    made = as_ranks_run(spec, costed, found)
    assert made.layouts[1]._replace(seconds=0.0, swap=0.0) == found.layouts[1]._replace(seconds=0.0, swap=0.0)
    tasks = tuple(replace(task, engine="megatron") for task in costed.problem.tasks)  # which divides no frozen weights
    whole = CostedProblem(replace(costed.problem, tasks=tasks)).costs.layout(1, Strategy(1, micro=4), halves, (384,))
    assert made.layouts[1].seconds == whole.seconds != found.layouts[1].seconds, "one of two devices computes all rows"
    assert made.layouts[1].swap == 0.0 < found.layouts[1].swap, "it stays where it is"
    assert made.layouts[0].seconds >= found.layouts[0].seconds
    assert made.layouts[2] == found.layouts[2]
    small = tuple(replace(each, memory=each.memory / 2000) for each in costed.problem.hardware.device_groups)
    tight = CostedProblem(replace(costed.problem, hardware=replace(costed.problem.hardware, device_groups=small)))
    assert tight.costs.layout(0, *found.layouts[0][:2]) is not None
    assert as_ranks_run(spec, tight, found) is None, "there is no room for both"
    assert not refusal(spec, written(costed.problem, found))


def test_a_machine_may_be_divided_where_groups_meet(obey: Callable, vllm: str, tmp_path: Path) -> None:
    """Whichever of alike devices the plan names: what trains, samples and infers takes them in the order of ranks."""
    machines, devices = {"quick": {"device": "new", "devices": 2, "count": 8}}, {"new": CLUSTER["devices"]["new"]}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER | {"machines": machines, "devices": devices}))

    def divided(said: dict) -> None:
        said["groups"] = [{"tasks": ["rollout"], "devices": {"quick": 14}, "ranks": [*range(14)]},
                          {"tasks": ["reference"], "devices": {"quick": 1}, "ranks": [14]},
                          {"tasks": ["update"], "devices": {"quick": 1}, "ranks": [15]}]
        for name, count in (("rollout", 14), ("reference", 1), ("update", 1)):
            said["tasks"][name] |= {"dp": count, "tp": 1, "shares": [{"count": count, "rows": 384 // count,
                                                                      "stages": ["quick"]}]}

    made = obey("mode=async", change=divided)
    assert [group.ranks for group in made.groups] == [range(1), range(1, 15), range(15, 16)]

    def split(said: dict) -> None:
        divided(said)
        said["tasks"]["rollout"] |= {"dp": 7, "tp": 2, "shares": [{"count": 7, "rows": 55, "stages": ["quick"]}]}

    with pytest.raises(InvalidInput, match="`rollout` has shares whose stages are not at ranks that follow each other"):
        obey("mode=async", vllm, change=split)


def test_a_plan_whose_tasks_all_take_turns_runs_in_mode_sync(obey: Callable) -> None:
    def together(said: dict) -> None:
        said["groups"] = [{"tasks": [*said["tasks"]], "devices": {"quick": 2, "slow": 2}, "ranks": [0, 1, 2, 3]}]
        for task in said["tasks"].values():
            task |= {"dp": 4, "tp": 1, "shares": [{"count": 2, "rows": 96, "stages": [each]}
                                                  for each in ("quick", "slow")]}

    made = obey("mode=async", change=together)
    assert (made.mode, made.groups) == ("sync", ())


def with_training(said: dict, first: Sequence[str] = ("rollout", "update"), second: str = "reference") -> None:
    three_groups(said)
    for group, tasks in zip(said["groups"], ([*first], [second], [])):
        group["tasks"] = tasks
    del said["groups"][2]
    said["groups"][0] |= {"devices": {"slow": 2}, "ranks": [2, 3]}


def test_groups_that_no_ranks_make_are_refused(obey: Callable) -> None:
    with pytest.raises(InvalidInput, match="one trains, rollout samples, and each of the others has all tasks of one"):
        obey("mode=semi_sync", change=partial(with_training, first=("rollout", "reference"), second="update"))


def test_a_group_may_sample_and_train_beside_one_that_infers(obey: Callable) -> None:
    """In mode sync, whatever the plan was made for."""
    def both(said: dict) -> None:
        with_training(said)
        for name in ("rollout", "update"):
            said["tasks"][name] |= {"dp": 2, "shares": [{"count": 2, "rows": 192, "stages": ["slow"]}]}

    made = obey("mode=async", change=both)
    assert made.mode == "sync"
    assert [(group.name, len(group.ranks)) for group in made.groups] == [("trainer", 2), ("inference reference", 2)]


def test_what_a_plan_says_is_a_run_file(spec_of: Callable, tmp_path: Path) -> None:
    spec = spec_of()
    costed = CostedProblem(problem_of(spec))
    own = planned_run(spec, written(costed.problem, runnable(spec, costed)))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(own.resolved()["run"]))
    again = load("grpo", str(tmp_path / "run.yaml"))
    assert again.run.ranks == 4
    assert plan(again, 4).digest == plan(own, 4).digest


def apart(said: dict) -> None:
    said["groups"] = [{"tasks": ["rollout"], "devices": {"quick": 2}, "ranks": [0, 1]},
                      {"tasks": ["reference", "update"], "devices": {"slow": 2}, "ranks": [2, 3]}]


def left_out(said: dict) -> None:
    said["groups"][0]["ranks"] = [0, 1, 3]


def without_a_task(said: dict) -> None:
    del said["tasks"]["reference"]


def staged(layers: list[int], stages: list[str]) -> Callable[[dict], None]:
    def change(said: dict) -> None:
        said["tasks"]["update"] |= {"dp": 2, "pp": 2, "layers": layers,
                                    "shares": [{"count": 2, "rows": 192, "stages": stages}]}

    return change


def by_stages(said: dict) -> None:
    for node in ("reference", "update"):
        said["tasks"][node] |= {"dp": 2, "pp": 2, "layers": [2, 2],
                                "shares": [{"count": 1, "rows": 192, "stages": [machine] * 2}
                                           for machine in ("quick", "slow")]}


@pytest.mark.parametrize(("change", "says"), [
    (apart, "in this mode one samples and trains, and each of the others has all tasks of one trained "
     "role, of frozen roles, or of both"),
    (left_out, "the plan uses 1 of the 2 devices of a machine `slow`, and all of a machine take part"),
    (without_a_task, "the plan's tasks are not the nodes that run models: rollout, reference, update"),
    (staged([2, 2], ["slow", "quick"]), "shares whose stages are not at ranks that follow each other"),
    (by_stages, "node `reference` wants pp 2 of `engine: fsdp`, which it cannot do"),
])
def test_what_ranks_cannot_do_is_refused(obey: Callable, change: Callable, says: str) -> None:
    with pytest.raises(InvalidInput) as error:
        obey(change=change)
    assert [mistake for mistake in error.value.mistakes if says in mistake.what], str(error.value)


@pytest.mark.parametrize(("stages", "order", "layers"), [
    ([["quick", "slow"]], STAGES_OUTERMOST, (3, 1)), ([["quick"] * 2, ["slow"] * 2], SHARES_OUTERMOST, (2, 2))])
def test_a_pipeline_may_have_a_stage_or_a_share_on_each_machine(
        obey: Callable, monkeypatch: pytest.MonkeyPatch, stages: list[list[str]], order: str,
        layers: tuple[int, ...]) -> None:
    monkeypatch.setattr("distflow.config.models.installed", lambda engine: "0.16.1")

    def piped(said: dict) -> None:
        rows = (300, 84)[:len(stages)] if len(stages) > 1 else (192,)
        for node in ("reference", "update"):
            said["tasks"][node] |= {"dp": 2, "tp": 1, "pp": 2, "layers": [*layers], "shares": [
                {"count": 2 // len(stages), "rows": count, "stages": each} for count, each in zip(rows, stages)]}

    found = layouts(obey("roles.actor.engine=megatron", "roles.reference={engine: megatron}", change=piped))
    assert (found["update"].pp, found["update"].order) == (2, order)
    assert found["update"].layers == found["reference"].layers == (() if layers == (2, 2) else layers)
    assert found["advantage"].rows == found["rollout"].rows


def order_of(spec: Spec, change: Callable[[dict], Any]) -> str:
    costed = CostedProblem(problem_of(spec))
    said = asdict(written(costed.problem, runnable(spec, costed)))
    change(said)
    return machines_in_order(costed.problem, placed_plan(said))


def test_machines_that_train_come_first_wherever_the_cluster_file_has_them(obey: Callable, spec_of: Callable) -> None:
    """Ranks 0 and 1 are those of `slow`, the second machine."""
    def on_the_slow(said: dict) -> None:
        apart(said)
        for node, machine in (("reference", "slow"), ("update", "slow"), ("rollout", "quick")):
            said["tasks"][node] |= {"dp": 2, "tp": 1, "shares": [{"count": 2, "rows": 192, "stages": [machine]}]}

    trainer, rollout = obey("mode=async", change=on_the_slow).groups
    assert (trainer.ranks, rollout.ranks) == (range(2), range(2, 4))
    assert order_of(spec_of("mode=async"), on_the_slow) == "1 slow, 1 quick"


def test_the_order_of_machines_names_one_that_stands_between_others(spec_of: Callable, tmp_path: Path) -> None:
    """Two of eight alike machines train; the rest follows in the order of the cluster file."""
    machines = {"slow": {"device": "old", "devices": 2}, "quick": {"device": "new", "devices": 2, "count": 8}}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER | {"machines": machines}, sort_keys=False))

    def between(said: dict) -> None:
        said["groups"] = [{"tasks": ["reference", "update"], "devices": {"quick": 4}, "ranks": [2, 3, 4, 5]},
                          {"tasks": ["rollout"], "devices": {"slow": 2, "quick": 12}, "ranks": [0, 1, *range(6, 18)]}]

    assert order_of(spec_of("mode=async"), between) == "2 quick, 1 slow, 6 quick"


def test_ranks_of_a_machine_follow_each_other(obey: Callable) -> None:
    def torn(said: dict) -> None:
        two_by_two(said)
        said["groups"][0] |= {"devices": {"quick": 1, "slow": 1}, "ranks": [1, 2]}
        said["groups"][1] |= {"devices": {"quick": 1, "slow": 1}, "ranks": [0, 3]}

    with pytest.raises(InvalidInput, match="those of a machine `quick` would be 0, 2, and ranks of a machine follow"):
        obey("mode=async", change=torn)


def test_nodes_of_one_engine_split_it_alike(obey: Callable) -> None:
    def unlike(said: dict) -> None:
        said["tasks"]["critic"] |= {"dp": 2, "tp": 2, "shares": [
            {"count": 1, "rows": 192, "stages": [machine]} for machine in ("quick", "slow")]}

    with pytest.raises(InvalidInput, match="the same engine of role `critic`, but split its model differently"):
        obey(dag="ppo", change=unlike)


def test_machines_that_a_plan_leaves_out_have_no_ranks(obey: Callable) -> None:
    def without_the_quick(said: dict) -> None:
        said["groups"][0] |= {"devices": {"slow": 2}, "ranks": [2, 3]}
        for task in said["tasks"].values():
            task |= {"dp": 2, "shares": [{"count": 2, "rows": 192, "stages": ["slow"]}]}

    found = obey(change=without_the_quick)
    assert found.ranks == 2
    assert {layout.dp for layout in layouts(found).values()} == {2}


def test_the_best_plan_leaves_out_what_is_too_far(spec_of: Callable, tmp_path: Path) -> None:
    said = yaml.safe_load(yaml.safe_dump(CLUSTER))
    said["links"]["world"] = {"gb_s": 1e-4, "latency_us": 1e6}
    said["machines"]["slow"]["zone"], said["zones"] = "far", {"far": "overseas"}
    (tmp_path / "cluster.yaml").write_text(dump(said))
    spec = spec_of()
    costed = CostedProblem(problem_of(spec))
    found = runnable(spec, costed)
    assert found.subsets == ((2, 0),)
    assert ranks_of(costed.problem, found.subsets) == [[0, 1]]


def test_a_hand_written_run_may_say_rows_too() -> None:
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


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("dag", ["grpo", "ppo"])
@pytest.mark.parametrize("name", ["h200", "h200_a100", "a100_l40s_l4", "multi_zone"])
def test_shipped_clusters_have_a_plan_that_runs(tmp_path: Path, dag: str, mode: str, name: str) -> None:
    spec = load(dag, None, [f"mode={mode}", "data.batch=512"], name)
    costed = CostedProblem(problem_of(spec))
    found = runnable(spec, costed)
    ranks = sum(map(sum, found.subsets))
    own = planned_run(spec, written(costed.problem, found))
    assert plan(own, ranks).ranks == ranks


@pytest.mark.parametrize("dag", sorted(path.stem for path in Path("dags").glob("*.yaml")))
def test_every_shipped_dag_has_a_plan_that_runs(tmp_path: Path, dag: str) -> None:
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    own_run = Path(f"dags/runs/embedded_{dag}.yaml")
    spec = load(dag, str(own_run) if own_run.exists() else None, [], str(tmp_path / "cluster.yaml"))
    costed = CostedProblem(problem_of(spec))
    found = runnable(spec, costed)
    ranks = sum(map(sum, found.subsets))
    own = planned_run(spec, written(costed.problem, found))
    assert plan(own, ranks).ranks == ranks
