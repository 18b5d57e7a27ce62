"""What an answer is worth."""

from __future__ import annotations

import functools
import re
import time
from fractions import Fraction

import torch
from torch import Tensor

from distflow import node, reward
from distflow.observe.metrics import current
from distflow.schema.errors import InvalidInput, did_you_mean
from distflow.schema.registry import REWARDS, Reward

_NUMBER = re.compile(r"[-+]?(\d+|\d{1,3}(,\d{3})+)(\.\d+|/[1-9]\d*)?")


@node(writes="rewards", default_for="reward")
def score(completions: list[str], answers: list[str], *, reward: Reward = "math", metric: str = "reward") -> Tensor:
    """[B] float32: each completion's reward against its answer, by the reward function of that name.

    Its mean is reported as `METRIC/mean`; a DAG that scores twice gives the second another name.
    """
    function = find_reward(reward)
    start = time.perf_counter()
    rewards = torch.tensor([float(function(completion, answer)) for completion, answer in zip(completions, answers)])
    if not torch.isfinite(rewards).all():
        row = int((~torch.isfinite(rewards)).nonzero()[0])
        raise ValueError(f"reward `{reward}` returned {rewards[row].item()} for completion {completions[row]!r}")
    current().mean_of(f"{metric}/mean", rewards)
    current().maximum(f"{metric}/seconds", time.perf_counter() - start)
    return rewards


def find_reward(name: str):
    """The registered reward function.

    Raises:
        InvalidInput: there is none of that name.
    """
    if name not in REWARDS:
        raise InvalidInput(f"there is no reward `{name}`. {did_you_mean(name, REWARDS)}")
    return REWARDS[name]


@reward
def math(completion: str, answer: str) -> float:
    """1.0 if the completion's final answer equals the reference's, else 0.0.

    The final answer is what follows the last `####` (GSM8K); in a completion without it, what stands in `\\boxed{}`;
    and if the reference has no `####` either, the whole text.
    Plain numbers are compared exactly; anything else by math-verify (LaTeX, sets, equations, units).
    """
    if "####" not in completion and "\\boxed" in completion:
        return float(_equal(_final(answer), completion))
    if "####" in answer and "####" not in completion:
        return 0.0
    return float(_equal(_final(answer), _final(completion)))


def _final(text: str) -> str:
    return text.rpartition("####")[2].strip()


@functools.lru_cache(maxsize=65536)
def _equal(expected: str, given: str) -> bool:
    if _NUMBER.fullmatch(expected) and _NUMBER.fullmatch(given):
        return _number(expected) == _number(given)
    from math_verify import parse, verify  # loads sympy: only answers that are no plain numbers pay for it

    return bool(verify(parse(f"${expected}$"), parse(given if "\\boxed" in given else f"${given}$")))


def _number(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))
