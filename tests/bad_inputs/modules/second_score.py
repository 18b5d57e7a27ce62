"""A second default for reward nodes."""

from distflow import node


@node(writes="rewards", default_for="reward")
def another_score(completions, answers):
    """As good a default as the first."""
