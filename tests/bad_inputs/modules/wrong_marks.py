"""What @node says does not fit."""

from typing import Annotated

from pydantic import Field

from distflow import node


@node(writes="x", type="COMPUT", repeats="copies", refills="kl",
      requires={"kl": "reference_logprobs"}, keep_together="episode",
      belongs_to={"kl": "clip"}, only_with={"epsilon": ("kl", 0.1)}, refuses={"kl": "k1"}, head="number", row_wise=True)
def muddled(rewards, *, kl: Annotated[float, Field(min=0)] = 0.0, epsilon: Annotated[float, Field(gt=0)] = 0.0):
    """Nothing fits."""
