"""Distillation: from a teacher's log-probabilities of sampled tokens, or of its `k` most probable tokens at each place.

Of the latter a divergence is that of two distributions over k + 1 outcomes: the teacher's k tokens, and all other
tokens as one. It is at most the divergence over the whole vocabulary (merging outcomes never raises one), equal to it
where k is the whole vocabulary, and 0 where student and teacher agree on the k tokens. With p of the teacher and q of
the student:

============== ======================================= ===========================================================
divergence     per token                               source
============== ======================================= ===========================================================
reverse_kl     `sum q log(q / p)`                      MiniLLM (Gu et al. 2024): seeks modes
forward_kl     `sum p log(p / q)`                      Hinton et al. 2015: covers all that the teacher says
jensen_shannon `beta KL(p, m) + (1 - beta) KL(q, m)`   GKD (Agarwal et al. 2024, Eq. 1), `m = beta p + (1 - beta) q`
============== ======================================= ===========================================================

Gradients are those of the divergence at given responses; how likely the responses are is no part of it, as in GKD.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from distflow.contracts.decorators import node
from distflow.data.batch import Batch, Ragged
from distflow.errors import InvalidInput
from distflow.telemetry.metrics import current
from workers.engines.role_engines import RoleEngines
from workers.functions.aggregation import trained_mask, weighted_sum
from workers.functions.kl import kl_estimate
from workers.functions.updates import optimize, split_mini_batches, with_token_weights

_LEAST_TAIL = 1e-6
"""Mass of all other tokens that counts at least, and below which it has no gradient: it is one minus a sum that is
rounded in float32."""


def divergence(kind: str, student_TK: Tensor, teacher_TK: Tensor, beta: float = 0.5) -> Tensor:
    """Return the divergence [T], in nats, of log-probabilities of the teacher's k tokens. A token of -inf in
    `teacher_TK` is not one of them. Gradients flow to `student_TK` alone."""
    there = teacher_TK > -torch.inf
    p, q = (_with_tail(part.masked_fill(~there, -torch.inf)) for part in (teacher_TK.detach(), student_TK))
    absent = torch.cat([~there, torch.zeros_like(there[..., :1])], -1)
    p, q = p.masked_fill(absent, 0.0), q.masked_fill(absent, 0.0)  # whose terms are 0
    if kind == "forward_kl":
        return (p.exp() * (p - q)).sum(-1)
    if kind == "reverse_kl":
        return (q.exp() * (q - p)).sum(-1)
    if kind != "jensen_shannon":
        raise ValueError(f"unknown divergence `{kind}`")
    mean = torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))
    return (beta * p.exp() * (p - mean) + (1 - beta) * q.exp() * (q - mean)).sum(-1)


def _with_tail(logprobs_TK: Tensor) -> Tensor:
    """Return [T, K + 1] with the log-probability of all other tokens."""
    inside = torch.logsumexp(logprobs_TK, -1, keepdim=True).clamp(max=math.log1p(-_LEAST_TAIL))
    return torch.cat([logprobs_TK, torch.log(-torch.expm1(inside))], -1)


_TELLING, _LOOKED_AT = 512, 4096  # fewest and most tokens that are searched for neighbours' log-probabilities


@node(type="MODEL_INFERENCE", writes=("top_tokens", "top_logprobs"), row_wise=True)
def top_logprobs(
    engine: RoleEngines, prompts: Ragged, responses: Ragged, images: Ragged | None = None,
    top_tokens: Ragged | None = None, top_logprobs: Ragged | None = None, *, k: PositiveInt = 32,
    temperature: PositiveFloat | None = None,
) -> tuple[Ragged, Ragged]:
    """Return the role's `k` most probable tokens at each place of a response, and their log-probabilities: [teachers,
    k] a token. What a teacher before it in the DAG has written stays, with the same `k`."""
    found = engine.top_logprobs(prompts, responses, k, images, temperature)
    return concat_teachers(top_tokens, top_logprobs, *found)


def concat_teachers(tokens: Ragged | None, logprobs: Ragged | None, own: Ragged,
                    own_logprobs: Ragged) -> tuple[Ragged, Ragged]:
    """Return a teacher's tokens and log-probabilities, [k] each, beside those of the teachers before it."""
    found = (own.with_values(own.values[:, None]), own_logprobs.with_values(own_logprobs.values[:, None]))
    if tokens is None or logprobs is None or tokens.values.ndim < 3:  # a rank without rows may not know their shape
        return found
    before, now = tokens.values.shape[2], own.values.shape[1]
    if before != now:
        raise InvalidInput(f"a teacher gives {now} tokens at each place, and the one before it {before}. Give both "
                           f"nodes the same:  with: {{k: {min(now, before)}}}")
    tokens, logprobs = (old.with_values(torch.cat([old.values, new.values], 1))
                        for old, new in zip((tokens, logprobs), found))
    return tokens, logprobs


class _Divergence:
    """Loss of a distillation step: the sum of a micro-batch's weighted divergences."""

    def __init__(self, kind: str, beta: float, weights: list[float], share: float):
        self.kind, self.beta, self.weights, self.share = kind, beta, torch.tensor(weights), share

    def __call__(self, logprobs_TC: Tensor, entropy_T: Tensor, micro: Batch) -> Tensor:
        mask, device = micro["mask"], logprobs_TC.device
        trained_S = mask.values.nonzero().squeeze(1)  # _S: trained tokens only
        teacher_SMK = micro["top_logprobs"].values[trained_S].to(device)
        weights_S = micro["weights"].values[trained_S].to(device)
        trained_S = trained_S.to(device)
        student_SMK = logprobs_TC[trained_S].view(teacher_SMK.shape)
        loss_SM = divergence(self.kind, student_SMK, teacher_SMK, self.beta)
        loss_S = (loss_SM * self.weights.to(loss_SM)).sum(1)
        total = weighted_sum(loss_S, weights_S)
        metrics = current()
        metrics.add("loss", total.detach() * self.share)
        metrics.mean_of("distillation/divergence", loss_S.detach())
        metrics.mean_of("distillation/teacher_tail", 1 - teacher_SMK.exp().sum(-1))
        metrics.mean_of("policy/entropy", entropy_T.detach()[trained_S])
        return total


@node(type="MODEL_TRAIN", keep_together="group", only_with={"beta": ("divergence", ("jensen_shannon",))})
def distillation_update(
    engine: RoleEngines, prompts: Ragged, responses: Ragged, top_tokens: Ragged, top_logprobs: Ragged, group: Tensor,
    response_mask: Ragged | None = None, images: Ragged | None = None, *,
    divergence: Literal["reverse_kl", "forward_kl", "jensen_shannon"] = "reverse_kl",
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5, weights: list[NonNegativeFloat] | None = None,
    aggregate: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean"] = "token_mean",
    mini_batches: PositiveInt = 1, epochs: PositiveInt = 1,
) -> None:
    """Make a step towards the teachers' distributions over their `k` most probable tokens and the rest.

    `divergence` and `beta` are in `workers/functions/distillation.py`. `weights` has one number for each teacher, in
    the DAG's order: their divergences are added with these; default: their mean. Log-probabilities are those at the
    roles' temperature.
    """
    empty = not len(top_tokens.values)  # a rank without rows does not know the columns' shape
    tokens, teacher = ((each.values.new_zeros(0, len(weights or [1]), 1) if empty else each.values)
                       for each in (top_tokens, top_logprobs))
    teachers = tokens.shape[1]
    if weights is not None and len(weights) != teachers:
        raise InvalidInput(f"`weights` has {len(weights)} numbers, and there are {teachers} teachers")
    known = tokens < engine.vocabulary  # the models of a family differ in how many rows for unused tokens they have
    rows = Batch(group, {"prompts": prompts, "responses": responses, "mask": trained_mask(responses, response_mask),
                         "candidates": top_tokens.with_values((tokens * known).flatten(1)),
                         "top_logprobs": top_tokens.with_values(teacher.masked_fill(~known, -torch.inf)),
                         **({} if images is None else {"images": images})})
    parts = split_mini_batches(engine, rows, mini_batches) * epochs
    objective = _Divergence(divergence, beta, weights or [1 / teachers] * teachers, 1 / max(len(parts), 1))
    for part in parts:
        optimize(engine, with_token_weights(engine, rows.select(part), aggregate), objective)


@node(writes="advantages")
def distillation_advantage(responses: Ragged, rollout_logprobs: Ragged, teacher_logprobs: Ragged,
                           response_mask: Ragged | None = None) -> Ragged:
    """Return log p_teacher - log p_student of each sampled token, the advantages of KL(student || teacher) (MiniLLM, Gu
    et al. 2024); each token counts for itself alone (Lu et al. 2025, "On-Policy Distillation")."""
    reverse_T = kl_estimate(rollout_logprobs.values, teacher_logprobs.values, "k1")
    current().mean_of("distillation/reverse_kl", reverse_T[trained_mask(rollout_logprobs, response_mask).values])
    current().mean("distillation/misplaced", *_misplaced(
        responses, teacher_logprobs.values.double(), rollout_logprobs.values.double()))
    return rollout_logprobs.with_values(-reverse_T)


def _misplaced(responses: Ragged, teacher_T: Tensor, student_T: Tensor) -> tuple[Tensor | float, int]:
    """Return how much better the place before or after fits a teacher's log-probabilities than their own, times the
    number of tokens that were looked at, and this number; 0 where too few tell nothing.

    In text that is copied the token before decides, so both must be: a neighbour explains more of their variance, and
    the student's log-probabilities there are correlated more with them."""
    row_of, tokens_T = responses.row_of, responses.values
    inner_S = 1 + (row_of[2:] == row_of[:-2]).nonzero().squeeze(1)[:_LOOKED_AT]
    if len(inner_S) < _TELLING:
        return 0.0, 0
    teacher_S = teacher_T[inner_S]
    fits = [(_explained(teacher_S, tokens_T[inner_S + place]), torch.stack([teacher_S, student_T[inner_S + place]])
             .corrcoef()[0, 1].nan_to_num()) for place in (0, -1, 1)]
    (own, same), *others = fits
    better = torch.stack([torch.minimum(other - own, apart - same) for other, apart in others]).max()
    return better * len(inner_S), len(inner_S)


def _explained(values_S: Tensor, tokens_S: Tensor) -> Tensor:
    """Return the share of a variance that is between tokens, adjusted for their number; 0 if it has no value."""
    kinds, kind_S, counts = torch.unique(tokens_S, return_inverse=True, return_counts=True)
    means = torch.zeros(len(kinds), dtype=values_S.dtype).index_add(0, kind_S, values_S) / counts
    within, total = (values_S - means[kind_S]).square().sum(), (values_S - values_S.mean()).square().sum()
    share = 1 - within / total * (len(values_S) - 1) / (len(values_S) - len(kinds))
    return torch.where(share.isfinite(), share, 0.0)
