"""The cost model's formulas, each where it can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distflow.config.spec import Spec
from planners import plan
from planners.heterogeneous.cost import CostModel, Objective
from planners.heterogeneous.hardware import Network
from planners.heterogeneous.layouts import every, in_rows, strategies
from planners.heterogeneous.problem import (
    GENERATE,
    INFER,
    TRAIN,
    DeviceGroup,
    Edge,
    Hardware,
    Measured,
    ModelTask,
    NetworkLink,
    Problem,
    Replicas,
    Strategy,
)
from planners.heterogeneous.workload import problem_of

FAST = DeviceGroup("fast", "big", "a", 1, 4, 100e12, 80e9, 2e12, 25e9, NetworkLink(1e-6, 100e9))
SLOW = replace(FAST, name="slow", kind="small", peak=50e12, bandwidth=1e12, memory=40e9)
FAR = NetworkLink(1e-3, 1e9)
WORK = ModelTask("task", "actor", INFER, 10**9, 10, 1000, 1000, 500, 8, 100, 100, micro_tokens=200, engine="megatron",
                 activations=17 * 2 * 1000, outputs=0, states=0)
"""Computes products alone: nothing is read or written between them."""


def costs(task: ModelTask = WORK, groups: tuple[DeviceGroup, ...] = (FAST, SLOW)) -> CostModel:
    links = tuple(tuple(FAR for _ in groups) for _ in groups)
    return CostModel(Problem(Hardware(groups, links), (task,), filled=1.0))


def seconds(task: ModelTask, strategy: Strategy, *kinds: Replicas) -> float:
    return costs(task).layout(0, strategy, kinds).seconds


def forward(rows: float, task: ModelTask = WORK, peak: float = 100e12) -> float:
    """2 FLOP a parameter and token, and 2 × context × width of queries for each layer (Kaplan et al. 2020)."""
    return rows * task.tokens * (2 * task.parameters + 2 * task.layers * task.tokens * task.queries) / peak


ONE = (Replicas((0,), 1),)
STEP, STATES = 2 * 10**9 * 18 / 2e12, 8 * 200 * 10 * 22 * 1000 * 2 / 2e12
FORMULAS = {  # changes of `WORK`, its strategy and devices, and its seconds
    "inference is arithmetic at the peak": ({}, Strategy(1), ONE, forward(8)),
    "four share it": ({}, Strategy(4), (Replicas((0,), 4),), forward(2)),
    "training takes three passes": ({"kind": TRAIN}, Strategy(1), ONE, 3 * forward(8) + STEP),
    "or four if it recomputes": ({"kind": TRAIN, "recompute": True}, Strategy(1), ONE, 4 * forward(8) + STEP),
    "few tokens are bound by reading the weights": ({"prompt": 1, "response": 1, "rows": 1}, Strategy(1), ONE,
                                                    2e9 / 2e12),
    "a last micro-batch has the rows that are left": ({"rows": 3}, Strategy(1, micro=2), ONE, forward(3)),
    "or is the only one": ({"rows": 3}, Strategy(1, micro=8), ONE, forward(3)),
    "each pass through each of ten layers takes its start": (
        {"rows": 3, "measured": Measured(times=1.0, launch=1e-3)}, Strategy(1, micro=2), ONE,
        forward(3) + 2 * 10 * 1e-3),
    # eight micro-batches of one row through two stages: nine steps of half a forward pass, and a hop
    "the bubble of a pipeline": ({}, Strategy(1, pp=2), (Replicas((0, 0), 1),),
                                 9 * forward(1) / 2 + 1e-6 + 200 * 1000 * 2 / 100e9),
    # two sums a layer, each of two messages of half the activations for two slices
    "slices add up their activations": ({}, Strategy(1, tp=2), ONE,
                                        forward(8) / 2 + 8 * 10 * 2 * 2 * (1e-6 + 200 * 1000 * 2 / 2 / 100e9)),
    "gradients go over the slowest link": (
        {"kind": TRAIN, "rows": 2}, Strategy(2), (*ONE, Replicas((1,), 1)),
        3 * forward(1, peak=50e12) + 2 * 1 * 1e-3 + 2 * 1 / 2 * 4e9 / 1e9 + 2 * 10**9 * (12 / 2 + 6) / 1e12),
    "what is computed between products passes through memory": ({"states": 22}, Strategy(1), ONE, forward(8) + STATES),
    "in training three times": ({"kind": TRAIN, "states": 22}, Strategy(1), ONE, 3 * (forward(8) + STATES) + STEP)}


@pytest.mark.parametrize("name", FORMULAS)
def test_cost_model_has_the_seconds_that_are_worked_out_by_hand(name):
    changes, strategy, kinds, expected = FORMULAS[name]
    assert seconds(replace(WORK, **changes), strategy, *kinds) == pytest.approx(expected)


def test_attention_has_a_rate_of_its_own():
    attends = forward(8) - forward(8, replace(WORK, queries=0))
    halved = costs(WORK, (replace(FAST, attention=0.5), SLOW)).layout(0, Strategy(1), ONE).seconds
    assert halved == pytest.approx(forward(8) + attends)


@pytest.mark.parametrize(("kind", "times"), [(INFER, 2 * 200), (TRAIN, 6 * 200), (GENERATE, 4 * 150)])
def test_attention_is_as_wide_as_the_queries(kind, times):
    """Heads × head size, whatever the hidden size: as much for each of 10 layers. Training counts three times, and a
    token that is sampled in full, of a context of 150 on the mean."""
    narrow, broad = (costs(replace(WORK, kind=kind, queries=queries,
                                   measured=Measured(read=0))).tasks[0].arithmetic([(FAST, 1)])
                     for queries in (1000, 10**6))
    assert broad - narrow == pytest.approx(8 * 100 * 10 * (10**6 - 1000) * times / 100e12)


def test_each_sampled_token_passes_through_all_layers():
    """100 of them, after reading the prompts."""
    task = replace(WORK, kind=GENERATE)
    plain, late = (seconds(each, Strategy(1, micro=8), *ONE) for each in (
        task, replace(task, measured=Measured(times=1.0, launch=1e-3))))
    assert late == pytest.approx(plain + (1 + 100) * 10 * 1e-3)


@pytest.mark.parametrize(("task", "starts"), [
    (replace(WORK, rows=3), 3), (replace(WORK, rows=3, measured=Measured(launch=0.0)), 0)], ids=["", "measured"])
def test_a_device_s_passes_start_late_and_compute_for_more_tokens(task, starts):
    device = replace(FAST, launch=1e-3, overhead=50.0)
    found = costs(task, (device,)).layout(0, Strategy(1, micro=1), ONE).seconds
    assert found == pytest.approx(forward(3) * (200 + 50) / 200 + starts * 10 * 1e-3)


def test_decoding_multiplies_by_the_weights_and_then_attends_to_the_caches():
    task = replace(WORK, kind=GENERATE, rows=1000, kv=4000)
    plain, cached = (costs(each).tasks[0].decode(0, FAST, 1, 1000) for each in (replace(task, kv=0), task))
    context = 150
    assert plain == pytest.approx(1000 * (2 * 1e8 + 4 * context * 1000) / 100e12), "arithmetic binds both"
    assert cached == pytest.approx(1000 * 2 * 1e8 / 100e12 + 1000 * 4000 * context / 2e12), "memory binds the caches"


def test_fsdp_gathers_weights_in_each_pass_and_scatters_gradients_once():
    """Two shares of four rows, one row a micro-batch, gather 2 bytes of 10⁹ parameters forward and backward, half of
    them over the link, and scatter 4 once; each keeps half of the 16 bytes of a parameter. In memory of 2 TB/s, a
    gather casts the half that a share has (4 bytes read, 2 written) and copies all out of a buffer (2 and 2); gradients
    are copied into one (2 read, 4 written), and the half that a share gets is written, copied and added (20).
    """
    task = replace(WORK, kind=TRAIN, engine="fsdp")
    copies, summed = 4 * 2 * (6 / 2 + 4) / 2e3, 4 * (6 + 20 / 2) / 2e3
    pair = (Replicas((0,), 1), Replicas((0,), 1))
    inside = replace(FAST, inside=NetworkLink(0.0, 1e9))
    model = costs(task, (inside, SLOW))
    found = model.layout(0, Strategy(2), pair, rows=(4, 4)).seconds
    assert found == pytest.approx(3 * forward(4) + copies + (4 * 2 * 2 + 4) / 2 + 2 * 16 / 2 / 2e3)
    by_layer = costs(replace(task, gathered=10**8), (inside, SLOW)).layout(0, Strategy(2), pair, rows=(4, 4)).seconds
    assert by_layer - found == pytest.approx((4 - 1) * 4 / 2 + summed)  # for each micro-batch
    meanwhile = costs(task, (replace(inside, overlaps=True), SLOW)).layout(0, Strategy(2), pair, rows=(4, 4)).seconds
    gathers = 4 * 2 * 2 / 2
    assert meanwhile == pytest.approx(max(3 * forward(4) + copies, gathers) + gathers / 10 + 4 / 2 + 2 * 16 / 2 / 2e3)
    kept = 10 * 17 * 2 * 1000 * 200
    filled, empty = (model.tasks[0].fills(Strategy(2), 0, layers) for layers in (10, 0))
    assert filled - empty == pytest.approx(16 / 2 * 10**9 + kept)


def counted(spec: Spec, node: str) -> tuple[float, dict[str, int]]:
    """The bytes that the solvers' cost model counts of a node's parameters, and what `distflow plan` counts of its
    role by kind, on 64 ranks."""
    items = {item.name: item.bytes for item in plan(spec, 64).memory}
    task = next(each for each in CostModel(problem_of(spec)).tasks if each.task.name == node)
    each, beside = task.kept(Strategy(64, micro=16), 0)
    filled = task.fills(Strategy(64, micro=16), 0, task.task.layers) - task.task.layers * each - beside
    role = f"{task.task.role}: "
    return filled, {name.removeprefix(role): size for name, size in items.items() if name.startswith(role)}


def of_kinds(planned: dict[str, int], *kinds: str) -> float:
    return pytest.approx(sum(planned.get(kind, 0) for kind in kinds), rel=1e-4)


@pytest.mark.parametrize(("engine", "gib"), [("fsdp", 11.0), ("megatron", 47.2)])
def test_both_plans_count_the_same_state(mixed_spec, engine, gib):
    """8B: `distflow plan` without a solver, and the solvers' cost model."""
    spec = mixed_spec("grpo", "h200", "roles.actor.dtype=bfloat16", "data.batch=512", size="8B")
    spec.run.roles["actor"] = spec.run.roles["actor"].model_copy(update={"engine": engine})
    solver, planned = counted(spec, "update")
    assert solver == of_kinds(planned, "training state", "weights while computing")
    assert solver / 2**30 == pytest.approx(gib, rel=0.01)


@pytest.mark.parametrize(("model", "frozen"), [
    ([], 10**9), (["roles.actor.model={architecture: qwen3, layers: 4, hidden: 256, heads: 4, kv_heads: 2}"], 10**6)],
    ids=["large", "gathered whole"])
def test_both_plans_count_frozen_parameters_and_a_reference_that_follows(mixed_spec, model, frozen):
    """Their weights are in float32, in bfloat16 too, and have no gradients."""
    spec = mixed_spec("grpo", "h200", "roles.actor.dtype=bfloat16", "data.batch=512",
                      "roles.reference.follow={every: 2, mix: 0.5}", *model)
    spec.frozen["actor"] = frozen  # as `freeze` counts it in the files of a model
    solver, planned = counted(spec, "update")
    assert planned["frozen weights"] > 0
    assert solver == of_kinds(planned, "training state", "frozen weights", "weights while computing")
    solver, planned = counted(spec, "reference")
    assert solver == of_kinds(planned, "following weights", "weights while computing")


@pytest.mark.parametrize(("dag", "rollout", "dtype"), [
    ("grpo", "hf", "bfloat16"), ("grpo", "vllm", "bfloat16"), ("sft", "hf", "float32")])
def test_both_plans_count_a_frozen_model_with_adapters(mixed_spec, dag, rollout, dtype):
    """It is whole on each rank that also samples with it by transformers, else divided."""
    learns = () if dag == "grpo" else ("data.train=arithmetic/demonstrations.jsonl",)
    spec = mixed_spec(dag, "h200", f"roles.actor.dtype={dtype}", "data.batch=512", "roles.actor.lora={rank: 16}",
                      *learns)
    spec.run.roles["actor"] = spec.run.roles["actor"].model_copy(update={"rollout": rollout})
    spec.adapters["actor"] = 40_000_000  # as `lora` counts them in the files of a model
    problem = problem_of(spec)
    solver, planned = counted(spec, problem.tasks[-1].name)
    assert solver == of_kinds(planned, "weights", "training state", "weights while computing")
    assert [sync.nbytes for sync in problem.syncs] == [2 * 40_000_000] * (dag == "grpo")


def test_a_model_with_adapters_needs_no_more_than_its_weights():
    """Of a device that has them, the bound is not infinite."""
    task = replace(WORK, kind=TRAIN, engine="fsdp", frozen=WORK.parameters, adapters=10**7)
    full = costs(task).tasks[0].room(FAST)
    just = replace(FAST, memory=FAST.memory * task.parameters * 2.05 / full)
    assert costs(task).tasks[0].ideal([(just, 1)]) < float("inf")
    assert costs(replace(task, frozen=0, adapters=0)).tasks[0].ideal([(just, 1)]) == float("inf")


def test_adapters_alone_are_sent_and_stepped_and_the_model_gets_no_gradients():
    """Two of three passes are left; the optimizer reads and writes 16 bytes of each of 10⁷ parameters. A model that is
    whole on each share is not gathered."""
    task, two = replace(WORK, kind=TRAIN, engine="fsdp"), (Replicas((0,), 1), Replicas((0,), 1))
    adapted = replace(task, frozen=task.parameters, adapters=10**7, undivided=True)
    product = 8 * task.tokens * 2 * task.parameters / 100e12
    saved = costs(task).tasks[0].arithmetic([(FAST, 1)]) - costs(adapted).tasks[0].arithmetic([(FAST, 1)])
    assert saved == pytest.approx(product)
    model = costs(adapted, (replace(FAST, inside=NetworkLink(0.0, 1e9)), SLOW))
    assert model.tasks[0].step(FAST, Strategy(2), 10) == pytest.approx(2 * 16 * 10**7 / 2 / 2e12)
    gathered = model.layout(0, Strategy(2), two, rows=(4, 4)).seconds - \
        model.layout(0, Strategy(1), two[:1], rows=(4,)).seconds
    assert gathered < 8 * 10**7 * (2 * 2 + 4) / 1e9  # where a model's gathers take 8 s


def test_logits_are_of_responses_alone():
    """50,000 × 1,000 of the parameters are the head's: 80 of 100 prompt and 20 response tokens of 8 rows need 2 FLOP
    less for each, and 20 have logits of 16 bytes, in training 34. Recomputed layers are without the head, and logits
    may be made again.
    """
    task, one, head = replace(WORK, prompt=80, response=20, outputs=50_000), Replicas((0,), 1), 50_000 * 1000
    prompts, responses = 8 * 80, 8 * 20
    for changed, passes, bytes_of_logit in (
            (task, 1, 16), (replace(task, kind=TRAIN), 3, 34), (replace(task, kind=TRAIN, recompute=True), 3, 34),
            (replace(task, kind=TRAIN, rescored=True, logit_bytes=64), 4, 64)):
        without = replace(changed, outputs=0, rescored=False)
        of_layers = 4 if changed.recompute else 3 if changed.kind == TRAIN else 1
        everywhere = of_layers * (prompts + responses) * 2 * head / 100e12
        found = seconds(changed, Strategy(1), one) - seconds(without, Strategy(1), one)
        assert found == pytest.approx(passes * responses * 2 * head / 100e12 - everywhere
                                      + responses * bytes_of_logit * 50_000 / 2e12)
        model = costs(changed)
        saved = costs(without).tasks[0].arithmetic([(FAST, 1)]) - model.tasks[0].arithmetic([(FAST, 1)])
        assert saved == pytest.approx(everywhere - passes * responses * 2 * head / 100e12)
        assert model.ideal(0, (1, 0)) <= seconds(changed, Strategy(1), one)


def test_a_prompt_that_is_read_has_logits_of_its_last_token():
    """Of 8 rows of 100 tokens, 8 have logits of 28 bytes; then each of 100 tokens of a response has."""
    task, one, head = replace(WORK, kind=GENERATE, outputs=50_000), Replicas((0,), 1), 50_000 * 1000
    without = replace(task, outputs=0)
    read = [model.tasks[0].batch(0, FAST, Strategy(1), 8 * 100, 100) for model in (costs(task), costs(without))]
    assert 10 * (read[1] - read[0]) == pytest.approx((800 - 8) * 2 * head / 100e12 - 8 * 28 * 50_000 / 2e12)
    drawn = seconds(task, Strategy(1, micro=8), one) - seconds(without, Strategy(1, micro=8), one)
    assert drawn + 10 * (read[1] - read[0]) == pytest.approx(100 * 8 * 28 * 50_000 / 2e12)


def test_embeddings_are_looked_up():
    """They are not multiplied by, nor read for a token: 2 FLOP and 2 bytes less for each of 10⁸ parameters."""
    one, looked_up = Replicas((0,), 1), {"looked_up": 10**8}
    assert seconds(WORK, Strategy(1), one) - seconds(replace(WORK, **looked_up), Strategy(1), one) == pytest.approx(
        8 * 200 * 2 * 10**8 / 100e12)
    sampled = replace(WORK, kind=GENERATE, rows=1, prompt=1)
    for task, saved in ((sampled, 2 * 10**8 / 2e12), (replace(sampled, rows=4000, kv=0), 4000 * 2 * 10**8 / 100e12)):
        plain, found = costs(task), costs(replace(task, **looked_up))
        less = 10 * (plain.tasks[0].decode(0, FAST, 1, task.rows) - found.tasks[0].decode(0, FAST, 1, task.rows))
        assert less == pytest.approx(saved)
        assert found.ideal(0, (1, 0)) < plain.ideal(0, (1, 0))
    assert costs(replace(WORK, **looked_up)).tasks[0].state(Strategy(1)) == costs(WORK).tasks[0].state(Strategy(1))


def test_frozen_parameters_have_no_gradients_to_compute():
    """Their gradient is a third of training's arithmetic."""
    task, one = replace(WORK, kind=TRAIN), (Replicas((0,), 1),)
    frozen = replace(task, frozen=task.parameters // 4)
    product = 8 * task.tokens * 2 * task.parameters / 100e12
    assert seconds(task, Strategy(1), *one) - seconds(frozen, Strategy(1), *one) == pytest.approx(product / 4)
    saved = costs(task).tasks[0].arithmetic([(FAST, 1)]) - costs(frozen).tasks[0].arithmetic([(FAST, 1)])
    assert saved == pytest.approx(product / 4)


def test_generation_reads_weights_and_cache_for_each_token():
    task = replace(WORK, kind=GENERATE, rows=4)
    decode = 100 * (2e9 + 4 * 10 * 500 * 150) / 2e12
    prefill = 4 * 100 * (2e9 + 2 * 10 * 100 * 1000) / 100e12
    assert seconds(task, Strategy(1), Replicas((0,), 1)) == pytest.approx(decode + prefill, rel=1e-3)


def test_rows_that_find_no_place_in_the_cache_wait():
    """A row takes 10 layers × 200 tokens × 5 MB = 10 GB, so 7 rows fit beside the weights."""
    task = replace(WORK, kind=GENERATE, kv=5 * 10**6, rows=7)
    model = costs(task)
    one, two = (model.layout(0, Strategy(1), ONE).seconds,
                costs(replace(task, rows=14)).layout(0, Strategy(1), ONE).seconds)
    assert two == pytest.approx(2 * one)


def test_what_does_not_fit_has_no_layout():
    task = replace(WORK, kind=TRAIN, parameters=5 * 10**9)
    assert costs(task).layout(0, Strategy(1), ONE) is None
    assert costs(task).layout(0, Strategy(1, pp=2), (Replicas((0, 0), 1),)) is not None


def test_swapping_takes_the_way_to_host_memory_and_back():
    for kind, nbytes in ((TRAIN, 2 * 18e9), (INFER, 2e9), (GENERATE, 0)):
        layout = costs(replace(WORK, kind=kind)).layout(0, Strategy(1), ONE)
        assert layout.swap == pytest.approx(nbytes / 25e9)
        assert layout.takes(True) == layout.seconds + layout.swap


def test_experts_are_read_and_held_in_parts():
    task = replace(WORK, experts=8, expert_parameters=8 * 10**8, experts_per_token=2, active=4 * 10**8)
    model = costs(task)
    whole, parts = (model.tasks[0].state(Strategy(4, ep=ep)) for ep in (1, 4))
    assert whole - parts == pytest.approx(0.75 * 8 * 10**8 * 2 / 10)
    assert model.layout(0, Strategy(4, ep=4), (Replicas((0,), 4),)).seconds > \
        4 / 4 * forward(2, replace(task, parameters=task.active))


def test_megatron_divides_experts_by_ep_and_not_by_tp():
    task = replace(WORK, kind=TRAIN, experts=8, expert_parameters=8 * 10**8, experts_per_token=2)
    state = costs(task).tasks[0].state(Strategy(2, tp=4, ep=8))
    assert 10 * state == pytest.approx(2 * 10**8 / 4 * (6 + 12 / 2) + 8 * 10**8 / 8 * (6 + 12))
    sharded = costs(replace(task, engine="fsdp")).tasks[0].state(Strategy(2, tp=4))
    assert 10 * sharded == pytest.approx(10**9 / 4 * 16 / 2)


def test_experts_are_divided_over_the_devices_of_a_stage():
    task = replace(WORK, experts=8, expert_parameters=8 * 10**8, experts_per_token=2)
    assert {strategy.ep for strategy in strategies(task, 2, 4, 1)} == {1, 2, 4, 8}
    assert {strategy.ep for strategy in strategies(task, 1, 4, 1)} == {1, 2, 4}
    assert {strategy.ep for strategy in strategies(replace(task, kind=GENERATE), 2, 4, 1)} == {1}


@pytest.mark.parametrize("kind", [GENERATE, INFER, TRAIN])
def test_nothing_undercuts_the_ideal(kind):
    model = costs(replace(WORK, kind=kind, rows=64))
    ideal = model.tasks[0].ideal([(FAST, 2), (SLOW, 2)])
    layouts = [model.layout(0, Strategy(2, pp=2), arrangement) for arrangement in every((2, 2), 2)]
    assert min(layout.seconds for layout in layouts if layout) >= ideal * (1 - 1e-9)


def test_all_arrangements_of_few_blocks():
    assert set(every((2, 1), 1)) == {(Replicas((0,), 2), Replicas((1,), 1))}
    assert len(list(every((2, 2), 2))) == 4  # 00 and 11, twice 01, 01 and 10, twice 10
    for arrangement in every((2, 2), 2):
        assert sum(kind.count * kind.stages.count(0) for kind in arrangement) == 2


def test_many_blocks_are_dealt_by_share_or_by_stage():
    assert in_rows((5, 3), Strategy(4, pp=2), (0, 1), by_stage=False) == (
        Replicas((0, 0), 2), Replicas((0, 1), 1), Replicas((1, 1), 1))
    assert in_rows((4, 4), Strategy(4, pp=2), (1, 0), by_stage=True) == (Replicas((1, 0), 4),)
    assert in_rows((5, 3), Strategy(2, pp=3), (0, 1), by_stage=False) == (
        Replicas((0, 0, 0), 1), Replicas((0, 0, 1), 1))


def test_a_share_without_a_row_is_no_layout():
    """The slow device takes longer for one row than the fast one for all eight."""
    crawling = replace(SLOW, peak=1e12)
    model = costs(groups=(FAST, crawling))
    assert model.layout(0, Strategy(2), (Replicas((0,), 1), Replicas((1,), 1))) is None
    assert {strategy.dp for strategy in strategies(WORK, 12, 1, 1)} == {8}


def test_micro_batches_of_all_sizes_are_tried():
    assert [strategy.micro for strategy in strategies(replace(WORK, rows=24, micro_tokens=2400), 2, 1, 1)] == \
        [12, 8, 4, 2, 1]


ABROAD = NetworkLink(0.1, 1e7)
THREE = Network(Hardware((FAST, SLOW, replace(FAST, name="third")),
                         ((FAR, ABROAD, FAR), (ABROAD, FAR, ABROAD), (FAR, ABROAD, FAR))))


def at(*groups: int) -> frozenset[int]:
    return frozenset(groups)


def test_rows_stay_where_they_are_and_leave_where_they_are_not_read():
    assert THREE.rows(at(0, 1), at(0, 1)) == NetworkLink(1e-6, 100e9)
    assert THREE.rows(at(0, 1), at(0)) == ABROAD
    assert THREE.rows(at(0), at(0, 2)) == FAR


def test_all_parts_of_trained_weights_get_to_all_who_sample():
    assert THREE.weights(at(0, 1), at(0, 1)) == ABROAD
    assert THREE.weights(at(0, 2), at(0)) == FAR
    assert THREE.weights(at(0), at(0)) == NetworkLink(1e-6, 100e9)


def test_weights_of_one_engine_move_only_if_it_trains_elsewhere():
    tasks = (replace(WORK, name="old"), replace(WORK, name="update", kind=TRAIN))
    problem = Problem(Hardware((FAST, SLOW), ((FAR, ABROAD), (ABROAD, FAR))), tasks, syncs=(Edge(1, 0, 1e7),))
    objective = Objective(problem, Network(problem.hardware))
    for sites, moved in (((at(0), at(0)), 0.0), ((at(0), at(1)), 1.1), ((at(0, 1), at(1)), 1.1)):
        assert objective.seconds(((0, 1),), (1.0, 2.0), sites) == pytest.approx(3.0 + moved)


@pytest.mark.parametrize(("grouping", "apart", "in_step"), [
    (((0, 2), (1,), (3,)), 9.0, 3 + 4 + 6.0),  # what trains waits for what infers, which waits for what samples
    (((0, 2), (1, 3)), 9.0, 3 + 4 + 6.0),  # while another role trains, the next iteration begins
    (((0, 1, 2), (3,)), 13.0, 13.0),  # it waits for nothing
    (((0,), (1,), (2, 3)), 8.0, 8.0),  # what samples does so ahead
    (((0, 1, 2, 3),), 15.0, 15.0)])
def test_ranks_that_sample_and_train_are_in_step_with_others(grouping, apart, in_step):
    """Nothing is sent here; the tasks take 3, 4, 6 and 2 seconds."""
    tasks = tuple(replace(WORK, name=kind + role, kind=kind, role=role) for kind, role in (
        (GENERATE, "actor"), (INFER, "reference"), (TRAIN, "actor"), (TRAIN, "critic")))
    problem = Problem(Hardware((FAST,), ((FAR,),)), tasks, (Edge(0, 1, 0), Edge(1, 2, 0), Edge(0, 3, 0)),
                      (Edge(2, 0, 0),), has_samplers=True)
    objective, durations = Objective(problem, Network(problem.hardware)), (3.0, 4.0, 6.0, 2.0)
    assert objective.seconds(grouping, durations) == apart
    assert objective.are_in_step(grouping) == (len(grouping) > 1 and grouping[0] != (0,))
    runs = Objective(replace(problem, freedom=replace(problem.freedom, in_step=True)), Network(problem.hardware))
    assert runs.seconds(grouping, durations) == pytest.approx(in_step)
