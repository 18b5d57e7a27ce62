"""The optimizer step does not depend on micro-batches; its schedule and its state are what they should be."""

import copy
from typing import Any

import pytest
import torch
from columns import random_rows, uneven_rows
from ranks import run_ranks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from training import built, engine_of, layered, named_mesh, plain_logprobs, share_of
from transformers import AutoModelForCausalLM, CohereConfig, GptOssConfig

from distflow.config.dag import Follow, Role
from distflow.config.run import Lora, RoleRun
from distflow.data.batch import Batch
from distflow.errors import EngineError
from workers.engines import fsdp
from workers.engines.fsdp import FSDPEngine, decays
from workers.engines.trainer import schedule, schedule_notes


@pytest.fixture
def batch():
    prompts = random_rows(6, 3, 8).select(torch.arange(3).repeat_interleave(3))
    return Batch(torch.arange(9), {"prompts": prompts, "responses": random_rows(4, 0, 2, 5, 3, 1, 7, 2, 2, seed=1)})


def engine(model, mesh, **settings) -> FSDPEngine:
    return FSDPEngine(model, RoleRun(learning_rate=1e-2, **settings), mesh, pad_token=0, steps=10,
                      role=Role(trained=True))


def plain(logprobs, entropy, micro):
    return -logprobs.sum() / 100


def test_weight_decay_spares_biases_and_norms_that_are_stacked():
    """As gpt-oss stacks biases of experts, and Cohere norms of heads."""
    sizes = {"vocab_size": 270, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    decaying = {type(config): {name for name, weight in AutoModelForCausalLM.from_config(config).named_parameters()
                               if decays(name, weight)}
                for config in (GptOssConfig(**sizes, **experts), CohereConfig(**sizes, use_qk_norm=True))}
    attention = {f"model.layers.0.self_attn.{letter}_proj.weight" for letter in "qkvo"} | {"model.embed_tokens.weight"}
    assert decaying[GptOssConfig] == attention | {
        "lm_head.weight", "model.layers.0.mlp.router.weight", "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.down_proj"}
    assert decaying[CohereConfig] == attention | {
        f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}


def test_zero_rows_take_part_and_change_nothing(model, mesh, batch):
    one = engine(model, mesh)
    before = {name: shard.full_tensor().clone() for name, shard in one.shards().items()}
    empty = batch.slice(0, 0)
    report = one.update(empty, plain, 1.0, 0)
    assert report["grad_norm"] == 0.0
    assert len(one.logprobs(empty["prompts"], empty["responses"], 1.0).values) == 0
    for name, shard in one.shards().items():
        assert torch.equal(before[name], shard.full_tensor()), name


def test_an_update_tells_how_many_weights_it_moves_and_whether_its_gradient_stays(model, mesh, batch):
    def rounded(*_):
        for shard in one.shards().values():
            shard.data.copy_(shard.data.to(torch.bfloat16))

    one = engine(model, mesh)
    assert one.update(batch, plain, 1.0, 0)["gradient/moved"] > 0.8
    rounded()
    one.optimizer.register_step_post_hook(rounded)
    one.accumulate(batch, plain, 1.0)
    assert one.step(1, 1e-7)["gradient/moved"] < 0.1
    assert one.update(batch, plain, 1.0, 2)["gradient/kept"] == 0
    vars(one)["zero_grad"] = lambda: None
    assert one.update(batch, plain, 1.0, 3)["gradient/kept"] == 1


def test_a_gradient_that_is_not_finite_leaves_no_trace(model, mesh, batch):
    one = engine(model, mesh)
    before = {name: shard.full_tensor().clone() for name, shard in one.shards().items()}
    with pytest.raises(EngineError, match="gradient norm of optimizer step 1 is nan"):
        one.update(batch, lambda logprobs, entropy, micro: plain(logprobs, entropy, micro) * torch.nan, 1.0, 0)
    for name, shard in one.shards().items():
        assert torch.equal(before[name], shard.full_tensor()), name
    assert one.update(batch, plain, 1.0, 0)["grad_norm"] > 0


def test_a_column_that_is_not_finite_is_named(model, mesh, batch):
    one, advantages = engine(model, mesh), torch.zeros(len(batch))
    advantages[1] = torch.nan
    spoilt = Batch(batch.ids, {**batch.columns, "advantages": advantages})
    with pytest.raises(EngineError, match=r"`advantages` is nan in 1 of this rank's \d+ rows"):
        one.update(spoilt, lambda logprobs, entropy, micro: plain(logprobs, entropy, micro) * torch.nan, 1.0, 0)


def test_a_frozen_role_refuses_to_train(model, mesh, batch):
    frozen = FSDPEngine(model, RoleRun(), mesh, pad_token=0, steps=1, role=Role())
    with pytest.raises(ValueError, match="frozen"):
        frozen.update(batch, plain, 1.0, 0)


@pytest.mark.parametrize(("kind", "steps", "warmup", "least", "expected"), [
    ("constant", 10, 2, 0.0, {0: 0.5, 1: 1.0, 6: 1.0}), ("linear", 10, 2, 0.0, {0: 0.5, 1: 1.0, 2: 1.0, 6: 0.5}),
    ("cosine", 10, 2, 0.0, {0: 0.5, 2: 1.0, 6: 0.5}), ("linear", 11, 2, 0.1, {4: 0.775, 6: 0.55, 10: 0.1}),
    ("cosine", 11, 2, 0.1, {4: 0.8682, 6: 0.55, 10: 0.1}), ("linear", 1, 0, 0.1, {0: 1.0}),
    ("linear", 2, 0, 0.1, {0: 1.0, 1: 0.1}), ("linear", 3, 2, 0.1, {0: 0.5, 1: 1.0, 2: 1.0}),
    ("linear", 2, 5, 0.1, {0: 0.2, 1: 0.4}), ("linear", 2, 0, 0.0, {0: 1.0, 1: 0.5}), ("cosine", 2, 0, 0.0, {1: 0.5})])
def test_schedule_warms_up_and_reaches_its_minimum_in_the_last_step(kind, steps, warmup, least, expected):
    """Without a minimum the last step trains too."""
    settings = RoleRun(schedule=kind, warmup_steps=warmup, learning_rate=1e-5, min_learning_rate=1e-5 * least)
    assert {step: schedule(settings, step, steps) for step in expected} == pytest.approx(expected, abs=1e-4)


CONSTANT, COSINE = RoleRun(learning_rate=1e-5), RoleRun(schedule="cosine", learning_rate=1e-5, min_learning_rate=1e-6)
LINEAR, LATER_WARM = (CONSTANT.model_copy(update=more) for more in ({"schedule": "linear"}, {"warmup_steps": 3}))
LOW, HIGH = (RoleRun(lora=Lora(rank=4, alpha=alpha)) for alpha in (32, 64))


@pytest.mark.parametrize(("before", "after", "steps", "said"), [
    (COSINE, COSINE, (4, 9),
     "the learning rate of role `actor` was 1e-06 in step 4 and is 5.5e-06 in step 5: its cosine schedule now lasts "
     "9 steps, counted from the run's first one. It was cosine, of 4 steps. To keep the rate as it was:  "
     "--set roles.actor.schedule=constant --set roles.actor.min_learning_rate=0 --set roles.actor.learning_rate=1e-06"),
    (COSINE, COSINE, (9, 9), ""), (CONSTANT, CONSTANT, (4, 9), ""), (CONSTANT, COSINE, (9, 9), "was constant, of 9 st"),
    (CONSTANT, LINEAR, (4, 8), "was 1e-05 in step 4 and is 5e-06 in step 5: its linear schedule now lasts 8 steps"),
    (CONSTANT, CONSTANT.model_copy(update={"warmup_steps": 50}), (9, 9),
     "is 1e-06 in step 5: `warmup_steps` is 50 and was 0, counted from the run's first step. To keep the rate"),
    (COSINE, COSINE.model_copy(update={"min_learning_rate": 5e-6}), (9, 9),
     ": `min_learning_rate` is 5e-06 and was 1e-06. To keep"),
    (CONSTANT, LATER_WARM, (4, 8), "has no warm-up from here: its 3 steps are counted from the run's first"),
    (CONSTANT, CONSTANT.model_copy(update={"learning_rate": 1e-6}), (4, 8), ""),
    (LOW, HIGH, (4, 4), "is 64 and was 32: what its adapters have learned so far counts 2 times as much")])
def test_notes_of_a_resume_say_what_other_settings_do_to_schedules_and_adapters(before, after, steps, said):
    notes = [*schedule_notes("actor", before, after, 4, steps)]
    assert len(notes) == bool(said)
    assert said in "".join(notes)


def whole_gradients(small: int) -> int:
    """Numbers in gradients that this rank holds as a whole when the second micro-batch begins."""
    found = []
    mesh = named_mesh(dp=2)
    one = engine_of(mesh, {}, small, micro_batch_tokens=1)

    def look(logprobs, *_):
        groups = [each._get_fsdp_state()._fsdp_param_group for each in one.policy.modules()
                  if isinstance(each, FSDPModule)]
        gradients = [each for group in groups if group for weight in group.fsdp_params
                     for each in (weight.unsharded_accumulated_grad, weight.unsharded_param.grad)]
        found.append(sum(each.numel() for each in gradients if each is not None))
        return -logprobs.sum()

    one.update(share_of(mesh), look, 1.0, 0)
    return found[1]


def test_ranks_add_up_whole_gradients_of_small_models_alone():
    parameters = sum(parameter.numel() for parameter in built().parameters())
    assert run_ranks(2, whole_gradients, 64_000_000) == [parameters] * 2
    assert run_ranks(2, whole_gradients, 0) == [0] * 2


@pytest.mark.parametrize("parameters_gathered_by", ["layer", "model"])
def test_a_frozen_model_is_held_in_the_dtype_that_it_computes_in(model, mesh, batch, monkeypatch,
                                                                 parameters_gathered_by):
    """The same log-probabilities as from float32 weights, to the bit: who trains has them rounded as they are gathered.
    """
    if parameters_gathered_by == "layer":
        monkeypatch.setattr(fsdp, "_SMALL", 0)
    exact = engine(copy.deepcopy(model), mesh, dtype="bfloat16")
    frozen = FSDPEngine(model, RoleRun(dtype="bfloat16"), mesh, pad_token=0, steps=10, role=Role())
    found, expected = (one.logprobs(batch["prompts"], batch["responses"], 1.0).values for one in (frozen, exact))
    assert torch.equal(found, expected)
    sizes = [sum(each.to_local().nbytes for each in one.policy.parameters()) for one in (frozen, exact)]
    assert 2 * sizes[0] == sizes[1]


def follow_on_shards() -> dict[str, list[float]]:
    """The weights of a model that has followed another one three times by a hundredth, and where they should be."""
    mesh, found = named_mesh(dp=2), {}
    start, aim = built(), built()
    with torch.no_grad():
        for parameter in aim.parameters():
            parameter.add_(torch.linspace(0.5, 1.5, parameter.numel()).view_as(parameter) * 0.01)
    wanted = {name: tensor.detach().clone() for name, tensor in start.named_parameters()}
    goal = {name: tensor.detach().clone() for name, tensor in aim.named_parameters()}
    settings = RoleRun(dtype="bfloat16")
    trained = FSDPEngine(aim, settings, mesh, pad_token=0, steps=1, role=Role(trained=True))
    following = FSDPEngine(start, settings, mesh, pad_token=0, steps=1,
                           role=Role(copy_of="actor", follow=Follow(every=1, mix=0.5)))
    for _ in range(3):
        following.follow(trained, 0.01)
        wanted = {name: torch.lerp(tensor, goal[name], 0.01) for name, tensor in wanted.items()}
    for name, tensor in following.export():
        found[name] = float((tensor - wanted[name]).abs().max())
    assert set(found) == set(wanted)
    return {"differences": [*found.values()], "version": [following.version],
            "optimizer": ["optimizer" in following.state_dict()]}


def test_a_model_follows_another_in_float32_on_shards():
    for result in run_ranks(2, follow_on_shards):
        assert result == {"differences": [0.0] * len(result["differences"]), "version": [3], "optimizer": [False]}


def train_partly(small: int, tp: int) -> dict[str, Any]:
    """Two updates of a model of which some parameters are frozen, on shards gathered as a whole or by layer."""
    mesh = named_mesh(dp=2 // tp, tp=tp)
    start = {name: tensor.detach().clone() for name, tensor in built().named_parameters()}
    settings = RoleRun(learning_rate=1e-2, freeze=["embed_tokens.*", "layers.0.*", "layers.1.self_attn.*_norm.weight"])
    with layered(small):
        one = FSDPEngine(built(), settings, mesh, pad_token=0, steps=2, role=Role(trained=True))
        norms = [one.update(share_of(mesh), plain, 1.0, step)["grad_norm"] for step in range(2)]
    moved = {name for name, tensor in one.export() if not torch.equal(tensor, start[name])}
    state, exported = one.state_dict(), {name for name, _ in one.export()}
    assert exported == set(start)
    assert set(state["model"]) == set(state["optimizer"]) == moved
    one.load_state_dict(state)
    assert not FSDPEngine(built(), settings, mesh, pad_token=0, steps=2, role=Role()).shards()
    return {"moved": sorted(moved), "norms": norms}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("small", [64_000_000, 1])
def test_frozen_parameters_stay_and_have_no_state(small, tp):
    first, second = run_ranks(2, train_partly, small, tp)
    names = [name for name, _ in built().named_parameters()]
    kept = [name for name in names if "embed_tokens" in name or "layers.0." in name or "_norm.weight" in name]
    assert len(kept) == 1 + 11 + 2
    assert first["moved"] == second["moved"] == sorted(set(names) - set(kept))
    model = built()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in kept)
    (-plain_logprobs(model, uneven_rows()).sum() / 100).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    assert first["norms"][0] == second["norms"][0] == pytest.approx(norm, rel=1e-4)


def interrupted() -> list[bool]:
    """Whether each weight is a shard after a loss has failed."""
    engine = engine_of(named_mesh(), small=64_000_000)
    with pytest.raises(ZeroDivisionError):
        engine.accumulate(uneven_rows(), lambda *outputs: 1 / 0, 1.0)
    return [isinstance(shard, DTensor) for shard in engine.shards().values()]


def test_weights_are_shards_again_after_a_loss_that_fails():
    assert all(run_ranks(1, interrupted)[0])
