"""Numbers of a step, gathered over all ranks when the step ends."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import msgpack
from torch import Tensor

_MEAN, _SUM, _MAX, _APART = "mean", "sum", "max", "apart"


class Metrics:
    """One rank's numbers. Names are free; a rank that has none of a name simply adds nothing to it."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[str, float, float]] = {}
        self.step = 0
        """Of which these are; parts of several may come one after the other."""
        self.scope = ""
        """What is reported is also reported as NAME/SCOPE, so that nodes that run one function can be told apart."""

        self.muted = False
        """Whether what is reported counts for nothing: of ranks that compute the same, one speaks for all."""

        self.of_ranks: list[dict[str, tuple[float, float]]] = []
        """What each rank, by its number, had reported `apart` when the numbers were collected last."""

    def mean(self, name: str, total: float | Tensor, weight: float | Tensor = 1.0) -> None:
        """Report the mean: `total` is the sum over `weight` items. The mean is over all items of all ranks."""
        self._merge(name, (_MEAN, float(total), float(weight)))

    def mean_of(self, name: str, values: Tensor) -> None:
        """Report the mean of all elements of `values`."""
        self.mean(name, values.double().sum(), values.numel())

    def add(self, name: str, value: float | Tensor) -> None:
        """Report the sum."""
        self._merge(name, (_SUM, float(value), 0.0))

    def maximum(self, name: str, value: float | Tensor) -> None:
        """Report the maximum."""
        self._merge(name, (_MAX, float(value), 0.0))

    def apart(self, name: str, value: float, weight: float) -> None:
        """Report a sum and a weight that stay this rank's own: no number of all ranks comes of them."""
        self._merge(name, (_APART, value, weight))

    def _merge(self, name: str, entry: tuple[str, float, float]) -> None:
        if self.muted:
            return
        for each in (name, f"{name}/{self.scope}") if self.scope else (name,):
            self._values[each] = _merged(each, self._values.get(each), entry)

    def collect(self, gather: Callable[[bytes], list[bytes]]) -> dict[str, float]:
        """The numbers of all ranks as one, by name; afterwards this rank's are empty. Every rank must call it.

        A mean over no items is left out.
        """
        total: dict[str, tuple[str, float, float]] = {}
        parts = [msgpack.unpackb(part) for part in gather(self.take())]
        self.of_ranks = [{name: (value, weight) for name, (kind, value, weight) in part.items() if kind == _APART}
                         for part in parts]
        for name, entry in ((name, entry) for part in parts for name, entry in part.items() if entry[0] != _APART):
            total[name] = _merged(name, total.get(name), tuple(entry))
        return {name: value / weight if kind == _MEAN and weight else value
                for name, (kind, value, weight) in sorted(total.items()) if kind != _MEAN or weight}

    def take(self, beginning: str = "") -> bytes:
        """This rank's numbers whose names begin so, as `add_all` takes them; afterwards there are none at all."""
        values, self._values = self._values, {}
        return msgpack.packb({name: entry for name, entry in values.items() if name.startswith(beginning)})

    def add_all(self, taken: bytes) -> None:
        """The numbers of another rank count as if they had been reported here."""
        for name, entry in msgpack.unpackb(taken).items():
            self._values[name] = _merged(name, self._values.get(name), tuple(entry))


def _merged(name: str, old: tuple[str, float, float] | None,
            new: tuple[str, float, float]) -> tuple[str, float, float]:
    if old is None:
        return new
    if old[0] != new[0]:
        raise ValueError(f"metric `{name}` is reported as {old[0]} and as {new[0]}; give one of them another name")
    if new[0] == _MAX:
        nan = math.isnan(old[1]) or math.isnan(new[1])  # Python's max would pass over it or not, as the order falls
        return (_MAX, math.nan if nan else max(old[1], new[1]), 0.0)
    return (new[0], old[1] + new[1], old[2] + new[2])


_of_rank = Metrics()
_current: ContextVar[Metrics] = ContextVar("metrics")


def current() -> Metrics:
    """The metrics of the step that this worker is in; node functions report here. A thread may have its own."""
    return _current.get(_of_rank)


@contextlib.contextmanager
def recording(metrics: Metrics) -> Iterator[None]:
    """What this thread reports meanwhile goes there."""
    token = _current.set(metrics)
    try:
        yield
    finally:
        _current.reset(token)

