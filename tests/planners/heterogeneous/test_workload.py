"""From DAGs, runs and clusters to the problem."""

from __future__ import annotations

import pytest

from distflow.config.cluster import Cluster, Device, Link, MachineGroup
from distflow.config.load import load
from distflow.config.sizes import Shape
from distflow.errors import InvalidInput
from planners.heterogeneous.efficiency import BETWEEN, OF_KINDS
from planners.heterogeneous.hardware import hardware_of
from planners.heterogeneous.layouts import strategies
from planners.heterogeneous.problem import GENERATE, INFER, TRAIN, Edge, Problem
from planners.heterogeneous.workload import problem_of, states_of


def by_name(problem: Problem, edges: tuple[Edge, ...]) -> set[tuple[str, str]]:
    return {(problem.tasks[edge.source].name, problem.tasks[edge.target].name) for edge in edges}


def test_the_works_of_grpo(mixed_spec):
    problem = problem_of(mixed_spec("grpo"))
    assert [(task.name, task.kind, task.rows) for task in problem.tasks] == [
        ("rollout", GENERATE, 512), ("reference", INFER, 512), ("update", TRAIN, 512)]
    assert all(task.response == 512 and task.width == 2 for task in problem.tasks)
    assert by_name(problem, problem.edges) == {("rollout", "reference"), ("rollout", "update"), ("reference", "update")}
    assert by_name(problem, problem.syncs) == {("update", "rollout")}


def test_ppo_brings_both_trained_models_to_those_who_use_them(mixed_spec):
    problem = problem_of(mixed_spec("ppo"))
    assert by_name(problem, problem.syncs) == {("update", "rollout"), ("critic", "values")}
    assert ("values", "update") in by_name(problem, problem.edges)  # through the node that computes advantages


@pytest.mark.parametrize(("size", "tied"), [("4B", True), ("8B", False)])
def test_heads_and_embeddings_are_counted_apart(mixed_spec, size, tied):
    """A vocabulary of 151,936; kernels make logits again for the backward pass, and in float32 plain passes where those
    of a micro-batch exceed 2²⁸, and by Megatron."""
    hidden = {"4B": 2560, "8B": 4096}[size]
    spec = mixed_spec("ppo", size=size)
    tasks = {task.name: task for task in problem_of(spec).tasks}
    for name, pieces in (("rollout", (0, False)), ("reference", (4, False)), ("update", (14, True))):
        task = tasks[name]
        assert (task.head, task.looked_up) == (151_936 * hidden, 0 if tied else 151_936 * hidden)
        assert (task.logit_bytes, task.rescored) == pieces
    assert (tasks["critic"].head, tasks["critic"].looked_up) == (hidden, 151_936 * hidden)
    assert (tasks["critic"].logit_bytes, tasks["critic"].rescored) == (76, False)
    assert tasks["update"].scored == 0.5, "512 of at most 512 + 512 tokens"
    actor = spec.run.roles["actor"].model_copy(update={"engine": "megatron", "micro_batch_tokens": 1024})
    spec.run = spec.run.model_copy(update={"roles": spec.run.roles | {"actor": actor}})
    assert {task.name: task.rescored for task in problem_of(spec).tasks}["update"]


def test_queries_are_as_wide_as_their_heads(mixed_spec):
    """Qwen3 4B: 32 heads of 128 beside a hidden size of 2,560, and 8 key-value heads."""
    for task in problem_of(mixed_spec("grpo")).tasks:
        assert (task.hidden, task.queries, task.kv) == (2560, 32 * 128, 2 * 2 * 8 * 128)


def test_states_between_products_follow_the_widths_of_layers(mixed_spec):
    """Norms of heads and rotations 2 each of 5,120 for a token, or rotations 10 of these and 3 of 4,096; 3 or 5 of
    9,728."""
    spec = mixed_spec("grpo")
    fused, own = 10 + (4 * 5120 + 3 * 9728) / 2560, 10 + (12 * 5120 + 3 * 4096 + 5 * 9728) / 2560
    assert {task.name: task.states for task in problem_of(spec).tasks} == pytest.approx(
        {"rollout": fused, "reference": own, "update": own})
    as_wide = Shape(1, 1, 64, 10, 64, heads=4, kv_heads=4, widening=172)
    assert states_of(as_wide, fused=True) == pytest.approx(22, abs=0.1), "as LLaMA's, of which default states are"


def test_only_engines_that_have_pipelines_are_planned_with_stages(mixed_spec):
    spec = mixed_spec("grpo")
    assert not any(task.stages for task in problem_of(spec).tasks)
    actor = spec.run.roles["actor"].model_copy(update={"engine": "megatron"})
    spec.run = spec.run.model_copy(update={"roles": spec.run.roles | {"actor": actor}})
    rollout, *others = problem_of(spec).tasks
    assert [task.stages for task in (rollout, *others)] == [False, True, True]
    assert [*strategies(rollout, 4, 1, 2)] == []
    assert [*strategies(others[0], 4, 1, 2)]


def test_edges_carry_what_is_read(mixed_spec):
    problem = problem_of(mixed_spec("grpo"))
    read = {problem.tasks[edge.target].name: edge.nbytes for edge in problem.edges if edge.source == 0}
    assert 0 < read["reference"] < read["update"]
    assert problem.syncs[0].nbytes == 2 * problem.tasks[0].parameters


def test_faults_of_a_run_are_no_matter_of_its_works(mixed_spec):
    fault = "faults=[{kind: kill, group: rollout, rank: 1, step: 1}]"
    assert problem_of(mixed_spec("grpo", "h200_a100", "mode=async", fault)).tasks == problem_of(mixed_spec()).tasks


def test_a_cluster_without_machines_is_refused():
    with pytest.raises(InvalidInput, match="mixed hardware is planned for a cluster with `machines`"):
        problem_of(load("grpo"))


def cluster(name: str = "fast", measured: bool = False, **machines: MachineGroup) -> Cluster:
    links = {"zone": Link(gb_s=50, latency_us=10), "region": Link(gb_s=5), "world": Link(gb_s=1),
             "east-west": Link(gb_s=2), "c-b": Link(gb_s=3)}
    device = Device(tflops={"bfloat16": 100, "float32": 10}, memory_gib=80, memory_gb_s=1000)
    linked = {key: kind.model_copy(update={"inside": Link(gb_s=100)}) for key, kind in machines.items()}
    return Cluster(devices={name: device}, machines=linked, links=links, measured=measured,
                   zones={"a": "east", "b": "east", "c": "west"})


def test_links_by_place_and_by_path():
    one, two, three = (MachineGroup(device="fast", zone=zone) for zone in "abc")
    found = hardware_of(cluster(one=one, two=two, three=three)).between
    assert [found[one][other].bandwidth / BETWEEN for one, other in ((0, 1), (0, 2), (1, 2))] == [5e9, 2e9, 3e9]


def test_what_a_machine_sends_limits_its_links():
    slow = MachineGroup(device="fast", zone="a", network_gb_s=12)
    found = hardware_of(cluster(one=MachineGroup(device="fast", zone="a"), two=slow)).between
    assert found[0][1].bandwidth == 12e9 * BETWEEN
    assert found[0][1].latency == pytest.approx(1e-5)


def test_measured_links_reach_what_was_measured():
    machines = {name: MachineGroup(device="a100", zone="a") for name in ("one", "two")}
    found = hardware_of(cluster("a100", measured=True, **machines))
    assert [group.inside.bandwidth for group in found.device_groups] == [100e9, 100e9]
    assert found.between[0][1].bandwidth == 50e9


def test_alike_machines_are_folded_when_there_are_many():
    few, many = (hardware_of(cluster(one=MachineGroup(device="fast", zone="a", devices=2, count=count)))
                 for count in (3, 30))
    assert [(group.name, group.counts) for group in few.device_groups] == [(f"one.{number}",
                                                                            (0, 1, 2)) for number in (1, 2, 3)]
    assert many.device_groups[0].counts == (0, 1, *range(2, 61, 2))


def test_parts_of_a_machine_divide_each_other():
    six = hardware_of(cluster(one=MachineGroup(device="fast", zone="a", devices=6, count=20)),
                      fold=True).device_groups[0]
    assert six.counts[:4] == (0, 1, 3, 6)


def test_the_peak_is_that_of_the_dtype():
    described = cluster(measured=True, one=MachineGroup(device="fast", zone="a"))
    assert [hardware_of(described, dtype).device_groups[0].peak for dtype in ("bfloat16", "float32")] == \
        pytest.approx([0.84e14, 0.84e13])


def test_rates_are_those_that_a_kind_of_device_reaches_or_that_were_measured():
    here = MachineGroup(device="nvidia_a100_sxm4_80gb", zone="a")
    known, said = (hardware_of(cluster(here.device, measured, one=here)).device_groups[0]
                   for measured in (False, True))
    share = OF_KINDS["a100"]
    assert (known.peak, known.bandwidth, known.inside.bandwidth) == pytest.approx(
        (1e14 * share.compute, 1e12 * share.memory, 1e11 * share.links))
    assert (known.launch, known.overhead, known.overlaps, known.attention) == share[3:]
    assert (said.peak, said.bandwidth, said.inside.bandwidth) == pytest.approx((0.84e14, 1e12, 1e11))
    other = hardware_of(cluster(one=MachineGroup(device="fast", zone="a"))).device_groups[0]
    assert (other.peak, other.launch, other.overlaps) == (5e13, 0.0, False), "of an unknown device"


@pytest.mark.parametrize("setting", ["roles.actor.replicas=2", "layouts={critic: {first: 8}}",
                                     "groups.inference={reference: 4}"])
def test_what_a_run_says_of_several_ranks_is_no_matter_of_its_works(mixed_spec, setting):
    """They are chosen by a plan, and one rank alone could not have them."""
    assert problem_of(mixed_spec("ppo", "h200_a100", setting)) == problem_of(mixed_spec("ppo", "h200_a100"))
