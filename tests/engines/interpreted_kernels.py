"""Prints, as JSON, how far results of the kernels of logits are from those of plain passes, largest for each case.

A process of its own, as Triton decides on its own import whether kernels are interpreted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
from logit_cases import drawn, results, several

from workers.engines import logit_kernels, sampling, vocabulary
from workers.engines.sampling import sample_tokens

DTYPES, WORDS = (torch.float32, torch.bfloat16), (300, 9000)
_plain = vocabulary.kernels_for


def apart(compute: Callable[[], Sequence[torch.Tensor]]) -> list[float]:
    """Compute with plain passes and with kernels; return the largest difference of each tensor, relative to it."""
    plain = compute()
    vocabulary.kernels_for = sampling.kernels_for = lambda device: logit_kernels
    interpreted = compute()
    vocabulary.kernels_for = sampling.kernels_for = _plain
    return [float((one - other).abs().max() / (1 + one.abs().max())) for one, other in zip(plain, interpreted)]


def scores(words: int, dtype: torch.dtype, many: bool, entropy: float) -> list[torch.Tensor]:
    vocabulary.PIECE = words * 7
    case = drawn(words, dtype)
    return results(*(several(*case) if many else case), entropy=entropy)


def samples(words: int, dtype: torch.dtype, temperature: float, transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows that partly exclude tokens, by noise from its least to its greatest."""
    hidden, head, *_ = drawn(words, dtype)
    logits = head(hidden).detach()
    logits[:10, words // 9 :], logits[10:20, : -words // 9] = -torch.inf, -torch.inf
    logits = logits.T.contiguous().T if transposed else logits
    return sample_tokens(logits, torch.linspace(0, 1 - 2.0**-53, len(logits), dtype=torch.float64), temperature)


logit_kernels.try_out(torch.device("cpu"))
found = {f"scores {case}": apart(partial(scores, *case)) for case in product(WORDS, DTYPES, (False, True), (0.0, 0.5))}
found |= {f"samples {case}": apart(partial(samples, *case))
          for case in product(WORDS, DTYPES, (1.0, 0.7, 2), (False, True))}
print(json.dumps(found))
