"""What distflow makes of a model folder, against plain transformers: eager attention, float32, each row alone.

Each check takes a folder of a tiny model and returns differences by name, relative to the largest value that is
compared. A refusal is InvalidInput (of planning) or EngineError (once the model is there).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engines.families import VOCABULARY, build
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from distflow.config.load import load
from distflow.config.spec import Spec
from distflow.data.batch import Batch, Ragged
from planners import plan
from workers.engines.embedded import build_tokenizer
from workers.engines.role_engines import RoleEngines
from workers.preflight.model import ModelProofs
from workers.preflight.proofs import Preflight
from workers.roles import build_roles

ENDS = torch.arange(2, VOCABULARY, 17)
DEVICE, DTYPE = os.environ.get("FAMILIES_DEVICE", "cpu"), os.environ.get("FAMILIES_DTYPE", "float32")
"""Of distflow's side; plain transformers stays on the CPU, in float32."""
SETTINGS = ("ranks=1", f"roles.actor.dtype={DTYPE}", "roles.actor.micro_batch_tokens=120",
            "roles.actor.learning_rate=1e-2", "roles.actor.warmup_steps=0", "roles.actor.max_grad_norm=1.0",
            "roles.actor.generation={max_new_tokens: 24, batch_rows: 5}", "data.max_prompt_tokens=40")


def write(folder: Path, family: str, wider: int = 1) -> dict[str, Any]:
    """Write a folder with a tiny model of the family and a tokenizer."""
    build(family, wider=wider).save_pretrained(folder)
    build_tokenizer(["one two three"], vocab_size=VOCABULARY).save_pretrained(folder)
    return {}


def planned(folder: Path) -> dict[str, Any]:
    """Return the parameters that planning counts and those that there are."""
    spec = _spec(folder)
    shape = spec.shape_of("actor")
    model = _plain(folder)
    return {"counted": shape and shape.parameters, "parameters": sum(each.numel() for each in model.parameters())}


def trained(folder: Path) -> dict[str, Any]:
    """Return the `way`, "own" or why it is the plain one. Compare log-probabilities and gradients, and the folder that
    is saved after an update."""
    _spec(folder)  # refuses what is no language model
    model, (prompts, responses), found = _plain(folder), rows(), dict[str, Any]()
    truth = torch.cat([logprobs(model, *row) for row in zip(prompts.rows, responses.rows)])
    weights = torch.randn(len(truth), generator=torch.Generator().manual_seed(4))
    (truth * weights).sum().backward()
    truth = truth.detach()
    with _role(folder) as role:
        engine = role.engine
        found["way"] = engine.policy.capabilities.plain or "own"
        if engine.policy.packs:
            engine.policy.chunks = 1  # packs all rows, however alike their lengths
            found["packed"] = _far(engine.logprobs(prompts, responses, 1.0).values, truth)
            engine.policy.packs, engine.policy.chunks = False, 2
        found["padded"] = _far(engine.logprobs(prompts, responses, 1.0).values, truth)
        batch = Batch(torch.tensor([0, 1, 1, 2, 3, 4]), {
            "prompts": prompts, "responses": responses, "weights": responses.with_values(weights)})
        engine.accumulate(batch, lambda values, _, micro: (values * micro["weights"].values).sum(), 1.0)
        own = {name: _whole(shard.grad) for name, shard in engine.shards().items() if shard.grad is not None}
        found["gradients"] = _far_gradients(own, model)
        engine.step(0)
        return found | _saved(role, folder)


def sampled(folder: Path, rollout: str = "hf") -> dict[str, Any]:
    """Compare the log-probabilities of sampled tokens, before and after an update."""
    if rollout == "vllm":  # looks at a model's class in a process of its own, which takes as long as all the rest
        registry = importlib.import_module("vllm.model_executor.models.registry")
        registry._run_in_subprocess = lambda call: call()
    with _role(folder, f"roles.actor.rollout={rollout}") as role:
        found = {"first weights": _far_samples(role, _plain(folder))}
        _update(role)
        role.save_pretrained(folder / "model")
        return found | {"updated": _far_samples(role, _plain(folder / "model"))}


def merged(folder: Path) -> dict[str, Any]:
    """Train adapters for a step; compare the folder into which they are merged with what trains and samples."""
    with _role(folder, "roles.actor.lora={rank: 4}") as role:
        _update(role)
        return _saved(role, folder) | {"sampled": _far_samples(role, _plain(folder / "model"))}


def proved(folder: Path, rollout: str = "hf") -> dict[str, Any]:
    """Make the proofs of a run's start, which refuse what is computed otherwise than by the model's own code."""
    settings = f"roles.actor.rollout={rollout}"
    proofs = ModelProofs(_spec(folder, settings), False)
    with _role(folder, settings, look=proofs.look) as role:
        proofs.at_start({"actor": role}, Preflight())
    return {}


CHECKS = {check.__name__: check for check in (planned, trained, sampled, merged, proved)}


def rows() -> tuple[Ragged, Ragged]:
    """Return prompts and responses of many lengths, two of one prompt; the longest passes each threshold."""
    generator = torch.Generator().manual_seed(1)
    prompts, responses = ([torch.randint(5, VOCABULARY, (size,), generator=generator) for size in sizes]
                          for sizes in ((5, 12, 12, 38, 3, 8), (9, 20, 4, 25, 1, 16)))
    prompts[2] = prompts[1]
    return Ragged.from_rows(prompts), Ragged.from_rows(responses)


def logprobs(model: PreTrainedModel, prompt: Tensor, response: Tensor) -> Tensor:
    """Return the log-probability of each token of one response [R] by a plain forward pass."""
    logits = model(torch.cat([prompt, response])[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, response[:, None]).squeeze(1)


def _spec(folder: Path, *more: str) -> Spec:
    return load("grpo", None, [f"roles.actor.model={folder}", *SETTINGS, *more])


@contextlib.contextmanager
def _role(folder: Path, *more: str, look: Callable[..., None] | None = None) -> Iterator[RoleEngines]:
    """Build the engines of the actor as a run does, in a process group of this process alone."""
    spec = _spec(folder, *more)
    chosen = plan(spec, 1)
    backend = "gloo" if DEVICE == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        role = build_roles(spec, chosen, {"actor"}, {"actor"}, DEVICE, look=look)["actor"]
        role.sampler.end_tokens = ENDS
        yield role
        role.sampler.close()
    finally:
        dist.destroy_process_group()


def _plain(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def _whole(shard: Tensor) -> Tensor:
    return (shard.full_tensor() if hasattr(shard, "full_tensor") else shard).cpu()


def _far(found: Tensor, truth: Tensor) -> float:
    """Return the largest difference, relative to the largest value; infinite if any is no number."""
    far = (found.cpu() - truth).abs().max() / truth.abs().max().clamp(min=1e-30)
    return float(far) if far.isfinite() else float("inf")


def _far_gradients(own: dict[str, Tensor], model: PreTrainedModel) -> float:
    """Return the largest difference of a gradient, relative to the largest of its tensor, or to a hundredth of the
    largest of all."""
    truth = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    most = max(float(gradient.abs().max()) for gradient in truth.values())
    gone = [name for name in truth if name not in own and bool(truth[name].any())]
    if gone:
        raise AssertionError(f"no gradient of {gone[:3]}")
    return max(float((own[name] - truth.get(name, torch.zeros(()))).abs().max()) /
               max(float(truth[name].abs().max()) if name in truth else 0.0, most / 100) for name in own)


def _update(role: RoleEngines) -> None:
    prompts, responses = rows()
    batch = Batch(torch.arange(len(prompts)), {"prompts": prompts, "responses": responses})
    role.update(batch, lambda values, _, micro: -values.sum(), 1.0)


def _saved(role: RoleEngines, folder: Path) -> dict[str, Any]:
    """Save what is trained, and compare it, loaded by plain transformers, with the engine. Name tensors of the source
    that are not there, and those that are no parameters and are not what they were."""
    prompts, responses = rows()
    after = role.engine.logprobs(prompts, responses, 1.0).values
    shutil.rmtree(folder / "model", ignore_errors=True)
    role.save_pretrained(folder / "model")
    saved = _plain(folder / "model")
    with torch.no_grad():
        truth = torch.cat([logprobs(saved, *row) for row in zip(prompts.rows, responses.rows)])
    parameters = {name for name, _ in saved.named_parameters(remove_duplicate=False)}
    source, now = _plain(folder).state_dict(), saved.state_dict()
    lost = [name for name in source if name not in parameters and not torch.equal(source[name], now[name])]
    names = [{*load_file(each / "model.safetensors")} for each in (folder, folder / "model")]
    copies = _plain(folder).all_tied_weights_keys  # adapters on one of them part them
    lost += sorted(names[0] ^ names[1] - copies.keys())
    return {"saved": _far(after, truth), **({"lost": lost[:4]} if lost else {})}


@torch.no_grad()
def _far_samples(role: RoleEngines, model: PreTrainedModel) -> float:
    prompts = rows()[0]
    samples = role.generate(prompts, torch.arange(2 * len(prompts)), repeats=2, temperature=1.0)
    truth = [logprobs(model, prompts.rows[index // 2], tokens) for index, tokens in enumerate(samples.tokens.rows)]
    if float(torch.cat(truth).mean()) > -0.01:
        raise AssertionError("the model is sure of each token, so that nothing is compared")
    return _far(samples.logprobs.values, torch.cat(truth))
