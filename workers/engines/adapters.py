"""LoRA adapters through peft: trains small matrices beside the frozen layers of a base model.

A rank that trains and samples holds the base once: both engines use the same tensors, and only the adapters are
sharded, gathered and sent.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from distflow.config.models import ALL_LINEAR
from distflow.config.run import Lora
from distflow.data.batch import Ragged
from distflow.errors import EngineError
from workers.engines.fsdp import FSDPEngine
from workers.engines.trainer import Reader

NAME = "default"  # peft's name of the default adapter
_PREFIX = "base_model.model."  # prefix of parameter names in peft's wrapper

_HEAD = "score"  # name of the value head in Hugging Face's classifiers


def attach(model: PreTrainedModel, lora: Lora, seed: int) -> None:
    """Freeze `model` and add adapters drawn from `seed` alone, which are zero until trained."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(_config(lora, model), model)
        except ValueError as error:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linears}))
            raise EngineError(f"targets {lora.targets} of `lora`: {error} Its linear layers: {known}") from None
    if _has_value_head(model):
        model.score.requires_grad_(True)  # a value head is new, so it is trained in full


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return ".lora_" in name


def frozen_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if not parameter.requires_grad]


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.set_scale(NAME, 0.0)  # peft's own switch unsets requires_grad, which FSDP has already looked at
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(NAME, 1.0)


class BaseEngine(Reader):
    """Engine of a frozen role that is the base of an adapted one; shares all its weights."""

    def __init__(self, engine: FSDPEngine):
        self.engine, self.device, self.mesh, self.version = engine, engine.device, engine.mesh, 0

    def infer(self, prompts: Ragged, responses: Ragged, temperature: float = 1.0, images: Ragged | None = None,
              routed_experts: Ragged | None = None, top: int = 0) -> tuple[Tensor, Tensor]:
        with adapters_off(self.engine.policy):
            return self.engine.infer(prompts, responses, temperature, images, routed_experts, top)


def merge_adapters(model: PreTrainedModel, lora: Lora, weights: dict[str, Tensor],
                   folder: Path) -> tuple[PreTrainedModel, set[str]]:
    """Write trained adapters to `folder` in peft's format, and return a new `model` with them added to its weights,
    and the names of the weights that have changed, float32. `weights`: whole adapters and value head, by their names
    after `attach`."""
    wrapped: PeftModel = get_peft_model(model, _config(lora, model))
    changed = {name for name in weights if not is_adapter(name)}
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):  # of a tensor of experts, or of a linear layer
            base, kind = layer.get_base_layer(), getattr(layer, "parameter_name", "weight")
            setattr(base, kind, nn.Parameter(getattr(base, kind).detach().float().clone(), False))  # tied to none
            changed.add(f"{name.replace('.base_layer', '')}.{kind}")
    missed = wrapped.load_state_dict({peft_name(name): tensor for name, tensor in weights.items()}, strict=False)
    wanted = {name for name, parameter in wrapped.named_parameters() if parameter.requires_grad}
    odd = sorted([*wanted.intersection(missed.missing_keys), *missed.unexpected_keys])
    if odd:
        raise EngineError(f"the adapters to be saved differ from the model's: {odd[:5]}")
    wrapped.save_pretrained(str(folder), save_embedding_layers=False)
    return cast(PreTrainedModel, wrapped.merge_and_unload()), changed


def _config(lora: Lora, model: PreTrainedModel) -> LoraConfig:
    targets = ALL_LINEAR if ALL_LINEAR in lora.targets else list(lora.targets)
    kind = "SEQ_CLS" if _has_value_head(model) else "CAUSAL_LM"  # for a classifier peft saves the head too
    return LoraConfig(r=lora.rank, lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  # floats do as well
                      target_modules=targets, task_type=kind,
                      exclude_modules=_bypassed(model) if targets == ALL_LINEAR else None)


def _bypassed(model: PreTrainedModel) -> list[str] | None:
    """Return the linear layers whose adapters a model would not compute: kernels of Mamba layers read the weight of
    `out_proj` itself, and some routers are linear layers that return more than a product."""
    modules = dict(model.named_modules())
    return [name for name, part in modules.items() if isinstance(part, nn.Linear) and (
        _returns_more(type(part)) or (name.endswith(".out_proj") and
                                        _reads_weight(type(modules[name.removesuffix(".out_proj")]))))] or None


@functools.cache
def _returns_more(kind: type[nn.Module]) -> bool:
    return re.search(r"return \w+, ", inspect.getsource(kind.forward)) is not None


@functools.cache
def _reads_weight(kind: type[nn.Module]) -> bool:
    return "self.out_proj.weight" in inspect.getsource(kind)


def _has_value_head(model: PreTrainedModel) -> bool:
    return isinstance(getattr(model, _HEAD, None), nn.Linear)


def peft_name(name: str) -> str:
    """Return a parameter's name in peft's wrapper."""
    return _PREFIX + name.replace(f"{_HEAD}.", f"{_HEAD}.modules_to_save.{NAME}.")
