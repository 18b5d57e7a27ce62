"""Names that are taken."""

from distflow import reward


@reward
def length(completion):
    """There is one already."""
