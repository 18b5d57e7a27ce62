"""Reward of the recipes whose answer is a word."""

from distflow import reward


@reward
def exact(completion: str, answer: str) -> float:
    """Return 1.0 for the answer itself and nothing else, else 0.0."""
    return float(completion.strip() == answer)


@reward
def letters(completion: str, answer: str) -> float:
    """Return the share of letters that are right and at their place; 1.0 for the answer itself."""
    said = completion.strip()
    return sum(one == other for one, other in zip(said, answer)) / max(len(said), len(answer))
