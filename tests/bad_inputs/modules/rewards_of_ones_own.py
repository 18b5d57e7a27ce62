"""Rewards that read columns and take settings."""

from distflow import reward
from distflow.contracts.decorators import Regex


@reward
def passes(completion, tests: str, hints: str = "", *, partial: bool = False, most: int, pattern: Regex | None = None):
    """Reads two columns of the data, one of them if it is there."""


@reward(timeout=3.0)
async def polite(completions: list[str], rollout_logprobs: "list[list[float]]"):
    """Reads a column of the rollout."""
