"""Parameters that `roles.ROLE.freeze` keeps as they are, from the headers of model files: before anything is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from distflow.config.models import VOCABULARY, WIDENING, embedded_vision, mixture_of, tensor_shapes_of
from distflow.config.run import Model
from distflow.errors import Diagnostic, did_you_mean

if TYPE_CHECKING:
    from distflow.config.load import Spec

Sizes = dict[str, int]  # number of elements, by a parameter's name
_HEADS = ("lm_head.weight", "score.weight")


def frozen_names(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the parameters that a pattern names: `*` is any text, and a name may begin at any of its parts."""
    return [name for name in names if any(_names(pattern, name) for pattern in patterns)]


def _names(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def idle_pattern(patterns: Sequence[str], names: Sequence[str]) -> tuple[int, str] | None:
    """Return the index of the first pattern that names no parameter, and what was probably meant; None if all do."""
    for index, pattern in enumerate(patterns):
        if not any(_names(pattern, name) for name in names):
            return index, did_you_mean(pattern, _patterns_of(names), "Patterns")
    return None


def _patterns_of(names: Iterable[str]) -> list[str]:
    """Return what one may write for some parameters, the numbers of layers left open: `model.layers.*.mlp.*`."""
    found: dict[str, None] = {}
    for name in names:
        *inner, last = re.sub(r"\.\d+(?=\.)", ".*", name).split(".")
        for end in range(2, len(inner) + 1):
            if inner[end - 1] != "*":
                found[".".join([*inner[:end], "*"])] = None
        found[".".join([*inner, last])] = None
    return sorted(found, key=lambda each: each.count("."))


def check_freeze(spec: Spec) -> list[Diagnostic]:
    """Return the mistakes in `freeze` of each role; put the numbers of frozen parameters into `spec.frozen`."""
    return [mistake for role in spec.dag.roles for mistake in _check(spec, role)]


def _check(spec: Spec, role: str) -> Iterator[Diagnostic]:
    """Check a role with its settings, which may be those of the role that it copies."""
    settings, item = spec.settings_of(role), spec.dag.roles[role]
    if settings is None or not settings.freeze:
        return
    owner = next(name for name in spec.lineage(role) if name in spec.run.roles)
    where = spec.run_source.location(("roles", owner, "freeze"), key=True)
    if not item.trained:
        if owner == role:
            yield Diagnostic(f"role `{role}` has `freeze`, but DAG `{spec.dag.name}` does not train it", where,
                             "Take `freeze` out.")
        return
    if settings.lora:
        yield Diagnostic(f"role `{role}` has `freeze` and `lora`, which freezes all of the model but its adapters",
                         where, "Take one of the two out; `lora.targets` says which layers get adapters.")
        return
    sizes = parameter_sizes(spec, role)
    if sizes and (idle := idle_pattern(settings.freeze, list(sizes))):
        index, hint = idle
        yield Diagnostic(f"role `{role}`: `freeze` names `{settings.freeze[index]}`, and its model has no such "
                         "parameter", spec.run_source.location(("roles", owner, "freeze", index)), hint)
        return
    frozen = frozen_names(settings.freeze, sizes)
    if sizes and len(frozen) == len(sizes):
        yield Diagnostic(f"role `{role}`: `freeze` names all {len(sizes)} parameters, so that nothing is left to be "
                         "trained", where, "Leave some out.")
    spec.frozen[role] = sum(sizes[name] for name in frozen)


def parameter_sizes(spec: Spec, role: str) -> Sizes:
    """Return the sizes of the role's parameters; {} if its model's files do not say."""
    model = spec.model_of(role)
    if model is None:
        return {}
    sizes = _of_embedded(model) if model.path is None else {
        name: math.prod(shape) for name, shape in tensor_shapes_of(spec, model).items()}
    shape = spec.shape_of(role)
    if sizes and spec.dag.roles[role].head == "value" and shape:
        sizes = {name: size for name, size in sizes.items() if name not in _HEADS} | {"score.weight": shape.hidden}
    return sizes


def _of_embedded(model: Model) -> Sizes:
    """Return the parameters of a tiny architecture, whose vocabulary is an upper bound."""
    hidden, text = model.hidden, "model.language_model" if model.takes_images else "model"
    sizes = {f"{text}.embed_tokens.weight": VOCABULARY * hidden, f"{text}.norm.weight": hidden}
    layer = _of_layer(model)
    sizes |= {f"{text}.layers.{number}.{name}": size for number in range(model.layers) for name, size in layer.items()}
    return {**(_of_vision(hidden) if model.takes_images else {}), **sizes}


def _of_layer(model: Model) -> Sizes:
    hidden, queries, keys = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    sizes = {"self_attn.q_proj.weight": queries * hidden, "self_attn.k_proj.weight": keys * hidden,
             "self_attn.v_proj.weight": keys * hidden, "self_attn.o_proj.weight": queries * hidden,
             "input_layernorm.weight": hidden, "post_attention_layernorm.weight": hidden}
    if str(model.architecture).startswith("qwen3"):
        sizes |= {"self_attn.q_norm.weight": model.head_dim, "self_attn.k_norm.weight": model.head_dim}
    if model.architecture == "qwen2":
        sizes |= {"self_attn.q_proj.bias": queries, "self_attn.k_proj.bias": keys, "self_attn.v_proj.bias": keys}
    if model.mixture:
        experts, inner = model.mixture[0], mixture_of(hidden, model.mixture)["moe_intermediate_size"]
        return sizes | {"mlp.experts.gate_up_proj": experts * 2 * inner * hidden, "mlp.gate.weight": experts * hidden,
                        "mlp.experts.down_proj": experts * inner * hidden}
    return sizes | {f"mlp.{name}_proj.weight": WIDENING * hidden * hidden for name in ("gate", "up", "down")}


def _of_vision(hidden: int) -> Sizes:
    """Return the parameters of the image encoder of a tiny architecture; linear layers and norms have biases."""
    vision = embedded_vision(hidden)
    width, inner, out = vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"]
    joined, pixels = vision["spatial_merge_size"] ** 2 * width, vision["patch_size"] ** 2
    linears = {"patch_embed.proj": (3 * vision["temporal_patch_size"] * pixels, width)}
    for block in range(vision["depth"]):
        linears |= {f"blocks.{block}.{name}": sizes for name, sizes in {
            "attn.qkv": (width, 3 * width), "attn.proj": (width, width), "mlp.linear_fc1": (width, inner),
            "mlp.linear_fc2": (inner, width), "norm1": (1, width), "norm2": (1, width)}.items()}
    mergers = {"merger": width, **{f"deepstack_merger_list.{index}": joined
                                   for index in range(len(vision["deepstack_visual_indexes"]))}}
    for merger, normed in mergers.items():
        linears |= {f"{merger}.norm": (1, normed), f"{merger}.linear_fc1": (joined, joined),
                    f"{merger}.linear_fc2": (joined, out)}
    sizes = {"model.visual.pos_embed.weight": vision["num_position_embeddings"] * width}
    for name, (inputs, outputs) in linears.items():
        sizes |= {f"model.visual.{name}.weight": inputs * outputs, f"model.visual.{name}.bias": outputs}
    return sizes
