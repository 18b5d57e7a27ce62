"""How many optimizer steps an update makes, and on which rows."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from distflow.data.batch import Ragged
from workers.functions.updates import policy_update, supervised_update


class Recorder:
    """A role that only notes which rows each optimizer step gets."""

    step, balances = 0, False

    def __init__(self):
        self.steps = []

    def total(self, values):
        dist.all_reduce(values)
        return values

    def update(self, batch, loss_of, temperature=None):
        self.steps.append(sorted(batch.ids.tolist()))
        return {}


def steps_of(groups: list[list[int]], **settings) -> list[list[int]]:
    """The groups of the rows of each optimizer step on this rank, whose rows are of `groups[rank]`."""
    group = torch.tensor(groups[dist.get_rank()])  # float where a rank has no rows, as in the databuffer
    tokens = Ragged.from_rows([torch.tensor([7, 8])] * len(group))
    logprobs = tokens.with_values(torch.zeros(len(tokens.values)))
    recorder = Recorder()
    policy_update(recorder, tokens, tokens, logprobs, torch.ones(len(group)), group, **settings)
    return recorder.steps


@pytest.mark.parametrize(("mini_batches", "expected"), [
    (1, ([[4, 4, 5]], [[6]])),
    (2, ([[4, 4], [5]], [[6], []])),
    (4, ([[4, 4], [5], []], [[], [], [6]])),
    (100, ([[4, 4], [5], []], [[], [], [6]])),
])
def test_each_mini_batch_with_a_prompt_is_one_step_on_all_ranks(mini_batches, expected):
    groups = [[4, 4, 5], [6]]
    assert run_ranks(2, _steps, groups, mini_batches, 1) == list(expected)
    assert run_ranks(2, _steps, groups, mini_batches, 2) == [steps * 2 for steps in expected]


def _steps(groups, mini_batches, epochs):
    return steps_of(groups, mini_batches=mini_batches, epochs=epochs)


def test_a_rank_without_rows_steps_with_the_others():
    assert run_ranks(2, _steps, [[], [3, 9]], 4, 1) == [[[], []], [[9], [3]]]


def test_no_rows_anywhere_are_no_step():
    assert run_ranks(2, _steps, [[], []], 4, 1) == [[], []]


def supervised_steps_of(groups: list[list[int]]) -> list[list[int]]:
    group, recorder = torch.tensor(groups[dist.get_rank()]), Recorder()
    tokens = Ragged.from_rows([torch.tensor([7, 8])] * len(group))
    supervised_update(recorder, tokens, tokens, group)
    return recorder.steps


@pytest.mark.parametrize("groups", [[[], []], [[3], []]])
def test_a_supervised_step_needs_a_row_on_some_rank(groups):
    """A filter may leave none; a step without one would still decay the weights."""
    assert run_ranks(2, supervised_steps_of, groups) == [[rows] if any(groups) else [] for rows in groups]


class Differentiating(Recorder):
    """A role that keeps the gradient of each token's log-probability."""

    def total(self, values):
        return values

    def update(self, batch, loss_of, temperature=None):
        logprobs = torch.tensor([-0.5, 0.0, -3.0], requires_grad=True)
        loss_of(logprobs, torch.zeros(3), batch).backward()
        self.steps.append(logprobs.grad.tolist())
        return {}


def test_the_supervised_loss_is_the_negative_log_likelihood():
    role, tokens = Differentiating(), Ragged.from_rows([torch.tensor([7, 8]), torch.tensor([9])])
    supervised_update(role, tokens, tokens, torch.tensor([0, 1]), aggregate="seq_mean_token_sum")
    assert role.steps == [[-0.5, -0.5, -0.5]]
