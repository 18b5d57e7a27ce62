"""A reward that mixes what is of one sample with what is of all."""

import distflow


@distflow.reward
def mixed(completion, answers):
    """Of one, and of all."""
