"""What of distflow's own way a model has earned, read from transformers' code of it.

The own way: attention by `attend`, packed rows, prompts that are read once, slots of keys and values, captured steps.
A model earns it where each layer mixes tokens by attention alone and hands to that nothing that `attend` does not know.
All others are computed the plain way, by their own code: whole rows without a cache, and sampling with the model's own.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from distflow.errors import EngineError
from workers.engines import attention
from workers.engines.context_parallel import has_windows

_READS = {"num_key_value_groups", "training", "head_dim"}
"""What eager attention of such models reads of its module."""
_PASTS = {"past_key_values", "past_key_value", "layer_past", "cache_params", "past_kv"}
"""Parameters by which a layer's parts take what earlier tokens have left."""
_KINDS = {"full_attention", "sliding_attention"}
_PLAIN_LOGITS = {"self.lm_head(hidden_states[:, slice_indices, :])", "self.lm_head(hidden_states)"}
_LAST_STATES = {"outputs.last_hidden_state", "outputs[0]"}
_VARYING = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on how long a row is."""
_NOTHING = ast.Module([], [])


@dataclass(frozen=True)
class Capabilities:
    """How a model is computed."""

    attention: str
    """Name of the implementation: distflow's, or "eager", the model's own."""
    plain: str
    """Why it is computed the plain way, as a sentence without its subject; "" if it is not."""
    packs: bool
    """Whether rows may lie one after the other without padding, as each token sees all before it in its row."""
    own_length: int
    """Longest row whose rotary frequencies are those of each shorter one, 0 if no row's depend on its length. Where
    one is longer, all rows are computed the plain way."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Capabilities:
        """Raises EngineError: tokens of the model see those after them, or transformers computes it in two ways."""
        layers = decoder_layers(model)
        mixers = [list(token_mixers(layer)) for layer in layers]
        if {getattr(mixer, "is_causal", None) for found in mixers for mixer in found} == {False}:
            raise EngineError(f"{type(model).__name__} is an encoder by its configuration: its tokens see those after "
                              "them, which it would be taught to copy. Give the role a decoder")
        unknown = [_unknown(mixer) for found in mixers for mixer in found if _calls_attention(type(mixer))]
        plain = next(filter(None, map(_other_mixing, mixers)), "") or _other_places(model) or \
            _other_cache(model.config, len(layers))
        if not plain and (other := _other_with_cache(model)):
            raise EngineError(f"{type(model).__name__} {other}: engines would train and sample another model than its "
                              "own code computes. Give the role another model")
        ours = not any(unknown) and bool(unknown) and bool(model._supports_attention_backend)
        packs = ours and not plain and _sees_all_before(model) and \
            all(_hands_on(layer, mixer) for layer, found in zip(layers, mixers) for mixer in found)
        return cls(attention.NAME if ours else "eager", plain, packs, _own_length(model.config))


def prepare(model: PreTrainedModel) -> Capabilities:
    """Set how a model computes that has just been loaded, and return what it has earned. It may be called again."""
    if model.base_model is model and isinstance(getattr(model, "model", None), PreTrainedModel):
        model.base_model_prefix = "model"  # some classes name another
    found = Capabilities.of(model)
    attend_by(model, found.attention)
    if found.own_length:
        _separate_rows(model)
    return found


def attend_by(model: PreTrainedModel, implementation: str) -> None:
    """Set how a model attends. It is loaded with "eager", and some are not to be set."""
    if model.config._attn_implementation != implementation:
        model.set_attn_implementation(implementation)


def bound_time_steps(model: nn.Module) -> None:
    """Bound the time steps of Mamba layers where they are projected: transformers does so for many tokens at once, and
    not for one."""
    for part in model.modules():
        low, high = getattr(part, "time_step_limit", (0.0, math.inf))
        if low > 0 or high < math.inf:
            bounds = [each + math.log(-math.expm1(-each)) if 0 < each < math.inf else None for each in (low, high)]
            part.get_submodule("in_proj").register_forward_hook(functools.partial(_bounded, part, bounds))


def _bounded(mixer: Any, bounds: list[float | None], _: nn.Module, __: Any, projected: Tensor) -> Tensor:
    """Return what `in_proj` gives, with time steps, its last columns, of which softplus makes what is in `bounds`."""
    steps = (projected[..., -mixer.num_heads :] + mixer.dt_bias).clamp(*bounds) - mixer.dt_bias
    return torch.cat([projected[..., : -mixer.num_heads], steps], -1)


def require_tokens_alone(kind: type[PreTrainedModel]) -> None:
    """Raise EngineError: a class of models takes something before its tokens, or needs more than these."""
    first, *more = [*inspect.signature(kind.forward).parameters.values()][1:]  # without self
    needed = [each.name for each in more if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    if first.name != "input_ids" or needed:
        other = needed[0] if first.name == "input_ids" else first.name
        raise EngineError(f"{kind.__name__} reads `{other}` besides tokens in each row, and rows here may be of text "
                          "alone. Give the role a decoder of text")


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the layers of the language model. Raises EngineError: it has none in a list."""
    for root in (model.get_decoder(), model.base_model):  # some call their head `decoder`
        parts = [*root.children()]
        while parts and not any(isinstance(part, nn.ModuleList) for part in parts):
            parts = [child for part in parts for child in part.children()]
        if lists := [part for part in parts if isinstance(part, nn.ModuleList)]:
            return max(lists, key=len)
    raise EngineError(f"{type(model).__name__} has no list of layers that could be computed one by one. Give the role "
                      "another model")


def token_mixers(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield the innermost parts of a layer that take what earlier tokens have left."""
    for part in layer.children():
        found = list(token_mixers(part))
        yield from found or ([part] if _PASTS & {*_parameters(type(part))} else [])


@functools.cache
def _parameters(kind: type[nn.Module]) -> list[str]:
    return [*inspect.signature(kind.forward).parameters]


@functools.cache
def _calls_attention(kind: type[nn.Module]) -> list[ast.Call]:
    """Return the calls in `forward` of what `_attn_implementation` names."""
    body = _source_of(kind.forward)
    return [node for node in ast.walk(body) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            and node.func.id == "attention_interface"]


def _unknown(mixer: nn.Module) -> str:
    """Return what `attend` would miss of a layer's attention; "" if nothing."""
    odd = (keyword.arg for keyword in _calls_attention(type(mixer))[0].keywords
           if keyword.arg and keyword.arg not in attention.KNOWN and not _is_none(keyword.value, mixer))
    read = (each for each in sorted(_eager_reads(type(mixer).__module__) - _READS)
            if getattr(mixer, each, None) is not None)
    return next(odd, "") or next(read, "")


def _other_mixing(mixers: list[nn.Module]) -> str:
    """Return how a layer mixes tokens, unless it is by one attention that can be replaced; "" if it is."""
    if len(mixers) != 1:
        return "has layers that do not mix tokens by one attention"
    return "" if _calls_attention(kind := type(mixers[0])) and _keeps_mask(kind) else \
        f"mixes tokens by `{kind.__name__}`, which is no attention that can be replaced"


def _is_none(value: ast.expr, module: nn.Module) -> bool:
    """Return whether an expression in a method of a module is None: that constant, or an attribute that is."""
    path = ast.unparse(value).split(".")
    if path[0] != "self" or not all(map(str.isidentifier, path)):
        return path == ["None"]
    return functools.reduce(lambda owner, name: getattr(owner, name, None), path[1:], module) is None


@functools.cache
def _keeps_mask(kind: type[nn.Module]) -> bool:
    """Return whether attention is called once, with the mask that the module was given."""
    call, body = _calls_attention(kind)[0], _source_of(kind.forward)
    stores = any(isinstance(node, ast.Name) and node.id == "attention_mask" and isinstance(node.ctx, ast.Store)
                 for node in ast.walk(body))
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    mask = named.get("attention_mask") or (call.args[4] if len(call.args) > 4 else None)
    return len(_calls_attention(kind)) == 1 and not stores and isinstance(mask, ast.Name) and \
        mask.id == "attention_mask"


def _hands_on(owner: nn.Module, mixer: nn.Module) -> bool:
    """Return whether all arguments of a layer that it does not know itself reach its attention."""
    if owner is mixer:
        return any(keyword.arg is None for keyword in _calls_attention(type(mixer))[0].keywords)
    name, part = next((name, part) for name, part in owner.named_children() if mixer in part.modules())
    calls = [node for node in ast.walk(_source_of(type(owner).forward)) if isinstance(node, ast.Call)
             and ast.unparse(node.func) == f"self.{name}"]
    return bool(calls) and all(any(each.arg is None for each in call.keywords) for call in calls) and \
        _hands_on(part, mixer)


@functools.cache
def _eager_reads(module: str) -> frozenset[str]:
    """Return the attributes that a file's own eager attention reads of the module that calls it."""
    eager = getattr(sys.modules[module], "eager_attention_forward", None)
    return frozenset(node.attr for node in ast.walk(_source_of(eager)) if isinstance(node, ast.Attribute)
                     and isinstance(node.value, ast.Name) and node.value.id == "module")


def _source_of(function: Callable | None) -> ast.Module:
    """Return what a function's source says; nothing where it cannot be read."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))) if function else _NOTHING
    except (OSError, TypeError, SyntaxError):
        return _NOTHING


def _sees_all_before(model: PreTrainedModel) -> bool:
    """Return whether every layer attends to all tokens before, and to no image."""
    config = model.config.get_text_config()
    full = {*(getattr(config, "layer_types", None) or ["full_attention"])} == {"full_attention"}
    return full and not has_windows(config) and not getattr(model, "image_processor", None)


def _other_with_cache(model: PreTrainedModel) -> str:
    """Return how a model computes a token otherwise with its cache than in a whole row; "" if it does not."""
    decoder, kept = model.get_decoder(), {type(layer) for layer in DynamicCache(config=model.config).layers}
    masks = {*re.findall(r"create_\w*causal_mask", inspect.getsource(sys.modules[type(decoder).__module__]))}
    if DynamicSlidingWindowLayer in kept and masks == {"create_causal_mask"}:
        return "attends to all tokens before, and its cache keeps those of a window"
    counts = any(hasattr(part, "create_position_ids_from_input_ids") for part in decoder.modules())
    return "counts positions from the padding token's number on, and rows here from 0" if counts else ""


def _other_places(model: PreTrainedModel) -> str:
    """Return what keeps tokens from having positions of their own; "" if they may."""
    takes = inspect.signature(model.base_model.forward).parameters
    return "" if "position_ids" in takes else "takes no `position_ids`"


def _other_cache(config: PretrainedConfig, layers: int) -> str:
    """Return what a model keeps between tokens besides keys and values of each layer; "" if nothing."""
    kept = DynamicCache(config=config).layers
    other = {type(layer).__name__ for layer in kept if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)}
    if other:
        return f"keeps {', '.join(sorted(other))} between tokens, not keys and values alone"
    if kept and len(kept) != layers:
        return "has layers that read keys and values of others"
    strange = {*(getattr(config.get_text_config(), "layer_types", None) or _KINDS)} - _KINDS
    return f"has layers of `{min(strange)}`" if strange else ""


def _own_length(config: PretrainedConfig) -> int:
    """Return the longest row whose frequencies are those of each shorter one; 0 if no row's depend on its length."""
    text = config.get_text_config()
    rope: Any = getattr(text, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [each for each in rope.values() if isinstance(each, dict)]
    lengths = [(kind["rope_type"] == "longrope" and kind.get("original_max_position_embeddings")) or
               text.max_position_embeddings for kind in kinds if kind.get("rope_type") in _VARYING]
    return min(lengths, default=0)


def _separate_rows(model: nn.Module) -> None:
    """Let rotary embeddings whose frequencies depend on lengths take each row of `position_ids` [B, L] for itself, its
    largest for its length: transformers takes the longest of the batch, and what longer ones before have left."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
        if any(kind in _VARYING for kind in kinds) and not isinstance(module, _RowsApart):
            module.__class__ = _separated(type(module))


class _RowsApart:
    """Mark of rotary embeddings that take each row for itself."""


@functools.cache
def _separated(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, x: Tensor, position_ids: Tensor, *more: Any, **named: Any) -> tuple[Tensor, ...]:
        together = int(position_ids.max()) < _own_length(cast(Any, self).config)
        parts = []
        for rows in position_ids.split(len(position_ids) if together else 1):
            _forget_longer(self)
            parts.append(kind.forward(self, x[: len(rows)], rows, *more, **named))
        return tuple(torch.cat(each) for each in zip(*parts))

    return type(kind.__name__, (_RowsApart, kind), {"forward": forward, "__module__": kind.__module__})


def _forget_longer(module: Any) -> None:
    """Take back the frequencies of a row of the original length."""
    for name in [name for name in vars(module) if name.endswith("original_inv_freq")] + \
            [name for name in module._buffers if name.endswith("original_inv_freq")]:
        prefix, original = name.removesuffix("original_inv_freq"), getattr(module, name)
        module.register_buffer(f"{prefix}inv_freq", original.to(getattr(module, f"{prefix}inv_freq").device),
                               persistent=False)
        setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def head_is_alone(model: PreTrainedModel) -> bool:
    """Return whether logits are a plain matrix times the last hidden states, by what `forward` says."""
    head, body = model.get_output_embeddings(), _source_of(type(model).forward)
    logits, states = (_assigned(body, name, model) for name in ("logits", "hidden_states"))
    return type(head) is nn.Linear and head.bias is None and len(logits) == 1 and logits <= _PLAIN_LOGITS and \
        states <= _LAST_STATES


def _assigned(body: ast.AST, name: str, module: nn.Module) -> set[str]:
    """Return what a method assigns to a variable, but where it asks first for an attribute that is None."""
    if isinstance(body, ast.If) and isinstance(test := body.test, ast.Compare) and ast.unparse(test).endswith(
            " is not None") and _is_none(test.left, module):
        return set()
    own = {ast.unparse(body.value)} if isinstance(body, ast.Assign) and any(
        ast.unparse(target) == name for target in body.targets) else set()
    return own.union(*(_assigned(part, name, module) for part in ast.iter_child_nodes(body)))
