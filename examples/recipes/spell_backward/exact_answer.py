"""Reward of the recipes whose answer is a word."""

from distflow import reward


@reward
def exact(completion: str, answer: str) -> float:
    """Return 1.0 for the answer itself and nothing else, else 0.0."""
    return float(completion.strip() == answer)
