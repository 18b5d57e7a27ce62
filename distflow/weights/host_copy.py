"""Copies tensors to ordinary host memory; those of a GPU while it computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

STAGE = 64 << 20
"""Bytes of each of the two pinned buffers through which a GPU's tensors pass."""


class HostCopy:
    """Copies, on a stream of its own where the tensors are a GPU's. For one thread at a time."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._stages: list[tuple[Tensor, torch.cuda.Event]] = []

    @staticmethod
    def record_event(tensors: Iterable[Tensor]) -> torch.cuda.Event | None:
        """Return an event of the present stream, after which the tensors have their values; None on a CPU."""
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if device is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]],
             values_ready: torch.cuda.Event | None = None) -> Iterator[None]:
        """Copy (target, source): the target is [bytes] uint8. Yields after each; the source may change then.
        `values_ready`: event after which the sources have their values; default: once this thread's stream has done
        what it is given."""
        for target, source in pairs:
            if source.is_cuda:
                self._copy_through_stages(target, source, values_ready)
            else:
                target.view(source.dtype).view(source.shape).copy_(source)
            yield

    def _copy_through_stages(self, target: Tensor, source: Tensor, values_ready: torch.cuda.Event | None) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream(source.device)
            self._stages = [(torch.empty(STAGE, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
                            for _ in range(2)]
        self._stream.wait_event(values_ready or torch.cuda.current_stream(source.device).record_event())
        with torch.cuda.stream(self._stream):
            source = source.contiguous().view(-1).view(torch.uint8)
        coming: list[tuple[Tensor, Tensor, torch.cuda.Event]] = []
        for index, start in enumerate(range(0, len(source), STAGE)):
            piece, (stage, event) = source[start : start + STAGE], self._stages[index % 2]
            with torch.cuda.stream(self._stream):
                stage[: len(piece)].copy_(piece, non_blocking=True)
                event.record(self._stream)
            coming.append((target[start : start + len(piece)], stage[: len(piece)], event))
            if len(coming) == 2:
                _wait_and_copy(*coming.pop(0))
        for each in coming:
            _wait_and_copy(*each)


def _wait_and_copy(target: Tensor, stage: Tensor, event: torch.cuda.Event) -> None:
    event.synchronize()
    target.copy_(stage)
