"""Value losses and GAE: closed forms in float64, and steps that do not depend on how rows are split."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from columns import random_rows
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from reported import reported
from training import Learner

from distflow.data.batch import Ragged
from distflow.data.exchange import gather
from distflow.telemetry.metrics import current
from workers.functions.values import clipped_value_loss, gae, value_update, values

numbers = st.floats(-5, 5, width=64)


def ragged(rows: list[list[float]], dtype: torch.dtype = torch.float32) -> Ragged:
    return Ragged.from_rows([torch.tensor(row, dtype=dtype) for row in rows], dtype)


@given(numbers, numbers, numbers, st.one_of(st.none(), st.floats(0.01, 3)))
def test_the_value_loss_is_the_larger_of_both_squares(value, old, target, clip):
    given_value = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    loss, clipped = clipped_value_loss(given_value, torch.tensor([old], dtype=torch.float64),
                                       torch.tensor([target], dtype=torch.float64), clip)
    free = (value - target) ** 2
    moved = value if clip is None else old + max(-clip, min(clip, value - old))
    bounded = (moved - target) ** 2
    assert loss.item() == pytest.approx(max(free, bounded) / 2, abs=1e-6)
    assert clipped.item() == (bounded > free)
    loss.sum().backward()
    if abs(bounded - free) > 1e-9 or clip is None:
        assert given_value.grad.item() == pytest.approx(0.0 if bounded > free else value - target, abs=1e-6)


def by_hand(rewards: list[float], estimates: list[float], gamma: float, lam: float) -> list[float]:
    """Eq. 11 of Schulman et al. 2016 as the sum that it is."""
    deltas = [reward + gamma * later - now
              for reward, now, later in zip(rewards, estimates, [*estimates[1:], 0.0])]
    return [sum((gamma * lam) ** step * delta for step, delta in enumerate(deltas[start:]))
            for start in range(len(deltas))]


ESTIMATES = [[0.1, -0.2, 0.7], [], [0.4]]
POLICY, REFERENCE = [[-1.0, -2.0, -0.3], [], [-0.5]], [[-1.5, -1.0, -0.2], [], [-0.25]]


@pytest.mark.parametrize(("gamma", "lam", "kl"), [(1.0, 1.0, 0.0), (0.9, 0.8, 0.0), (1.0, 0.95, 0.3), (0.5, 0.0, 1.0)])
def test_the_reward_stands_at_the_last_token_and_each_token_pays_for_its_kl(gamma, lam, kl):
    rewards = torch.tensor([1.0, 5.0, -2.0], dtype=torch.float64)
    advantages, returns = gae(rewards, ragged(ESTIMATES, torch.float64), ragged(POLICY, torch.float64),
                              ragged(REFERENCE, torch.float64), gamma=gamma, lam=lam, kl=kl)
    expected = []
    for reward, estimates, policy, reference in zip(rewards.tolist(), ESTIMATES, POLICY, REFERENCE):
        paid = [-kl * (p - q) for p, q in zip(policy, reference)]
        expected += by_hand([*paid[:-1], paid[-1] + reward], estimates, gamma, lam) if paid else []
    assert advantages.values.tolist() == pytest.approx(expected, abs=1e-6)
    flat = [value for row in ESTIMATES for value in row]
    assert returns.values.tolist() == pytest.approx([a + v for a, v in zip(expected, flat)], abs=1e-6)
    assert advantages.lengths.tolist() == [3, 0, 1]


def test_masked_tokens_are_no_steps_and_pay_nothing():
    """The middle token is a tool's: the rest is what the row would be without it."""
    mask = ragged([[True, False, True], [], [False]], torch.bool)
    advantages, returns = gae(torch.tensor([1.0, 0.0, 3.0]), ragged(ESTIMATES), ragged(POLICY), ragged(REFERENCE), mask,
                              gamma=0.9, lam=0.8, kl=0.5)
    first, last = by_hand([-0.5 * 0.5, 1.0 - 0.5 * -0.1], [0.1, 0.7], 0.9, 0.8)
    assert advantages.values.tolist() == pytest.approx([first, 0.0, last, 0.0], abs=1e-6)
    assert returns.values.tolist() == pytest.approx([first + 0.1, 0.0, last + 0.7, 0.0], abs=1e-6)


def columns(first: int, last: int) -> dict:
    """Rows `first` to `last` of seven, one of them without tokens; the third is masked, with a return that is no
    number."""
    group = torch.tensor([0, 0, 1, 1, 1, 2, 2])
    prompts, responses = random_rows(6, 3, 8).select(group), random_rows(4, 0, 2, 5, 3, 1, 7, seed=1)
    mask = responses.with_values(responses.row_of != 2)
    returns = torch.where(mask.values, torch.linspace(-1, 1, 22), torch.nan)
    ragged = {"prompts": prompts, "responses": responses, "values": responses.with_values(torch.zeros(22)),
              "returns": responses.with_values(returns), "response_mask": mask}
    return {**{name: column.slice(first, last) for name, column in ragged.items()}, "group": group[first:last]}


def after_updates(cut: int, settings: dict, options: dict) -> tuple[dict[str, float], list[float]]:
    """The metrics of two updates, and the critic's values after them; the first rank has the rows up to `cut`."""
    critic = Learner("value", **settings)
    rows = columns(0, cut) if dist.get_rank() == 0 else columns(cut, 7)
    reported()
    for _ in range(2):
        value_update(critic, **rows, **options)
    found = current().collect(gather)
    assert 0.9 < found["value/gradient/moved"] <= 1
    return found, values(critic, rows["prompts"], rows["responses"]).values.tolist()


@pytest.mark.parametrize("options", [{"clip": None}, {"clip": 0.05, "aggregate": "seq_mean_token_mean", "epochs": 2},
                                     {"mini_batches": 2}])
def test_an_update_does_not_depend_on_ranks_or_micro_batches(options):
    (expected, estimates), = run_ranks(1, after_updates, 7, {}, options)
    assert expected["value/loss"] > 0
    if options.get("clip"):
        assert expected["value/clipped"] > 0
    for ranks, cut, budget in ((1, 7, 12), (2, 3, 12), (2, 7, 10_000)):
        found = run_ranks(ranks, after_updates, cut, {"micro_batch_tokens": budget}, options)
        for metrics, _ in found:
            assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)
        assert [value for _, part in found for value in part] == pytest.approx(estimates, abs=1e-4)


def test_values_approach_the_returns_and_say_how_well(mesh):
    critic, rows = Learner("value"), columns(3, 7)
    explained = []
    for _ in range(30):
        estimates = values(critic, rows["prompts"], rows["responses"])
        reported()
        value_update(critic, **{**rows, "values": estimates}, clip=None)
        explained.append(reported()["value/explained"])
    returns, errors = rows["returns"].values.double(), (rows["returns"].values - estimates.values).double()
    by_definition = 1 - float(errors.var(unbiased=False) / returns.var(unbiased=False))
    assert explained[-1] == pytest.approx(by_definition, abs=1e-6)
    assert explained[0] == pytest.approx(0.0, abs=1e-6)  # a head of zeros knows nothing
    assert explained[-1] > 0.5


def test_no_rows_anywhere_are_no_step(mesh):
    critic, rows = Learner("value"), columns(0, 0)
    value_update(critic, **rows)
    assert critic.engine.version == 0
