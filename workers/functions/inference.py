"""Log-probabilities of given responses under a role's model, and distillation from a teacher's."""

from __future__ import annotations

from pydantic import PositiveFloat

from distflow import Ragged, node
from distflow.telemetry.metrics import current
from workers.functions.aggregation import trained_mask
from workers.functions.kl import kl_estimate
from workers.roles import RoleEngines


@node(type="MODEL_INFERENCE", writes="{role}_logprobs", default_for="reference", row_wise=True)
def logprobs(engine: RoleEngines, prompts: Ragged, responses: Ragged, images: Ragged | None = None,
             routed_experts: Ragged | None = None, *, temperature: PositiveFloat | None = None) -> Ragged:
    """Return the log-probability of each response token, by default at the temperature at which the role samples."""
    return engine.logprobs(prompts, responses, images, temperature, routed_experts)


@node(writes="advantages")
def distillation_advantage(rollout_logprobs: Ragged, teacher_logprobs: Ragged,
                           response_mask: Ragged | None = None) -> Ragged:
    """Return log p_teacher - log p_student of each sampled token, the advantages of KL(student || teacher) (MiniLLM, Gu
    et al. 2024); each token counts for itself alone (Lu et al. 2025, "On-Policy Distillation")."""
    reverse_T = kl_estimate(rollout_logprobs.values, teacher_logprobs.values, "k1")
    current().mean_of("distillation/reverse_kl", reverse_T[trained_mask(rollout_logprobs, response_mask).values])
    return rollout_logprobs.with_values(-reverse_T)
