"""Training steps of policies; what all training functions share: mini-batches, token weights, optimizer steps."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor

from distflow.contracts.decorators import Loss, node
from distflow.data.batch import Batch, Ragged
from distflow.telemetry.metrics import current
from workers.engines.devices import on_device
from workers.engines.role_engines import RoleEngines
from workers.engines.trainer import LossOf
from workers.functions.aggregation import local_totals, token_weights, trained_mask, weighted_sum
from workers.functions.corrections import Mismatch, report_staleness
from workers.functions.entropy import high_entropy
from workers.functions.kl import kl_estimate
from workers.functions.losses import Surrogate, surrogate, user_loss


def split_mini_batches(engine: RoleEngines, rows: Batch, count: int) -> list[Tensor]:
    """Return the row numbers of each of `count` mini-batches, by prompt, that has rows on any rank: a step without data
    would still decay the weights and use up Adam's moments. Collective."""
    part_of = rows.ids.long() % count  # an empty column is float
    filled = engine.total(torch.bincount(part_of, minlength=count)).nonzero().squeeze(1)
    return [(part_of == part).nonzero().squeeze(1) for part in filled.tolist()]


def with_token_weights(engine: RoleEngines, rows: Batch, aggregate: str, fixed_length: int | None = None) -> Batch:
    mask = rows["mask"]
    totals = engine.total(local_totals(mask.values, mask.lengths))
    weights = token_weights(mask.values, mask.lengths, aggregate, totals, fixed_length)
    return rows.with_columns({"weights": mask.with_values(weights)})


def normalized(engine: RoleEngines, advantages: Ragged, mask: Ragged) -> Ragged:
    """Return `(A - mean) / deviation` over the trained tokens of all ranks, float32, 0 for untrained ones (REINFORCE++,
    Hu et al. 2025). 1e-8 under the unbiased deviation's root keeps rounding of equal advantages small."""
    values_S = advantages.values[mask.values].double()
    tokens, total = engine.total(torch.stack([mask.values.sum(), values_S.sum()]).double())
    centred_S = values_S - total / tokens.clamp(min=1)
    variance = engine.total(centred_S.square().sum()) / (tokens - 1).clamp(min=1)
    result_T = torch.zeros(len(mask.values), dtype=torch.float64)
    result_T[mask.values] = centred_S * (variance + 1e-8).rsqrt()
    return advantages.with_values(result_T.float())


def optimize(engine: RoleEngines, rows: Batch, loss: LossOf, temperature: float | None = None, prefix: str = "",
             **options: Any) -> None:
    """Make one optimizer step over all ranks' rows by `RoleEngines.update`; report its metrics under `prefix`."""
    for name, value in engine.update(rows, loss, temperature, **options).items():
        current().maximum(f"{prefix}{name}", value)


_CLIPPED = ("policy/clip_ratio", "policy/clip_ratio_low", "policy/clip_ratio_high")
_PER_TOKEN = ("old", "behaviour", "advantages", "weights", "importance", "reference", "high_entropy")


class PolicyLoss:
    """Loss of a policy update: the sum of a micro-batch's weighted token losses. Untrained tokens are left out first,
    as they may have log-probabilities of -inf. `share` is the weight of one call in the step's reported loss."""

    def __init__(self, surrogate: Surrogate, kl: float, kl_kind: str, share: float, entropy: float = 0.0):
        self.surrogate, self.kl, self.kl_kind, self.share, self.entropy = surrogate, kl, kl_kind, share, entropy
        self.mismatch: Mismatch | None = Mismatch()
        """Until the step's first optimizer step the trainer's policy is still the rollout's: they are compared then."""

    def __call__(self, logprobs_T: Tensor, entropy_T: Tensor, micro: Batch) -> Tensor:
        mask = micro["mask"]
        device, trained_S = logprobs_T.device, mask.values.nonzero().squeeze(1)  # _S: trained tokens only
        columns = {name: on_device(micro[name].values[trained_S], device)
                   for name in _PER_TOKEN if name in micro.columns}
        lengths_B = torch.zeros_like(mask.lengths).index_add(0, mask.row_of, mask.values.long())
        trained_S, lengths_B = on_device(trained_S, device), on_device(lengths_B, device)
        logprobs_S, entropy_S = logprobs_T[trained_S], entropy_T[trained_S]
        loss_S, ratio_S, clipped_S = self.surrogate(logprobs_S, columns["old"], columns["advantages"], lengths_B)
        if "importance" in columns:
            loss_S = loss_S * columns["importance"]
            current().mean_of("importance/with_ratio", (columns["importance"] - columns["importance"].mean()) *
                              (columns["old"] - columns["behaviour"]))
        if "high_entropy" in columns:
            loss_S = torch.where(columns["high_entropy"], loss_S, 0.0)
        metrics = current()
        if self.kl:
            kl_S = kl_estimate(logprobs_S, columns["reference"], self.kl_kind)
            loss_S = loss_S + self.kl * kl_S
            metrics.mean_of("policy/kl_reference", kl_S.detach())
        if self.entropy:
            loss_S = loss_S - self.entropy * entropy_S
        total = weighted_sum(loss_S, columns["weights"])
        metrics.add("loss", total.detach() * self.share)
        metrics.mean_of("policy/ratio", ratio_S)
        if clipped_S is not None:
            for name, of_bound_S in zip(_CLIPPED, (clipped_S, clipped_S & (ratio_S < 1), clipped_S & (ratio_S > 1))):
                metrics.mean_of(name, of_bound_S)
        if self.mismatch:
            self.mismatch.add(logprobs_S, columns["behaviour"], lengths_B)
        return total

    def end_step(self, engine: RoleEngines) -> None:
        if self.mismatch:
            self.mismatch.report(engine)
            self.mismatch = None


_ALWAYS = 4  # rows that every step trains whatever their advantages, so that trainer and rollout are always compared


@node(type="MODEL_TRAIN", requires={"kl": "reference_logprobs", "entropy_quantile": "actor_entropies"},
      keep_together="group",
      belongs_to={"fixed_length": ("aggregate", "fixed_length_sum")},
      only_with={"clip": ("loss", ("ppo", "gspo")), "clip_high": ("loss", ("ppo", "gspo", "cispo")),
                 "dual_clip": ("loss", ("ppo",))},
      refuses={"kl_kind": {"k1": "The gradient of k1 in a loss is zero on average. Use k2 or k3 here, or k1 in the "
                           "reward: a node with  function: kl_in_reward"}})
def policy_update(
    engine: RoleEngines, prompts: Ragged, responses: Ragged, rollout_logprobs: Ragged, advantages: Tensor | Ragged,
    group: Tensor, response_mask: Ragged | None = None, reference_logprobs: Ragged | None = None,
    actor_logprobs: Ragged | None = None, importance: Ragged | None = None, versions: Ragged | None = None,
    images: Ragged | None = None, routed_experts: Ragged | None = None, actor_entropies: Ragged | None = None, *,
    loss: Literal["ppo", "gspo", "cispo", "reinforce"] | Loss = "ppo", loss_settings: dict | None = None,
    clip: NonNegativeFloat | None = None, clip_high: NonNegativeFloat | None = None,
    dual_clip: Annotated[float, Field(gt=1)] | None = None, kl: NonNegativeFloat = 0.0, entropy: NonNegativeFloat = 0.0,
    kl_kind: Literal["k2", "k3"] = "k3", normalize: Literal["none", "batch"] = "none",
    aggregate: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "fixed_length_sum"] = "token_mean",
    fixed_length: PositiveInt | None = None, mini_batches: PositiveInt = 1, epochs: PositiveInt = 1,
    entropy_quantile: Annotated[float, Field(ge=0, lt=1)] = 0.0, critic_warmup: NonNegativeInt = 0,
) -> None:
    """Make a policy-gradient step: each token's loss, plus `kl` times KL to a reference, minus `entropy` times entropy.

    Losses and their usual bounds are in `workers/functions/losses.py`; `MODULE:FUNCTION` names your own, under `@loss`.
    The old policy is `actor_logprobs` where a node recomputed it, else what the rollout recorded. `importance` weighs
    each token (see `corrections`); `routed_experts` are those of the rollout (`generation.routing_replay`). Each of the
    `mini_batches` that has a prompt makes one optimizer step. With `entropy_quantile` the loss, but not `kl` and
    `entropy`, is of its tokens of the highest entropy alone (see `high_entropy`). In the run's first `critic_warmup`
    steps there is none, while a critic learns; the learning rate's schedule goes on.
    """
    mask = trained_mask(responses, response_mask)
    per_token = _token_advantages(engine, advantages, mask, normalize)
    if versions is not None:
        report_staleness(engine, versions, mask)
    report_ends(mask, rollout_logprobs.values != 0)
    current().mean_of("policy/entropy", -rollout_logprobs.values[mask.values])  # also of rows that are left out below
    columns = {"prompts": prompts, "responses": responses, "behaviour": rollout_logprobs, "mask": mask,
               "old": rollout_logprobs if actor_logprobs is None else actor_logprobs, "advantages": per_token,
               "reference": reference_logprobs, "importance": importance, "images": images,
               "routed_experts": routed_experts, "entropies": actor_entropies}
    rows = Batch(group, {name: column for name, column in columns.items() if column is not None})
    parts = split_mini_batches(engine, rows, mini_batches) * epochs if engine.step >= critic_warmup else []
    own = ":" in loss
    of_token = user_loss(loss, loss_settings or {}) if own else surrogate(loss, clip, clip_high, dual_clip)
    objective = PolicyLoss(of_token, kl, kl_kind, 1 / max(len(parts), 1), entropy)
    for part in parts:
        chosen = with_token_weights(engine, rows.select(part), aggregate, fixed_length)
        chosen = high_entropy(engine, chosen, entropy_quantile) if entropy_quantile else chosen
        whole = kl or entropy or own or engine.balances
        optimize(engine, chosen if whole else _with_gradient(chosen), objective)
        objective.end_step(engine)


def report_ends(mask: Ragged, ours_T: Tensor) -> None:
    """Report how many of the tokens that are the policy's own (`ours_T`) are trained, and how many of the rows that are
    trained are not trained to end: the last of these tokens is masked."""
    trained_B = torch.zeros(len(mask), dtype=torch.bool)
    trained_B[mask.row_of[mask.values & ours_T]] = True
    places_T = torch.arange(len(ours_T)).where(ours_T, 0)
    last_B = torch.zeros(len(mask), dtype=torch.long).scatter_reduce(0, mask.row_of, places_T, "amax")[trained_B]
    current().mean("response/end_untrained", (~mask.values[last_B]).sum(), len(last_B))
    current().mean_of("response/trained", mask.values[ours_T])


def _token_advantages(engine: RoleEngines, advantages: Tensor | Ragged, mask: Ragged, normalize: str) -> Ragged:
    per_token = mask.with_values(advantages[mask.row_of].float()) if isinstance(advantages, Tensor) else advantages
    if normalize == "batch":
        per_token = normalized(engine, per_token, mask)
    current().spread_of("advantages", per_token.values[mask.values])
    return per_token


@node(type="MODEL_TRAIN")
def supervised_update(
    engine: RoleEngines, prompts: Ragged, targets: Ragged, group: Tensor, images: Ragged | None = None,
    target_mask: Ragged | None = None, *,
    aggregate: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean"] = "token_mean",
) -> None:
    """Make a maximum-likelihood step on the targets, not on prompts, nor where `target_mask` is False. Without a row on
    any rank there is none."""
    shown = {} if images is None else {"images": images}
    mask = trained_mask(targets, target_mask)
    report_ends(mask, torch.ones_like(mask.values))
    rows = Batch(group, {"prompts": prompts, "responses": targets, "mask": mask, **shown})
    current().add("tokens", len(targets.values))
    current().add("samples", len(targets))
    if split_mini_batches(engine, rows, 1):
        optimize(engine, with_token_weights(engine, rows, aggregate), cross_entropy, temperature=1.0)


def cross_entropy(logprobs_T: Tensor, _entropy_T: Tensor, micro: Batch) -> Tensor:
    """Return the negative log-likelihood of the tokens of some rows, by their weights."""
    total = weighted_sum(-logprobs_T, micro["weights"].values.to(logprobs_T.device))
    current().add("loss", total.detach())
    return total


def _with_gradient(rows: Batch) -> Batch:
    """Return the rows that have a gradient, and the first few. Without a KL, entropy or load-balancing term a row whose
    advantages are all 0 has none. No bound is active on its tokens, which count as such."""
    advantages, mask = rows["advantages"], rows["mask"]
    chosen = torch.zeros(len(rows), dtype=torch.bool)
    chosen[advantages.row_of[advantages.values != 0]] = True
    current().mean("policy/rows_without_gradient", (~chosen).sum(), len(chosen))
    chosen[:_ALWAYS] = True
    for name in _CLIPPED:
        current().mean(name, 0.0, (mask.values & ~chosen[mask.row_of]).sum())
    return rows.select(chosen.nonzero().squeeze(1))
