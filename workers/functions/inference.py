"""Log-probabilities of given answers under a role's model."""

from __future__ import annotations

from distflow import Ragged, node
from workers.roles import Role


@node(type="MODEL_INFERENCE", writes="{role}_logprobs", default_for="reference", row_wise=True)
def logprobs(engine: Role, prompts: Ragged, responses: Ragged, images: Ragged | None = None) -> Ragged:
    """The log-probability of each response token, at the temperature that it was sampled at."""
    return engine.logprobs(prompts, responses, images)
