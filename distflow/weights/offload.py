"""Offloads tensors to host memory while they are not needed: the swap of MindSpeed RL's allgather-swap (§3.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class HostOffload:
    """Offload of tensors from their device to host memory, and back. The tensors stay; only their storage is released.
    Host memory is pinned where the device is a GPU, and kept for the next time; there the way back overlaps with other
    work until `wait` waits for it."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], scratch: Callable[[], Iterable[Tensor]] = tuple):
        """`tensors` is called again each time: an optimizer makes its state in its first step. `scratch`: tensors whose
        contents are not kept; they are zeros afterwards."""
        self.tensors, self.scratch = tensors, scratch
        self._host: dict[int, Tensor] = {}
        """By storage: host memory of its size."""
        self._out: list[tuple[Tensor, Tensor | None]] = []
        """Offloaded tensors and their host memory; None for scratch."""
        self._stream: torch.cuda.Stream | None = None
        self._coming = False

    @property
    def bytes(self) -> int:
        return sum(host.nbytes for _, host in self._out if host is not None)

    @torch.no_grad()
    def offload(self) -> None:
        """Offload all tensors, so that other processes can use the memory too. Those that are out already stay so."""
        self.wait()
        there = _storages(self.tensors())
        known = {tensor.untyped_storage()._cdata for tensor in there}
        self._host = {key: host for key, host in self._host.items() if key in known}
        leaving: list[tuple[Tensor, Tensor | None]] = [(tensor, None) for tensor in _storages(self.scratch())
                                                       if len(tensor)]
        for tensor in there:
            if len(tensor):
                leaving.append((tensor, self._room(tensor).copy_(tensor, non_blocking=True)))
        if leaving and leaving[0][0].is_cuda:
            torch.cuda.current_stream().synchronize()
        for tensor, _ in leaving:
            tensor.untyped_storage().resize_(0)
        if leaving and leaving[0][0].is_cuda:
            torch.cuda.empty_cache()  # torch would keep it for itself
        self._out += leaving

    @torch.no_grad()
    def reload(self) -> None:
        """Bring the tensors back; on a GPU the copies may still be under way when this returns."""
        if self._out and self._out[0][0].is_cuda:
            self._stream = self._stream or torch.cuda.Stream()
        for tensor, _ in self._out:
            tensor.untyped_storage().resize_(len(tensor))
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())  # other tensors may have used the memory just now
        with torch.cuda.stream(self._stream):
            for tensor, host in self._out:
                tensor.zero_() if host is None else tensor.copy_(host, non_blocking=True)
        self._coming, self._out = bool(self._out), []

    def _room(self, tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage()._cdata
        if key not in self._host or len(self._host[key]) != len(tensor):
            self._host[key] = torch.empty(len(tensor), dtype=torch.uint8, pin_memory=tensor.is_cuda)
        return self._host[key]

    def wait(self) -> None:
        """Wait until the tensors are back."""
        if self._coming and self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._coming = False


def _storages(tensors: Iterable[Tensor]) -> list[Tensor]:
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return [torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage) for storage in found.values()]
