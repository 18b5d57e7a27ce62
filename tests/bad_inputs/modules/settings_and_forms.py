"""Functions that bad DAGs use wrongly."""

from distflow import Ragged, node


@node(writes="rewards")
def scaled(completions: list[str], *, by: float) -> "Tensor":
    """A setting without default."""


@node(writes="advantages")
def wants_ragged_rewards(rewards: Ragged) -> Ragged:
    """Rewards per token."""
