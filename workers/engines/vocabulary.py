"""Log-probabilities and entropies over a vocabulary, with only a piece of the logits in memory at a time.

A vocabulary of 150,000 takes 600 kB of logits per token, and autograd keeps several such tables. Here the head is
applied to some tokens at a time, and again in the backward pass (as in Liger Kernel, Hsu et al. 2024, and Cut Cross-
Entropy, Wijmans et al. 2024), on a GPU with a Triton kernel for what follows the matrix product (`logit_kernels.py`),
else in plain PyTorch. With a head that is split over ranks they exchange a few numbers per token (Shoeybi et al. 2019,
§3), not logits.
"""

from __future__ import annotations

import functools
import subprocess
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distflow.weights.reshard import all_gather

PIECE = 2**25  # logits in memory at a time: 128 MiB in float32. If all fit, they are computed once and kept
_ON_GPU = 8  # times as many there: short kernels are slow


def score(hidden: Tensor, head: nn.Linear, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of `tokens` [N] or [N, K] after `hidden` [N, D], shaped like them, and entropies [N],
    both float32 and with gradients. `head` has no bias; its weight [V, D] may be a DTensor split by rows over one mesh
    dimension."""
    weight = head.weight
    if isinstance(weight, DTensor):
        return score_cut(hidden, weight.to_local(), len(weight), tokens, temperature, weight.device_mesh.get_group())
    if len(hidden) * len(weight) > _logits_at_once(hidden) or kernels_for(hidden.device):
        return _Scores.apply(hidden, weight, tokens, temperature, None, 0, len(weight))
    return score_logits(head(hidden).float() / temperature, tokens)


def score_cut(hidden: Tensor, weight: Tensor, vocabulary: int, tokens: Tensor, temperature: float,
              group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Compute `score` with a head of `vocabulary` rows split over `group`, of which `weight` holds this rank's, with
    padding beyond the vocabulary ignored. Every rank gets the whole gradient of `hidden`."""
    rows = -(-vocabulary // dist.get_world_size(group))
    first = rows * dist.get_rank(group)
    return _Scores.apply(hidden, weight[: max(0, vocabulary - first)], tokens, temperature, group, first, rows)


def score_logits(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of `tokens` [N] or [N, K] and entropies [N] under `logits` [N, V]."""
    logprobs = torch.log_softmax(logits, -1)
    rows = torch.arange(len(tokens), device=tokens.device)
    return logprobs[rows if tokens.ndim == 1 else rows[:, None], tokens], _Entropies.apply(logprobs)


@torch.no_grad()
def top_logprobs(hidden: Tensor, head: nn.Linear, count: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the `count` most probable tokens after `hidden` [N, D], int32 [N, count], the most probable first, and
    their log-probabilities, float32. `head` as in `score`; it has at least as many rows."""
    weight, group, first, part = head.weight, None, 0, len(head.weight)
    if isinstance(weight, DTensor):
        group = weight.device_mesh.get_group()
        part = -(-part // dist.get_world_size(group))
        weight, first = weight.to_local(), part * dist.get_rank(group)
    tokens = torch.empty(len(hidden), count, dtype=torch.int32, device=hidden.device)
    logprobs = torch.empty(len(hidden), count, device=hidden.device)
    for piece in _pieces(hidden, part):
        logits = _scaled(nn.functional.linear(hidden[piece], weight), temperature).float()
        best, columns = logits.topk(min(count, len(weight)), -1)
        normalizers = logits.logsumexp(-1, keepdim=True)
        if group is not None:
            missing = min(count, part) - best.shape[1]  # the last ranks may have fewer rows
            best = _gather_columns(nn.functional.pad(best, (0, missing), value=-torch.inf), group)
            columns = _gather_columns(nn.functional.pad(columns + first, (0, missing)), group)
            normalizers = _gather_columns(normalizers, group).logsumexp(-1, keepdim=True)
            best, order = best.topk(count, -1)
            columns = columns.gather(1, order)
        tokens[piece], logprobs[piece] = columns.int(), best - normalizers
    return tokens, logprobs


def top_logprobs_of(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return `top_logprobs` of `logits` [N, V]."""
    best, tokens = logits.topk(count, -1)
    return tokens.int(), best - logits.logsumexp(-1, keepdim=True)


class _Entropies(torch.autograd.Function):
    """Entropies [N] of `logprobs` [N, V], which log_softmax keeps in any case: they take no memory of their own."""

    @staticmethod
    def forward(ctx, logprobs: Tensor) -> Tensor:
        ctx.save_for_backward(logprobs)
        ctx.set_materialize_grads(False)
        return logprobs.exp().mul_(logprobs).sum(-1).neg_()

    @staticmethod
    def backward(ctx, gradient: Tensor | None) -> Tensor | None:
        (logprobs,) = ctx.saved_tensors
        if gradient is None:
            return None
        powers = logprobs.exp()
        return powers.addcmul_(powers, logprobs).mul_(-gradient[:, None])


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float,
                group: dist.ProcessGroup | None, first: int, part: int) -> tuple[Tensor, Tensor]:
        """Compute piece by piece; `part`, the rows of the largest split, makes all ranks agree on the pieces.
        `to_sum` [n, K + 2]: logits of the K tokens, the sum of all powers, and of powers times logits."""
        asked = _as_columns(tokens)
        entropies, normalizers = (torch.empty(len(hidden), device=hidden.device) for _ in range(2))
        logprobs = torch.empty(tokens.shape, device=hidden.device)
        for piece in _pieces(hidden, part):
            logits = nn.functional.linear(hidden[piece], weight)
            to_sum = normalizers.new_zeros(len(logits), asked.shape[1] + 2)
            columns = _local_columns(asked[piece] - first, len(weight))
            if len(weight):
                # before `moments`, which takes the memory of the logits; -1: a token of another rank
                chosen = logits.gather(1, columns.clamp(min=0)).float() / temperature
                to_sum[:, :-2] = chosen.where(columns >= 0, 0.0)
            own_top, *sums = moments(logits, temperature)
            del logits  # the next piece has its own
            top = _all_reduce(own_top.clone(), dist.ReduceOp.MAX, group)
            to_sum[:, -2], to_sum[:, -1] = relative_to(top, own_top, *sums)
            to_sum[:, :-2] -= top[:, None].where(columns >= 0, 0.0)
            *_, total, weighted = _all_reduce(to_sum, dist.ReduceOp.SUM, group).unbind(-1)
            log_total = total.log()
            _as_columns(logprobs)[piece] = to_sum[:, :-2] - log_total[:, None]
            entropies[piece], normalizers[piece] = log_total - weighted / total, top + log_total
        ctx.save_for_backward(hidden, weight, asked, normalizers, entropies)
        ctx.temperature, ctx.group, ctx.first, ctx.part = temperature, group, first, part
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, of_logprobs: Tensor | None, of_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, asked, normalizers, entropies = ctx.saved_tensors
        gradient = normalizers.new_zeros(asked.shape) if of_logprobs is None else of_logprobs.reshape(asked.shape)
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros(weight.shape, device=weight.device) if ctx.needs_input_grad[1] else None
        for piece in _pieces(hidden, ctx.part):
            table = to_gradients(
                nn.functional.linear(hidden[piece], weight), ctx.temperature, normalizers[piece],
                _local_columns(asked[piece] - ctx.first, len(weight)), gradient[piece],
                entropies[piece], None if of_entropies is None else of_entropies[piece])
            to_hidden[piece] = table @ weight
            if to_weight is not None and hidden.dtype == torch.float32:
                to_weight.addmm_(table.T, hidden[piece])
            elif to_weight is not None:
                to_weight += table.T @ hidden[piece]  # summed in float32: bfloat16 would lose the last pieces
        to_weight = None if to_weight is None else to_weight.to(weight.dtype)
        return _all_reduce(to_hidden, dist.ReduceOp.SUM, ctx.group), to_weight, None, None, None, None, None


@functools.cache
def kernels_for(device: torch.device) -> ModuleType | None:
    """Return `logit_kernels` if Triton is there and can compile for `device`, which takes a C compiler and the headers
    of Python; else passes over logits are those of plain PyTorch, and a warning says why."""
    if device.type != "cuda":
        return None
    try:
        from triton.errors import TritonError

        from workers.engines import logit_kernels
    except ImportError as error:
        return _warn_of_plain_passes(error)
    try:
        logit_kernels.try_out(device)
    except (OSError, RuntimeError, subprocess.CalledProcessError, TritonError) as error:
        return _warn_of_plain_passes(error)
    return logit_kernels


def _warn_of_plain_passes(error: Exception) -> None:
    warnings.warn("sampling and training read logits several times, and take up to 2 GiB more than `distflow plan` "
                  f"counts, as Triton compiles no kernels here: {error}. It needs a C compiler (gcc), Python.h "
                  "(python3-dev) and a cache that it can write (TRITON_CACHE_DIR)", stacklevel=3)


def _logits_at_once(hidden: Tensor) -> int:
    return PIECE * (_ON_GPU if hidden.is_cuda else 1)


def _pieces(hidden: Tensor, part: int) -> Iterator[slice]:
    size = max(1, _logits_at_once(hidden) // part)
    yield from (slice(start, start + size) for start in range(0, len(hidden), size))


def moments(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return, of each row x of `logits` [N, V] over `temperature`, m = max x, Σ exp(x − m) and Σ (x − m) exp(x − m),
    each float32 [N]. The logits may be overwritten."""
    if not logits.shape[1]:  # a rank with padding alone
        nothing = torch.zeros(len(logits), device=logits.device)
        return nothing - torch.inf, nothing, nothing
    if kernels := kernels_for(logits.device):
        tops, totals, weighted = kernels.block_moments(logits, temperature)
        top = tops.amax(1)
        sums, products = relative_to(top[:, None], tops, totals, weighted)
        return top, sums.sum(1), products.sum(1)
    values = _scaled(logits, temperature)
    top = values.amax(-1).float()
    values = _subtract(values, top)
    powers = values.exp()
    return top, powers.sum(-1), torch.bmm(powers[:, None], values[:, :, None]).flatten()


def to_gradients(logits: Tensor, temperature: float, normalizers: Tensor, columns: Tensor, scale: Tensor,
                 entropies: Tensor, of_entropies: Tensor | None) -> Tensor:
    """Return the gradients of `logits` [N, V], in their dtype and perhaps in their memory, where those of the
    log-probabilities of `columns` [N, K] (-1: another rank's) are `scale` [N, K] and those of `entropies` [N]
    `of_entropies`: ∂ log p(t) / ∂ logits = onehot(t) − p, and ∂ entropy / ∂ logits = −p (log p + entropy)."""
    if logits.shape[1] and (kernels := kernels_for(logits.device)):
        return kernels.to_gradients(logits, temperature, normalizers, columns, scale, entropies, of_entropies)
    dtype, scale = logits.dtype, scale / temperature
    table, amounts = _subtract(_scaled(logits, temperature), normalizers), -scale.sum(1, keepdim=True)
    width = logits.shape[1]
    del logits  # the table may be another one
    if of_entropies is not None:
        amounts = (table + entropies[:, None]).mul_(of_entropies[:, None] / -temperature).add_(amounts)
    table = table.exp_().mul_(amounts)
    if width:
        rows = torch.arange(len(table), device=table.device)[:, None]
        table.index_put_((rows, columns.clamp(min=0)), scale.where(columns >= 0, 0.0).to(table.dtype), accumulate=True)
    return table.to(dtype)


def relative_to(top: Tensor, tops: Tensor, totals: Tensor, weighted: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ exp(x − `top`) and Σ (x − `top`) exp(x − `top`), given what they are with `tops` in its place
    (Milakov and Gimelshein 2018, §3)."""
    lower = (tops - top).clamp(min=-1e4)  # the maximum of no logits is -inf
    shrink = lower.exp()
    return shrink * totals, shrink * (weighted + lower * totals)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Return logits over temperature, in their dtype where nothing divides them: each pass over them takes time."""
    return logits if temperature == 1.0 else logits.float().div_(temperature)


def _subtract(logits: Tensor, amounts: Tensor) -> Tensor:
    """Return `logits` [N, V] less `amounts` [N], float32; it is in place where they were."""
    return logits.sub_(amounts[:, None]) if logits.dtype == amounts.dtype else logits - amounts[:, None]


def _as_columns(tokens: Tensor) -> Tensor:
    return tokens[:, None] if tokens.ndim == 1 else tokens


def _local_columns(columns: Tensor, size: int) -> Tensor:
    """Return `columns` [N, K] where they are within 0 … `size` - 1, else -1: no size waits for the device."""
    return columns.long().where((columns >= 0) & (columns < size), -1)


def _gather_columns(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [N, ranks * K]: what the ranks of a group have [N, K], side by side."""
    every = own.new_empty(dist.get_world_size(group), *own.shape)
    all_gather(every.flatten(), own.contiguous().flatten(), group=group)
    return every.movedim(0, 1).flatten(1)


def _all_reduce(values: Tensor, how: Any, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(values, how, group=group)
    return values
