"""Rewards, nodes and environments of the fifth blind set of `learning_faults.py`. A DAG imports this module."""

from __future__ import annotations

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
