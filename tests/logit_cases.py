"""Hidden states, heads and tokens whose log-probabilities are compared."""

from __future__ import annotations

import torch
from torch import nn

from workers.engines.vocabulary import score

WIDTH = 32


def drawn(vocabulary_size: int, dtype: torch.dtype = torch.float32):
    """Hidden states, a head, tokens and what each log-probability counts."""
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(WIDTH, vocabulary_size, bias=False).to(dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(vocabulary_size, WIDTH, generator=generator))
    hidden = torch.randn(50, WIDTH, generator=generator).to(dtype).requires_grad_()
    return hidden, head, torch.randint(vocabulary_size, (50,), generator=generator), torch.linspace(-1, 1, 50)


def results(hidden, head, tokens, counts, of=score, entropy=0.0) -> list[torch.Tensor]:
    """Log-probabilities, entropies and the gradients of a weighted sum of both, as `entropy` counts the second."""
    logprobs, entropies = of(hidden, head, tokens, 0.7)
    weights = torch.linspace(1, 2, len(entropies), device=entropies.device)
    total = (logprobs * counts).sum() + entropy * (entropies * weights).sum()
    gradients = torch.autograd.grad(total, [hidden, head.weight])
    return [logprobs.detach(), entropies.detach(), *gradients]


def several(hidden, head, tokens, counts):
    """The same with five tokens at each place, one of them twice."""
    others = [(tokens + 7 * more) % head.out_features for more in (0, 1, 2, 3, 1)]
    return hidden, head, torch.stack(others, 1), torch.stack([counts, counts.flip(0), counts**2, -counts, counts], 1)
