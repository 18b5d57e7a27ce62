"""Sends Hugging Face weights to an SGLang server, bucket by bucket through shared memory."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing
from torch import Tensor

from distflow.rpc.packing import aligned, tensor_at
from workers.engines.external import FileNames
from workers.engines.rollout import require_shapes

BUCKET = 256 << 20  # bytes; a larger tensor has a bucket of its own
Named = list[tuple[str, Tensor]]


class Buckets:
    """Whole tensors, packed into shared-memory buckets. `size` counts their bytes."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, torch.Size], dtype: torch.dtype,
                 device: str, files: FileNames | None = None):
        """`files`: of the parameters, unless they are tensors of files already."""
        self.weights, self.shapes, self.dtype, self.device = weights, shapes, dtype, device
        self.files = files
        whole = sum(aligned(shape.numel() * dtype.itemsize) for shape in shapes.values())
        self.room, self.size = min(BUCKET, whole), 0

    def __iter__(self) -> Iterator[str]:
        """Yield each bucket as `/update_weights_from_tensor` takes it."""
        named: Named = []
        bucket_memory, used = torch.empty(0), 0
        known = require_shapes(self.weights, self.shapes)
        for name, tensor in self.files.stream(known) if self.files else known:
            bytes_ = tensor.numel() * self.dtype.itemsize
            if named and used + bytes_ > len(bucket_memory):
                yield serialize_handles(named)
                named, used = [], 0
            if not named:  # not reused: the server may still copy from the previous one, on its own stream
                bucket_memory = self._shared(max(self.room, bytes_))
            copy = tensor_at(bucket_memory, used, tensor.shape, self.dtype)
            named.append((name, copy.copy_(tensor)))
            self.size += bytes_
            used += aligned(bytes_)
        if named:
            yield serialize_handles(named)

    def _shared(self, size: int) -> Tensor:
        if self.device == "cuda":
            return torch.empty(size, dtype=torch.uint8, device="cuda")
        with _files():
            return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size))


def serialize_handles(named: Named) -> str:
    """Serialise names, shapes and shared-memory handles. SGLang requires a pickle; only our own server reads it."""
    buffer = io.BytesIO()
    with _files():
        ForkingPickler(buffer).dump(named)
    return base64.b64encode(buffer.getvalue()).decode()


@contextlib.contextmanager
def _files() -> Iterator[None]:
    """Let torch share memory by file name, since no descriptors can be passed to the server."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
