"""Context parallelism: divides the tokens of each row between ranks, which all-gather keys and values.

As in Llama 3 (Dubey et al. 2024, §3.3.2): keys and values are gathered before each attention; with grouped queries they
are much smaller than the queries. Of 2·n pieces of the columns rank r has the r-th from the front and the r-th from the
back, which balances the causal mask. Responses do not share a prompt here: each row is read whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from distflow.weights.reshard import all_gather, reduce_scatter


@dataclass(frozen=True)
class ContextParallelCache:
    """Passed to the model as its cache: `update` returns the keys and values of all ranks that share these rows."""

    group: dist.ProcessGroup

    def pieces(self, width: int) -> Tensor:
        """Return [n, w], the columns of each rank; `width` is a multiple of 2·n."""
        parts = torch.arange(width).chunk(2 * self.group.size())
        return torch.stack([torch.cat(pair) for pair in zip(parts[: len(parts) // 2], parts[::-1])])

    def update(self, keys: Tensor, values: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        gathered = _AllGather.apply(torch.stack([keys, values]), self.group)  # [n, 2, B, K, w, D]
        columns = gathered.movedim(0, 3).flatten(3, 4)
        back = torch.argsort(self.pieces(columns.shape[3]).flatten()).to(columns.device)
        keys, values = columns.index_select(3, back)
        return keys, values

    def join(self, own: Tensor) -> Tensor:
        """Gather [B, w, …] of this rank's columns into [B, W, …]. Gradients are not summed: all ranks have one loss."""
        columns = _AllGatherLocalGrad.apply(own, self.group).movedim(0, 1).flatten(1, 2)
        return columns[:, torch.argsort(self.pieces(columns.shape[1]).flatten()).to(columns.device)]


def has_windows(config: PretrainedConfig) -> bool:
    """Return whether some layers use sliding-window attention, which the mask here cannot express."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return any(kind != "full_attention" for kind in kinds)
    return getattr(config, "sliding_window", None) is not None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(own, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        summed = gradient.new_empty(gradient.shape[1:])
        reduce_scatter(summed.flatten(), gradient.contiguous().flatten(), group=ctx.group)
        return summed, None


class _AllGatherLocalGrad(_AllGather):
    """All-gather whose backward pass takes this rank's gradient alone."""

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[ctx.group.rank()], None


def _gather(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    everyone = own.new_empty(group.size(), *own.shape)
    all_gather(everyone.flatten(), own.contiguous().flatten(), group=group)
    return everyone
