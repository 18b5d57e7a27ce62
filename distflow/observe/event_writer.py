"""Writes TensorBoard's file of a run; what cannot be written is left out of it, and the run goes on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from distflow.observe import lines

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_FIRST = {"validation": "1_validation", "reward": "2_reward"}
"""What these groups of metrics are called in TensorBoard, which sorts groups by name."""


class EventWriter:
    """TensorBoard's file. Steps that cannot be written are left out; later another file is begun."""

    def __init__(self, create: Callable[[], SummaryWriter]):
        self.create = create
        self.writer: SummaryWriter | None = None
        self.warned = False
        self._open()

    def add_scalars(self, step: int, values: dict[str, float], again: bool) -> None:
        """`again`: begin another file if the last one could not be written."""
        if self.writer is None and again:
            self._open()
        if self.writer is not None:
            with self._losing():
                for name, value in values.items():
                    group, slash, rest = name.partition("/")
                    self.writer.add_scalar(f"{_FIRST.get(group, group)}{slash}{rest}", value, step)

    def add_samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Write the rows of a step as one text."""
        if self.writer is not None and rows:
            text = "\n\n---\n\n".join(map(_as_text, rows))
            with self._losing():
                self.writer.add_text("samples", text.encode(errors="backslashreplace").decode(), step)

    def flush(self) -> None:
        if self.writer is not None:
            with self._losing():
                self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            with self._losing():
                self.writer.close()

    def _open(self) -> None:
        with self._losing():
            self.writer = self.create()

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.writer = None
            if not self.warned:
                lines.show(f"warning: TensorBoard's file cannot be written: {error.strerror}. Steps are left out of it "
                           "until it can; the run goes on.", sys.stderr)
            self.warned = True


def _as_text(row: dict[str, Any]) -> str:
    """Return a sample as Markdown: its numbers in a line, its texts as they are."""
    texts = {name: value for name, value in row.items() if isinstance(value, str)}
    numbers = "  ".join(f"{name} {value}" for name, value in row.items() if name not in texts)
    blocks = [f"**{name}**\n\n" + "\n".join(f"    {line}" for line in value.splitlines())
              for name, value in texts.items()]
    return "\n\n".join([numbers, *blocks])
