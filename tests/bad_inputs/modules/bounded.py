"""A setting with bounds."""

from distflow import node


@node(writes="rewards", bounds={"share": "> 0, <= 1"})
def cut(completions: list[str], *, share: float) -> "Tensor":
    """A share of something."""
