"""Metrics of a step, reduced over all ranks when the step ends."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import msgpack

from distflow.errors import InvalidInput

if TYPE_CHECKING:  # reward processes report too, and need no torch
    from torch import Tensor

_MEAN, _SUM, _MAX, _MIN, _STD, _CORRELATION, _PER_RANK = "mean", "sum", "max", "min", "std", "correlation", "per rank"
_Entry = tuple[str, *tuple[float, ...]]
"""A kind and its numbers: a total and a weight; for a deviation the count, the mean and the squares around it; for a
correlation the sums of products and of squares."""
_NO_SPREAD = 1e-9  # of two values together, below which they have no correlation


class Metrics:
    """Metrics of one rank. Names are free, and need not be the same on all ranks."""

    def __init__(self) -> None:
        self._values: dict[str, _Entry] = {}
        self._on_device: list[tuple[tuple[str, ...], str, tuple[float | Tensor, ...]]] = []
        self.step = 0  # whose metrics these are; parts of several may come one after the other
        self.scope, self.muted = "", False  # see `attributed`
        self.of_ranks: list[dict[str, tuple[float, float]]] = []
        """What each rank had reported by `per_rank` at the last `collect`."""

    @contextlib.contextmanager
    def attributed(self, scope: str = "", muted: bool = False) -> Iterator[None]:
        """Report metrics also as NAME/`scope`, to tell nodes that run one function apart. `muted`: ignore them, since
        of the ranks that compute the same one reports."""
        self.scope, self.muted = scope, muted
        try:
            yield
        finally:
            self.scope, self.muted = "", False

    def mean(self, name: str, total: float | Tensor, weight: float | Tensor = 1.0) -> None:
        """Report the mean: `total` is the sum over `weight` items. The mean is over all items of all ranks."""
        self._merge(name, _MEAN, total, weight)

    def mean_of(self, name: str, values: Tensor) -> None:
        self.mean(name, values.double().sum(), values.numel())

    def add(self, name: str, value: float | Tensor) -> None:
        self._merge(name, _SUM, value, 0.0)

    def maximum(self, name: str, value: float | Tensor) -> None:
        self._merge(name, _MAX, value, 0.0)

    def minimum(self, name: str, value: float | Tensor) -> None:
        self._merge(name, _MIN, value, 0.0)

    def deviation_of(self, name: str, values: Tensor) -> None:
        """Report the deviation of all elements of `values` around their mean, unbiased (n - 1)."""
        values = values.double()
        mean = values.mean() if values.numel() else 0.0
        self._merge(name, _STD, values.numel(), mean, (values - mean).square().sum())

    def correlation_of(self, name: str, a: Tensor, b: Tensor) -> None:
        """Report the correlation of two values of each item, given as their deviations from what they are compared
        with, over the items of all ranks; nothing where one of them is the same everywhere."""
        self._merge(name, _CORRELATION, (a * b).sum(), a.square().sum(), b.square().sum())

    def extremes_of(self, name: str, values: Tensor) -> None:
        """Report the least and the largest element of `values` as NAME_min and NAME_max."""
        if values.numel():
            self.minimum(f"{name}_min", values.min())
            self.maximum(f"{name}_max", values.max())

    def spread_of(self, name: str, values: Tensor) -> None:
        """Report NAME/mean, NAME/std, NAME/min and NAME/max of all elements of `values`."""
        self.mean_of(f"{name}/mean", values)
        self.deviation_of(f"{name}/std", values)
        if values.numel():
            self.minimum(f"{name}/min", values.min())
            self.maximum(f"{name}/max", values.max())

    def per_rank(self, name: str, value: float, weight: float) -> None:
        """Report a sum and a weight of this rank that are not reduced; see `of_ranks`."""
        self._merge(name, _PER_RANK, value, weight)

    def _merge(self, name: str, kind: str, *numbers: float | Tensor) -> None:
        if self.muted:
            return
        names = (name, f"{name}/{self.scope}") if self.scope else (name,)
        if any(getattr(number, "is_cuda", False) for number in numbers):
            self._on_device.append((names, kind, tuple(_copied(number) for number in numbers)))
            return
        for each in names:
            self._values[each] = _merged(each, self._values.get(each), (kind, *map(float, numbers)))

    def _settle(self) -> None:
        """Read what was reported from a GPU, all at once: to read a number stops this process until the GPU has it."""
        waiting, self._on_device = self._on_device, []
        tensors: list[Any] = [number for *_, numbers in waiting for number in numbers if not isinstance(number, float)]
        if tensors:
            import torch

            known = iter(torch.stack(tensors).tolist())
            for names, kind, numbers in waiting:
                entry = (kind, *(number if isinstance(number, float) else next(known) for number in numbers))
                for each in names:
                    self._values[each] = _merged(each, self._values.get(each), entry)

    def collect(self, gather: Callable[[bytes], list[bytes]]) -> dict[str, float]:
        """Return the metrics of all ranks, reduced, by name, and clear this rank's. Collective. A mean over no items is
        left out, and so is a deviation of less than two."""
        total, self.of_ranks = dict[str, _Entry](), []
        for part in gather(self.take()):
            own: dict[str, tuple[float, float]] = {}
            for name, (kind, *numbers) in msgpack.unpackb(part).items():
                if kind == _PER_RANK:
                    own[name] = numbers[0], numbers[1]
                else:
                    total[name] = _merged(name, total.get(name), (kind, *numbers))
            self.of_ranks.append(own)
        return {name: value for name, entry in sorted(total.items()) if (value := _result(*entry)) is not None}

    def means(self) -> list[tuple[str, float, float]]:
        """Return the name, the sum and the count of each mean that was reported here."""
        self._settle()
        return [(name, total, count) for name, (kind, total, count) in self._values.items() if kind == _MEAN]

    def take(self, beginning: str = "") -> bytes:
        """Return this rank's metrics whose names begin so, for `add_all`, and clear all of them."""
        self._settle()
        values, self._values = self._values, {}
        return msgpack.packb({name: entry for name, entry in values.items() if name.startswith(beginning)}) or b""

    def add_all(self, taken: bytes) -> None:
        """Report the metrics that another rank has taken."""
        for name, (kind, *numbers) in msgpack.unpackb(taken).items():
            self._values[name] = _merged(name, self._values.get(name), (kind, *numbers))


def _copied(number: float | Tensor) -> float | Tensor:
    """Return a number as it is now, on the device where it is."""
    if not getattr(number, "is_cuda", False):
        return float(number)
    return number.detach().double().clone()  # pyright: ignore[reportAttributeAccessIssue]


def _result(kind: str, value: float, *more: float) -> float | None:
    if kind == _STD:
        return math.sqrt(more[1] / (value - 1)) if value > 1 else None
    if kind == _MEAN:
        return value / more[0] if more[0] else None
    if kind == _CORRELATION:
        spread = math.sqrt(more[0]) * math.sqrt(more[1])
        return value / spread if spread > _NO_SPREAD else None
    return value


def _merged(name: str, old: _Entry | None, new: _Entry) -> _Entry:
    if old is None:
        return new
    if old[0] != new[0]:
        raise ValueError(f"metric `{name}` is reported as {old[0]} and as {new[0]}; give one of them another name")
    (kind, *a), (_, *b) = old, new
    if kind in (_MAX, _MIN):
        nan = math.isnan(a[0]) or math.isnan(b[0])  # Python's max would pass over it or not, as the order falls
        return (kind, math.nan if nan else (max if kind == _MAX else min)(a[0], b[0]), 0.0)
    if kind == _STD:
        count, gap = a[0] + b[0], b[1] - a[1]
        share = b[0] / count if count else 0.0
        return (_STD, count, a[1] + gap * share, a[2] + b[2] + gap * gap * a[0] * share)
    return (kind, *(x + y for x, y in zip(a, b)))


_of_rank = Metrics()
_current: ContextVar[Metrics] = ContextVar("metrics")


RESERVED = frozenset([
    "advantages", "all_tokens_per_second_per_device", "checkpoint", "data", "distillation", "dock", "earned",
    "environment",
    "epoch", "evaluation", "filter",
    "grad_norm", "gradient", "greedy", "importance", "inference", "learning_rate", "lines", "loss", "memory", "mfu",
    "mismatch",
    "peer_replica", "policy", "preference", "prompt", "response", "reward", "router", "samples", "samples_total",
    "seconds", "snapshot", "staleness", "step", "tokens", "tokens_per_second",
    "tokens_per_second_per_device", "tokens_total", "validation", "validation_high", "validation_lag",
    "validation_low", "validation_pass", "value", "waiting", "wall_seconds",
    "weights"])
"""First parts of the names of distflow's own metrics, up to `/`."""
HISTOGRAMS = frozenset(["staleness/tokens"])
"""Metrics of which each whole number has a count, NAME/NUMBER: TensorBoard and W&B draw their histogram."""


def metric(name: str, value: float | Tensor) -> None:
    """Report a metric of this step under a name of your own; metrics.jsonl has the mean over all ranks.

    Each value counts once, and so does each element of a tensor: one value for each token gives the mean over tokens,
    however they are divided into micro-batches and ranks. Call it in node functions, losses and rewards, but not in
    environments and hooks, which run outside of any step. Raises InvalidInput: the name is empty or one of distflow's
    own, or `value` is no number."""
    if not isinstance(name, str) or not name:
        raise InvalidInput(f"metric({name!r}, …): a metric needs a name, as  metric(\"my/name\", value)")
    first = name.partition("/")[0]
    if first in RESERVED:
        raise InvalidInput(f"metric({name!r}, …): distflow writes metrics named `{first}` itself. "
                           f"Choose a name of your own, as  metric(\"my/{name.rpartition('/')[2]}\", value)")
    if (detach := getattr(value, "detach", None)) is not None:
        current().mean_of(name, detach())
        return
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InvalidInput(f"metric({name!r}, {value!r}): the value is no number. Give a number or a tensor.") from None
    current().mean(name, number)


def current() -> Metrics:
    """Return the metrics of the step that this worker is in, or those that a thread is `recording` to."""
    return _current.get(_of_rank)


@contextlib.contextmanager
def recording(metrics: Metrics) -> Iterator[None]:
    """Collect what this thread reports in `metrics`."""
    token = _current.set(metrics)
    try:
        yield
    finally:
        _current.reset(token)

