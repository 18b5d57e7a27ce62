"""The memory estimate by hand, on a model small enough to count."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness import model_folder
from planning import DIAMOND, RUN, node, refused

from distflow.config.cluster import Cluster
from distflow.config.load import load
from distflow.config.run import Model, RoleRun
from distflow.config.sizes import Attention, Shape, shape_of, shape_of_embedded
from distflow.errors import InvalidInput
from distflow.plan import SAMPLING, TRAINING, MemoryItem
from planners import plan
from planners.memory import GIB, KEPT_WHOLE, LOGITS_AT_ONCE, SMALL, _cache, activation_bytes, needed

CONFIG = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 10, "num_attention_heads": 2,
          "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 16, "tie_word_embeddings": True,
          "max_position_embeddings": 99}
# queries and outputs 8 × 8 each, keys and values 8 × 4 each; gate, up and down 8 × 16 each; two norms of 8
LAYER = 2 * 64 + 2 * 32 + 3 * 128 + 2 * 8


MODEL = {"architecture": "qwen3", "layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1}
PARAMETERS = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192 + 2 * 64 + 2 * 32) + 512 * 64 + 64
KEPT = 2 * (4 + 4 + 4) * 64 + (64 + 32) * (4 + 4) + 4 * (3 * 64 + 2 * 32) + 4 * 4 * 192
"""Bytes of a token in a layer of the embedded model: norms, also of heads, attention, gate and product."""
KEPT_FROZEN = KEPT - 2 * 4 * 64 - (64 + 32) * 4  # norms that are not trained keep no input to be scaled


def test_parameters_are_counted_by_hand():
    assert shape_of(CONFIG) == Shape(2 * LAYER + 10 * 8 + 8, 2, 4, 10, 8, 99, heads=2, widening=16)
    assert shape_of({**CONFIG, "tie_word_embeddings": False}).parameters == 2 * LAYER + 2 * 10 * 8 + 8
    assert shape_of({**CONFIG, "num_key_value_heads": None, "head_dim": None}).kv_width == 8


def test_the_shape_of_an_embedded_model_is_that_of_its_configuration():
    from workers.engines.embedded import build_model, build_tokenizer

    sizes = {"architecture": "qwen2", "layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1}
    made = build_model(len(build_tokenizer(["one"] * 3)), 0, **sizes)
    counted, estimated = shape_of(made.config.to_dict()), shape_of_embedded(Model(**sizes))
    assert counted.parameters == sum(weight.numel() for weight in made.parameters())
    assert estimated.parameters - counted.parameters == (512 - counted.vocabulary) * 64
    assert (estimated.layers, estimated.hidden) == (counted.layers, counted.hidden) == (2, 64)
    assert estimated.kv_width == counted.kv_width == 32


def items_of(plan) -> dict[str, int]:
    return {item.name: item.bytes for item in plan.memory}


def test_every_tenant_by_hand(plan_of):
    generation, parameters = {"max_new_tokens": 50, "batch_rows": 7}, PARAMETERS
    roles = {"actor": {"model": MODEL, "micro_batch_tokens": 100, "generation": generation}}
    nodes = {**DIAMOND, "judge": {"role": "critic", "type": "MODEL_INFERENCE", "function": "judge",
                                  "dependencies": ["sample"]}}
    plan = plan_of(nodes, {"critic": {"copy_of": "actor"}}, ranks=4, roles=roles)
    assert items_of(plan) == {
        "actor: training state": parameters * 16 // 4,
        "actor: weights while computing": parameters * (4 + 4),
        "actor: gradients counted twice": -parameters * 4 // 4,
        "actor: activations": 100 * (2 * KEPT + 12 * 512),
        "actor: rollout weights": parameters * 4,
        "actor: rollout cache": 6 * (80 + 20) * 2 * 2 * 32 * 4,
        "critic: weights": parameters * 4 // 4,
        "critic: weights while computing": parameters * 4,
        "critic: activations": 100 * (KEPT + 12 * 512),
    }
    assert [item.bytes for item in plan.memory] == sorted(items_of(plan).values(), reverse=True)
    halved = plan_of(nodes, {"critic": {"copy_of": "actor"}}, roles={"actor": {**roles["actor"], "dtype": "bfloat16"}})
    assert items_of(halved)["actor: rollout cache"] * 2 == 7 * (80 + 20) * 2 * 2 * 32 * 4
    assert items_of(halved)["actor: training state"] == parameters * 16 // 2


@pytest.mark.parametrize(("said", "asked", "width"), [
    ({"dtype": "bfloat16"}, "auto", 2), ({"torch_dtype": "float16"}, "auto", 2),
    ({"torch_dtype": "float32"}, "auto", 4), ({}, "auto", 4),
    ({"dtype": "bfloat16"}, "float32", 4), ({"dtype": "float32"}, "bfloat16", 2),
])
def test_auto_is_what_the_models_folder_says(plan_of, tmp_path, said, asked, width):
    roles = {"actor": {"model": str(model_folder(tmp_path / "model", {**CONFIG, **said})), "dtype": asked}}
    found = items_of(plan_of(DIAMOND, roles=roles))
    parameters = shape_of(CONFIG).parameters
    assert found["actor: rollout weights"] == parameters * width
    assert found["actor: weights while computing"] == parameters * (width + 4)
    assert found["actor: training state"] == parameters * 16 // 2


def test_adapters_are_trained_and_their_base_lies_once(plan_of):
    actor = {"model": MODEL, "lora": {"rank": 4, "targets": ["q_proj"]}, "micro_batch_tokens": 100,
             "generation": {"max_new_tokens": 50, "batch_rows": 7}}
    parameters, adapters = PARAMETERS, 2 * 4 * (64 + 64)
    judge = {"role": "critic", "type": "MODEL_INFERENCE", "function": "judge", "dependencies": ["sample"]}
    plan = plan_of({**DIAMOND, "judge": judge}, {"critic": {"copy_of": "actor"}}, ranks=4, roles={"actor": actor})
    assert items_of(plan) == {
        "actor: training state": adapters * 16 // 4,
        "actor: weights": parameters * 4,
        "actor: weights while computing": adapters * (4 + 4),
        "actor: activations": 100 * (2 * KEPT_FROZEN + 12 * 512),
        "actor: rollout adapters": adapters * 4,
        "actor: rollout cache": 6 * (80 + 20) * 2 * 2 * 32 * 4,
        "critic: activations": 100 * (KEPT + 12 * 512)}
    alone = items_of(plan_of({}, ranks=4, roles={"actor": actor}))
    assert alone["actor: weights"] == parameters * 4 // 4
    assert alone["actor: weights while computing"] == parameters * 4 + adapters * (4 + 4)
    assert "actor: rollout adapters" not in alone


def test_splits_divide_what_they_should(plan_of):
    roles = {"actor": {"model": {**MODEL, "kv_heads": 2}, "micro_batch_tokens": 100}}
    whole, split = (items_of(plan_of(DIAMOND, ranks=4, roles=roles, layouts=layouts))
                    for layouts in ({}, {"learn": {"tp": 2}}))
    assert split["actor: training state"] == whole["actor: training state"]  # tp 2 × dp 2 instead of dp 4
    assert split["actor: weights while computing"] * 2 == whole["actor: weights while computing"]
    assert split["actor: rollout weights"] == whole["actor: rollout weights"]
    norms = 2 * (4 + 4 + 4) * 64
    assert split["actor: activations"] == 100 * (2 * (norms + (KEPT + 16 * 32 - norms) // 2) + 12 * 256)


def test_experts_count_and_are_cut(plan_of, engines):
    model = {"architecture": "qwen3_moe", "layers": 2, "hidden": 64, "heads": 2, "kv_heads": 2}
    shape = shape_of_embedded(Model(**model))
    assert shape.expert_parameters == 2 * 8 * 3 * 64 * (3 * 64 // 2)
    dense = shape.parameters - shape.expert_parameters
    fsdp, megatron = (items_of(plan_of(DIAMOND, ranks=4, roles={"actor": {"model": model, "engine": engine}},
                                       layouts={"learn": split}))["actor: training state"]
                      for engine, split in (("fsdp", {"tp": 2}), ("megatron", {"ep": 2})))
    assert fsdp == (dense // 2 + shape.expert_parameters // 2) * 16 // 2
    assert megatron == dense * (8 + 8 // 4) + shape.expert_parameters // 2 * (8 + 8 // 2)
    both = items_of(plan_of(DIAMOND, ranks=4, roles={"actor": {"model": model, "engine": "megatron"}},
                            layouts={"learn": {"tp": 2, "ep": 4}}))["actor: training state"]
    assert both == dense // 2 * (8 + 8 // 2) + shape.expert_parameters // 4 * (8 + 8)


def test_what_is_recomputed_or_made_in_pieces_is_not_kept(plan_of):
    from workers.engines import fsdp
    from workers.engines.vocabulary import PIECE

    assert PIECE * 8 == LOGITS_AT_ONCE
    assert fsdp.KEPT_WHOLE == KEPT_WHOLE
    model = {"architecture": "qwen3", "layers": 4, "hidden": 64, "heads": 2, "kv_heads": 1}
    roles = {"actor": {"model": model, "micro_batch_tokens": 1_000_000, "recompute": True, "offload": True}}
    found = items_of(plan_of(DIAMOND, roles=roles))
    assert found["actor: activations"] == 1_000_000 * (KEPT + 4 * 4 * 64) + 12 * LOGITS_AT_ONCE
    assert "actor: training state" not in found


def test_a_role_that_swaps_has_one_phase_at_a_time(plan_of):
    roles = {"actor": {"model": {"architecture": "qwen3"}}}
    plain, swapped = (plan_of(DIAMOND, roles={"actor": {**roles["actor"], "swap": swap}}) for swap in (False, True))
    assert items_of(plain) == items_of(swapped)
    sampling = sum(count for name, count in items_of(plain).items() if ": rollout" in name)
    training = sum(items_of(plain).values()) - sampling
    assert needed(swapped.memory) == max(sampling, training)
    kept = items_of(plain)["actor: training state"] + items_of(plain)["actor: rollout weights"]
    while_sampling = items_of(plain)["actor: rollout cache"]
    assert needed(plain.memory) == kept + max(while_sampling, training - items_of(plain)["actor: training state"])


def test_a_frozen_role_that_swaps_has_its_weights_while_it_computes(plan_of):
    nodes = {**DIAMOND, "judged": node("judge", "sample", role="reference")}
    plain, swapped = (plan_of(nodes, {"reference": {"copy_of": "actor"}}, roles={
        "actor": {"model": {"architecture": "qwen3"}},
        "reference": {"model": {"architecture": "qwen3"}, "swap": swap, "micro_batch_tokens": 9}})
        for swap in (False, True))
    weights = items_of(plain)["reference: weights"]
    assert items_of(swapped)["reference: swapped weights"] == weights > 0
    assert needed(swapped.memory) == needed(plain.memory) - weights, "the update is the largest task"


def test_the_largest_task_of_a_rank_that_trains_counts_and_all_of_one_that_samples():
    def item(name: str, size: int, phase: str = "") -> MemoryItem:
        return MemoryItem(name, size, "", phase)

    caches = item("a: rollout cache", 7, SAMPLING), item("b: rollout cache", 5, SAMPLING)
    assert needed([item("a: rollout weights", 100), *caches]) == 112
    trained = item("a: training state", 1000), item("a: activations", 20, TRAINING)
    reference = item("r: weights", 300), item("r: activations", 25, TRAINING)
    assert needed([*caches, *trained, *reference]) == 1325
    swapped = item("a: training state", 1000, TRAINING), item("a: rollout weights", 990, SAMPLING)
    assert needed([*swapped, caches[0], trained[1], *reference]) == 1000 + 300 + 25
    assert needed([*swapped, item("a: rollout cache", 50, SAMPLING), trained[1], *reference]) == 990 + 300 + 50


@pytest.fixture
def paged(spec_of, engines):
    """`paged(rollout, memory_gib, generation, layouts, **model)`: the plan of 2 ranks where every engine is there."""

    def make(rollout: str, memory_gib: float | None, generation: dict, layouts: dict | None = None,
             lora: dict | None = None, **model):
        actor = {"model": {"architecture": "qwen3", **model}, "rollout": rollout, "micro_batch_tokens": 100,
                 "lora": lora, "generation": {"batch_rows": 1024, "max_new_tokens": 8192, **generation}}
        spec = spec_of(DIAMOND, roles={"actor": actor}, layouts=layouts or {}, data={**RUN["data"], "batch": 1024})
        spec.cluster = Cluster(memory_gib=memory_gib)
        return plan(spec, 2)

    return make


def test_vllm_has_a_base_of_its_own_beside_that_of_adapters(paged):
    whole, adapted = (items_of(paged("vllm", None, {}, lora=lora)) for lora in (None, {"rank": 4}))
    assert adapted["actor: rollout weights"] == whole["actor: rollout weights"]
    assert adapted["actor: weights"] == whole["actor: rollout weights"] // 2  # sharded over 2 ranks


@pytest.mark.parametrize("rollout", ["vllm", "sglang"])
def test_a_cache_in_pages_has_a_share_of_the_memory(paged, rollout):
    found = paged(rollout, 4, {"memory_share": 0.25})
    assert items_of(found)["actor: rollout engine"] == GIB
    assert not {"actor: rollout weights", "actor: rollout cache"} & set(items_of(found))
    assert any(item.formula == "memory_share 0.25 × 4 GiB, weights and cache" for item in found.memory)
    with pytest.raises(InvalidInput, match="actor: rollout cache"):
        paged("hf", 4, {})


def test_without_a_clusters_memory_there_is_no_share(paged):
    parameters = shape_of_embedded(Model(architecture="qwen3")).parameters
    found = items_of(paged("vllm", None, {}))
    assert found["actor: rollout weights"] == parameters * 4
    assert not {"actor: rollout engine", "actor: rollout cache"} & set(found)


def test_weights_beyond_their_share_are_told_with_it(paged):
    weights = shape_of_embedded(Model(architecture="qwen3", hidden=896)).parameters * 4
    enough, little = {"memory_share": 0.75}, {"memory_share": 0.6 * weights / GIB}
    with refused("run.yaml", "the `actor: rollout weights` are ", "(roles.actor.generation.memory_share)",
                 "Raise  roles.actor.generation.memory_share  , or split the model over more ranks", mistakes=1):
        paged("vllm", 1, little, hidden=896)
    assert "actor: rollout engine" in items_of(paged("vllm", 2, enough, hidden=896))
    assert "actor: rollout engine" in items_of(paged("vllm", 1, little, {"sample": {"tp": 2}}, hidden=896))


@pytest.mark.parametrize(("mib", "remedy"), [
    (20, "roles.actor.swap: true"),  # the 11 MiB of training fit when the engine is out
    (10, "Lower  roles.actor.generation.memory_share"),
])
def test_an_engine_that_fills_a_rank_has_remedies(paged, mib, remedy):
    with refused("The largest memory item is `actor: rollout engine`", remedy, mistakes=1):
        paged("vllm", mib / 1024, {"memory_share": 0.9})


def test_a_large_model_is_gathered_by_layer_with_its_gradients(plan_of):
    model = {"architecture": "qwen3", "layers": 40, "hidden": 512, "heads": 4, "kv_heads": 4}
    actor = {"model": model, "micro_batch_tokens": 10**6}
    found = items_of(plan_of(DIAMOND, ranks=2, roles={"actor": actor}))
    outside, parameters = 512 * 512, shape_of_embedded(Model(**model)).parameters
    assert parameters > SMALL
    assert "actor: gradients counted twice" not in found
    at_once = outside + 2 * -(-(parameters - outside) // 40)
    assert found["actor: weights while computing"] == (4 + 4) * at_once + 4 * (parameters - at_once)


def test_what_a_layer_keeps_counts_its_experts_and_its_grouped_heads():
    seven = shape_of({"hidden_size": 3584, "num_hidden_layers": 28, "vocab_size": 152064, "num_attention_heads": 28,
                      "num_key_value_heads": 4, "intermediate_size": 18944})
    norms, attention, widening = 2 * (4 + 4 + 4) * 3584, 4 * (3 * 3584 + 2 * 512), 4 * 4 * 18944
    assert activation_bytes(seven, 4, fused=True) == activation_bytes(seven, 4) == norms + attention + widening
    norms, attention, widening = 2 * (2 + 2) * 3584, 2 * (2 * 3584 + 2 * 512), 2 * 4 * 18944  # by fused kernels
    assert activation_bytes(seven, 2, fused=True) == norms + attention + widening
    experts = shape_of_embedded(Model(architecture="qwen3_moe", hidden=64, heads=2, kv_heads=1))
    assert activation_bytes(experts, 4) == KEPT  # two experts are as wide as a dense layer


def test_a_rank_without_rows_of_a_role_has_nothing_of_it(plan_of):
    """The shards of a model are those of the ranks that have it, and the fullest rank counts."""
    judged = {"role": "judge", "type": "MODEL_INFERENCE", "function": "judge", "dependencies": ["sample"]}
    nodes = {**DIAMOND, "judged": judged}
    settings = {"actor": {"model": MODEL}, "judge": {"model": {**MODEL, "layers": 1}}}

    def made(**rows: list[int]) -> dict[str, int]:
        layouts = {node: {"rows": share} for node, share in rows.items()}
        return items_of(plan_of(nodes, {"judge": {}}, ranks=4, roles=settings, layouts=layouts))

    everywhere, two = made(), made(learn=[1, 1, 0, 0], left=[1, 0, 0, 0])
    name = "actor: training state"
    assert two[name] == pytest.approx(2 * everywhere[name], abs=2)
    assert two["judge: weights"] == everywhere["judge: weights"]
    apart = made(learn=[1, 1, 0, 0], judged=[0, 0, 0, 1])
    assert not any(item.startswith("judge") for item in apart), "no rank has both, and the actor is larger"
    assert apart["actor: rollout weights"] == everywhere["actor: rollout weights"]


def test_a_cache_has_the_rows_that_a_rank_samples(plan_of, tmp_path):
    """Two of each of 10 prompts, or those of a validation; all of a step where other ranks may leave them theirs."""
    def rows_of(ranks: int = 2, batch_rows: int = 512, **run) -> int:
        generation = {"max_new_tokens": 50, "batch_rows": batch_rows}
        plan = plan_of(DIAMOND, ranks=ranks, roles={"actor": {"model": {"architecture": "qwen3"},
                                                              "generation": generation}}, **run)
        cache, = (item for group in (plan, *(each.plan for each in plan.groups)) for item in group.memory
                  if item.name == "actor: rollout cache")
        rows = cache.bytes // of_a_row
        asked = f"min(batch_rows {batch_rows}, {rows} of a step or validation) rows ×"
        assert cache.formula.startswith(f"{rows} rows ×" if rows == batch_rows else asked)
        return rows

    of_a_row = (80 + 20) * 3 * 2 * 64 * 4
    assert [rows_of(ranks) for ranks in (1, 2, 3)] == [20, 10, 8]
    assert rows_of(1, batch_rows=7) == 7
    assert rows_of(3, layouts={"sample": {"rows": [1, 3, 1]}}) == 12
    (tmp_path / "held.jsonl").write_text('{"question": "?", "answer": "!"}\n' * 59)
    held = {"data": {"held": str(tmp_path / "held.jsonl")}}
    assert rows_of(validation=held) == 30
    assert rows_of(validation={**held, "samples": 4, "temperature": 1.0}) == 120
    assert rows_of(validation={"data": {"held": str(tmp_path)}}) == 512  # a folder does not say
    assert rows_of(mode="async", staleness=2) == 60


def test_caches_are_of_the_kinds_of_layers(plan_of):
    """Slots keep rows whole; a model's own cache, 8 tokens of a window and a state as it is."""
    windows = (Attention(1, 64, 32), Attention(3, 64, 16, 8))
    shape = Shape(1000, 4, 16, 10, 64, attention=windows, state=10)
    assert shape.cached == 32 + 3 * 16
    assert shape.forward_flops(2, 3, 100) == 2 * (1000 - 640) * 5 + 4 * 64 * (100 + 3 * 40) + 4 * 10 * 5 + 2 * 640 * 3
    settings, spec = RoleRun(), load("grpo", overrides=["data.max_prompt_tokens=60"])
    slots, own = (_cache("cache", spec, settings, 20, each, 1, 2, 5)
                  for each in (shape, replace(shape, plain="mixes tokens otherwise")))
    assert slots.bytes == 5 * (100 * (32 + 3 * 16) * 2 + 40)
    assert own.bytes == 5 * ((80 * 32 + 8 * 3 * 16) * 2 + 40)
    assert own.formula == "min(batch_rows 512, 5 of a step or validation) rows × (80 tokens × 1 layers × 64 B + " \
                          "8 tokens × 3 layers × 32 B + 40 B of state)"
