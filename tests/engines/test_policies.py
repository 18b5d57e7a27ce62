"""Which policy samples: what an engine holds after an update is compared with what was published, in each library."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from engines.rollouts import TRAITS, build, tiny
from engines.test_rollout_contract import changed, require_logprobs, weights
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from distflow.config.run import Lora
from distflow.errors import EngineError
from distflow.weights.fingerprint import fingerprint_of, sums_of
from workers.engines.adapters import attach
from workers.engines.devices import NAMES


def stale(part: str):
    """Weights of which those with this part in their names are of the version before."""
    return lambda old, new: [(name, old[name] if part in name else whole) for name, whole in new.items()]


FAULTS = {
    "base weights": lambda old, new: [],
    "one bucket missing": lambda old, new: [(name, new[name]) for name in new if ".layers.0." in name],
    "another dtype": lambda old, new: [(name, whole.bfloat16().float()) for name, whole in new.items()],
    "a relay one version behind": lambda old, new: [*old.items()],
    "a part of a fused module": stale("layers.1.self_attn.k_proj"), "one vector": stale("model.norm")}


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_an_engine_does_not_hold_are_refused(engine, model, fault):
    old = {name: weight.clone() for name, weight in weights(model)}
    new = dict(weights(changed(model)))
    published = sums_of(new.items(), engine.dtype)
    engine.load(new.items(), version=1)
    engine.prove("actor", published)
    assert engine.proved[-1] == (1, fingerprint_of(published))
    engine.load(old.items(), version=2)
    engine.load(FAULTS[fault](old, new), version=3)
    with pytest.raises(EngineError, match=r"role `actor`.*does not hold version 3 .*`model\.\S+` differs"):
        engine.prove("actor", published)
    engine.load(new.items(), version=4)
    engine.prove("actor", published)
    engine.proved = engine.proved[:1]


def test_what_older_weights_have_read_serves_no_row(name, engine, model, prompts, monkeypatch):
    """Though the library is kept from emptying its prefix cache."""
    if name == "vllm":
        monkeypatch.setattr(engine.llm, "reset_prefix_cache", lambda **_: True)
    elif name == "sglang":
        call = engine._call
        monkeypatch.setattr(engine, "_call", lambda path, body: path == "/flush_cache" or call(path, body))
    ids = torch.arange(len(prompts))
    engine.generate(prompts, 1, ids, key=1)
    engine.load(weights(changed(model)), version=1)
    require_logprobs(model, prompts, engine.generate(prompts, 1, ids, key=1))


def test_a_prefix_cache_that_cannot_be_emptied_is_an_error(name, engine, model, monkeypatch):
    if name != "vllm":
        pytest.skip("the others have none, or answer with an error")
    monkeypatch.setattr(engine.llm, "reset_prefix_cache", lambda **_: False)
    with pytest.raises(EngineError, match="prefix cache cannot be emptied"):
        engine.load(weights(changed(model)), version=1)


@pytest.mark.skipif(not TRAITS["vllm"].installed, reason="vllm is not installed")
def test_a_head_that_is_not_tied_is_named(mesh):
    engine, model = build("vllm", mesh, tiny()), changed(tiny())
    engine.copies = {}  # on a CPU vLLM has packed the head, which is then the old one
    engine.load(weights(model), version=1)
    with pytest.raises(EngineError, match="`lm_head.weight` differs"):
        engine.prove("actor", sums_of(weights(model), engine.dtype))
    engine.close()


@pytest.mark.skipif(not TRAITS["vllm"].installed, reason="vllm is not installed")
@pytest.mark.parametrize("alpha", [8.0, 5.0])  # times 2, which is exact, and 1.25
def test_adapters_that_are_not_used_or_not_all_new_are_named(mesh, alpha):
    model, lora = tiny(), Lora(rank=4, alpha=alpha)
    attach(model, lora, seed=0)
    engine = build("vllm", mesh, model, lora=lora)

    def updated(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return {name: 0.1 * torch.randn(weight.shape) for name, weight in weights(model) if ".lora_" in name}

    for version in (1, 2):
        new = updated(version)
        engine.load(new.items(), version)
        engine.prove("actor", sums_of(new.items(), engine.dtype))
    used, engine.adapter = engine.adapter, None
    with pytest.raises(EngineError, match=r"lora_A.* differs"):
        engine.prove("actor", sums_of(new.items(), engine.dtype))
    engine.adapter, newer = used, updated(3)
    engine.load({name: new[name] if "lora_B" in name else whole for name, whole in newer.items()}.items(), version=3)
    with pytest.raises(EngineError, match=r"lora_B.* differs"):
        engine.prove("actor", sums_of(newer.items(), engine.dtype))
    engine.close()


def one_is_stale() -> list[str]:
    """On two ranks with one engine: what is said after an update that rank 1 has taken only half."""
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": "2",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    mesh, model = init_device_mesh("cpu", (1, 1, 1, 2), mesh_dim_names=NAMES), tiny(kv_heads=2)
    engine, said = build("vllm", mesh, model), []
    for version, skipped in ((1, ""), (2, "mlp.down_proj"), (3, "self_attn.v_proj"), (4, "model.norm")):
        old = {name: weight.clone() for name, weight in weights(model)}
        new = dict(weights(changed(model, version)))
        own = stale(skipped)(old, new) if skipped and dist.get_rank() == 1 else new.items()
        engine.load(own, version)
        try:
            engine.prove("actor", sums_of(new.items(), engine.dtype))
        except EngineError as error:
            said.append(str(error).partition("`model.")[2].partition("`")[0])
    engine.close()
    dist.barrier()
    return said


@pytest.mark.skipif(not TRAITS["vllm"].installed, reason="vllm is not installed")
def test_one_stale_rank_of_a_split_model_is_noticed_on_all():
    first, second = run_ranks(2, one_is_stale)
    assert first == second
    assert [name.rpartition(".layers.0.")[2] or name for name in first] == [
        "layers.0.mlp.down_proj.weight", "layers.0.self_attn.q_proj.weight", "norm.weight"]
