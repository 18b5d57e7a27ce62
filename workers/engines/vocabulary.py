"""Log-probabilities and entropies over a vocabulary, of which only a piece of the logits exists at a time.

A vocabulary of 150,000 makes 600 kB of logits of each token, and plain autograd keeps several such tables for the
backward pass. Here the head is applied to some tokens at a time, and once more to the same ones in the backward pass
(as in Liger Kernel, Hsu et al. 2024, and Cut Cross-Entropy, Wijmans et al. 2024, but in plain PyTorch). Where the head
is cut over ranks by the vocabulary, they exchange three numbers for each token (Shoeybi et al. 2019, §3), not logits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

PIECE = 2**25
"""Logits that exist at a time: 128 MiB in float32. Where all fit, they are made once and kept."""


def score(hidden: Tensor, head: nn.Linear, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `tokens` [N] after `hidden` [N, D], and entropies [N] (detached), both float32.

    head: without a bias; its weight [V, D] may be a DTensor that is cut by rows over one mesh dimension.
    """
    weight = head.weight
    if isinstance(weight, DTensor):
        return score_cut(hidden, weight.to_local(), len(weight), tokens, temperature, weight.device_mesh.get_group())
    if len(hidden) * len(weight) > PIECE:
        return _Scores.apply(hidden, weight, tokens, temperature, None, 0, len(weight))
    return scored(head(hidden).float() / temperature, tokens)


def score_cut(hidden: Tensor, weight: Tensor, vocabulary: int, tokens: Tensor, temperature: float,
              group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """As `score`, of a head of `vocabulary` rows that is cut over `group`: `weight` are this rank's. The last ranks
    have fewer than the others, or none, or rows behind the vocabulary, which count for nothing. The gradient of
    `hidden` is the whole one on each of them."""
    rows = -(-vocabulary // dist.get_world_size(group))
    first = rows * dist.get_rank(group)
    return _Scores.apply(hidden, weight[: max(0, vocabulary - first)], tokens, temperature, group, first, rows)


def scored(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `tokens` [N] and entropies [N] under `logits` [N, V]."""
    logprobs = torch.log_softmax(logits, -1)
    with torch.no_grad():
        entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs[torch.arange(len(tokens), device=tokens.device), tokens], entropies


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float,
                group: dist.ProcessGroup | None, first: int, part: int) -> tuple[Tensor, Tensor]:
        """`part`: the rows of the head's largest part, alike on all ranks, so that they agree on the pieces."""
        logprobs, entropies = (torch.empty(len(hidden), device=hidden.device) for _ in range(2))
        normalizers = torch.empty_like(logprobs)
        for piece in _pieces(len(hidden), part):
            logits = _logits(hidden[piece], weight, temperature)
            top = logits.amax(-1) if len(weight) else logits.new_full((len(logits),), -torch.inf)
            _reduced(top, dist.ReduceOp.MAX, group)
            logits.sub_(top[:, None])
            rows, places = _own(tokens[piece] - first, len(weight))
            chosen = torch.zeros_like(top)
            chosen[rows] = logits[rows, places]
            powers = logits.exp()
            weighted = torch.bmm(powers[:, None], logits[:, :, None]).flatten()
            chosen, total, weighted = _reduced(torch.stack([chosen, powers.sum(-1), weighted]), dist.ReduceOp.SUM,
                                               group)
            spread = total.log()
            logprobs[piece], entropies[piece], normalizers[piece] = chosen - spread, spread - weighted / total, top + \
                spread
        ctx.save_for_backward(hidden, weight, tokens, normalizers)
        ctx.temperature, ctx.group, ctx.first, ctx.part = temperature, group, first, part
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        """∂ log p(t) / ∂ logits = onehot(t) − p."""
        hidden, weight, tokens, normalizers = ctx.saved_tensors
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros(weight.shape, device=weight.device) if ctx.needs_input_grad[1] else None
        for piece in _pieces(len(hidden), ctx.part):
            logits = _logits(hidden[piece], weight, ctx.temperature)
            scale = gradient[piece] / ctx.temperature
            table = logits.sub_(normalizers[piece, None]).exp_().mul_(-scale[:, None])
            rows, places = _own(tokens[piece] - ctx.first, len(weight))
            table[rows, places] += scale[rows]
            table = table.to(hidden.dtype)
            to_hidden[piece] = table @ weight
            if to_weight is not None and hidden.dtype == torch.float32:
                to_weight.addmm_(table.T, hidden[piece])
            elif to_weight is not None:
                to_weight += table.T @ hidden[piece]  # summed in float32: bfloat16 would lose the last pieces
        to_weight = None if to_weight is None else to_weight.to(weight.dtype)
        return _reduced(to_hidden, dist.ReduceOp.SUM, ctx.group), to_weight, None, None, None, None, None


def _pieces(count: int, part: int) -> Iterator[slice]:
    size = max(1, PIECE // part)
    yield from (slice(start, start + size) for start in range(0, count, size))


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    return nn.functional.linear(hidden, weight).float().div_(temperature)


def _own(places: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The rows whose token lies in this rank's part of the vocabulary, and where."""
    rows = ((places >= 0) & (places < size)).nonzero().squeeze(1)
    return rows, places[rows]


def _reduced(values: Tensor, how: dist.ReduceOp, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(values, how, group=group)
    return values
