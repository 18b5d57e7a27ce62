"""Batches of any columns, for tests of what carries them."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from distflow.data.batch import Batch, Ragged, levels

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
          torch.float32, torch.float64, torch.float8_e4m3fn, torch.complex64, torch.complex128]


def tensor(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits at all, NaN included."""
    count = torch.Size(shape).numel()
    bits = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8,
                         generator=torch.Generator().manual_seed(seed))
    return (bits % 2 if dtype == torch.bool else bits).view(dtype).reshape(shape)


@st.composite
def batches(draw) -> Batch:
    rows = draw(st.integers(0, 40))
    columns = {}
    for number in range(draw(st.integers(0, 4))):
        dtype, trailing = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 3), max_size=2))
        kind = draw(st.sampled_from(["dense", "ragged", "nested"]))
        if kind == "nested":
            turns = draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows))
            lengths = draw(st.lists(st.integers(0, 3), min_size=sum(turns), max_size=sum(turns)))
            inner = Ragged(tensor([sum(lengths), *trailing], dtype, number), torch.tensor(lengths, dtype=torch.int64))
            columns[f"turns{number}"] = Ragged(inner, torch.tensor(turns, dtype=torch.int64))
        elif kind == "ragged":
            lengths = draw(st.lists(st.integers(0, 6), min_size=rows, max_size=rows))
            values = tensor([sum(lengths), *trailing], dtype, number)
            columns[f"столбец {number}"] = Ragged(values, torch.tensor(lengths, dtype=torch.int64))
        else:
            columns[f"column{number}"] = tensor([rows, *trailing], dtype, number)
    return Batch(torch.arange(rows) * 3, columns)


def bits(column: torch.Tensor | Ragged) -> tuple:
    lengths, values = levels(column)
    raw = values.contiguous().flatten().view(torch.uint8).tolist()
    return values.dtype, values.shape, raw, [level.tolist() for level in lengths]


def random_rows(*lengths: int, seed: int = 0) -> Ragged:
    """Rows of tokens that are none of the special ones, one of each length."""
    generator = torch.Generator().manual_seed(seed)
    return Ragged.from_rows([torch.randint(5, 260, (length,), generator=generator) for length in lengths])


def uneven_rows() -> Batch:
    """Prompts and responses of seven rows of three prompts; ranks get unequally many rows and micro-batches of them."""
    tokens = random_rows(6, 3, 8, 4, 0, 2, 5, 3, 1, 7)
    prompts = tokens.slice(0, 3).select(torch.tensor([0, 0, 0, 1, 1, 2, 2]))
    return Batch(torch.arange(7), {"prompts": prompts, "responses": tokens.slice(3, 10)})
