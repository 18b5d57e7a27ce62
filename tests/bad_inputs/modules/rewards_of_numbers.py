"""A reward that wants numbers where text is."""

import distflow


@distflow.reward
def wants_numbers(completion, answer: float):
    """The answers are text."""
