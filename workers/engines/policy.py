"""Log-probabilities of responses under a causal language model, the prompt read once for all its responses.

The responses of a group share their prompt. Its keys and values are computed once and lent to each response,
gradients flowing back through them: with G responses of R tokens after a prompt of P tokens, P + G·R tokens pass
through the model instead of G·(P + R).
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from distflow.data.batch import Ragged


class Policy(nn.Module):
    """Wraps a transformers model so that one forward answers what training and inference ask.

    `chunks`: responses are computed in up to so many pieces of similar length, so that short ones are not padded to
    the longest. It must be 1 where the model's layers communicate when called: ranks would call them unequally often.
    """

    def __init__(self, model: PreTrainedModel, chunks: int = 4):
        super().__init__()
        self.model, self.chunks = model, chunks

    def forward(self, prompts: Tensor, prompt_lengths: Tensor, prompt_of: Tensor, responses: Tensor,
                response_lengths: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """
        Args:
            prompts: [P, L] tokens, padded on the left; prompt_lengths: [P].
            prompt_of: [B] the prompt of each response.
            responses: [B, R] tokens, R at least 2, padded on the right; response_lengths: [B].
            temperature: divides the logits.

        Returns:
            logprobs [T] of all response tokens back to back, and entropies [T] (detached), both float32.
        """
        width = prompts.shape[1]
        mask = (torch.arange(width, device=prompts.device) >= width - prompt_lengths[:, None]).long()
        prefix = self.model(prompts, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0),
                            use_cache=True, logits_to_keep=1)
        order = torch.argsort(response_lengths, stable=True)
        places, pieces = [], []
        for rows in order.chunk(min(self.chunks, len(order))):
            lengths, prompt = response_lengths[rows], prompt_of[rows]
            tokens = responses[rows, : max(int(lengths.max()), 2)]
            logits = self._logits(tokens, lengths, prompt_lengths[prompt], mask[prompt], prefix.logits[prompt],
                                  _lend(prefix.past_key_values, prompt))
            steps = torch.arange(tokens.shape[1], device=tokens.device)
            valid = steps < lengths[:, None]
            pieces.append(_score(logits[valid].float() / (temperature or 1.0), tokens[valid]))
            first = response_lengths.cumsum(0) - response_lengths
            places.append((first[rows, None] + steps)[valid])
        back = torch.argsort(torch.cat(places))
        logprobs, entropies = (torch.cat(parts)[back] for parts in zip(*pieces))
        return logprobs, entropies

    def _logits(self, tokens: Tensor, lengths: Tensor, prompt_lengths: Tensor, mask: Tensor, first: Tensor,
                cache: Cache) -> Tensor:
        """[B, R, V]: the first token is foretold by the prompt's end, each later one by the token before it."""
        steps = torch.arange(tokens.shape[1] - 1, device=tokens.device)
        seen = torch.cat([mask, (steps < lengths[:, None]).long()], 1)
        rest = self.model(tokens[:, :-1], attention_mask=seen, position_ids=prompt_lengths[:, None] + steps,
                          past_key_values=cache, use_cache=True)
        return torch.cat([first, rest.logits], 1)


def _lend(cache: Cache, prompt_of: Tensor) -> Cache:
    """The cache with a row for each response; the one that is lent stays as it is."""
    lent = copy.copy(cache)
    lent.layers = [copy.copy(layer) for layer in cache.layers]
    lent.batch_select_indices(prompt_of)
    return lent


def _score(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `tokens` [T] and entropies [T] under `logits` [T, V]."""
    logprobs = torch.log_softmax(logits, -1)
    with torch.no_grad():
        entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs[torch.arange(len(tokens), device=tokens.device), tokens], entropies


def inputs_of(prompts: Ragged, responses: Ragged, pad_token: int, device: torch.device) -> tuple[Tensor, ...]:
    """The tensors that `Policy.forward` takes; equal prompts that follow each other become one."""
    starts = torch.ones(len(prompts), dtype=torch.bool)
    padded = prompts.padded(pad_token, side="left")
    same = (padded[1:] == padded[:-1]).all(1) & (prompts.lengths[1:] == prompts.lengths[:-1])
    starts[1:] = ~same
    tokens = responses.padded(pad_token)
    tokens = nn.functional.pad(tokens, (0, max(0, 2 - tokens.shape[1])), value=pad_token)
    parts = (padded[starts], prompts.lengths[starts], starts.long().cumsum(0) - 1, tokens, responses.lengths)
    return tuple(part.to(device) for part in parts)
