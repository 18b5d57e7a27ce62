"""Table of rows: their metadata in arrays, and a slot for each row by its id."""

from __future__ import annotations

import itertools

import numpy

Ids = numpy.ndarray  # [rows] int64


class SlotTable:
    """Arrays of int64 by slot, one for each of `names`, and the slot of each row by its id. A slot is used again when
    its row has been removed; a new row's metadata are 0."""

    def __init__(self, *names: str) -> None:
        self.slots: dict[int, int] = {}  # by row id
        self.free: list[int] = []
        self.arrays = {name: numpy.empty(0, numpy.int64) for name in ("ids", *names)}

    def __getitem__(self, name: str) -> numpy.ndarray:
        """Return the array of that name, to be read and changed until rows are added."""
        return self.arrays[name]

    def __len__(self) -> int:
        return len(self.slots)

    def __contains__(self, row: int) -> bool:
        return row in self.slots

    def find(self, ids: Ids) -> Ids:
        """Return the slots of rows, -1 for those that are not here."""
        return numpy.fromiter(map(self.slots.get, ids.tolist(), itertools.repeat(-1)), numpy.int64, len(ids))

    def find_present(self, ids: Ids) -> Ids:
        """Return the slots of those rows that are here."""
        slots = self.find(ids)
        return slots[slots >= 0]

    def all(self) -> Ids:
        """Return all slots that have a row, in the order in which the rows came."""
        return numpy.fromiter(self.slots.values(), numpy.int64, len(self.slots))

    def find_or_add(self, ids: Ids) -> Ids:
        """Return the slots of rows; those that are not here are added."""
        slots = self.find(ids)
        if (new := slots < 0).any():
            slots[new] = self.add(ids[new])
        return slots

    def add(self, ids: Ids) -> Ids:
        """Return the slots of rows that are not here yet."""
        while len(self.free) < len(ids):
            self._grow()
        first = len(self.free) - len(ids)
        slots = self.free[first:]
        del self.free[first:]
        self.slots.update(zip(ids.tolist(), slots))
        found = numpy.array(slots, numpy.int64)
        for array in self.arrays.values():
            array[found] = 0
        self.arrays["ids"][found] = ids
        return found

    def remove(self, slots: Ids) -> None:
        for row in self.arrays["ids"][slots].tolist():
            del self.slots[row]
        self.free += slots.tolist()

    def add_array(self, name: str) -> None:
        self.arrays[name] = numpy.zeros(len(self.arrays["ids"]), numpy.int64)

    def _grow(self) -> None:
        before, size = len(self.arrays["ids"]), max(2 * len(self.arrays["ids"]), 256)
        self.arrays = {name: grown(array, size) for name, array in self.arrays.items()}
        self.free += range(before, size)


def grown(array: numpy.ndarray, size: int, fill: int = 0) -> numpy.ndarray:
    """Return an array with a last axis of `size`."""
    result = numpy.full((*array.shape[:-1], size), fill, array.dtype)
    result[..., : array.shape[-1]] = array
    return result
