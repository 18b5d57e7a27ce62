"""Fingerprints of weights: equal however they are laid out, and another one for any weight that differs."""

from __future__ import annotations

import secrets

import pytest
import torch
from ranks import run_ranks
from stores import hosted
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM

from distflow.config.run import Generation
from distflow.errors import EngineError
from distflow.weights.fingerprint import HeldWeights, add_up, fingerprint_of, sums_of
from distflow.weights.publisher import Publisher
from distflow.weights.puller import Puller
from distflow.weights.reshard import sums_of_shards
from workers.engines.hf import HFRollout
from workers.engines.weight_updates import WeightUpdates

FLOAT = torch.float32


def tiny(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied))


def engine_of(model: LlamaForCausalLM) -> HFRollout:
    engine = HFRollout(model, Generation(), 0, [2])
    engine.version, engine.tied = 0, dict(model.all_tied_weights_keys)
    return engine


def weights(model, factor: float = 1.0) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() * factor for name, parameter in model.named_parameters()}


def test_sums_are_equal_for_other_layouts_and_differ_by_one_bit():
    whole = torch.randn(6, 10)
    total = sums_of([("w", whole)], FLOAT)["w"]
    padded = torch.cat([whole, torch.zeros(2, 10)])
    for other in (whole.T, padded, whole[:, torch.randperm(10)]):
        assert sums_of([("w", other)], FLOAT) == {"w": total}
    assert sums_of([("w", whole[:2]), ("w", whole[2:])], FLOAT) == {"w": total}
    assert sums_of([("w", -torch.zeros(3))], FLOAT) == {"w": 0}
    changed = whole.clone().view(torch.int32)
    changed[1, 1] += 1
    changed[2, 2] -= 1  # which a plain sum would not see
    assert sums_of([("w", changed.view(FLOAT))], FLOAT) != {"w": total}
    assert sums_of([("w", whole)], torch.bfloat16) == sums_of([("w", whole.bfloat16())], torch.bfloat16)
    assert sums_of([("w", whole.half())], torch.bfloat16) != sums_of([("w", whole)], torch.bfloat16)


def sharded() -> dict[str, int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    cut = distribute_tensor(torch.randn(7, 6), mesh, [Shard(0), Shard(1)], src_data_rank=None)
    norm = distribute_tensor(torch.randn(5), mesh["dp"], [Shard(0)], src_data_rank=None)
    copied = distribute_tensor(torch.randn(4), mesh, [Replicate(), Replicate()], src_data_rank=None)
    return sums_of_shards({"cut": cut, "norm": norm, "copied": copied}, FLOAT, torch.device("cpu"))


def test_sums_of_shards_are_those_of_whole_tensors():
    torch.manual_seed(0)
    expected = sums_of([("cut", torch.randn(7, 6)), ("norm", torch.randn(5)), ("copied", torch.randn(4))], FLOAT)
    assert run_ranks(4, sharded) == [expected] * 4


def test_fused_modules_are_compared_as_one_and_copies_on_ranks_are_allowed_for():
    published = {"a.attn.q_proj.weight": 3, "a.attn.k_proj.weight": 5, "a.attn.norm.weight": 7, "a.mixer.A_log": 11}
    held = HeldWeights()
    of_two = {"a.attn.qkv_proj.weight": 3 + 2 * 5, "a.attn.norm.weight": 14, "a.mixer.A": -4}
    assert not held.differing(published, of_two, ranks=2)
    assert held.differing(published, of_two | {"a.attn.qkv_proj.weight": 3 + 5 + 4}, ranks=2) == [
        "a.attn.q_proj.weight", "a.attn.k_proj.weight"]
    newer = published | {"a.mixer.A_log": 12}
    assert held.differing(newer, of_two, ranks=2) == ["a.mixer.A_log"], "it is held in another form, and did not change"
    assert not held.differing(published, of_two | {"a.mixer.A": -5}, ranks=2)
    assert add_up([(1 << 63) - 1, 1]) == -(1 << 63)


def test_a_head_that_is_not_tied_is_named(recorded):
    engine = engine_of(tiny(tied=True))
    new = weights(engine.model, 1.5)
    engine.load(new.items(), 1)
    engine.prove("actor", sums_of(new.items(), FLOAT))
    engine.model.lm_head.weight = torch.nn.Parameter(engine.model.lm_head.weight.detach() / 1.5, False)
    with pytest.raises(EngineError, match="role `actor`.* version 1 .*`lm_head.weight` differs"):
        engine.prove("actor", sums_of(new.items(), FLOAT))
    assert [(event["role"], event["version"], event["tensor"]) for event in recorded("policy_refused")] == [
        ("actor", 1, "lm_head.weight")]


def test_an_engine_of_another_dtype_than_was_asked_for_is_refused():
    engine = engine_of(tiny())
    new = weights(engine.model, 1.5)
    engine.model.half()
    engine.dtype = torch.bfloat16
    engine.load(new.items(), 1)
    with pytest.raises(EngineError, match="another dtype"):
        engine.prove("actor", sums_of(((name, each.bfloat16()) for name, each in new.items()), torch.bfloat16))


def test_memory_of_a_relay_that_is_overwritten_by_an_older_version_is_refused(recorded):
    """The chunks were right when they came; the weights are read from memory of another process."""
    store, token, model = hosted(), secrets.token_bytes(32), tiny()
    publisher = Publisher(store.below("run"), token, rank=0, ranks=1)
    updates, engine = WeightUpdates(Puller(store.below("run"), token, "rollout 0"), 0, "actor"), engine_of(tiny())
    old, new = weights(model, 1.25), weights(model, 1.5)
    for version, each in ((1, old), (2, new)):
        publisher.publish(version, each, FLOAT, sums_of(each.items(), FLOAT))
        with updates.changed:
            assert updates.changed.wait_for(lambda: updates.pulled is not None, 60.0) or updates.pulled_weights()
        if version == 1:
            updates.load_into(engine)
            updates.mark_loaded()
    assert engine.proved[-1] == (1, fingerprint_of(sums_of(old.items(), FLOAT)))
    pulled = updates.pulled_weights()
    for name, tensor in pulled.tensors():
        tensor.copy_(old[name])
    with pytest.raises(EngineError, match="does not hold version 2"):
        updates.load_into(engine)
    assert recorded("policy_refused")[0]["version"] == 2
    assert engine.proved[-1][0] == 1
    updates.close()
    publisher.close()
