"""Triton kernels of what sampling and training do with logits: each reads them once, where plain PyTorch writes and
reads a float32 table for each operation.

Blocks have the same sizes on every GPU and nothing is tuned at run time: the same logits give the same bits in each
process.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096
"""Logits of one program."""
_WARPS = 8


def block_moments(logits: Tensor, temperature: float, block: int = _TILE) -> tuple[Tensor, Tensor, Tensor]:
    """Return m = max x, Σ exp(x − m) and Σ (x − m) exp(x − m) of each `block` columns x of `logits` [N, V] over
    `temperature`, each float32 [N, blocks]. `block` is a power of two, 4,096 at most."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, width = logits.shape
    found = torch.empty(3, rows, triton.cdiv(width, block), dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):
        _block_moments[rows, triton.cdiv(width, _TILE)](  # pyright: ignore[reportIndexIssue]
            logits, found, width, logits.stride(0), found.shape[2], found.stride(0), float(temperature),
            DIVIDE=temperature != 1.0, BLOCK=block, BLOCKS=_TILE // block, num_warps=_WARPS)
    tops, totals, weighted = found
    return tops, totals, weighted


def to_gradients(logits: Tensor, temperature: float, normalizers: Tensor, columns: Tensor, scale: Tensor,
                 entropies: Tensor, of_entropies: Tensor | None) -> Tensor:
    """Replace `logits` [N, V], rows of consecutive numbers, by their gradients, and return them: see
    `vocabulary.to_gradients`."""
    rows, width = logits.shape
    with torch.cuda.device_of(logits):
        _to_gradients[rows, triton.cdiv(width, _TILE)](  # pyright: ignore[reportIndexIssue]
            logits, normalizers, columns.contiguous(), scale.contiguous(), scale.sum(1), entropies,
            entropies if of_entropies is None else of_entropies.contiguous(), width, logits.stride(0),
            columns.shape[1], float(temperature), DIVIDE=temperature != 1.0, ENTROPY=of_entropies is not None,
            TILE=_TILE, num_warps=_WARPS)
    return logits


def try_out(device: torch.device) -> None:
    """Compile both kernels and run them on `device`. Raises what Triton raises where it cannot."""
    logits, numbers = torch.zeros(1, 2, device=device), torch.zeros(1, device=device)
    block_moments(logits, 0.5)
    to_gradients(logits, 0.5, numbers, torch.zeros(1, 1, dtype=torch.int64, device=device), numbers[:, None], numbers,
                 numbers)


@triton.jit
def _block_moments(logits, found, width, stride, blocks, size, temperature, DIVIDE: tl.constexpr, BLOCK: tl.constexpr,
                   BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    columns = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = columns < width
    values = tl.load(logits + row * stride + columns, mask=inside, other=-float("inf")).to(tl.float32)
    if DIVIDE:
        values = tl.div_rn(values, temperature)
    top = tl.maximum(tl.max(values, 1), -3e38)  # finite, also of nothing
    below = values - top[:, None]
    powers = tl.exp(below)
    weighted = tl.where(powers == 0.0, 0.0, below * powers)
    place = found + row * blocks + block
    tl.store(place, top, mask=block < blocks)
    tl.store(place + size, tl.sum(powers, 1), mask=block < blocks)
    tl.store(place + 2 * size, tl.sum(weighted, 1), mask=block < blocks)


@triton.jit
def _to_gradients(logits, normalizers, asked, scale, amounts, entropies, of_entropies, width, stride, count,
                  temperature, DIVIDE: tl.constexpr, ENTROPY: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TILE
    columns = first + tl.arange(0, TILE)
    inside = columns < width
    values = tl.load(logits + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    if DIVIDE:
        values = tl.div_rn(values, temperature)
    logprobs = values - tl.load(normalizers + row)
    amount = -tl.load(amounts + row)
    if ENTROPY:
        table = tl.exp(logprobs) * (amount - (logprobs + tl.load(entropies + row)) * tl.load(of_entropies + row))
    else:
        table = tl.exp(logprobs) * amount
    for index in range(count):
        column = tl.load(asked + row * count + index)
        if (column >= first) & (column < first + TILE):
            table += tl.where(columns == column, tl.load(scale + row * count + index), 0.0)
    if DIVIDE:
        table = tl.div_rn(table, temperature)
    tl.store(logits + row * stride + columns, table.to(logits.dtype.element_ty), mask=inside)
