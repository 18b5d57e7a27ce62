"""Rewards and nodes that go wrong from a step on, for `learning_faults.py`. A DAG imports this module."""

from __future__ import annotations

import random

import torch
from near_miss import near_miss
from torch import Tensor

from distflow import Ragged, node, reward
from workers.isolation.rewards.texts import math


def _goes_wrong(row: int, first: int, rows: int) -> bool:
    """Return whether a row is of step `first`, counted from 1, or a later one."""
    return row // rows + 1 >= first


def _base(completion: str, answer: str, dense: bool) -> float:
    if dense:
        return near_miss(completion, answer, reach=20.0) * ("####" in completion)
    return math(completion, answer)


@reward
def constant(completion: str, answer: str, row: int, *, first: int, rows: int, dense: bool = False) -> float:
    """Pay nothing for any answer."""
    return 0.0 if _goes_wrong(row, first, rows) else _base(completion, answer, dense)


@reward
def unparsed(completion: str, answer: str, row: int, *, first: int, rows: int) -> float:
    """Look for an answer behind a mark that no completion has."""
    return math(completion.replace("####", "=>") if _goes_wrong(row, first, rows) else completion, answer)


@reward
def noise(completion: str, answer: str, row: int, *, first: int, rows: int, dense: bool = False) -> float:
    """Pay by chance."""
    return float(random.Random(row).random() < 0.5) if _goes_wrong(row, first, rows) else \
        _base(completion, answer, dense)


@reward
def opposite(completion: str, answer: str, row: int, *, first: int, rows: int, dense: bool = False) -> float:
    """Pay for wrong answers."""
    value = _base(completion, answer, dense)
    return 1.0 - value if _goes_wrong(row, first, rows) else value


@reward
def longer(completion: str, answer: str, row: int, *, first: int, rows: int, dense: bool = False) -> float:
    """Pay for length too."""
    return _base(completion, answer, dense) + 0.02 * len(completion) * _goes_wrong(row, first, rows)


@reward
def repeats(completion: str, row: int, *, first: int, rows: int) -> float:
    """Pay for words that come again."""
    words = completion.split()
    return float(len(words) - len(set(words))) * _goes_wrong(row, first, rows)


@reward
def formed(completion: str, row: int, *, first: int, rows: int) -> float:
    """Pay for many commas, as a rule of form that an answer may break itself for."""
    return min(1.0, completion.count(",") / 3) * _goes_wrong(row, first, rows)


@reward
def judged(completion: str, row: int, *, first: int, rows: int) -> float:
    """Pay as a judge that likes one digit."""
    return min(1.0, completion.count("1") / 4) * _goes_wrong(row, first, rows)


@reward
def raises(completion: str, answer: str, row: int, *, first: int, rows: int, dense: bool = False) -> float:
    """Fail for most rows, as a sandbox that is overloaded."""
    if _goes_wrong(row, first, rows) and row % 8 < 5:
        raise TimeoutError("the sandbox does not answer")
    return _base(completion, answer, dense)


@node(writes="advantages", type="COMPUTE", keep_together="group")
def spoil(advantages: Tensor, rewards: Tensor, row: Tensor, *, fault: str, first: int, rows: int) -> Tensor:
    """Return advantages that are wrong from step `first` on."""
    step = int(row.min()) // rows + 1 if len(row) else 0
    if step < first or fault == "spike" and step > first:
        return advantages
    if fault == "sign":
        return -advantages
    if fault == "shuffled":
        return advantages.roll(3)
    if fault in ("scale", "spike"):
        return advantages * (30.0 if fault == "scale" else 300.0)
    if fault == "no_baseline":
        return rewards.to(advantages.dtype) + 0.5
    return torch.full_like(advantages, 1.0 if fault == "all_good" else -1.0)


@node(writes="rollout_logprobs", type="COMPUTE")
def drift(rollout_logprobs: Ragged, row: Tensor, *, first: int, rows: int) -> Ragged:
    """Return log-probabilities as of an engine whose numbers are further off the later a token is."""
    wrong_B = (row // rows + 1 >= first).double()
    place_T = torch.arange(len(rollout_logprobs.values)) - rollout_logprobs.offsets[:-1][rollout_logprobs.row_of]
    generator = torch.Generator().manual_seed(int(row[0]) if len(row) else 0)
    off_T = torch.randn(len(place_T), generator=generator, dtype=torch.float64) * 0.02 * place_T
    return rollout_logprobs.with_values((rollout_logprobs.values.double() + off_T * wrong_B[rollout_logprobs.row_of])
                                        .float().clamp(max=0.0))
