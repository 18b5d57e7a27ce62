"""Low-rank adapters: what is trained, moved, shared and saved, against peft's own model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from columns import uneven_rows
from peft import LoraConfig, PeftModel, get_peft_model
from ranks import run_ranks
from reported import reported
from torch.distributed.tensor import DTensor
from training import layered, loss_of, plain_logprobs, role_of
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from distflow.config.dag import Role
from distflow.config.load import load_for_planning
from distflow.config.run import Lora, RoleRun
from distflow.errors import EngineError
from workers.engines import fsdp
from workers.engines.adapters import BaseEngine, attach, frozen_parameters, merge_adapters
from workers.engines.embedded import build_model, build_tokenizer
from workers.engines.value import with_value_head

STEPS, LORA, RATE = 3, Lora(rank=4, alpha=8, targets=["q_proj", "down_proj"]), 1e-2
SIZES = {"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1, "head_dim": 32}


def engine_of(model, shared: bool, small: int = 64_000_000) -> fsdp.FSDPEngine:
    attach(model, LORA, seed=3)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    settings = RoleRun(learning_rate=RATE, micro_batch_tokens=20, lora=LORA)
    with layered(small):
        return fsdp.FSDPEngine(model, settings, mesh, 0, 10, Role(trained=True),
                               whole=frozen_parameters(model) if shared else ())


def trained(shared: bool, small: int, cut: int) -> tuple[list[float], list[float], list[float]]:
    """Gradient norms of some steps, the log-probabilities after them, and those of the base alone."""
    engine = engine_of(build_model(270, 0, **SIZES), shared, small)
    mine = uneven_rows().slice(*((0, cut) if dist.get_rank() == 0 else (cut, 7)))
    alone = BaseEngine(engine).logprobs(mine["prompts"], mine["responses"], 1.0)  # before any step, as a reference does
    norms = [engine.update(mine, loss_of, 1.0, step)["grad_norm"] for step in range(STEPS)]
    after = BaseEngine(engine).logprobs(mine["prompts"], mine["responses"], 1.0)
    assert torch.equal(alone.values, after.values)
    return norms, engine.logprobs(mine["prompts"], mine["responses"], 1.0).values.tolist(), alone.values.tolist()


@pytest.mark.parametrize(("shared", "small"), [(True, 64_000_000), (False, 64_000_000), (True, 0), (False, 0)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_equals_peft_and_a_plain_optimizer(shared, small, ranks):
    norms, after, alone = by_peft()
    results = run_ranks(ranks, trained, shared, small, 5 if ranks == 2 else 7)
    assert all(found[0] == pytest.approx(norms, rel=1e-4) for found in results)
    assert sum((found[1] for found in results), []) == pytest.approx(after, abs=1e-4)
    assert sum((found[2] for found in results), []) == pytest.approx(alone, abs=1e-5)
    assert max(abs(one - other) for one, other in zip(after, alone)) > 0.1


def by_peft() -> tuple[list[float], list[float], list[float]]:
    """The same by peft's own model, unsharded, without micro-batches and shared prompts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = get_peft_model(build_model(270, 0, **SIZES), LoraConfig(
            r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    batch, norms = uneven_rows(), []
    with torch.no_grad():
        before = plain_logprobs(model, batch).tolist()
    for _ in range(STEPS):
        (-plain_logprobs(model, batch).sum() / 22).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return norms, plain_logprobs(model, batch).tolist(), before


def sampled() -> None:
    """Only adapters are sharded and move; trainer and rollout have one base, and agree."""
    settings = RoleRun(lora=LORA, learning_rate=RATE, generation={"max_new_tokens": 6})
    role = role_of(build_model(270, 0, **SIZES), build_tokenizer(["one"]), settings)
    before = build_model(270, 0, **SIZES).state_dict()
    batch = uneven_rows()
    reported()
    role.update(batch, loss_of)
    prompts = batch["prompts"].select(torch.tensor([0, 3, 5]))
    samples = role.generate(prompts, torch.arange(6), repeats=2)
    shards, rollout = role.engine.shards(), role.rollout.weight_buffers()
    count = 2 * 4 * (64 + 64 + 192 + 64)
    assert reported()["weights/bytes"] == count * 4
    assert sum(shard.numel() for shard in shards.values()) == count
    assert all(isinstance(shard, DTensor) for shard in shards.values())
    for name, parameter in role.engine.policy.model.named_parameters():
        if name in shards:
            assert torch.equal(rollout[name], shards[name].full_tensor())
        else:
            assert parameter.data_ptr() == rollout[name].data_ptr(), name
            assert torch.equal(parameter, before[name.replace(".base_layer", "")]), name
    repeated = prompts.select(torch.arange(3).repeat_interleave(2))
    ours = role.logprobs(repeated, samples.tokens).values
    assert torch.allclose(ours, samples.logprobs.values, atol=5e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_adapters_move_and_the_base_lies_once(ranks):
    run_ranks(ranks, sampled)


def test_a_value_head_is_trained_and_saved_whole(tmp_path, model):
    valued = with_value_head(copy.deepcopy(model))
    attach(valued, LORA, seed=3)
    trained = {name: parameter for name, parameter in valued.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * 2 * 2 + 1
    assert "score.weight" in trained
    weights = {name: torch.randn(parameter.shape) for name, parameter in trained.items()}
    valued.load_state_dict(weights, strict=False)
    new = with_value_head(copy.deepcopy(model))
    merge_adapters(new, LORA, weights, tmp_path / "adapter")[0].save_pretrained(tmp_path / "model")
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    theirs = PeftModel.from_pretrained(with_value_head(copy.deepcopy(model)), tmp_path / "adapter")
    tokens = torch.arange(5, 15)[None]
    with torch.no_grad():
        expected = valued(tokens).logits
        assert torch.allclose(whole(tokens).logits, expected, atol=1e-4)
        assert torch.allclose(theirs(tokens).logits, expected, atol=1e-4)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "q_proj"])
def test_the_line_that_merges_an_adapter_gives_what_peft_computes(tmp_path, monkeypatch, model, target):
    """Also where the adapted head or embeddings are tied (peft#2777), and in float32 whatever the base is in."""
    monkeypatch.chdir(tmp_path)
    base, tokens = copy.deepcopy(model).to(torch.bfloat16), torch.arange(5, 15)[None]
    assert base.config.tie_word_embeddings
    base.save_pretrained("base")
    base = AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["v_proj", target], init_lora_weights=False)).eval()
    adapted.save_pretrained("adapter")
    (mistake,) = load_for_planning("sft", None, ["roles.actor.model=adapter"]).mistakes
    exec(mistake.hint.partition('python -c "')[2].removesuffix('"'), {})
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained("merged", dtype=torch.float32)(tokens).logits
        assert torch.allclose(merged, adapted(tokens).logits, atol=1e-5)


def test_targets_that_match_nothing_are_refused(model):
    with pytest.raises(EngineError, match="Its linear layers: down_proj, gate_proj, k_proj, lm_head, o_proj"):
        attach(model, Lora(targets=["query"]), 0)
