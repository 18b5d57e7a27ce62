"""Who consumes what, and where everything lives: the few facts that all processes of a dock share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy

from distflow.data.dock.errors import DockError
from distflow.data.dock.selection import check_rules
from distflow.schema.errors import did_you_mean

Address = tuple[str, int]
"""Host and port."""
Ids = numpy.ndarray
"""[rows] int64."""


@dataclass(frozen=True)
class Consumer:
    """A worker state that takes rows, as `reward` or `update`; it has one controller.

    A row is ready for it as soon as it has all columns of `reads`. `writes` says which columns it owes to others: that
    is how the dock knows whom to name when one is missing, and what to do again when a warehouse was lost. `rules`
    are names of the selection registry with their settings, applied in order: `{"fresh": {"bound": 1}}`. Its
    controller lives with warehouse number `home`. `seconds`: how long a lease lasts without a sign of life. `recalls`:
    its commits of steps can be taken back until they are settled; their rows stay as long.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    rules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    deal: str = "balanced"
    home: int = 0
    seconds: float = 60.0
    recalls: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads", tuple(self.reads))
        object.__setattr__(self, "writes", tuple(self.writes))
        check_rules(self.name, self.rules, self.deal)
        if self.seconds <= 0:
            raise DockError(f"a lease of consumer `{self.name}` must last longer than {self.seconds} s")


@dataclass(frozen=True)
class Layout:
    """The warehouses by number, and the consumers. Row `i` lives in warehouse `i` modulo their count.

    Row ids must be unique in the run and are best dense (step · rows + row): then warehouses fill evenly, and what
    was consumed is remembered as a few ranges (MindSpeed RL: warehouses split the batch by sample index).
    """

    addresses: tuple[Address, ...]
    consumers: tuple[Consumer, ...]

    def __post_init__(self) -> None:
        names = [consumer.name for consumer in self.consumers]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DockError(f"each consumer has one controller, but there are several named {', '.join(twice)}")
        for consumer in self.consumers:
            if not 0 <= consumer.home < len(self.addresses):
                raise DockError(f"consumer `{consumer.name}` lives with warehouse {consumer.home}, but warehouses are "
                                f"numbered 0 to {len(self.addresses) - 1}")

    def consumer(self, name: str) -> Consumer:
        for consumer in self.consumers:
            if consumer.name == name:
                return consumer
        hint = did_you_mean(name, [consumer.name for consumer in self.consumers])
        raise DockError(f"there is no consumer `{name}` at this dock. {hint}")

    def writers(self, column: str) -> list[Consumer]:
        """The consumers that owe a column."""
        return [consumer for consumer in self.consumers if column in consumer.writes]

    def split(self, ids: Ids) -> Iterable[tuple[int, Ids]]:
        """Which of `ids` live in which warehouse: (its number, their places in `ids`), for those that have any."""
        homes = ids % len(self.addresses)
        for number in range(len(self.addresses)):
            places = numpy.flatnonzero(homes == number)
            if len(places):
                yield number, places

    def to_plain(self) -> dict[str, Any]:
        """As msgpack carries it."""
        return {"addresses": [list(address) for address in self.addresses],
                "consumers": [asdict(consumer) for consumer in self.consumers]}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Layout:
        return cls(tuple((host, port) for host, port in plain["addresses"]),
                   tuple(Consumer(**consumer) for consumer in plain["consumers"]))
