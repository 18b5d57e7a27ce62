"""A setting with bounds."""

from typing import Annotated

from pydantic import Field

from distflow import node


@node(writes="rewards")
def cut(completions: list[str], *, share: Annotated[float, Field(gt=0, le=1)]) -> "Tensor":
    """A share of something."""
