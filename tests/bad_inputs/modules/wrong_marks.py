"""What @node says does not fit."""

from distflow import node


@node(writes="x", type="COMPUT", repeats="copies", requires={"kl": "reference_logprobs"}, keep_together="episode")
def muddled(rewards, *, kl=0.0):
    """Nothing fits."""
