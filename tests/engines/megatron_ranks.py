"""What each rank does in the tests of the Megatron engine, and what one rank of FSDP does instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from engines import megatron_on_cpu  # noqa: F401 - before any Megatron engine is made
from numpy import ndarray
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from distflow.config.dag import Role
from distflow.config.run import RoleRun
from distflow.data.batch import Batch, Ragged
from distflow.plan import Layout
from workers.engines import attention
from workers.engines.devices import mesh_of
from workers.engines.embedded import build_model
from workers.engines.fsdp import FSDPEngine
from workers.engines.megatron.engine import MegatronEngine
from workers.engines.routing import Routing

SIZES = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32}


def tiny(architecture: str = "qwen3", tied: bool = False, vocabulary: int = 271, **sizes: int) -> PreTrainedModel:
    """The same on every rank; an odd vocabulary, so that tp has to fill it up."""
    if architecture == "qwen3_moe":
        torch.manual_seed(0)
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(
            vocab_size=vocabulary, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=32, intermediate_size=128, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2,
            norm_topk_prob=True, initializer_range=0.06, tie_word_embeddings=tied))
    model = build_model(vocabulary, 0, architecture=architecture, **{**SIZES, **sizes})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # biases and norms that are not what they begin as, so that none can be lost unseen
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(0.06 * torch.randn(vocabulary, SIZES["hidden"], generator=generator))
    return model


def rows(seed: int = 0, count: int = 9) -> Batch:
    """Rows with and without a response, of all lengths; one has the padding token in its midst."""
    generator = torch.Generator().manual_seed(seed)

    def ragged(lengths: list[int]) -> Ragged:
        return Ragged.from_rows([torch.randint(5, 260, (length,), generator=generator) for length in lengths])

    prompts, responses = ragged([6, 3, 8, 1, 5, 2, 7, 4, 3][:count]), ragged([4, 0, 2, 5, 3, 1, 7, 2, 12][:count])
    responses.values[1] = 0
    return Batch(torch.arange(count), {"prompts": prompts, "responses": responses,
                                       "advantages": torch.randn(count, generator=generator)})


def policy_gradient(logprobs: Tensor, entropies: Tensor, micro: Batch) -> Tensor:
    """Not linear, so that a division by anything anywhere is seen, and with weights that differ between rows."""
    weights = micro["advantages"][micro["responses"].row_of]
    return (-weights * logprobs + 0.05 * logprobs.square()).sum() / 40


def share(batch: Batch, index: int, count: int) -> Batch:
    """The rows of one of `count` shares; the first has more."""
    cut = [round(len(batch) * (number / count) ** 0.8) for number in range(count + 1)]
    return batch.slice(cut[index], cut[index + 1])


def train(engine: Any, batch: Batch, updates: int = 3) -> dict[str, Any]:
    """Log-probabilities before, the loss and norm of each update, and the weights after."""
    routed: Any = batch.columns.get("routed_experts")
    before = engine.logprobs(batch["prompts"], batch["responses"], 0.7, routed_experts=routed)
    entropies = engine.entropies(batch["prompts"], batch["responses"], 0.7, routed_experts=routed)
    losses, norms, entropy = [], [], 0.0

    def loss_of(logprobs: Tensor, entropies: Tensor, micro: Batch) -> Tensor:
        nonlocal entropy
        loss = policy_gradient(logprobs, entropies, micro)
        losses[-1] += float(loss)
        entropy += float(entropies.sum())
        return loss

    for step in range(updates):
        losses.append(0.0)
        norms.append(engine.update(batch, loss_of, 0.7, step)["grad_norm"])
    return {"logprobs": before.values.numpy(), "entropies": entropies.values.numpy(), "losses": losses, "norms": norms,
            "entropy": entropy, "weights": exported(engine), "version": engine.version}


def exported(engine: Any) -> dict[str, ndarray]:
    return {name: tensor.float().numpy().copy() for name, tensor in engine.export()}


def settings(**given: Any) -> RoleRun:
    return RoleRun(**{"learning_rate": 5e-4, "weight_decay": 0.1, "micro_batch_tokens": 24, "warmup_steps": 2, **given})


def megatron(model: PreTrainedModel, ways: dict[str, Any], trained: bool = True, **given: Any) -> MegatronEngine:
    layout = Layout(**{"dp": 1, **ways})
    mesh = mesh_of(replace(layout, ep=1, layers=()), "cpu")
    return MegatronEngine(model, settings(**given), mesh, 0, 10, Role(trained=trained), layout=layout)


def with_choices(batch: Batch, model: PreTrainedModel) -> Batch:
    """The rows with experts for each token but the last, by lot, of which some are left to the routers."""
    routing, draw = Routing.of(model), torch.Generator().manual_seed(7)
    lengths = batch["prompts"].lengths + (batch["responses"].lengths - 1).clamp(min=0)
    shape = int(lengths.sum()), routing.layers, model.config.num_experts
    chosen = torch.rand(shape, generator=draw).topk(routing.experts_per_token).indices.to(routing.dtype)
    chosen[::5] = routing.unknown
    return Batch(batch.ids, {**batch.columns, "routed_experts": Ragged(chosen, lengths)})


def with_megatron(ways: dict[str, int], architecture: str, tied: bool, layers: int = 2, dtype: str = "auto",
                  replays: bool = False) -> dict:
    """This rank's results, whether the weights came back as they went in, and which rows it had."""
    model = tiny(architecture, tied, layers=layers)
    batch = with_choices(rows(), model) if replays else rows()
    engine = megatron(model, ways, dtype=dtype, generation={"routing_replay": replays})
    whole = model.state_dict()
    out = dict(engine.export())
    back = set(out) == set(dict(model.named_parameters())) and all(torch.equal(out[name], whole[name]) for name in out)
    index = engine.dp_group.rank()
    result = train(engine, share(batch, index, engine.dp_group.size()))
    return {**result, "back": back, "share": index}


def with_fsdp(architecture: str, tied: bool, layers: int = 2, replays: bool = False) -> dict:
    """All rows on one rank."""
    model = tiny(architecture, tied, layers=layers)
    if replays:
        model.set_attn_implementation(attention.NAME)
    batch, chosen = with_choices(rows(), model) if replays else rows(), settings(generation={"routing_replay": replays})
    return train(FSDPEngine(model, chosen, init_device_mesh("cpu", (1,)), 0, 10, Role(trained=True)), batch)
