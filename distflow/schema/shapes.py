"""The sizes of models, from their configurations: what memory is estimated from."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distflow.schema.run import Model

_VOCABULARY = 512
"""Of the tokenizer that is trained for a model without a folder; an upper bound."""
WIDENING = 3
"""Width of the feed-forward layers of a model without a folder, in hidden sizes."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, as far as memory depends on them."""

    parameters: int
    layers: int
    kv_width: int
    """Elements of one layer's keys of one token: key-value heads × head size."""
    vocabulary: int
    hidden: int
    positions: int | None = None
    """Tokens that prompt and response may have together; None if the configuration does not say."""
    dtype: str | None = None
    """In which its weights lie in the folder, as `bfloat16`; None if the configuration does not say."""
    vocabulary_head: int = 0
    """Parameters that the head over the vocabulary has for itself; 0 if it shares those of the embeddings."""
    labels: int | None = None
    """Numbers that it gives for each token in place of a vocabulary; None for a language model."""
    token_pixels: int = 0
    """Pixels of an image that become one token; 0 for a model that takes no images."""
    heads: int = 1
    kv_heads: int = 1
    experts: int = 0
    """Of each layer; 0 for a model without."""
    expert_parameters: int = 0
    """Of the experts of all layers together."""
    experts_per_token: int = 0
    """How many of a layer's experts compute for a token."""
    widening: int = 0
    """Width of the feed-forward layers; 0 where experts have their own."""

    @property
    def active_parameters(self) -> int:
        """Parameters that compute for a token: all but those of experts that it does not have."""
        idle = 1 - self.experts_per_token / self.experts if self.experts else 0
        return self.parameters - int(idle * self.expert_parameters)

    def with_value_head(self) -> Shape:
        """The same model with one number for each token."""
        return replace(self, parameters=self.parameters - self.vocabulary_head + self.hidden, vocabulary_head=0,
                       labels=1)


def read_shape(config: Path) -> Shape:
    """The shape that a Hugging Face `config.json` describes.

    Raises:
        ValueError: it is not the configuration of a language model; says what is missing.
    """
    try:
        return shape_of(json.loads(config.read_text(encoding="utf-8")))
    except KeyError as error:
        raise ValueError(f"it has no {error}") from None
    except TypeError as error:
        raise ValueError(f"a value has the wrong type: {error}") from None


def shape_of(config: dict[str, Any]) -> Shape:
    """Sizes from a Hugging Face configuration of the Llama and Qwen families, of those that see also."""
    if "vision_config" in config:
        outer = {name: value for name, value in config.items() if name not in ("vision_config", "text_config")}
        inner = shape_of({**config.get("text_config", {}), **outer})
        vision = config["vision_config"]
        return replace(inner, parameters=inner.parameters + _seeing(vision, inner.hidden),
                       token_pixels=(vision["patch_size"] * vision.get("spatial_merge_size", 2)) ** 2)
    hidden, layers, vocabulary = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    kv_width = kv_heads * head_dim
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_width
    per_layer = attention + _feed_forward(config, hidden) + 2 * hidden
    own_head = 0 if config.get("tie_word_embeddings") else vocabulary * hidden
    positions = config.get("max_position_embeddings")
    dtype = config.get("dtype") or config.get("torch_dtype")
    parameters = layers * per_layer + vocabulary * hidden + own_head + hidden
    return Shape(parameters, layers, kv_width, vocabulary, hidden, positions, dtype, own_head, _labels(config),
                 heads=heads, kv_heads=kv_heads, experts=_experts(config),
                 experts_per_token=config.get("num_experts_per_tok", 0) if _experts(config) else 0,
                 expert_parameters=layers * _experts(config) * 3 * hidden * config.get("moe_intermediate_size", 0),
                 widening=0 if _experts(config) else config["intermediate_size"])


def _experts(config: dict[str, Any]) -> int:
    return config.get("num_experts") or config.get("num_local_experts") or 0  # transformers writes the latter


def _feed_forward(config: dict[str, Any], hidden: int) -> int:
    """Parameters of a layer's feed-forward part: one, or its experts and the router."""
    experts = _experts(config)
    if not experts:
        return 3 * hidden * config["intermediate_size"]
    return experts * (3 * hidden * config["moe_intermediate_size"] + hidden)


def _seeing(vision: dict[str, Any], hidden: int) -> int:
    """Parameters of the part that sees, up to a few in a hundred: layers, first patches, and the way to `hidden`."""
    width, inner = vision["hidden_size"], vision["intermediate_size"]
    matrices = 3 if vision.get("hidden_act") == "silu" else 2  # gated or not
    patch = vision.get("in_channels", 3) * vision.get("temporal_patch_size", 2) * vision["patch_size"] ** 2
    joined = vision.get("spatial_merge_size", 2) ** 2 * width
    mergers = 1 + len(vision.get("deepstack_visual_indexes", ()))
    return (vision["depth"] * (4 * width**2 + matrices * width * inner) + patch * width
            + mergers * (joined**2 + joined * hidden))


def _labels(config: dict[str, Any]) -> int | None:
    """How many numbers a classifier gives for each token: as many as labels, of which Hugging Face's default are 2."""
    kinds = ("ForSequenceClassification", "ForTokenClassification")
    if not str(next(iter(config.get("architectures") or ()), "")).endswith(kinds):
        return None
    return len(config.get("id2label") or (0, 1))


def shape_of_embedded(model: Model) -> Shape:
    """Sizes of a model that is made at start from an `architecture`."""
    text = {"hidden_size": model.hidden, "num_hidden_layers": model.layers, "vocab_size": _VOCABULARY,
            "num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads, "head_dim": model.head_dim,
            "intermediate_size": WIDENING * model.hidden, "tie_word_embeddings": True,
            "max_position_embeddings": model.max_positions, **mixture_of(model.hidden, model.mixture)}
    return shape_of({**text, "vision_config": embedded_vision(model.hidden)} if model.sees else text)


def mixture_of(hidden: int, mixture: tuple[int, int] | None) -> dict[str, Any]:
    """The experts of a tiny architecture, as its configuration says them: those of a token have the width of a
    feed-forward part between them."""
    if not mixture:
        return {}
    experts, each = mixture
    return {"num_experts": experts, "num_experts_per_tok": each, "norm_topk_prob": True,
            "moe_intermediate_size": WIDENING * hidden // each}


def embedded_vision(hidden: int) -> dict[str, Any]:
    """The part that sees of a tiny architecture, as its configuration says it: two layers as wide as the text's.

    A token stands for a square of 16 pixels.
    """
    return {"depth": 2, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_heads": max(1, hidden // 32),
            "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": hidden,
            "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
