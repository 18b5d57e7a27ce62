"""What a holder knows of its lease."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Lease:
    """Rows that are this holder's for `seconds` from now, and again with every `renew`.

    `ids` [rows] are its share, ascending; the other tensors stand in their order: tokens, weight version, group (-1:
    of its own), and the last saved turn (-1: none). `all_ids` are those of all shares, which a commit covers.
    """

    consumer: str
    number: int
    step: int | None
    seconds: float
    ids: Tensor
    tokens: Tensor
    versions: Tensor
    groups: Tensor
    turns: Tensor
    all_ids: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def granted(cls, consumer: str, step: int | None, reply: Mapping[str, Any]) -> Lease:
        """From a controller's answer."""
        marks = {name: numpy.frombuffer(data, numpy.int64) for name, data in reply["marks"].items()}
        order = numpy.argsort(marks["id"])
        columns = [torch.from_numpy(marks[name][order]) for name in ("id", "tokens", "version", "group", "turn")]
        everyone = torch.from_numpy(numpy.frombuffer(reply["all"], numpy.int64).copy())
        return cls(consumer, reply["lease"], step, reply["seconds"], *columns, everyone)
