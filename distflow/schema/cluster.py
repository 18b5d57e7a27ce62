"""The machines that a plan is made for."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from distflow.schema.document import Document


class Cluster(Document):
    """Alike machines. `memory_gib` is per rank; without it a plan estimates memory but refuses nothing."""

    name: str = "local"
    ranks: PositiveInt | None = None
    memory_gib: PositiveFloat | None = None
