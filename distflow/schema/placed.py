"""A plan for mixed hardware as a file: what `distflow plan --out` writes and reads again.

It belongs to one DAG, one cluster and one amount of work, and says their digests; for another it is refused.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from distflow.schema.document import Document, check
from distflow.schema.errors import InvalidInput, Mistake
from distflow.schema.source import Source


class Digests(Document):
    """Of what a plan was made for."""

    dag: str
    cluster: str
    work: str
    """Models, rows, lengths and mode."""


class PlacedGroup(Document):
    """Works that take turns on the same devices: how many of each kind of machine, and their ranks, which count through
    the machines in the order of the cluster file."""

    tasks: list[str] = Field(min_length=1)
    devices: dict[str, PositiveInt]
    ranks: list[NonNegativeInt] = Field(min_length=1)


class PlacedShares(Document):
    """`count` data-parallel shares of `rows` rows each, and the machines of their stages."""

    count: PositiveInt
    rows: NonNegativeInt
    stages: list[str] = Field(min_length=1)


class PlacedTask(Document):
    """How a work is split, the seconds that the cost model says it takes, and those to bring its state from host memory
    and back where it takes turns."""

    dp: PositiveInt
    tp: PositiveInt = 1
    pp: PositiveInt = 1
    ep: PositiveInt = 1
    micro_rows: PositiveInt = 1
    layers: list[PositiveInt] = Field(min_length=1)
    shares: list[PlacedShares] = Field(min_length=1)
    seconds: NonNegativeFloat
    swap_seconds: NonNegativeFloat = 0.0


class PlacedPlan(Document):
    """`seconds` of an iteration and the `bound` below which no plan can come, both by the cost model; `rest_seconds`
    come to them that no task takes, as runs have shown."""

    made_for: Digests
    solver: str
    seconds: PositiveFloat
    bound: NonNegativeFloat
    rest_seconds: NonNegativeFloat = 0.0
    groups: list[PlacedGroup] = Field(min_length=1)
    tasks: dict[str, PlacedTask] = Field(min_length=1)


def digest(said: Any) -> str:
    """16 hexadecimal digits of what can be written as JSON."""
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def placed_plan(source: Source, expected: Digests) -> PlacedPlan:
    """The plan of a file.

    Raises:
        InvalidInput: it is no plan, or one for another DAG, cluster or amount of work.
    """
    found, mistakes = check(PlacedPlan, source)
    if mistakes or found is None:
        raise InvalidInput(mistakes)
    names = {"dag": "DAG", "cluster": "cluster", "work": "amount of work (models, rows, lengths or mode)"}
    others = [Mistake(f"this plan is for another {name}: its digest is {getattr(found.made_for, key)}, and here it is "
                      f"{getattr(expected, key)}", source.spot(("made_for", key)),
                      "Plan again:  distflow plan DAG --cluster FILE --solver hybrid --out FILE")
              for key, name in names.items() if getattr(found.made_for, key) != getattr(expected, key)]
    if others:
        raise InvalidInput(others)
    return found
