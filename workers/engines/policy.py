"""What a causal language model says of responses, the prompt read once for all its responses.

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
from workers.engines.context_parallel import Context, read_rows
from workers.engines.vision import places_of
from workers.engines.vocabulary import score, scored

_SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Settings of models that do something to logits after the head."""


class SharedPrompt(nn.Module):
    """Wraps a transformers model so that one forward answers what training and inference ask. Its heads derive from it.

    `chunks`: responses are computed in up to so many pieces of similar length, so that short ones are not padded to
    the longest. It must be 1 where the model's layers communicate when called: ranks would call them unequally often.
    `context`: the ranks that have the columns of these rows with this one.
    """

    beyond = 0
    """1 for a head that is also read after the last token of each response."""

    def __init__(self, model: PreTrainedModel, chunks: int = 4, context: Context | None = None):
        super().__init__()
        self.model, self.chunks, self.context = model, chunks, context

    def run(self, tokens: Tensor, only_last: bool = False, **places) -> tuple[Tensor, Cache]:
        """What the head is made from at each token [B, L, D] (at the last one [B, 1, D]), and the keys and values."""
        raise NotImplementedError

    def read(self, outputs: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, ...]:
        """The head's numbers [N] of `outputs` [N, D]; `tokens` [N] are those that follow (any token after the last)."""
        raise NotImplementedError

    def forward(self, prompts: Tensor, prompt_lengths: Tensor, prompt_of: Tensor, responses: Tensor,
                response_lengths: Tensor, temperature: float = 1.0, images: dict[str, Tensor] | None = None,
                ) -> tuple[Tensor, ...]:
        """
        Args:
            prompts: [P, L] tokens, padded on the left; prompt_lengths: [P].
            prompt_of: [B] the prompt of each response.
            responses: [B, R] tokens, R at least 2, padded on the right; response_lengths: [B].
            temperature: divides the logits.
            images: what the prompts show (see `vision.shown`).

        Returns:
            what `read` returns, for all places of each response back to back: before each of its T tokens, and with
            `beyond` after the last one too.
        """
        if self.context:
            return read_rows(self, prompts, prompt_lengths, prompt_of, responses, response_lengths, temperature)
        width = prompts.shape[1]
        mask = (torch.arange(width, device=prompts.device) >= width - prompt_lengths[:, None]).long()
        places, following = places_of(self.model, prompts, mask, images or {})
        first, cache = self.run(prompts, only_last=True, attention_mask=mask, **places)
        counts = response_lengths + self.beyond
        starts = counts.cumsum(0) - counts
        order = torch.argsort(response_lengths, stable=True)
        order_of, pieces = [], []
        for rows in order.chunk(min(self.chunks, len(order))):
            prompt, tokens = prompt_of[rows], responses[rows, : max(int(response_lengths[rows].max()), 2)]
            outputs = self._after_prompt(tokens, response_lengths[rows], following[prompt], mask[prompt],
                                         first[prompt], _lend(cache, prompt))
            steps = torch.arange(outputs.shape[1], device=tokens.device)
            valid = steps < counts[rows, None]
            next_tokens = nn.functional.pad(tokens, (0, self.beyond))
            pieces.append(self.read(outputs[valid], next_tokens[valid], temperature))
            order_of.append((starts[rows, None] + steps)[valid])
        back = torch.argsort(torch.cat(order_of))
        return tuple(torch.cat(parts)[back] for parts in zip(*pieces))

    def _after_prompt(self, tokens: Tensor, lengths: Tensor, following: Tensor, mask: Tensor, first: Tensor,
                      cache: Cache) -> Tensor:
        """[B, R + beyond, D]: what the prompt's end says, then each token; the last only if it is read beyond it."""
        seen_tokens = tokens[:, : tokens.shape[1] - 1 + self.beyond]
        steps = torch.arange(seen_tokens.shape[1], device=tokens.device)
        seen = torch.cat([mask, (steps < lengths[:, None]).long()], 1)
        rest, _ = self.run(seen_tokens, attention_mask=seen, position_ids=following[:, None] + steps,
                           past_key_values=cache)
        return torch.cat([first, rest], 1)


class Policy(SharedPrompt):
    """The vocabulary head: `logprobs` [T] of all response tokens, and `entropies` [T] (detached), both float32."""

    def __init__(self, model: PreTrainedModel, chunks: int = 4, context: Context | None = None):
        super().__init__(model, chunks, context)
        head = model.get_output_embeddings()
        scaled = any(getattr(model.config.get_text_config(), name, None) for name in _SCALES)
        self.by_itself = type(head) is nn.Linear and head.bias is None and not scaled
        """Whether the head may be called without the model, for some tokens at a time."""

    def run(self, tokens: Tensor, only_last: bool = False, **places) -> tuple[Tensor, Cache]:
        if self.by_itself:
            return last_states(self.model, tokens, only_last, **places)
        output = self.model(tokens, use_cache=True, logits_to_keep=int(only_last), **places)
        return output.logits, output.past_key_values

    def read(self, outputs: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        if self.by_itself:
            return score(outputs, self.model.get_output_embeddings(), tokens, temperature or 1.0)
        return scored(outputs.float() / (temperature or 1.0), tokens)


def last_states(model: PreTrainedModel, tokens: Tensor, only_last: bool, **places) -> tuple[Tensor, Cache]:
    """What the last layer says of each token [B, L, D], or of the last one [B, 1, D]; and the keys and values."""
    output = model.base_model(tokens, use_cache=True, **places)
    states = output.last_hidden_state
    return states[:, -1:] if only_last else states, output.past_key_values


def _lend(cache: Cache, prompt_of: Tensor) -> Cache:
    """The cache with a row for each response; the one that is lent stays as it is."""
    lent = copy.copy(cache)
    lent.layers = [copy.copy(layer) for layer in cache.layers]
    lent.batch_select_indices(prompt_of)
    return lent


def inputs_of(prompts: Ragged, responses: Ragged, pad_token: int, device: torch.device,
              alike: Tensor | bool = True) -> tuple[Tensor, ...]:
    """The tensors that `Policy.forward` takes; equal prompts that follow each other become one.

    `alike` [B - 1]: whether a row is like the one before it in all but tokens.
    """
    starts = torch.ones(len(prompts), dtype=torch.bool)
    padded = prompts.padded(pad_token, side="left")
    same = (padded[1:] == padded[:-1]).all(1) & (prompts.lengths[1:] == prompts.lengths[:-1]) & alike
    starts[1:] = ~same
    tokens = responses.padded(pad_token)
    tokens = nn.functional.pad(tokens, (0, max(0, 2 - tokens.shape[1])), value=pad_token)
    parts = (padded[starts], prompts.lengths[starts], starts.long().cumsum(0) - 1, tokens, responses.lengths)
    return tuple(part.to(device) for part in parts)
