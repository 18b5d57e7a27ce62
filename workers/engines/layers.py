"""What is done to each layer before it is sharded: activations made anew in the backward pass, and compilation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache


def recompute(layer: nn.Module) -> None:
    """Keep only what enters the layer; the rest is computed again when its gradient is (Chen et al. 2016).

    transformers' own way gives up the cache, and with it the prompt that responses share.
    """
    layer.forward = functools.partial(_recomputed, layer.forward, layer.self_attn.layer_idx)


def _recomputed(forward: Callable, number: int, *inputs: Any, past_key_values: Cache | None = None, **more: Any) -> Any:
    past = getattr(past_key_values, "layers", None)
    before = dict(vars(past[number])) if past else {}

    def from_the_beginning(*inputs: Any, **more: Any) -> Any:
        if past:  # the first time has added this layer's keys and values to it
            vars(past[number]).clear()
            vars(past[number]).update(before)
        return forward(*inputs, past_key_values=past_key_values, **more)

    return checkpoint(from_the_beginning, *inputs, use_reentrant=False, **more)


def compiled(layer: nn.Module) -> None:
    """What the layer has beside attention, by torch.compile, for inputs of any length.

    Attention adds to a cache by the number of its layer, so that each layer would be compiled anew; it is one kernel
    already. The rest is the same code in all of them. Experts stay too: which tokens they get is not known beforehand.
    """
    for name, part in layer.named_children():
        if name != "self_attn" and not hasattr(part, "experts"):
            part.forward = torch.compile(part.forward, dynamic=True)
