"""Contracts as data: what functions under distflow's decorators read, accept and return."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field

from distflow.contracts.decorators import NodeMarks
from distflow.contracts.settings import Setting
from distflow.errors import Location

ENGINE_TYPES = ("MODEL_INFERENCE", "MODEL_TRAIN")
GROUP = "group"  # column with the prompt that a row stems from. A step's rows are always moved by it.
_OF_DATA = {"question": "questions", "answer": "answers"}
"""Parameter of one row → the column of the dataset that it is from."""


@dataclass(frozen=True)
class Read:
    """Positional parameter: the column of its name, in the form of its annotation ("" if it has none)."""

    name: str
    form: str = ""
    optional: bool = False
    reader: str = ""  # description of the reader, where that is not the function itself


@dataclass(frozen=True)
class Signature:
    """Parameters of a user's function or class, before its decorator gives them a meaning."""

    name: str
    module: str
    where: Location
    reads: tuple[Read, ...] = ()
    settings: dict[str, Setting] = field(default_factory=dict)
    result: str = ""  # annotation of what it returns
    summary: str = ""

    @property
    def key(self) -> str:
        return f"{self.module}:{self.name.rpartition(':')[2]}"


@dataclass(frozen=True)
class Contract(Signature):
    """What a node function reads, writes and accepts. `name` is its name in YAML."""

    marks: NodeMarks = NodeMarks()
    returns: tuple[str, ...] = ()  # form of each column that it writes, if annotated

    @property
    def samples(self) -> bool:
        """Whether the engine of the node's role must be ready to sample."""
        repeats = self.marks.repeats is not None if self.marks.samples is None else self.marks.samples
        return repeats and self.marks.type in ENGINE_TYPES

    def reading(self, more: Iterable[Read]) -> Contract:
        """Return the contract with further columns; those that it reads already stay as they are."""
        reads = {read.name: read for read in self.reads}
        for read in more:
            reads.setdefault(read.name, read)
        return dataclasses.replace(self, reads=tuple(reads.values()))

    def writing(self, column: str, form: str) -> Contract:
        """Return the contract with one more column at the end of those that it writes."""
        marks = dataclasses.replace(self.marks, writes=(*self.marks.writes, column))
        return dataclasses.replace(self, marks=marks, returns=(*self.returns, form) if self.returns else ())


@dataclass(frozen=True)
class RewardContract(Signature):
    """What a reward reads and accepts. `columns`: by parameter, in order; `batched`: it gets all samples at once."""

    columns: dict[str, Read] = field(default_factory=dict)
    batched: bool = False
    checked: bool = False  # whether its decorator has a `check`


@dataclass(frozen=True)
class EnvironmentContract(Signature):
    """What `__init__` of an environment takes. `steps`: it has a method `step`; `coroutine`: that is one; `starts`: it
    has a method `start`."""

    steps: bool = True
    starts: bool = False
    safe: bool = False
    coroutine: bool = False

    @property
    def columns(self) -> dict[str, str]:
        return {read.name: _OF_DATA.get(read.name, read.name) for read in self.reads}
