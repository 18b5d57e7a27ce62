"""Loss aggregation: turns per-token losses into one number by one weight per token.

Weights follow from totals over the whole optimizer step, before rows are split into micro-batches or ranks, so that
loss and gradient are plain sums over all pieces however the rows are split. Engines therefore sum gradients over
ranks, and a row must be whole on its rank when weights are made.

====================== ============================== ============================================================
mode                   weight of a trained token      source
====================== ============================== ============================================================
`token_mean`           1 / tokens                     DAPO (Yu et al. 2025), section 3.3: every token the same
`seq_mean_token_sum`   1 / rows                       the policy gradient itself: row log-probability is the sum
`seq_mean_token_mean`  1 / (rows * tokens of its row) GRPO (Shao et al. 2024), Eq. 3: every row the same
`fixed_length_sum`     1 / (rows * fixed_length)      Dr. GRPO (Liu et al. 2025): a constant, so no length bias
====================== ============================== ============================================================

A masked token weighs 0, and a row without trained tokens is not among `rows`.
"""

import torch
from torch import Tensor

from distflow.data.batch import Ragged


def trained_mask(tokens: Ragged, response_mask: Ragged | None) -> Ragged:
    if response_mask is not None:
        return response_mask
    return tokens.with_values(torch.ones(len(tokens.values), dtype=torch.bool))


def local_totals(mask_T: Tensor | None, lengths_B: Tensor) -> Tensor:
    """Return float64 `[2]`: trained tokens (bool `mask_T`; None: all), and rows with any; to be summed over ranks."""
    trained_B = _trained_tokens_per_row(_checked_mask(mask_T, lengths_B), lengths_B)
    return torch.stack([trained_B.sum(), (trained_B > 0).sum()]).to(torch.float64)


def token_weights(
    mask_T: Tensor | None, lengths_B: Tensor, mode: str, totals: Tensor, fixed_length: int | None = None
) -> Tensor:
    """Return each token's weight, float32 `[T]`. `totals` [2]: the sum of `local_totals` over the optimizer step."""
    mask_T = _checked_mask(mask_T, lengths_B)
    tokens, rows = totals.to(device=mask_T.device, dtype=torch.float64)
    if mode == "seq_mean_token_mean":
        trained_B = _trained_tokens_per_row(mask_T, lengths_B)
        denominator_T = rows * trained_B[_row_of_token(lengths_B, mask_T.numel())]
    else:
        per_step = {"token_mean": tokens, "seq_mean_token_sum": rows, "fixed_length_sum": rows * (fixed_length or 1)}
        denominator_T = per_step[mode].expand(mask_T.shape)
    # Every denominator is a whole number: the clamp only keeps the discarded branch of `where` finite.
    weight_T = torch.where(mask_T & (denominator_T > 0), 1.0 / denominator_T.clamp(min=1.0), 0.0)
    return weight_T.to(torch.float32)


def weighted_sum(loss_T: Tensor, weights_T: Tensor) -> Tensor:
    """Return `sum(weight * loss)`. Tokens of weight 0 are left out: their loss may be inf, and 0 * inf is NaN."""
    if loss_T.shape != weights_T.shape:
        raise ValueError(f"loss {tuple(loss_T.shape)} and weights {tuple(weights_T.shape)} differ: slice both alike")
    return (torch.where(weights_T != 0, loss_T, 0.0) * weights_T).sum()


def _checked_mask(mask_T: Tensor | None, lengths_B: Tensor) -> Tensor:
    tokens = int(lengths_B.sum())
    if mask_T is None:
        return torch.ones(tokens, dtype=torch.bool, device=lengths_B.device)
    if mask_T.dtype != torch.bool:
        raise ValueError(f"the mask says which tokens are trained: bool, not {mask_T.dtype}; pass `mask > 0`")
    if mask_T.shape != (tokens,):
        raise ValueError(f"the mask has shape {tuple(mask_T.shape)}, but the lengths add up to {tokens} tokens")
    return mask_T


def _row_of_token(lengths_B: Tensor, tokens: int) -> Tensor:
    rows_B = torch.arange(lengths_B.numel(), device=lengths_B.device)
    return torch.repeat_interleave(rows_B, lengths_B, output_size=tokens)


def _trained_tokens_per_row(mask_T: Tensor, lengths_B: Tensor) -> Tensor:
    row_T = _row_of_token(lengths_B, mask_T.numel())
    return torch.zeros_like(lengths_B).index_add_(0, row_T, mask_T.to(lengths_B.dtype))
