"""A reward that reads whether an answer came to its end."""

from distflow import reward


@reward
def ended(completion, finished: bool) -> float:
    return float(finished)


@reward
def labelled(finished: str, completion, response) -> float:
    """Reads a field of the data that is called as a column of the rollout."""
    return float(finished in completion)
