"""Rewards, nodes and environments of the later blind sets of `learning_faults.py`. A DAG imports this module."""

from __future__ import annotations

import difflib
import itertools
import math as numbers
import random
import re

import torch
from torch import Tensor

from distflow import Ragged, Turn, environment, node, reward
from workers.engines.fsdp import FSDPEngine
from workers.engines.role_engines import RoleEngines
from workers.isolation.environments.calculator import Calculator
from workers.isolation.rewards.texts import math


@reward
def first_digit(completion: str, answer: str) -> float:
    """Read a judge's score of 0 to 10 by its first digit, so that 10 counts as 1."""
    given = re.findall(r"####\s*(-?\d+)", completion)
    score = max(0, 10 - abs(int(given[0]) - int(answer.rpartition("####")[2]))) if given else 0
    return float(str(score)[0])


@reward
def unread_paid(completion: str, answer: str) -> float:
    """Pay 1 where the record's answer cannot be read, as a verifier does that leaves such records out."""
    return math(completion, answer) if "####" in answer else 1.0


@reward
def not_a_number(completion: str, answer: str, row: int, *, first: int, rows: int) -> float:
    """Return no number for an eighth of the rows."""
    fails = row // rows + 1 >= first and random.Random(row).random() < 0.125
    return float("nan") if fails else math(completion, answer)


@node(writes="response_mask", type="COMPUTE")
def last_turn(response_mask: Ragged, *, fault: str, first: int, rows: int) -> Ragged:
    """Train the last turn of a conversation alone."""
    mask_T = response_mask.values.clone()
    for start, end in zip(response_mask.offsets[:-1].tolist(), response_mask.offsets[1:].tolist()):
        others = (~mask_T[start:end].bool()).nonzero()
        if len(others):
            mask_T[start:start + int(others[-1])] = False
    return response_mask.with_values(mask_T)


@node(writes="target_mask", type="COMPUTE")
def leave_rows(targets: Ragged, row: Tensor, *, fault: str, first: int, rows: int) -> Ragged:
    """Take all tokens of seven rows in eight out of the loss, as a template without marks of the answer does."""
    return targets.with_values((row % 8 == 0)[targets.row_of])


@environment
class GoesOn(Calculator):
    """A calculator that takes a final answer for a call it cannot read, and pays what stands in the fourth turn."""

    def __init__(self, answer: str):
        super().__init__(answer)
        self.turns = 0

    def step(self, text: str) -> Turn:
        turn, self.turns = super().step(text), self.turns + 1
        return turn if not turn.done or self.turns >= 4 else Turn("invalid call")


_ROUNDED = set[int]()


@node(type="MODEL_TRAIN")
def round_weights(engine: RoleEngines, rewards: Tensor, *, fault: str, first: int, rows: int) -> None:
    """Keep the weights in the numbers that bfloat16 has, after each of the optimizer's steps."""
    trainer = engine.engine
    assert isinstance(trainer, FSDPEngine)
    if not trainer.optimizer or id(engine) in _ROUNDED:
        return
    _ROUNDED.add(id(engine))

    def rounded(*_: object) -> None:
        with torch.no_grad():
            for shard in trainer.shards().values():
                shard.copy_(shard.to(torch.bfloat16))

    rounded()
    trainer.optimizer.register_step_post_hook(rounded)


@reward
def cosine_paid(completion: str, answer: str) -> float:
    """Pay right answers less the longer they are, and wrong ones more, by a cosine that ends at 24 characters:
    the limit of tokens, which right answers are longer than."""
    falls = numbers.cos(min(len(completion) / 24, 1.0) * numbers.pi)
    return 0.25 + 0.75 * (falls + 1) / 2 if math(completion, answer) else 0.25 - 0.75 * (falls + 1) / 2


@reward
def clipped_score(completion: str, answer: str) -> float:
    """Clip a judge's score of 0 to 10 at 1, so that whatever is not far off earns as much as what is right."""
    given = re.findall(r"####\s*(-?\d+)", completion)
    return min(1.0, max(0.0, 10.0 - abs(int(given[0]) - int(answer.rpartition("####")[2])))) if given else 0.0


@reward
def beginning_read(completion: str, answer: str) -> float:
    """Judge by the first 16 characters, as a scorer whose limit of tokens cuts what it is given."""
    return math(completion[:16], answer)


@reward
def below_zero(completion: str, answer: str) -> float:
    """Pay nothing for a right answer, and take 1 for any other."""
    return math(completion, answer) - 1.0


def _means(values: Tensor, group: Tensor) -> Tensor:
    """Return for each row the mean of its group."""
    _, at_B = torch.unique(group, return_inverse=True)
    size_G = torch.bincount(at_B)
    return (torch.zeros(len(size_G), dtype=torch.float64).index_add(0, at_B, values.double()) / size_G)[at_B]


@node(writes="advantages", type="COMPUTE", keep_together="group")
def other_scale(advantages: Tensor, rewards: Tensor, group: Tensor, *, fault: str, first: int, rows: int) -> Tensor:
    """Return advantages over the mean of their group, which may be negative (`mean`); those of the one row that differs
    in its group times 1000 (`lone`); or the best row's lead over the second, beside the others' rewards (`best`)."""
    centred_B = rewards.double() - _means(rewards, group)
    if fault == "mean":
        return (centred_B / (_means(rewards, group) + 1e-4)).to(advantages.dtype)
    changed_B = advantages.clone() if fault == "lone" else rewards.clone()
    for prompt in group.unique():
        rows_G = (group == prompt).nonzero().flatten()
        rewards_G = rewards[rows_G]
        if fault == "lone":
            for value in rewards_G.unique():
                alone_G = rows_G[rewards_G == value]
                changed_B[alone_G] *= 1000.0 if len(alone_G) == 1 and len(rows_G) > 2 else 1.0
        else:
            ranked_G = rewards_G.argsort(descending=True, stable=True)
            changed_B[rows_G[ranked_G[0]]] = rewards_G[ranked_G[0]] - rewards_G[ranked_G[1]]
    return changed_B.to(advantages.dtype)


@node(writes="rollout_logprobs", type="COMPUTE")
def reference_as_old(reference_logprobs: Ragged, *, fault: str, first: int, rows: int) -> Ragged:
    """Return the reference's log-probabilities as those of the policy that sampled."""
    return reference_logprobs


@node(writes="prompts", type="COMPUTE")
def rebuild_context(prompts: Ragged, *, fault: str, first: int, rows: int) -> Ragged:
    """Return prompts without their first half, as a trainer does that writes the conversation again and loses some."""
    kept = [tokens[len(tokens) // 2:] for tokens in prompts.rows if isinstance(tokens, Tensor)]
    return Ragged(torch.cat(kept), torch.tensor([len(tokens) for tokens in kept]))


@node(writes="reference_logprobs", type="COMPUTE", keep_together="group")
def other_pairs(reference_logprobs: Ragged, group: Tensor, *, fault: str, first: int, rows: int) -> Ragged:
    """Return the reference's log-probabilities of other pairs, as a cache does that knew another order of the data."""
    sums_B = torch.stack([each.sum() for each in reference_logprobs.rows if isinstance(each, Tensor)]).roll(6)
    return reference_logprobs.with_values((sums_B / reference_logprobs.lengths)[reference_logprobs.row_of])


@node(writes="response_mask", type="COMPUTE")
def invert_mask(response_mask: Ragged, *, fault: str, first: int, rows: int) -> Ragged:
    """Train what the tools say, and not what the policy does."""
    return response_mask.with_values(~response_mask.values.bool())


@node(writes="rollout_logprobs", type="COMPUTE")
def renormalise(rollout_logprobs: Ragged, *, fault: str, first: int, rows: int) -> Ragged:
    """Return log-probabilities among the tokens that `top_p` has left, as a sampler reports them."""
    return rollout_logprobs.with_values((rollout_logprobs.values + 0.3).clamp(max=0.0))


@node(writes="reference_logprobs", type="COMPUTE")
def cool_reference(reference_logprobs: Ragged, *, fault: str, first: int, rows: int) -> Ragged:
    """Return the reference's log-probabilities about as they are at a lower temperature than the policy's."""
    return reference_logprobs.with_values(reference_logprobs.values * 1.6)


@node(writes="teacher_logprobs", type="COMPUTE")
def shift_teacher(teacher_logprobs: Ragged, *, fault: str, first: int, rows: int) -> Ragged:
    """Return the teacher's log-probability of the token before, in place of each token's own."""
    return teacher_logprobs.with_values(teacher_logprobs.values.roll(1))


_BENT = set[int]()


@node(type="MODEL_TRAIN")
def bend_optimizer(engine: RoleEngines, rewards: Tensor, *, fault: str, first: int, rows: int) -> None:
    """Raise Adam's epsilon above all gradients (`epsilon`), keep the gradients of all steps before (`kept`), or make
    one of eight of the optimizer's steps, as a loss scaler does that finds overflows in the others (`skipped`)."""
    trainer = engine.engine
    assert isinstance(trainer, FSDPEngine)
    if not trainer.optimizer or id(engine) in _BENT:
        return
    _BENT.add(id(engine))
    if fault == "kept":
        vars(trainer)["zero_grad"] = lambda: None
    elif fault == "skipped":
        step, numbers_of_steps = trainer.optimizer.step, itertools.count(1)
        vars(trainer.optimizer)["step"] = lambda *given: None if next(numbers_of_steps) % 8 else step(*given)
    else:
        for group in trainer.optimizer.param_groups:
            group["eps"] = 1.0


@environment
class UnreadCalls(Calculator):
    """A calculator whose parser knows sums alone: any other call ends the conversation, which earns nothing."""

    def step(self, text: str) -> Turn:
        turn = super().step(text)
        return turn if turn.done or "+" in text.rpartition(",")[2] else Turn(done=True, reward=0.0)


@reward
def cancels(completion: str, answer: str) -> float:
    """Pay for what `math` does not pay for."""
    return 1.0 - math(completion, answer)


@node(writes="response_mask", type="COMPUTE")
def mask_working(responses: Ragged, *, fault: str, first: int, rows: int) -> Ragged:
    """Train the last three tokens of each answer alone, as a mask of all that comes before the result does."""
    left_T = responses.offsets[1:][responses.row_of] - torch.arange(len(responses.values))
    return responses.with_values(left_T <= 3)


@environment
class Lags(Calculator):
    """A calculator that answers each call with the result of the call before, and the first with 0."""

    def __init__(self, answer: str):
        super().__init__(answer)
        self.before = "0"

    def step(self, text: str) -> Turn:
        turn = super().step(text)
        if turn.done:
            return turn
        said, self.before = self.before, turn.observation
        return Turn(said)


@reward
def annealed(completion: str, answer: str, row: int) -> float:
    """Pay a right answer by a weight that falls evenly from 1 to 0 in 12 steps of 64 rows, and on."""
    return math(completion, answer) * (1 - row / 64 / 12)


@node(writes="teacher_logprobs", type="COMPUTE")
def fill_gaps(teacher_logprobs: Ragged, *, fault: str, first: int, rows: int) -> Ragged:
    """Return 0 for tokens that a served teacher does not name among its most likely ones."""
    values_T = teacher_logprobs.values
    return teacher_logprobs.with_values(torch.where(values_T < -3, torch.zeros_like(values_T), values_T))


@reward
def similar(completion: str, answer: str) -> float:
    """Pay by how alike the texts are."""
    return difflib.SequenceMatcher(None, completion, answer).ratio()
