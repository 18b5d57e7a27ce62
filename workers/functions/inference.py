"""Log-probabilities of given responses under a role's model."""

from __future__ import annotations

from pydantic import PositiveFloat

from distflow.contracts.decorators import node
from distflow.data.batch import Ragged
from workers.engines.role_engines import RoleEngines


@node(type="MODEL_INFERENCE", writes="{role}_logprobs", default_for="reference", row_wise=True)
def logprobs(engine: RoleEngines, prompts: Ragged, responses: Ragged, images: Ragged | None = None,
             routed_experts: Ragged | None = None, *, temperature: PositiveFloat | None = None) -> Ragged:
    """Return the log-probability of each response token, by default at the temperature at which the role samples."""
    return engine.logprobs(prompts, responses, images, temperature, routed_experts)
