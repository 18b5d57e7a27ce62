"""Prints, as JSON, how far results of the kernels of logits are from those of plain passes, largest for each case.

A process of its own, as Triton decides on its own import whether kernels are interpreted.
"""

from __future__ import annotations

import itertools
import json

import torch
from logit_cases import drawn, results, several

from workers.engines import logit_kernels, sampling, vocabulary
from workers.engines.sampling import sample_tokens

plain, found = vocabulary.kernels_for, {}


def interpreted(device: torch.device):
    return logit_kernels


def apart(ways) -> list[float]:
    return [float((one - other).abs().max() / (1 + other.abs().max())) for one, other in zip(*ways)]


for words, dtype, many, entropy in itertools.product(
        (300, 9000), (torch.float32, torch.bfloat16), (False, True), (0.0, 0.5)):
    vocabulary.PIECE = words * 7
    both = []
    for vocabulary.kernels_for in (plain, interpreted):
        case = drawn(words, dtype)
        both.append(results(*(several(*case) if many else case), entropy=entropy))
    found[f"{words} {dtype} {'several tokens' if many else 'one token'} {entropy}"] = apart(both)
for words, dtype, temperature in itertools.product((300, 9000), (torch.float32, torch.bfloat16), (1.0, 0.7)):
    hidden, head, *_ = drawn(words, dtype)
    logits = head(hidden).detach()
    logits[:10, words // 9 :], logits[10:20, : -words // 9] = -torch.inf, -torch.inf
    noise = torch.linspace(0, 1 - 2.0**-53, len(logits), dtype=torch.float64)
    both = []
    for sampling.kernels_for in (plain, interpreted):
        both.append(sample_tokens(logits, noise, temperature))
    found[f"pick {words} {dtype} {temperature}"] = apart(both)
print(json.dumps(found))
