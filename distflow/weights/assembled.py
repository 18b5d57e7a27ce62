"""Weights that have come, as tensors: whole ones, or the boxes that another layout wants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from distflow.weights.boxes import Box
from distflow.weights.errors import WeightsError
from distflow.weights.holding import Holding
from distflow.weights.manifest import Content


class Weights:
    """A version, whole and verified, in this process's host memory, which stays as it is while this object or a tensor
    of it lives.

    wanted: the boxes that were pulled, by name; tensors that are not among them are whole.
    """

    def __init__(self, holding: Holding, wanted: Mapping[str, Box]):
        self.holding, self.wanted = holding, wanted
        self.found: dict[str, list[tuple[int, Content]]] = {}
        for number, part in holding.parts.items():
            for content in part.contents:
                self.found.setdefault(content.box.name, []).append((number, content))

    @property
    def version(self) -> int:
        return self.holding.version

    @property
    def key(self) -> str:
        """Of the version and the start of the trainer that published it, which may publish a version again."""
        return self.holding.key

    @property
    def nbytes(self) -> int:
        """Of all tensors, as they were pulled."""
        return sum(self.box(name).nbytes for name in self.found)

    def names(self) -> list[str]:
        """In the model's order."""
        return sorted(self.found, key=lambda name: self.found[name][0][1].order)

    def box(self, name: str) -> Box:
        """What is here of a tensor."""
        first = self.found[name][0][1].box
        return self.wanted.get(name, Box.whole(name, first.shape, first.dtype))

    def tensors(self, into: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Each tensor by name, on the CPU; those that lie in one piece are views of staging memory, which other
        processes may use too, and must not be changed.

        Args:
            into: tensors of the right shapes, of any device or dtype, such as an engine's parameters: what is named
                there is written there, without a copy in between.

        Raises:
            WeightsError: boxes do not cover a tensor, or `into` has another shape for it.
        """
        for name in self.names():
            target = (into or {}).get(name)
            yield name, self._one(name, target)

    @torch.no_grad()
    def _one(self, name: str, target: Tensor | None) -> Tensor:
        box, pieces = self.box(name), self._pieces(name)
        if target is not None and tuple(target.shape) != box.size:
            raise WeightsError(f"tensor `{name}` comes as {list(box.size)} and was to be written into one of "
                               f"{list(target.shape)}")
        if sum(common.numel for common, _ in pieces) != box.numel:
            raise WeightsError(f"the boxes that were published of tensor `{name}` {list(box.shape)} do not cover what "
                               "is wanted of it exactly once; did all ranks publish the same tensors?")
        if target is None:
            if len(pieces) == 1 and pieces[0][1].is_contiguous():
                return pieces[0][1]
            target = torch.empty(box.size, dtype=box.dtype)
        for common, piece in pieces:
            target[common.within(box)].copy_(piece)
        return target

    def _pieces(self, name: str) -> list[tuple[Box, Tensor]]:
        """What each published box has of the wanted one; of boxes that several ranks published, one."""
        wanted, pieces = self.box(name), {}
        for number, (box, offset, _) in self.found[name]:
            common = box.overlap(wanted)
            if common is not None and box not in pieces:
                memory = torch.from_numpy(self.holding.memory[number])[offset : offset + box.nbytes]
                pieces[box] = common, memory.view(box.dtype).view(box.size)[common.within(box)]
        return list(pieces.values())
