"""What @node says does not fit."""

from distflow import node


@node(writes="x", type="COMPUT", repeats="copies", refills="kl",
      requires={"kl": "reference_logprobs"}, keep_together="episode",
      bounds={"kl": "=> 0", "epsilon": "> 0", "clipp": ">= 0"}, belongs_to={"kl": "clip"},
      only_with={"epsilon": ("kl", 0.1)}, refuses={"kl": "k1"}, head="number", row_wise=True)
def muddled(rewards, *, kl=0.0, epsilon=0.0):
    """Nothing fits."""
