"""Parameters that `roles.ROLE.freeze` keeps as they are, from the headers of model files: before anything is loaded.

Names are those of the loaded model. transformers 5 renames what it reads (its `conversion_mapping.py`, which needs
torch): the families below are known here, and patterns for any other are checked when its model is loaded.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from fnmatch import fnmatchcase

from distflow.config.model_code import read_json
from distflow.config.models import tensor_shapes_of
from distflow.config.run import Model
from distflow.config.shipped import find
from distflow.config.sizes import VOCABULARY, WIDENING, mixture_of, vision_sizes
from distflow.config.spec import Spec
from distflow.errors import Diagnostic, InvalidInput, Location, listing, nearest

Sizes = dict[str, int]  # number of elements, by a parameter's name
_HEADS = ("lm_head.weight", "score.weight")
_HINTS = 5  # patterns that are shown beside one that names nothing

_STACKED = ((r"(\.experts)\.\d+\.(?:gate|up)_proj\.weight$", r"\1.gate_up_proj"),
            (r"(\.experts)\.\d+\.down_proj\.weight$", r"\1.down_proj"))
_NESTED = ((r"^visual\.", "model.visual."), (r"^model\.(?!language_model\.|visual\.)", "model.language_model."))
_RENAMED: dict[str, tuple[tuple[str, str], ...]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "qwen3_vl", "qwen3_vl_moe", "gemma", "gemma2", "gemma3_text",
                     "phi3", "olmo2", "granite", "smollm3", "glm4"), ()),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), _STACKED), **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _NESTED)}
"""Patterns of names in model files that have others when they are loaded, by `model_type`."""


def frozen_names(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the parameters that a pattern names: `*` is any text, and a name may begin at any of its parts."""
    return [name for name in names if any(_names(pattern, name) for pattern in patterns)]


def _names(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _idle(patterns: Sequence[str], names: Sequence[str]) -> int | None:
    """Return the index of the first pattern that names no parameter; None if all do."""
    return next((index for index, pattern in enumerate(patterns)
                 if not any(_names(pattern, name) for name in names)), None)


def _likely(pattern: str, names: Iterable[str]) -> str:
    """Return what was probably meant by a pattern that names no parameter."""
    written = re.sub(r"\.\d+(?=\.)", ".*", pattern)

    def likeness(other: str) -> float:
        return max(SequenceMatcher(None, written, ending).ratio() for ending in _endings(other))

    near = sorted(_patterns_of(names), key=likeness, reverse=True)[:_HINTS]
    proposed = f"Did you mean `{near[0]}`? " if nearest(written, _endings(near[0])) else ""
    return proposed + listing(near, "Nearest")


def _endings(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[begin:]) for begin in range(len(parts))]


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
    found: dict[Location | None, Diagnostic] = {}  # one for each line: a copy repeats the mistakes of what it copies
    for role in sorted(spec.dag.roles, key=lambda role: len(spec.lineage(role))):
        for mistake in _check(spec, role):
            found.setdefault(mistake.where, mistake)
    return list(found.values())


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
    if sizes:
        yield from _misnamed(spec, role, list(sizes))
    spec.frozen[role] = sum(sizes[name] for name in frozen_names(settings.freeze, sizes))


def check_loaded(spec: Spec, role: str, names: Sequence[str]) -> None:
    """Check the patterns of a trained role against the names of its loaded model, which its files need not have said.
    Raises InvalidInput, with the line."""
    if mistakes := list(_misnamed(spec, role, names)):
        raise InvalidInput(mistakes)


def _misnamed(spec: Spec, role: str, names: Sequence[str]) -> Iterator[Diagnostic]:
    """Return the mistake in the patterns of a trained role whose parameters have these names, if there is one."""
    settings = spec.settings_of(role)
    patterns = settings.freeze if settings else []
    owner = next(name for name in spec.lineage(role) if name in spec.run.roles)
    who, hint = f"role `{role}`", ""
    if owner != role:
        who = f"role `{role}`, which has the settings of `{owner}` since it copies it"
        hint = f"Give it settings of its own:  roles: {{{role}: {{…, freeze: []}}}}"
    if (index := _idle(patterns, names)) is not None:
        what = f"{who}: `freeze` names `{patterns[index]}`, and its model has no such parameter"
        yield Diagnostic(what, spec.run_source.location(("roles", owner, "freeze", index)),
                         hint or _likely(patterns[index], names))
    elif patterns and len(frozen_names(patterns, names)) == len(names):
        what = f"{who}: `freeze` names all {len(names)} parameters, so that nothing is left to be trained"
        where = spec.run_source.location(("roles", owner, "freeze"), key=True)
        yield Diagnostic(what, where, hint or "Leave some out.")


def parameter_sizes(spec: Spec, role: str) -> Sizes:
    """Return the sizes of the role's parameters, named as in the loaded model; {} if its model's files do not say."""
    model, shape, valued = spec.model_of(role), spec.shape_of(role), spec.dag.roles[role].head == "value"
    if model is None or valued and shape and shape.token_pixels:  # whose classifier is another class, of other names
        return {}
    sizes = _of_embedded(model) if model.path is None else _of_folder(spec, model)
    if sizes and valued and shape:
        sizes = {name: size for name, size in sizes.items() if name not in _HEADS} | {"score.weight": shape.hidden}
    return sizes


def _of_folder(spec: Spec, model: Model) -> Sizes:
    folder = find(model.path or "", "models", spec.folder)
    try:
        config = read_json(folder / "config.json") if folder else {}
        renamed = _RENAMED.get(config.get("model_type", ""))
    except (OSError, ValueError, AttributeError):  # which another check reports
        renamed = None
    if renamed is None:
        return {}
    sizes: Sizes = {}
    for name, shape in tensor_shapes_of(spec, model).items():
        loaded = functools.reduce(lambda read, change: re.sub(*change, read), renamed, name)
        sizes[loaded] = sizes.get(loaded, 0) + math.prod(shape)
    if config.get("tie_word_embeddings"):
        sizes.pop("lm_head.weight", None)
    return sizes


def _of_embedded(model: Model) -> Sizes:
    """Return the parameters of a tiny architecture, whose vocabulary is an upper bound."""
    hidden, text = model.hidden, "model.language_model" if model.takes_images else "model"
    sizes = {f"{text}.embed_tokens.weight": VOCABULARY * hidden, f"{text}.norm.weight": hidden}
    layer = _of_layer(model)
    sizes |= {f"{text}.layers.{number}.{name}": size for number in range(model.layers) for name, size in layer.items()}
    return {**(vision_sizes(hidden) if model.takes_images else {}), **sizes}


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
