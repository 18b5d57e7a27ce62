"""Tensors that are not needed for a while, in host memory: the swap of MindSpeed RL's allgather-swap (§3.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class HostOffload:
    """Takes tensors out of their device's memory and brings them back to where they were.

    The tensors themselves stay: only their storage is given back meanwhile. Host memory is pinned where the device is a
    GPU, and kept for the next time; there the way back overlaps with other work until `ready` waits for it.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], scratch: Callable[[], Iterable[Tensor]] = tuple):
        """`tensors`: those to be stored, called anew each time: an optimizer makes its state in its first step.
        `scratch`: those whose memory is given back too, but not what is in it: they are zeros afterwards."""
        self.tensors, self.scratch = tensors, scratch
        self._host: dict[int, Tensor] = {}
        """By storage: room of its size."""
        self._out: list[tuple[Tensor, Tensor | None]] = []
        """What is out, and where it is meanwhile; scratch is nowhere."""
        self._stream: torch.cuda.Stream | None = None
        self._coming = False

    @property
    def bytes(self) -> int:
        """What is in host memory at the moment."""
        return sum(host.nbytes for _, host in self._out if host is not None)

    @torch.no_grad()
    def out(self) -> None:
        """Their memory is free afterwards, for other processes too. Those that are out already stay so."""
        self.ready()
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
    def back(self) -> None:
        """Bring them back; on a GPU they are on their way when this returns."""
        if self._out and self._out[0][0].is_cuda:
            self._stream = self._stream or torch.cuda.Stream()
        for tensor, _ in self._out:
            tensor.untyped_storage().resize_(len(tensor))
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())  # the memory may have been somebody else's just now
        with torch.cuda.stream(self._stream):
            for tensor, host in self._out:
                tensor.zero_() if host is None else tensor.copy_(host, non_blocking=True)
        self._coming, self._out = bool(self._out), []

    def _room(self, tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage()._cdata
        if key not in self._host or len(self._host[key]) != len(tensor):
            self._host[key] = torch.empty(len(tensor), dtype=torch.uint8, pin_memory=tensor.is_cuda)
        return self._host[key]

    def ready(self) -> None:
        """Wait until they are back; whoever computes with them calls this first."""
        if self._coming and self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._coming = False


def _storages(tensors: Iterable[Tensor]) -> list[Tensor]:
    """One tensor [bytes] for each storage."""
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return [torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage) for storage in found.values()]
