"""Describes a model by its configuration: builds it without weights, on torch's meta device, and lets it read a few
tokens.

`python -m workers.engines.description < config.json` prints null once the configuration is read, and then shapes as
JSON, each of which knows more than the one before it. It ends where the model fails: what is printed until then holds.
It exits with REFUSED where the configuration is bad, or no engine could compute the model.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from distflow.config.sizes import REFUSED, Attention, Shape
from distflow.errors import EngineError
from workers.engines.capabilities import Capabilities, require_tokens_alone

_TOKENS = 5  # that the model reads; no state of a fixed size is likely to have such a dimension
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
_EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k", "top_k",
                       "num_selected_experts")
"""Names that configurations have for these numbers."""
_NO_POSITIONS = ("vision", "visual", "image", "video", "audio", "relative")


def shapes_of(config: PretrainedConfig) -> Iterator[Shape]:
    """Yield the shape of a configuration's model, then with what it has earned, then with what it keeps of the tokens
    that it reads. Raises EngineError: no engine could compute it."""
    seeing = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    kind = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model = kind.from_config(config).eval()
    except (ImportError, ValueError, TypeError, LookupError, AttributeError, AssertionError, RuntimeError) as error:
        raise EngineError(f"transformers cannot build it ({type(error).__name__}: {_line(error)})") from error
    require_tokens_alone(type(model))
    shape = replace(_sizes(model, config), token_pixels=_token_pixels(config) if seeing else 0)
    yield shape
    earned = Capabilities.of(model)
    shape = replace(shape, plain=earned.plain, own_length=earned.own_length)
    yield shape
    for part in model.modules():
        if type(part).__name__.endswith("Experts"):  # which ask for values where they divide tokens
            part.forward = lambda states, *_, **__: torch.empty_like(states)
    try:
        with torch.no_grad():
            read = model(input_ids=torch.zeros(1, _TOKENS, dtype=torch.long, device="meta"), use_cache=True)
    except (ValueError, TypeError) as error:  # not of torch, which raises others for a model without weights
        raise EngineError(f"it does not read tokens alone ({type(error).__name__}: {_line(error)})") from error
    kept = getattr(read, "past_key_values", None) or getattr(read, "cache_params", None)
    kinds, state = _kept(getattr(kept, "layers", ()), config.get_text_config())
    yield replace(shape, attention=kinds, state=state)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _sizes(model: PreTrainedModel, config: PretrainedConfig) -> Shape:
    text, parameters = config.get_text_config(), dict(model.named_parameters())
    tables = {id(part.weight): part.weight.numel() for part in model.modules() if isinstance(part, nn.Embedding)}
    head = model.get_output_embeddings()
    own_head = sum(each.numel() for each in head.parameters() if id(each) not in tables) if head else 0
    experts, heads = _number(text, _EXPERTS), _largest(text, "num_attention_heads") or 1
    of_experts = sum(each.numel() for name, each in parameters.items() if _is_of_experts(name, each, experts))
    size = _largest(text, "head_dim") or text.hidden_size // heads
    kv_heads = _largest(text, "num_key_value_heads") or heads
    return Shape(
        sum(each.numel() for each in parameters.values()), text.num_hidden_layers, kv_heads * size, text.vocab_size,
        text.hidden_size, getattr(text, "max_position_embeddings", None), _dtype(config), own_head,
        heads=heads, kv_heads=kv_heads, experts=experts if of_experts else 0, expert_parameters=of_experts,
        experts_per_token=_number(text, _EXPERTS_OF_A_TOKEN) if of_experts else 0,
        widening=0 if of_experts else _largest(text, "intermediate_size") or 4 * text.hidden_size,
        head_norms=any(".q_norm." in name for name in parameters), looked_up=sum(tables.values()),
        learned_positions=_learned_positions(model), weights={name: each.numel() for name, each in parameters.items()},
        linears={name: sum(part.weight.shape) for name, part in model.named_modules()
                 if isinstance(part, nn.Linear | Conv1D) and part is not head})


def _number(config: PretrainedConfig, names: tuple[str, ...]) -> int:
    found = (getattr(config, name, None) for name in names)
    return next((int(number) for number in found if isinstance(number, int) and number), 0)


def _largest(config: PretrainedConfig, name: str) -> int | None:
    """Return a size, the largest of those of layers that differ; None if the configuration does not say one."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # each layer has its own (Gemma 4)
        return None
    return max(value) if isinstance(value, list | tuple) else value


def _is_of_experts(name: str, parameter: Tensor, experts: int) -> bool:
    """Return whether a parameter is of routed experts: stacked ones, or one of many modules."""
    named = re.search(r"(?<!shared_)experts\.", name) is not None
    return experts > 0 and (named or parameter.ndim > 2 and parameter.shape[0] == experts)


def _dtype(config: PretrainedConfig) -> str | None:
    dtype = config.dtype or config.get_text_config().dtype
    return str(dtype).removeprefix("torch.") if dtype else None


def _token_pixels(config: PretrainedConfig) -> int:
    """Return the pixels of an image's token: of an image with a fixed number, or of patches that are merged."""
    vision: Any = getattr(config, "vision_config", None)
    size, tokens, patch = (getattr(owner, name, None) for owner, name in (
        (vision, "image_size"), (config, "mm_tokens_per_image"), (vision, "patch_size")))
    if isinstance(size, int) and tokens:
        return size**2 // tokens
    first = patch[0] if isinstance(patch, list | tuple) else patch or 16
    return (first * getattr(vision, "spatial_merge_size", 1)) ** 2


def _learned_positions(model: PreTrainedModel) -> int:
    """Return the rows of the shortest table of positions of the part that reads text; 0 if it has none."""
    tables = {name: part.num_embeddings - getattr(part, "offset", 0) for name, part in model.named_modules()
              if isinstance(part, nn.Embedding)}
    tables |= {name: len(buffer) for name, buffer in model.named_buffers() if name.endswith("embed_positions")}
    return min((rows for name, rows in tables.items() if re.search(r"(wpe|position\w*)$", name)
                and not any(part in name for part in _NO_POSITIONS)), default=0)


def _kept(layers: Iterable[Any], text: PretrainedConfig) -> tuple[tuple[Attention, ...], int]:
    """Return the kinds of layers that keep something of each token, and the elements that others keep of a row."""
    kinds, state = Counter[tuple[int, int, int]](), 0
    heads = _largest(text, "num_attention_heads") or 1
    for layer in layers:
        values = [each for value in vars(layer).values() for each in (
            value.values() if isinstance(value, dict) else [value])]
        own = [each for each in values if isinstance(each, Tensor) and each.ndim > 2]
        growing = [each for each in own if each.shape[-2] == _TOKENS]
        state += sum(each.numel() for each in own) - sum(each.numel() for each in growing)
        if growing:
            latent = getattr(text, "qk_nope_head_dim", None)
            sizes = (latent + text.qk_rope_head_dim, text.v_head_dim) if latent else [
                each.shape[-1] for each in growing[:2]]
            cached, window = sum(each.numel() for each in growing) // _TOKENS, getattr(layer, "sliding_window", None)
            kinds[heads * sum(sizes) // 2, cached, window or 0] += 1
    return tuple(Attention(count, *kind) for kind, count in kinds.items()), state


def main() -> None:
    text = sys.stdin.read()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(text, encoding="utf-8")
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except (StrictDataclassError, ValueError, TypeError, LookupError, AttributeError) as error:
            refuse(f"{type(error).__name__}: {_line(error)}")
    if config.is_encoder_decoder:
        refuse("an encoder reads its prompts (is_encoder_decoder), and rows here are read by one decoder")
    print("null", flush=True)  # nothing is known yet
    try:
        for shape in shapes_of(config):
            print(json.dumps(asdict(shape)), flush=True)
    except EngineError as error:
        refuse(str(error))


def refuse(why: str) -> NoReturn:
    print(why, file=sys.stderr)
    sys.exit(REFUSED)


if __name__ == "__main__":
    main()
