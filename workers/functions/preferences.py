"""Preference learning from pairs of answers: policies (DPO, IPO, SLiC) and reward models.

A pair is two rows of one group. The column `preference` says 1 for the better one, -1 for the worse one, 0 for rows
that are in no pair.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor
from torch.nn.functional import logsigmoid

from distflow.contracts.decorators import node
from distflow.data.batch import Batch, ColumnData, Ragged
from distflow.telemetry.metrics import current
from workers.engines.role_engines import RoleEngines
from workers.functions.aggregation import trained_mask
from workers.functions.rollout import note_lengths
from workers.functions.updates import optimize


@node(type="MODEL_INFERENCE", head=None, samples=False, repeats="answers",
      writes=("responses", "preference", "completions"))
def labelled_pairs(engine: RoleEngines, prompts: Ragged, chosen: Ragged, rejected: Ragged, *,
                   answers: Literal[2] = 2) -> tuple[Ragged, Tensor, list[str]]:
    """Return the two answers of each record, the preferred one first: fields of the data (`data.columns`) as tokens."""
    responses = Ragged.from_rows([tokens for pair in zip(chosen.rows, rejected.rows) for tokens in pair])
    current().add("tokens", responses.lengths.sum())
    note_lengths(prompts.lengths, responses.lengths)
    return responses, torch.tensor([1, -1], dtype=torch.int32).repeat(len(prompts)), engine.decode(responses)


@node(writes=("preference", "keep"), keep_together="group")
def best_and_worst(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Pair each prompt's best sample with its worst, the first of equals. Rows in no pair leave the step."""
    if not torch.isfinite(rewards).all():
        raise ValueError("a reward is not finite, so that no sample is better than another")
    falling = torch.argsort(rewards, descending=True, stable=True)
    ranked = falling[torch.argsort(group[falling], stable=True)]
    groups, sizes = torch.unique_consecutive(group[ranked], return_counts=True)
    best = ranked[sizes.cumsum(0) - sizes]
    rising = torch.argsort(rewards, stable=True)
    worst = rising[torch.argsort(group[rising], stable=True)][sizes.cumsum(0) - sizes]
    differ = rewards[best] > rewards[worst]
    preference = torch.zeros(len(rewards), dtype=torch.int32)
    preference[best[differ]], preference[worst[differ]] = 1, -1
    current().mean("preference/tied", (~differ).sum(), len(groups))
    return preference, preference != 0


def preference_loss(margin_P: Tensor, kind: str, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Return the loss of each pair whose log-ratios to the reference, preferred minus rejected, differ by `margin_P`.

    ========= ============================================ =========================================================
    kind      loss, `h` being `beta * margin`              source
    ========= ============================================ =========================================================
    `sigmoid` -(1 - s) log σ(h) - s log σ(-h)              DPO (Rafailov et al. 2023, Eq. 7); `s`, label smoothing:
                                                           labels wrong with that probability (Mitchell 2023, cDPO)
    `ipo`     (margin - 1 / (2 beta))²                     IPO (Azar et al. 2023, Eq. 17, `beta` their τ)
    `hinge`   max(0, 1 - h)                                SLiC (Zhao et al. 2023), as in RSO (Liu et al. 2023)
    ========= ============================================ =========================================================
    """
    if not beta > 0 or not 0 <= label_smoothing < 0.5:
        raise ValueError(f"beta must be above 0 and label_smoothing from 0 to below 0.5; got {beta}, {label_smoothing}")
    scaled_P = beta * margin_P
    if kind == "sigmoid":
        return -(1 - label_smoothing) * logsigmoid(scaled_P) - label_smoothing * logsigmoid(-scaled_P)
    if kind == "ipo":
        return (margin_P - 1 / (2 * beta)).square()
    if kind == "hinge":
        return (1 - scaled_P).clamp(min=0)
    raise ValueError(f"unknown preference loss `{kind}`; there are sigmoid, ipo and hinge")


@node(type="MODEL_TRAIN", keep_together="group",
      only_with={"label_smoothing": ("loss", ("sigmoid",))})
def preference_update(
    engine: RoleEngines, prompts: Ragged, responses: Ragged, preference: Tensor, reference_logprobs: Ragged,
    group: Tensor, response_mask: Ragged | None = None, *, loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid",
    beta: PositiveFloat = 0.1, label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0, per_token: bool = False,
    nll: NonNegativeFloat = 0.0, temperature: PositiveFloat = 1.0,
) -> None:
    """Make a step of direct preference optimisation: see `preference_loss`. Without a pair on any rank there is none.

    Args:
        per_token: compare log-ratios per token, so that long answers weigh no more than short ones.
        nll: weight of the preferred answers' negative log-likelihood, the mean over an answer's tokens and then over
            answers (RPO, Pang et al. 2024, "Iterative Reasoning Preference Optimization", Eq. 1, without the prompt).
        temperature: divides the policy's logits; the node that writes `reference_logprobs` must have the same.
    """
    rows, count = _pairs(engine, preference, group, {
        "prompts": prompts, "responses": responses, "reference": reference_logprobs,
        "mask": trained_mask(responses, response_mask)})

    def loss_of(logprobs_T: Tensor, entropy_T: Tensor, micro: Batch) -> Tensor:
        mask = micro["mask"]
        mask_T, row_T = (column.to(logprobs_T.device) for column in (mask.values, mask.row_of))
        tokens_B = _per_row(torch.ones_like(logprobs_T), mask_T, row_T, len(micro)).clamp(min=1)
        ratio_T = logprobs_T - micro["reference"].values.to(logprobs_T.device)
        ratio_B = _per_row(ratio_T, mask_T, row_T, len(micro)) / (tokens_B if per_token else 1)
        better_P, worse_P = ratio_B.view(-1, 2).unbind(1)
        total = preference_loss(better_P - worse_P, loss, beta, label_smoothing).sum() / count
        if nll:
            nll_P = -(_per_row(logprobs_T, mask_T, row_T, len(micro)) / tokens_B).view(-1, 2)[:, 0]
            total = total + nll * nll_P.sum() / count
            current().mean_of("preference/nll", nll_P.detach())
        _report(total, beta * better_P, beta * worse_P)
        return total

    if count:
        optimize(engine, rows, loss_of, temperature, together=True)


@node(type="MODEL_TRAIN", head="value", keep_together="group")
def reward_update(engine: RoleEngines, prompts: Ragged, responses: Ragged, preference: Tensor, group: Tensor, *,
                  centering: NonNegativeFloat = 0.0) -> None:
    """Make a step of a reward model: the preferred answer's score above the other's. Without a pair there is none.

    -log σ(better - worse), the model of Bradley and Terry 1952 (Ouyang et al. 2022, Eq. 1). `centering` times
    (better + worse)² keeps scores near 0, where the loss itself leaves them free (Eisenstein et al. 2023).
    """
    rows, count = _pairs(engine, preference, group, {"prompts": prompts, "responses": responses})

    def loss_of(values_T: Tensor, scores_B: Tensor, micro: Batch) -> Tensor:
        better_P, worse_P = scores_B.view(-1, 2).unbind(1)
        total = bradley_terry_loss(better_P, worse_P, centering).sum() / count
        _report(total, better_P, worse_P)
        return total

    if count:
        optimize(engine, rows, loss_of, together=True)


def bradley_terry_loss(better_P: Tensor, worse_P: Tensor, centering: float = 0.0) -> Tensor:
    return -logsigmoid(better_P - worse_P) + centering * (better_P + worse_P).square()


def _pairs(engine: RoleEngines, preference: Tensor, group: Tensor, columns: dict[str, ColumnData]) -> tuple[Batch, int]:
    marked = preference.nonzero().squeeze(1)
    marked = marked[torch.argsort(preference[marked], descending=True, stable=True)]
    marked = marked[torch.argsort(group[marked], stable=True)]
    groups, sizes = torch.unique_consecutive(group[marked], return_counts=True)
    wrong = sizes != 2
    if not wrong.any():
        wrong = (preference[marked].view(-1, 2) != preference.new_tensor([1, -1])).any(1)
    if wrong.any():
        raise ValueError(f"a group must have one row with preference 1 and one with -1, or none with either; group "
                         f"{int(groups[wrong][0])} has others")
    count = int(engine.total(torch.tensor(len(groups))))
    current().add("preference/pairs", len(groups))
    return Batch(group, columns).select(marked), count


def _per_row(values_T: Tensor, mask_T: Tensor, row_T: Tensor, rows: int) -> Tensor:
    return values_T.new_zeros(rows).index_add(0, row_T, torch.where(mask_T, values_T, 0.0))


def _report(loss: Tensor, better_P: Tensor, worse_P: Tensor) -> None:
    metrics, margin_P = current(), (better_P - worse_P).detach()
    metrics.add("loss", loss.detach())
    metrics.mean_of("preference/margin", margin_P)
    metrics.mean_of("preference/accuracy", margin_P > 0)
    metrics.mean_of("preference/better", better_P.detach())
    metrics.mean_of("preference/worse", worse_P.detach())
