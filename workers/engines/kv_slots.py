"""Keys and values of rows that are decoded together: a row takes a slot, and leaves it to another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

_ROOM = 16
"""Tokens that the rows may grow by before keys and values move to another place."""
KeysValues = list[tuple[Tensor, Tensor]]
"""Of each layer: keys and values [rows, heads, columns, size]. Each row's last token lies in the last column; what
lies to the left of its first one is finite and means nothing."""


@dataclass(frozen=True, eq=False)
class Past:
    """What the model has read of one row: row `index` of `batch`, `length` tokens, and the logits [V] after them."""

    batch: KeysValues
    index: int
    length: int
    logits: Tensor | None = None
    shift: int = 0
    """How many positions it has more than tokens: below 0 where it shows images."""


class Slots(Cache):
    """A transformers cache whose rows come and go.

    All rows end at the same column, so that a step writes one column whatever the lengths are. What is seen of each
    layer is a window as wide as the longest row; rows that leave and rows that come move its beginning.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.count = 0

    @property
    def width(self) -> int:
        return self.layers[0].keys.shape[2] if self.layers else 0

    def see(self, width: int) -> None:
        """Look at the last `width` columns only: no row is longer."""
        for layer in self.layers:
            layer.see(layer.end - width, layer.end)

    def make_room(self) -> None:
        """For one more column."""
        if self.layers and self.layers[0].full:
            self.keep(None, self.count, self.width)

    def keep(self, kept: Tensor | None, count: int, width: int) -> None:
        """From now on there are `count` slots, at first the `kept` ones (None: all), and `width` columns are seen."""
        for layer in self.layers:
            layer.keep(kept, count, width)
        self.count = count

    def put(self, slots: Tensor, pasts: list[Past]) -> None:
        """Write rows into slots; the window is as wide as the longest of them."""
        for index, batch, chosen in _by_batch(pasts, slots.device):
            where: Tensor | slice = slots[index]
            if bool((where[1:] - where[:-1] == 1).all()):
                where = slice(int(where[0]), int(where[-1]) + 1)  # copies faster
            if not self.layers:
                self.layers = [_Window(*layer, self.count, self.width_of(pasts)) for layer in batch]
            for layer, (keys, values) in zip(self.layers, batch):
                width = min(keys.shape[2], layer.keys.shape[2])
                layer.keys[where, :, -width:] = keys[chosen, :, -width:]
                layer.values[where, :, -width:] = values[chosen, :, -width:]

    @staticmethod
    def width_of(pasts: list[Past]) -> int:
        return max(past.length for past in pasts)

    def take(self, slots: Tensor, width: int) -> KeysValues:
        """A copy of the last `width` columns of some slots."""
        return [(layer.keys[slots, :, -width:], layer.values[slots, :, -width:]) for layer in self.layers]


class _Window(DynamicLayer):
    """A layer's keys and values with room for more, so that a new token does not copy all old ones."""

    def __init__(self, keys: Tensor, values: Tensor, count: int, width: int):
        super().__init__()
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.rooms = [like.new_zeros(count, like.shape[1], width + _ROOM, like.shape[3]) for like in (keys, values)]
        self.see(0, width)

    def see(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.keys, self.values = (room[:, :, start:end] for room in self.rooms)

    @property
    def full(self) -> bool:
        return self.end == self.rooms[0].shape[2]

    def keep(self, kept: Tensor | None, count: int, width: int) -> None:
        shared = min(width, self.end - self.start)
        for index, old in enumerate(self.rooms):
            part = old[:, :, self.end - shared : self.end]
            part = part if kept is None else part[kept]
            room = old.new_empty(count, old.shape[1], width + _ROOM, old.shape[3])
            room[: len(part), :, width - shared : width] = part
            # A masked column counts for nothing only as long as it is a number.
            room[len(part) :, :, :width], room[:, :, : width - shared] = 0, 0
            self.rooms[index] = room
        self.see(0, width)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        end = self.end + key_states.shape[2]
        for room, states in zip(self.rooms, (key_states, value_states)):
            room[:, :, self.end : end] = states
        self.see(self.start, end)
        return self.keys, self.values


def beginnings(pasts: list[Past | None], lengths: Tensor) -> KeysValues:
    """The first `lengths` [B] tokens of each row as one batch; none of a row without a past."""
    known = [(row, past) for row, past in enumerate(pasts) if past is not None and lengths[row]]
    width, result = int(lengths.max()), []
    for index, batch, chosen in _by_batch([past for _, past in known], lengths.device):
        rows = torch.tensor([known[place][0] for place in index.tolist()], device=lengths.device)
        read = torch.tensor([known[place][1].length for place in index.tolist()], device=lengths.device)
        last = batch[0][0].shape[2] - read + lengths[rows]  # the column after the last one that is wanted
        columns = (last[:, None] - width + torch.arange(width, device=lengths.device)).clamp(min=0)
        result = result or [tuple(part.new_zeros(len(pasts), part.shape[1], width, part.shape[3]) for part in layer)
                            for layer in batch]
        for new, old in zip(result, batch):
            for target, source in zip(new, old):
                target[rows] = source[chosen[:, None], :, columns].transpose(1, 2)
    return result


def _by_batch(pasts: list[Past], device: torch.device) -> list[tuple[Tensor, KeysValues, Tensor]]:
    """For each batch that the rows come from: their places in `pasts`, the batch, and their rows in it."""
    groups: dict[int, list[int]] = {}
    for place, past in enumerate(pasts):
        groups.setdefault(id(past.batch), []).append(place)
    return [(torch.tensor(places, device=device), pasts[places[0]].batch,
             torch.tensor([pasts[place].index for place in places], device=device)) for places in groups.values()]
