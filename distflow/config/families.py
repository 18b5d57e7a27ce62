"""Families of models: which ones transformers has as causal language models, by its tables, without loading it."""

from __future__ import annotations

import ast
import functools
import importlib.util
from importlib.metadata import version
from pathlib import Path
from typing import Any


def why_refused(config: dict[str, Any]) -> str:
    """Return why a configuration's model can neither be trained nor sampled, "" if it may be."""
    kind, architectures = config.get("model_type"), config.get("architectures") or ()
    if not isinstance(kind, str) or not kind:
        return "it has no `model_type`, by which transformers finds the class of a model"
    if not isinstance(architectures, list | tuple):
        return f"its `architectures` must be a list of names of classes, not {architectures!r}"
    if f'"{kind}"' not in known_types():
        return f"transformers {version('transformers')} does not know its `model_type: {kind}`"
    if config.get("is_encoder_decoder") or kind in _types("SEQ_TO_SEQ_CAUSAL_LM"):
        return f"`{kind}` is an encoder and a decoder, and rows here are read by a decoder alone"
    if kind not in _types("CAUSAL_LM") | _types("IMAGE_TEXT_TO_TEXT"):
        return f"transformers has no causal language model of `model_type: {kind}`"
    if kind in _types("MASKED_LM") and not config.get("is_decoder"):
        return f"`{kind}` is an encoder, whose tokens see those after them (is_decoder: false)"
    if kind == "cpmant":
        return f"`{kind}` takes each token 0 for padding on the left, and rows here are padded on the right"
    return ""


_RENAMED = {"mrope": "default", "su": "longrope"}
"""Older names of kinds of scaling."""


def why_contradictory(config: dict[str, Any]) -> tuple[str, str]:
    """Return what a configuration says twice of rotary embeddings, of which transformers takes one without a word, and
    the remedy; empty texts if nothing."""
    text = config.get("text_config")
    named = [(key, value) for key in ("rope_scaling", "rope_parameters") if isinstance(value := config.get(key), dict)
             and value and not any(isinstance(each, dict) for each in value.values())]  # of all layers
    for key, rope in named:
        outer, inner = config.get("rope_theta"), rope.get("rope_theta")
        if outer is not None and inner is not None and outer != inner:
            return (f"`rope_theta` is {outer} and, in `{key}`, {inner}, of which transformers takes the second",
                    "Take the wrong one out of its config.json.")
        kind = rope.get("rope_type", rope.get("type"))
        if kind in (None, "default") and (factor := rope.get("factor")) not in (None, 1):
            return (f"`{key}` has `factor: {factor}` without a kind of scaling, and transformers scales nothing",
                    'Name it in its config.json, such as  "rope_type": "yarn" , or take `factor` out.')
    kinds = {_RENAMED.get(kind, kind) for _, rope in named
             for kind in [rope.get("rope_type") or rope.get("type") or "default"]}
    if len(kinds) > 1:
        return ("`rope_scaling` and `rope_parameters` name different kinds of scaling, of which transformers takes the "
                "first", "Take the wrong one out of its config.json.")
    outer, layers = config.get("rope_theta") or 500_000, config.get("layer_types") or ["sliding_attention"]
    if config.get("model_type") == "olmo3" and outer != 500_000 and not config.get("rope_parameters") and \
            "sliding_attention" in layers:
        each = f'{{"rope_type": "default", "rope_theta": {outer}}}'
        return (f"`rope_theta` is {outer}, and transformers takes 500000 in layers with a window",
                f'Add to it  "rope_parameters": {{"sliding_attention": {each}, "full_attention": {each}}}')
    return why_contradictory(text) if isinstance(text, dict) else ("", "")


def has_classifier(kind: str) -> bool:
    """Return whether transformers has a sequence classifier of a `model_type`: models with a value head are such."""
    return kind in _types("SEQUENCE_CLASSIFICATION")


@functools.cache
def known_types() -> str:
    """Return the tables of transformers in which the names of kinds of models stand."""
    return "\n".join(_table(name) for name in ("auto_mappings.py", "configuration_auto.py"))


@functools.cache
def _types(task: str) -> frozenset[str]:
    """Return the kinds of models that transformers has for a task."""
    name = f"MODEL_FOR_{task}_MAPPING_NAMES"
    for item in _tables().body:
        if isinstance(item, ast.Assign) and isinstance(item.value, ast.Call) and ast.unparse(item.targets[0]) == name:
            return frozenset(kind for kind, _ in ast.literal_eval(item.value.args[0]))
    return frozenset()


@functools.cache
def _tables() -> ast.Module:
    return ast.parse(_table("modeling_auto.py"))


def _table(name: str) -> str:
    package = importlib.util.find_spec("transformers")
    assert package
    assert package.submodule_search_locations
    file = Path(package.submodule_search_locations[0], "models/auto", name)
    return file.read_text(encoding="utf-8") if file.is_file() else ""
