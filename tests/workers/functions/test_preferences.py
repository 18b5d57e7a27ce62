"""Preference pairs: their sources, closed forms of their losses, and steps that do not depend on how rows are split."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from columns import random_rows
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from reported import reported
from training import Learner, role_of

from distflow.config.run import RoleRun
from distflow.data.batch import Ragged
from distflow.data.exchange import gather
from distflow.telemetry.metrics import current
from workers.engines.embedded import build_model, build_tokenizer
from workers.functions.preferences import (
    best_and_worst,
    bradley_terry_loss,
    labelled_pairs,
    preference_loss,
    preference_update,
    reward_update,
)

margins = st.floats(-30, 30, width=64)


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@given(margins, st.floats(0.01, 1), st.floats(0, 0.49))
def test_closed_forms_of_the_losses(margin, beta, smoothing):
    pair = torch.tensor([margin], dtype=torch.float64, requires_grad=True)
    dpo = preference_loss(pair, "sigmoid", beta, smoothing)
    expected = -(1 - smoothing) * math.log(logistic(beta * margin)) - smoothing * math.log(logistic(-beta * margin))
    assert dpo.item() == pytest.approx(expected, abs=1e-6)
    (slope,) = torch.autograd.grad(dpo, pair)
    assert slope.item() == pytest.approx(-beta * (logistic(-beta * margin) - smoothing), abs=1e-6)
    assert preference_loss(pair, "ipo", beta).item() == pytest.approx((margin - 1 / (2 * beta)) ** 2, rel=1e-6)
    assert preference_loss(pair, "hinge", beta).item() == pytest.approx(max(0.0, 1 - beta * margin), abs=1e-6)


@given(margins, margins, st.floats(0, 1))
def test_closed_form_of_bradley_and_terry(better, worse, centering):
    scores = [torch.tensor([score], dtype=torch.float64, requires_grad=True) for score in (better, worse)]
    loss = bradley_terry_loss(*scores, centering)
    expected = math.log1p(math.exp(worse - better)) + centering * (better + worse) ** 2
    assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    slopes = [slope.item() for slope in torch.autograd.grad(loss.sum(), scores)]
    pull = 2 * centering * (better + worse)
    assert slopes == pytest.approx([-logistic(worse - better) + pull, logistic(worse - better) + pull], abs=1e-6)


def test_losses_stay_finite_where_margins_are_huge():
    pair = torch.tensor([1e4, -1e4], requires_grad=True)
    loss = preference_loss(pair, "sigmoid", 1.0, 0.1)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(pair.grad).all()


def test_the_best_meets_the_worst_and_ties_are_no_pair():
    rewards = torch.tensor([0.5, 1.0, 0.0, 1.0, 0.0, 2.0, 2.0, 3.0, -1.0])
    group = torch.tensor([4, 4, 4, 4, 4, 1, 1, 9, 2])
    reported()
    preference, keep = best_and_worst(rewards, group)
    assert preference.tolist() == [0, 1, -1, 0, 0, 0, 0, 0, 0]  # the first of equals
    assert keep.tolist() == [False, True, True] + [False] * 6
    assert reported()["preference/tied"] == 0.75


def test_labelled_pairs_have_the_chosen_answer_of_each_record_first(alone, model):
    role = role_of(model, build_tokenizer(["one two"]), RoleRun(), samples=False)
    chosen, rejected = (Ragged.from_rows([torch.tensor(role.tokenizer(text)["input_ids"]) for text in texts])
                        for texts in (("one", "two"), ("two", "7 7 7")))
    prompts = Ragged.from_rows([torch.tensor([1]), torch.tensor([2])])
    responses, preference, texts = labelled_pairs(role, prompts, chosen, rejected)
    assert texts == ["one", "two", "two", "7 7 7"]
    assert preference.tolist() == [1, -1, 1, -1]
    assert [row.tolist() for row in responses.rows] == [role.tokenizer(text)["input_ids"] for text in texts]
    assert len(labelled_pairs(role, *(each.slice(0, 0) for each in (prompts, chosen, rejected)))[0]) == 0


SAMPLED_AT = 0.25  # which is not DPO's temperature
PREFERENCE = [-1, 0, 1, 1, -1, 0, 1, -1]


def columns(first: int, last: int, preference: list[int] = PREFERENCE) -> dict:
    """Rows `first` to `last` of eight of three prompts: a pair each; rows between; one empty, one partly masked."""
    group = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    prompts, responses = random_rows(6, 3, 8).select(group), random_rows(4, 3, 2, 5, 3, 1, 7, 0, seed=1)
    reference = responses.with_values(torch.linspace(-7, -4, 25))
    mask = responses.with_values(torch.arange(25) % 4 != 3)
    ragged = {"prompts": prompts, "responses": responses, "reference_logprobs": reference, "response_mask": mask}
    marks = torch.tensor(preference[first:last], dtype=torch.int32)
    return {**{name: column.slice(first, last) for name, column in ragged.items()}, "group": group[first:last],
            "preference": marks if len(marks) else torch.empty(0)}


def arguments(head: str, rows: dict) -> dict:
    unused = ("reference_logprobs", "response_mask") if head == "value" else ()
    return {name: column for name, column in rows.items() if name not in unused}


def metrics_after(head: str, cut: int, budget: int, options: dict, preference: list[int] = PREFERENCE) -> dict:
    """The metrics of three updates; the first rank has the rows up to `cut`."""
    learner = Learner(head, SAMPLED_AT, micro_batch_tokens=budget)
    rows = columns(0, cut, preference) if dist.get_rank() == 0 else columns(cut, 8, preference)
    rows = arguments(head, rows)
    reported()
    update = reward_update if head == "value" else preference_update
    for _ in range(3):
        update(learner, **rows, **options)
    return {"version": learner.engine.version, **current().collect(gather)}


SETTINGS = [("lm", {}), ("lm", {"loss": "ipo", "per_token": True}), ("lm", {"loss": "hinge", "beta": 0.5}),
            ("lm", {"label_smoothing": 0.1}), ("lm", {"nll": 0.5}), ("value", {}), ("value", {"centering": 0.1})]


@pytest.mark.parametrize(("head", "options"), SETTINGS, ids=str)
def test_an_update_does_not_depend_on_ranks_or_micro_batches(head, options):
    (expected,) = run_ranks(1, metrics_after, head, 8, 10_000, options)
    assert expected["version"] == 3
    assert expected["preference/pairs"] == 9
    for ranks, cut, budget in ((1, 8, 1), (2, 3, 10_000), (2, 6, 10), (2, 8, 10_000)):  # the last: all on one rank
        for found in run_ranks(ranks, metrics_after, head, cut, budget, options):
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("head", ["lm", "value"])
def test_without_a_pair_there_is_no_step(head):
    for found in run_ranks(2, metrics_after, head, 3, 10_000, {}, [0] * 8):
        assert found["version"] == 0
        assert found["preference/pairs"] == 0
        assert "loss" not in found


@pytest.mark.parametrize("preference", [[1, 1, -1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0],
                                        [-1, -1, 0, 1, 1, 0, 0, 0]])
def test_a_group_that_is_no_pair_is_refused(mesh, preference):
    with pytest.raises(ValueError, match="one row with preference 1 and one with -1, or none with either; group 0 has"):
        preference_update(Learner("lm", SAMPLED_AT), **columns(0, 8, preference))


@pytest.mark.parametrize("nll", [0.0, 0.4])
def test_the_loss_is_that_of_the_pairs_summed_log_ratios(mesh, nll):
    """By plain forwards in float64, masked tokens left out; with `nll` the preferred answers' mean loss of a token."""
    rows, learner = columns(0, 8), Learner("lm", SAMPLED_AT)
    model = build_model(270, 0, layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32).double()
    ratios, losses = [], []
    for prompt, response, reference, mask in zip(*(rows[name].rows for name in (
            "prompts", "responses", "reference_logprobs", "response_mask"))):
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits, -1).gather(1, response[:, None]).squeeze(1)
        ratios.append(((logprobs - reference) * mask).sum().item())
        losses.append(-logprobs[mask].mean().item())
    differences = [ratios[2] - ratios[0], ratios[3] - ratios[4], ratios[6] - ratios[7]]
    reported()
    preference_update(learner, **rows, beta=0.3, nll=nll)
    found = reported()
    preferred = (losses[2] + losses[3] + losses[6]) / 3
    pairs = -sum(math.log(logistic(0.3 * each)) for each in differences) / 3
    assert found["loss"] == pytest.approx(pairs + nll * preferred, abs=1e-5)
    assert found.get("preference/nll") == (pytest.approx(preferred, abs=1e-5) if nll else None)
    assert found["preference/margin"] == pytest.approx(0.3 * sum(differences) / 3, abs=1e-5)
    assert found["preference/accuracy"] == pytest.approx(sum(each > 0 for each in differences) / 3)
