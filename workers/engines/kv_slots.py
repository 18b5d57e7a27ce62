"""KV cache in slots: rows that are decoded together take a slot each, and leave it to another row."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

_SPARE = 16
"""Columns, and a quarter of the window at least, by which rows may grow before keys and values are copied to a larger
buffer: each token of a long row is then copied four times in all."""
KeysValues = list[tuple[Tensor, Tensor]]
"""Keys and values [rows, heads, columns, size] of each layer. Each row's last token lies in the last column; columns
left of its first token hold finite, meaningless values."""


@dataclass(frozen=True, eq=False)
class PrefilledRow:
    """Prefilled row: row `index` of `batch`, `length` tokens, and the logits [V] after them."""

    batch: KeysValues
    index: int
    length: int
    logits: Tensor | None = None
    shift: int = 0  # positions minus tokens: below 0 with images
    experts: Tensor | None = None  # chosen for the tokens just read [tokens, layers, experts of a token], on the CPU


class SlotCache(Cache):
    """A transformers cache that rows join and leave. All rows end at the same column, so that a step writes one column
    whatever the lengths. The model sees a window as wide as the longest row."""

    layers: list[_Window]

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.count = 0
        self.resized = 0  # how often the buffers were replaced

    @property
    def width(self) -> int:
        return self.layers[0].keys.shape[2] if self.layers else 0

    @property
    def room(self) -> int:
        """Columns of the buffers, spare ones too."""
        return self.layers[0].buffers[0].shape[2]

    @property
    def end(self) -> int:
        """The column of the next token."""
        return self.layers[0].end

    @contextlib.contextmanager
    def show_all(self, column: Tensor) -> Iterator[None]:
        """Let the model see all columns, spare ones too, and write to `column` [1]: shapes then stay until the buffers
        are replaced."""
        for layer in self.layers:
            layer.column = column
        try:
            yield
        finally:
            for layer in self.layers:
                layer.column = None

    def advance(self) -> None:
        """Take the column that was written while all were seen into the window."""
        for layer in self.layers:
            layer.set_window(layer.start, layer.end + 1)

    def set_window(self, width: int) -> None:
        """Narrow the window to the last `width` columns: no row is longer."""
        for layer in self.layers:
            layer.set_window(layer.end - width, layer.end)

    def grow(self) -> None:
        if self.layers and self.layers[0].full:
            self.keep(None, self.count, self.width)

    def keep(self, kept: Tensor | None, count: int, width: int) -> None:
        """Resize to `count` slots, the `kept` ones first (None: all), with a window of `width` columns."""
        for layer in self.layers:
            layer.keep(kept, count, width)
        self.count = count
        self.resized += 1

    def put(self, slots: Tensor, pasts: list[PrefilledRow]) -> None:
        for index, batch, chosen in _by_batch(pasts, slots.device):
            where: Tensor | slice = slots[index]
            if bool((where[1:] - where[:-1] == 1).all()):
                where = slice(int(where[0]), int(where[-1]) + 1)  # a slice copies faster
            if not self.layers:
                self.layers = [_Window(*layer, self.count, self.width_of(pasts)) for layer in batch]
                self.resized += 1
            for layer, (keys, values) in zip(self.layers, batch):
                width = min(keys.shape[2], layer.keys.shape[2])
                layer.keys[where, :, -width:] = keys[chosen, :, -width:]
                layer.values[where, :, -width:] = values[chosen, :, -width:]

    @staticmethod
    def width_of(pasts: list[PrefilledRow]) -> int:
        return max(past.length for past in pasts)

    def take(self, slots: Tensor, width: int) -> KeysValues:
        return [(layer.keys[slots, :, -width:], layer.values[slots, :, -width:]) for layer in self.layers]


class _Window(DynamicLayer):
    """A layer's keys and values with spare columns, so that a new token does not copy the old ones."""

    keys: Tensor
    values: Tensor
    column: Tensor | None = None

    def __init__(self, keys: Tensor, values: Tensor, count: int, width: int):
        super().__init__()
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.buffers = [like.new_zeros(count, like.shape[1], _room(width), like.shape[3]) for like in (keys, values)]
        self.set_window(0, width)

    def set_window(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.keys, self.values = (buffer[:, :, start:end] for buffer in self.buffers)

    @property
    def full(self) -> bool:
        return self.end == self.buffers[0].shape[2]

    def keep(self, kept: Tensor | None, count: int, width: int) -> None:
        shared = min(width, self.end - self.start)
        for index, old in enumerate(self.buffers):
            part = old[:, :, self.end - shared : self.end]
            part = part if kept is None else part[kept]
            buffer = old.new_empty(count, old.shape[1], _room(width), old.shape[3])
            buffer[: len(part), :, width - shared : width] = part
            # A masked column must hold finite numbers: NaN would spread.
            buffer[len(part) :], buffer[:, :, : width - shared], buffer[:, :, width:] = 0, 0, 0
            self.buffers[index] = buffer
        self.set_window(0, width)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if self.column is not None:
            for buffer, states in zip(self.buffers, (key_states, value_states)):
                buffer.index_copy_(2, self.column, states)
            return self.buffers[0], self.buffers[1]
        end = self.end + key_states.shape[2]
        for buffer, states in zip(self.buffers, (key_states, value_states)):
            buffer[:, :, self.end : end] = states
        self.set_window(self.start, end)
        return self.keys, self.values


def _room(width: int) -> int:
    return -(-(width + max(_SPARE, width // 4)) // _SPARE) * _SPARE  # masks of other widths are copied by a kernel


def prefixes(pasts: list[PrefilledRow | None], lengths: Tensor) -> KeysValues:
    """Return the first `lengths` [B] tokens of each row as one batch; zeros for a row without a past."""
    known = [(row, past) for row, past in enumerate(pasts) if past is not None and lengths[row]]
    width, result = int(lengths.max()), []
    for index, batch, chosen in _by_batch([past for _, past in known], lengths.device):
        rows = torch.tensor([known[i][0] for i in index.tolist()], device=lengths.device)
        read = torch.tensor([known[i][1].length for i in index.tolist()], device=lengths.device)
        last = batch[0][0].shape[2] - read + lengths[rows]  # the column after the last wanted one
        columns = (last[:, None] - width + torch.arange(width, device=lengths.device)).clamp(min=0)
        result = result or [tuple(part.new_zeros(len(pasts), part.shape[1], width, part.shape[3]) for part in layer)
                            for layer in batch]
        for new, old in zip(result, batch):
            for target, source in zip(new, old):
                target[rows] = source[chosen[:, None], :, columns].transpose(1, 2)
    return result


def _by_batch(pasts: list[PrefilledRow], device: torch.device) -> list[tuple[Tensor, KeysValues, Tensor]]:
    """Group rows by their batch: (indices in `pasts`, the batch, row numbers in it)."""
    groups: dict[int, list[int]] = {}
    for index, past in enumerate(pasts):
        groups.setdefault(id(past.batch), []).append(index)
    return [(torch.tensor(group, device=device), pasts[group[0]].batch,
             torch.tensor([pasts[index].index for index in group], device=device)) for group in groups.values()]
