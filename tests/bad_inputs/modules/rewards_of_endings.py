"""A reward that reads whether an answer came to its end."""

from distflow import reward


@reward
def ended(completion, finished: bool) -> float:
    return float(finished)
