"""Log-probabilities of given answers under a role's model."""

from __future__ import annotations

from distflow import Ragged, node
from workers.roles import Role


@node(type="MODEL_INFERENCE", writes="{role}_logprobs", default_for="reference", row_wise=True,
      bounds={"temperature": "> 0"})
def logprobs(engine: Role, prompts: Ragged, responses: Ragged, images: Ragged | None = None, *,
             temperature: float | None = None) -> Ragged:
    """The log-probability of each response token, by default at the temperature at which the role samples."""
    return engine.logprobs(prompts, responses, images, temperature)
