"""Hugging Face weights on their way into SGLang's server: bucket by bucket, through memory that both processes see."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing
from torch import Tensor

from distflow.errors import EngineError
from workers.engines.rollout import misplaced

BUCKET = 256 << 20
"""Bytes; a tensor that is larger has a bucket of its own."""
_ALIGNED = 16
Named = list[tuple[str, Tensor]]


def checked(weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, Tensor]]:
    """The same; SGLang itself would skip a name that it does not know.

    Raises:
        EngineError: a name or a shape is not the model's.
    """
    for name, tensor in weights:
        if wrong := misplaced(name, tensor, shapes):
            raise EngineError(wrong)
        yield name, tensor


def apart(name: str, tensor: Tensor) -> Named:
    """As SGLang loads it: transformers has the experts of a layer in one tensor, checkpoints have them one by one."""
    layer, _, kind = name.rpartition(".")
    if not layer.endswith(".experts"):
        return [(name, tensor)]
    parts = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else [kind]
    return [(f"{layer}.{number}.{part}.weight", values) for number, expert in enumerate(tensor)
            for part, values in zip(parts, expert.chunk(len(parts)))]


class Buckets:
    """Whole tensors, packed into shared memory as many at a time as fit. `size` counts their bytes."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, torch.Size], dtype: torch.dtype,
                 device: str):
        self.weights, self.shapes, self.dtype, self.device = weights, shapes, dtype, device
        whole = sum(shape.numel() * dtype.itemsize + _ALIGNED for shape in shapes.values())
        self.room, self.size = min(BUCKET, whole), 0

    def __iter__(self) -> Iterator[str]:
        """Each bucket as `/update_weights_from_tensor` wants it."""
        named: Named = []
        place, used = torch.empty(0), 0
        for name, tensor in checked(self.weights, self.shapes):
            bytes_ = tensor.numel() * self.dtype.itemsize
            if named and used + bytes_ > len(place):
                yield sealed(named)
                named, used = [], 0
            if not named:  # a new one each time: the server may still copy from the one before, on its own stream
                place = self._shared(max(self.room, bytes_))
            copy = place[used : used + bytes_].view(self.dtype).view(tensor.shape)
            named += apart(name, copy.copy_(tensor))
            self.size += bytes_
            used += -(-bytes_ // _ALIGNED) * _ALIGNED
        if named:
            yield sealed(named)

    def _shared(self, size: int) -> Tensor:
        if self.device == "cuda":
            return torch.empty(size, dtype=torch.uint8, device="cuda")
        with _files():
            return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size))


def sealed(named: Named) -> str:
    """Names, shapes and handles of memory that another process can open; the values stay where they are.

    The form is the one that SGLang reads: a pickle, which only we write and only our own server gets.
    """
    buffer = io.BytesIO()
    with _files():
        ForkingPickler(buffer).dump(named)
    return base64.b64encode(buffer.getvalue()).decode()


class _files:
    """Shared memory is handed over by name: the server is no child of ours, to which descriptors could be passed."""

    def __enter__(self) -> None:
        self.before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")

    def __exit__(self, *_: object) -> None:
        torch.multiprocessing.set_sharing_strategy(self.before)
