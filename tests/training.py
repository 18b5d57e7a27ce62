"""Some updates of a tiny model: by an engine on any mesh, and by a plain loop without any of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from columns import uneven_rows
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distflow.config.dag import Role
from distflow.config.run import Data, Model, RoleRun
from distflow.data.batch import Batch
from distflow.plan import Layout
from distflow.weights.reshard import gather_tensors
from workers.engines import fsdp
from workers.engines.embedded import build_model
from workers.engines.role_engines import Meshes, RoleEngines
from workers.engines.value import with_value_head

STEPS = 3
SETTINGS = {"learning_rate": 1e-3, "weight_decay": 0.1, "micro_batch_tokens": 20}


@dataclass
class Trained:
    """What can be compared: log-probabilities of all rows before the updates, the gradient norm of each, the (clipped)
    gradients of the first, and the weights after the last."""

    logprobs: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, numpy.ndarray] = field(default_factory=dict)
    weights: dict[str, numpy.ndarray] = field(default_factory=dict)

    def equals(self, other: Trained, close: float = 1e-5) -> None:
        assert self.logprobs == pytest.approx(other.logprobs, abs=close)
        assert self.norms == pytest.approx(other.norms, rel=close)
        assert self.weights.keys() == self.gradients.keys() == other.weights.keys() == other.gradients.keys()
        for name, weight in self.weights.items():
            assert numpy.allclose(self.gradients[name], other.gradients[name], atol=close / 10), name
            # Adam makes steps of any size, up to the learning rate, out of the rounding of gradients near zero.
            far = numpy.abs(weight - other.weights[name]) > close
            assert far.mean() < 0.05, (name, far.mean())
            assert numpy.allclose(weight, other.weights[name], atol=STEPS * SETTINGS["learning_rate"]), name


def built(architecture: str = "qwen3", tied: bool = True, vocabulary: int = 270, **sizes: int):
    """A model of two layers; its biases, if it has any, are not zero."""
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, **sizes}
    model = build_model(vocabulary, 0, architecture=architecture, **sizes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.linspace(-0.1, 0.1, len(parameter)))
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0).contiguous())
    return model


def named_mesh(**sizes: int) -> DeviceMesh:
    names = ("dp", "pp", "cp", "tp")
    return init_device_mesh("cpu", tuple(sizes.get(name, 1) for name in names), mesh_dim_names=names)


@contextlib.contextmanager
def layered(small: int) -> Iterator[None]:
    """Models of more parameters are gathered layer by layer."""
    limit, fsdp._SMALL = fsdp._SMALL, small
    try:
        yield
    finally:
        fsdp._SMALL = limit


def share_of(mesh: DeviceMesh) -> Batch:
    """The rows of this rank's share: five and two, or all of them and none."""
    cuts = {1: [0, 7], 2: [0, 5, 7], 4: [0, 3, 4, 7, 7]}[mesh["dp"].size()]
    here = mesh["dp"].get_local_rank()
    return uneven_rows().slice(cuts[here], cuts[here + 1])


@contextlib.contextmanager
def kept_for_backward() -> Iterator[dict[int, int]]:
    """Bytes of each storage that the graph keeps for the backward pass, weights apart."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter) and not isinstance(tensor._base, torch.nn.Parameter):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def loss_of(logprobs, entropies, micro):
    return -logprobs.sum() / 22


def engine_of(mesh: DeviceMesh, model: dict[str, Any] | None = None, small: int = 0, **settings) -> fsdp.FSDPEngine:
    with layered(small):
        return fsdp.FSDPEngine(built(**(model or {})), RoleRun(**{**SETTINGS, **settings}), mesh, pad_token=0,
                               steps=10, role=Role(trained=True))


def trained_by(engine: fsdp.FSDPEngine, mine: Batch) -> Trained:
    """Each rank's own rows; the weights are gathered, so that all ranks take part."""
    found = Trained()

    def look(*_):
        gradients = gather_tensors({name: shard.grad for name, shard in engine.shards().items()})
        found.gradients = found.gradients or {name: tensor.clone().numpy() for name, tensor in gradients}

    engine.optimizer.register_step_pre_hook(look)
    found.logprobs = engine.logprobs(mine["prompts"], mine["responses"], 1.0).values.tolist()
    found.norms = [engine.update(mine, loss_of, 1.0, step)["grad_norm"] for step in range(STEPS)]
    found.weights = {name: tensor.clone().numpy() for name, tensor in engine.export()}
    return found


def training(layout: dict[str, int], model: dict[str, Any] | None = None, small: int = 0,
             settings: dict[str, Any] | None = None) -> Trained:
    """On each rank: `trained_by` on a named mesh."""
    mesh = named_mesh(**layout)
    return trained_by(engine_of(mesh, model, small, **(settings or {})), share_of(mesh))


def plain_training(model: dict[str, Any] | None = None) -> Trained:
    """The same rows by transformers and torch alone: one forward for each row, no sharding, no micro-batches."""
    whole, batch, found = built(**(model or {})), uneven_rows(), Trained()
    matrices, vectors = ([p for p in whole.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": SETTINGS["weight_decay"]},
                                   {"params": vectors, "weight_decay": 0.0}],
                                  lr=SETTINGS["learning_rate"], betas=(0.9, 0.95))
    for _ in range(STEPS):
        logprobs = plain_logprobs(whole, batch)
        found.logprobs = found.logprobs or logprobs.tolist()
        (-logprobs.sum() / 22).backward()
        found.norms.append(float(torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)))
        found.gradients = found.gradients or {name: parameter.grad.clone().numpy()
                                              for name, parameter in whole.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    found.weights = {name: parameter.detach().numpy() for name, parameter in whole.named_parameters()}
    return found


def joined(results: list[Trained], stride: int) -> Trained:
    """One result of all shares: ranks of a share follow each other, `stride` at a time."""
    logprobs = [value for result in results[::stride] for value in result.logprobs]
    return replace(results[0], logprobs=logprobs)


def row_logprobs(model, prompt: Tensor, response: Tensor, temperature: float = 1.0, **more: Any) -> Tensor:
    """Log-probabilities of one response, by one forward pass of the whole row, without a cache."""
    tokens = torch.cat([prompt, response])[None]
    logits = model(input_ids=tokens, use_cache=False, **more).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, response[:, None]).squeeze(1)


def plain_logprobs(model, batch: Batch, temperature: float = 1.0) -> Tensor:
    """The same of all rows of a batch."""
    rows = zip(batch["prompts"].rows, batch["responses"].rows)
    return torch.cat([row_logprobs(model, *row, temperature) for row in rows])


def valued(layout) -> list[float]:
    """Gradient norms of a value model, then the values and scores of this rank's rows."""
    mesh = named_mesh(**layout)
    model = with_value_head(built())
    with torch.no_grad():
        model.score.weight.copy_(torch.linspace(-0.1, 0.1, 64)[None])
    engine = fsdp.FSDPEngine(model, RoleRun(**SETTINGS), mesh, 0, 10, Role(trained=True, head="value"))
    mine = share_of(mesh)

    def squared(values, scores, micro):
        return values.square().sum() / 22 + (scores - 0.5).square().sum() / 7

    norms = [engine.update(mine, squared, 1.0, step)["grad_norm"] for step in range(STEPS)]
    return [*norms, *engine.values(mine["prompts"], mine["responses"]).values.tolist(),
            *engine.scores(mine["prompts"], mine["responses"]).tolist()]


def role_spec(settings: RoleRun, source: Path | None = None, head: str = "lm", trained: bool = True) -> SimpleNamespace:
    """What engines read of a run with one role; `source`: the folder of its model."""
    dag = SimpleNamespace(roles={"actor": SimpleNamespace(trained=trained, follow=None, head=head)})
    run = SimpleNamespace(seed=0, steps=10, data=Data(train="", max_prompt_tokens=32, max_target_tokens=16))
    return SimpleNamespace(dag=dag, run=run, folder=source, shape_of=lambda _: None, settings_of=lambda _: settings,
                           model_of=lambda _: Model(path=str(source)) if source else None)


def role_of(model, tokenizer, settings: RoleRun, source: Path | None = None, head: str = "lm",
            samples: bool = True, trained: bool = True) -> RoleEngines:
    """The engines of a role on all ranks."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    return RoleEngines("actor", model, tokenizer, settings, Meshes(mesh, mesh if samples else None, Layout(ranks)),
                       role_spec(settings, source, head, trained), 0 if samples else None)


class Learner:
    """A role without its surroundings: the engine alone, and a sum over ranks. It samples at `temperature`."""

    def __init__(self, head: str = "lm", temperature: float = 1.0, model: Any = None, **settings: Any):
        model = model or build_model(270, 0, layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32)
        model = with_value_head(model) if head == "value" else model
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.engine = fsdp.FSDPEngine(model, RoleRun(learning_rate=1e-2, **settings), mesh, 0, 10,
                                      Role(trained=True, head=head))
        self.temperature, self.values, self.score = temperature, self.engine.values, self.engine.scores
        self.step, self.version, self.balances = 0, 0, self.engine.balances

    def total(self, numbers: Tensor) -> Tensor:
        dist.all_reduce(numbers)
        return numbers

    def update(self, batch: Batch, loss: Any, temperature: float | None = None, **options: Any) -> dict[str, float]:
        return self.engine.update(batch, loss, self.temperature if temperature is None else temperature, 0, **options)
