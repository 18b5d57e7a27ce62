"""Which layers get adapters and how many parameters those have, known from a model's files before it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.schema.errors import Mistake, did_you_mean
from distflow.schema.run import Lora, Model
from distflow.schema.shapes import WIDENING, embedded_vision
from distflow.schema.shipped import find

if TYPE_CHECKING:
    from distflow.schema.spec import Spec

ALL_LINEAR = "all-linear"
_NOT_ADAPTED = ("embed", "wte", "wpe", "lm_head", ".experts.", ".mlp.gate.")
"""Parts of the names of matrices that belong to no inner linear layer."""

Linears = dict[str, int]
"""Inputs plus outputs of each inner linear layer, by its name."""


def check_lora(spec: Spec) -> list[Mistake]:
    """What cannot work of each role's `lora`; the counts of the others' parameters go to `spec.adapters`."""
    mistakes = []
    for role, settings in spec.run.roles.items():
        if settings.lora is None or role not in spec.dag.roles:
            continue
        place = ("roles", role, "lora")
        if not spec.dag.roles[role].trained:
            what = f"role `{role}` has `lora`, but DAG `{spec.dag.name}` does not train it"
            hint = "Take `lora` out: a frozen role that copies an adapted one is that one's model without adapters."
            mistakes.append(Mistake(what, spec.run_source.spot(place, key=True), hint))
            continue
        linears = linears_of(spec, spec.model_of(role))
        for target in settings.lora.targets if linears else ():
            if not matched([target], linears):
                what = f"role `{role}`: no linear layer of its model is called `{target}`"
                known = sorted({name.rpartition(".")[2] for name in linears})
                hint = did_you_mean(target, [*known, ALL_LINEAR], "Layers")
                mistakes.append(Mistake(what, spec.run_source.spot((*place, "targets")), hint))
        spec.adapters[role] = parameters(settings.lora, linears)
    return mistakes


def parameters(lora: Lora, linears: Linears) -> int:
    """How many parameters the adapters have: `rank` for each input and output of an adapted layer."""
    return lora.rank * sum(linears[name] for name in matched(lora.targets, linears))


def matched(targets: list[str], linears: Linears) -> list[str]:
    """The layers that `targets` name."""
    return [name for name in linears
            if ALL_LINEAR in targets or any(f".{name}".endswith(f".{target}") for target in targets)]


def linears_of(spec: Spec, model: Model | None) -> Linears:
    """The inner linear layers of a model; none if its files are not there or of another kind than safetensors."""
    if model is None:
        return {}
    if model.path is None:
        return _of_embedded(model)
    folder, found = find(model.path, "models", spec.folder), {}
    for file in sorted(folder.glob("*.safetensors")) if folder else ():
        for name, shape in _shapes(file).items():
            layer, _, kind = name.rpartition(".")
            if kind == "weight" and len(shape) == 2 and not any(part in f"{layer}." for part in _NOT_ADAPTED):
                found[layer] = sum(shape)
    return found


def _of_embedded(model: Model) -> Linears:
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    inner = WIDENING * model.hidden
    sizes = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys,
             "self_attn.o_proj": queries}
    if not model.mixture:  # experts are no linear layers
        sizes |= {"mlp.gate_proj": inner, "mlp.up_proj": inner, "mlp.down_proj": inner}
    layers = "model.language_model.layers" if model.sees else "model.layers"
    found = {f"{layers}.{layer}.{name}": model.hidden + size
             for layer in range(model.layers) for name, size in sizes.items()}
    return {**_of_embedded_vision(embedded_vision(model.hidden)), **found} if model.sees else found


def _of_embedded_vision(vision: dict[str, Any]) -> Linears:
    width, inner, out = vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"]
    sizes = {"attn.qkv": 4 * width, "attn.proj": 2 * width, "mlp.linear_fc1": width + inner,
             "mlp.linear_fc2": inner + width}
    found = {f"model.visual.blocks.{layer}.{name}": size
             for layer in range(vision["depth"]) for name, size in sizes.items()}
    joined = vision["spatial_merge_size"] ** 2 * width
    deep = range(len(vision["deepstack_visual_indexes"]))
    for merger in ("merger", *(f"deepstack_merger_list.{index}" for index in deep)):
        found |= {f"model.visual.{merger}.linear_fc1": 2 * joined, f"model.visual.{merger}.linear_fc2": joined + out}
    return found


def _shapes(file: Path) -> dict[str, list[int]]:
    """The shape of each tensor of a safetensors file: 8 bytes of length, then so many of JSON (the format's header).

    A file that is cut short has none; loading the model says what is wrong with it.
    """
    with file.open("rb") as opened:
        header = opened.read(int.from_bytes(opened.read(8), "little"))
    try:
        listed = json.loads(header)
    except ValueError:
        return {}
    return {name: item["shape"] for name, item in listed.items() if name != "__metadata__"}


def adapted(spec: Spec, role: str) -> Lora | None:
    """The adapters that are trained instead of the role's model; None if that is trained, or frozen."""
    settings = spec.settings_of(role)
    return settings.lora if settings and spec.dag.roles[role].trained else None


def base_of(spec: Spec, role: str) -> str | None:
    """The adapted role whose model without adapters is what frozen `role` needs; None if it needs one of its own."""
    if spec.dag.roles[role].trained or spec.dag.roles[role].head != "lm":
        return None
    for name in spec.lineage(role):
        if name not in spec.dag.roles or spec.dag.roles[name].head != "lm":
            return None
        if spec.dag.roles[name].trained:
            return name if adapted(spec, name) else None
        if name in spec.run.roles and spec.run.roles[name].model:
            return None
    return None
