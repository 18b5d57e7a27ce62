"""Log-probabilities of responses by a causal language model that reads each prompt once for all its responses.

The prompt's keys and values are computed once and shared by its responses, with gradients: for G responses of R tokens
to a prompt of P tokens, P + G·R tokens pass through the model instead of G·(P + R). They are packed into one row,
without padding; where layers have windows, with images, and on a CPU where it costs less, prompts and responses are
padded.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from distflow.data.batch import Ragged
from workers.engines.attention import NAME, NO_MASK
from workers.engines.context_parallel import ContextParallelCache, has_windows
from workers.engines.packing import Packing
from workers.engines.vision import position_inputs
from workers.engines.vocabulary import score, scored

_SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Settings of models that do something to logits after the head."""
_PADDING = 1.25  # computed tokens for each true one, from which on packing is faster on a CPU


class SharedPrompt(nn.Module):
    """Base of the heads: a transformers model with one forward pass for training and inference. Responses are computed
    in up to `chunks` pieces, to save padding; 1 where layers communicate when called."""

    after_last = 0  # 1 for a head that is also applied after the last token of each response

    def __init__(self, model: PreTrainedModel, chunks: int = 4, context: ContextParallelCache | None = None):
        super().__init__()
        self.model, self.chunks, self.context = model, chunks, context
        self.packs = context is None and _can_pack(model)

    def run(self, tokens: Tensor, only_last: bool = False, **places) -> tuple[Tensor, Cache]:
        """Return the head's input at each token [B, L, D] (`only_last`: [B, 1, D]), and the keys and values."""
        raise NotImplementedError

    def run_packed(self, places: Tensor, tokens: Tensor, **inputs: Any) -> Tensor:
        """Return the head's input [N, D] at the `places` [N] of packed tokens [1, T]."""
        return self.model.base_model(tokens, use_cache=False, **inputs).last_hidden_state[0].index_select(0, places)

    def read(self, outputs: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, ...]:
        """Return the head's values [N] for `outputs` [N, D] and the next `tokens` [N] (any token after the last)."""
        raise NotImplementedError

    def forward(self, prompts: Tensor, prompt_lengths: Tensor, prompt_of: Tensor, responses: Tensor,
                response_lengths: Tensor, temperature: float = 1.0, images: dict[str, Tensor] | None = None,
                ) -> tuple[Tensor, ...]:
        """Return the values of `read` for all responses back to back, before each token (see `after_last`).

        Args:
            prompts: [P, L] tokens, padded on the left; prompt_lengths: [P].
            prompt_of: [B] index of each response's prompt.
            responses: [B, R] tokens, R at least 2, padded on the right; response_lengths: [B].
            images: see `vision.image_inputs`.
        """
        if self.context:
            return _forward_split_rows(self, self.context, prompts, prompt_lengths, prompt_of, responses,
                                       response_lengths, temperature)
        if self.packs and not images and (self.chunks == 1 or prompts.is_cuda or
                                          self._wastes(prompts, prompt_lengths, response_lengths)):
            return _forward_packed(self, prompts, prompt_lengths, prompt_of, responses, response_lengths, temperature)
        width = prompts.shape[1]
        mask = (torch.arange(width, device=prompts.device) >= width - prompt_lengths[:, None]).long()
        places, following = position_inputs(self.model, prompts, mask, images or {})
        first, cache = self.run(prompts, only_last=True, attention_mask=mask, **places)
        counts = response_lengths + self.after_last
        starts = counts.cumsum(0) - counts
        order = torch.argsort(response_lengths, stable=True)
        order_of, pieces = [], []
        for rows in order.chunk(min(self.chunks, len(order))):
            prompt, tokens = prompt_of[rows], responses[rows, : max(int(response_lengths[rows].max()), 2)]
            outputs = self._after_prompt(tokens, response_lengths[rows], following[prompt], mask[prompt],
                                         first[prompt], _expand(cache, prompt))
            steps = torch.arange(outputs.shape[1], device=tokens.device)
            valid = steps < counts[rows, None]
            next_tokens = nn.functional.pad(tokens, (0, self.after_last))
            pieces.append(self.read(outputs[valid], next_tokens[valid], temperature))
            order_of.append((starts[rows, None] + steps)[valid])
        back = torch.argsort(torch.cat(order_of))
        return tuple(torch.cat(parts)[back] for parts in zip(*pieces))

    def _wastes(self, prompts: Tensor, prompt_lengths: Tensor, response_lengths: Tensor) -> bool:
        """Return whether padding costs more than packing does on a CPU."""
        parts = response_lengths.sort().values.chunk(min(self.chunks, len(response_lengths)))
        padded = prompts.numel() + sum(len(part) * int(part[-1]) for part in parts)
        return padded > _PADDING * int(prompt_lengths.sum() + response_lengths.sum())

    def _after_prompt(self, tokens: Tensor, lengths: Tensor, following: Tensor, mask: Tensor, first: Tensor,
                      cache: Cache) -> Tensor:
        """Return [B, R + after_last, D]: the outputs at the prompt's end and at each token, the last one if needed."""
        seen_tokens = tokens[:, : tokens.shape[1] - 1 + self.after_last]
        steps = torch.arange(seen_tokens.shape[1], device=tokens.device)
        seen = torch.cat([mask, (steps < lengths[:, None]).long()], 1)
        rest, _ = self.run(seen_tokens, attention_mask=seen, position_ids=following[:, None] + steps,
                           past_key_values=cache)
        return torch.cat([first, rest], 1)


def _can_pack(model: PreTrainedModel) -> bool:
    """Return whether every layer attends to all tokens before, through `attention.attend`, and to no image."""
    config = model.config.get_text_config()
    full = {*(getattr(config, "layer_types", None) or ["full_attention"])} == {"full_attention"}
    return full and not has_windows(config) and config._attn_implementation == NAME and \
        model._supports_attention_backend and not getattr(model, "image_processor", None)


def _forward_packed(policy: SharedPrompt, prompts: Tensor, prompt_lengths: Tensor, prompt_of: Tensor,
                    responses: Tensor, response_lengths: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """Compute `SharedPrompt.forward` without padding, all tokens in one row."""
    columns = torch.arange(prompts.shape[1], device=prompts.device)
    steps = torch.arange(responses.shape[1] + policy.after_last, device=prompts.device)
    counts = response_lengths + policy.after_last
    rest = (counts - 1).clamp(min=0)
    packing = Packing(prompt_lengths.tolist(), prompt_of.tolist(), rest.tolist(), prompts.device)
    following = nn.functional.pad(responses, (0, policy.after_last))
    tokens = torch.cat([prompts[columns >= prompts.shape[1] - prompt_lengths[:, None]],
                        following[steps < rest[:, None]]])
    last, before = prompt_lengths.cumsum(0)[prompt_of] - 1, int(prompt_lengths.sum()) + rest.cumsum(0) - rest
    # A response's first value is read at the prompt's end, the others at its own tokens.
    places = torch.where(steps == 0, last[:, None], before[:, None] + steps - 1)
    valid = steps < counts[:, None]
    outputs = policy.run_packed(places[valid], tokens[None], position_ids=packing.positions()[None], packing=packing,
                                attention_mask=tokens.new_empty(NO_MASK))
    return policy.read(outputs, following[valid], temperature)


def _forward_split_rows(policy: SharedPrompt, context: ContextParallelCache, prompts: Tensor, prompt_lengths: Tensor,
                        prompt_of: Tensor, responses: Tensor, response_lengths: Tensor,
                        temperature: float) -> tuple[Tensor, ...]:
    """Compute `SharedPrompt.forward` with context parallelism; each rank runs model and head on its own columns."""
    tokens, begins = torch.cat([prompts[prompt_of], responses], 1), prompts.shape[1] - prompt_lengths[prompt_of]
    ends = prompts.shape[1] + response_lengths
    tokens = torch.nn.functional.pad(tokens, (0, -tokens.shape[1] % (2 * context.group.size())))
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    own = context.pieces(tokens.shape[1])[context.group.rank()].to(tokens.device)
    there = (columns >= begins[:, None]) & (columns < ends[:, None])
    earlier, itself = columns <= own[:, None], columns == own[:, None]  # padding attends to itself
    mask = (earlier & there[:, None]) | itself
    last = prompts.shape[1] - 1
    wanted = (columns >= last) & (columns < ends[:, None] - 1 + policy.after_last)
    here = wanted[:, own]
    states, _ = policy.run(tokens[:, own], attention_mask=mask[:, None], past_key_values=context,
                           position_ids=(own - begins[:, None]).clamp(min=0))
    following = torch.roll(tokens, -1, 1)[:, own]
    numbers = policy.read(states[here], following[here], temperature)
    empty = torch.zeros(here.shape, device=here.device)
    return tuple(context.join(empty.masked_scatter(here, part))[wanted] for part in numbers)


class Policy(SharedPrompt):
    """Vocabulary head: `logprobs` [T] of all response tokens, and `entropies` [T] (detached), both float32."""

    def __init__(self, model: PreTrainedModel, chunks: int = 4, context: ContextParallelCache | None = None):
        super().__init__(model, chunks, context)
        head = model.get_output_embeddings()
        scaled = any(getattr(model.config.get_text_config(), name, None) for name in _SCALES)
        self.head_alone = type(head) is nn.Linear and head.bias is None and not scaled
        """Whether the head is a plain matrix, applied to some tokens at a time to save memory."""

    def run(self, tokens: Tensor, only_last: bool = False, **places) -> tuple[Tensor, Cache]:
        if self.head_alone:
            return last_states(self.model, tokens, only_last, **places)
        output = self.model(tokens, use_cache=True, logits_to_keep=int(only_last), **places)
        return output.logits, output.past_key_values

    def run_packed(self, places: Tensor, tokens: Tensor, **inputs: Any) -> Tensor:
        if self.head_alone:
            return super().run_packed(places, tokens, **inputs)
        return self.model(tokens, use_cache=False, logits_to_keep=places, **inputs).logits[0]

    def read(self, outputs: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        if self.head_alone:
            return score(outputs, cast(nn.Linear, self.model.get_output_embeddings()), tokens, temperature or 1.0)
        return scored(outputs.float() / (temperature or 1.0), tokens)


def last_states(model: PreTrainedModel, tokens: Tensor, only_last: bool, **places) -> tuple[Tensor, Cache]:
    """Return the last hidden states [B, L, D] (`only_last`: [B, 1, D]), and the keys and values."""
    output = model.base_model(tokens, use_cache=True, **places)
    states = output.last_hidden_state
    return states[:, -1:] if only_last else states, output.past_key_values


def _expand(cache: Cache, prompt_of: Tensor) -> Cache:
    lent = copy.copy(cache)
    lent.layers = [copy.copy(layer) for layer in cache.layers]
    lent.batch_select_indices(prompt_of)
    return lent


def inputs_of(prompts: Ragged, responses: Ragged, pad_token: int, device: torch.device,
              alike: Tensor | bool = True) -> tuple[Tensor, ...]:
    """Return the tensors for `Policy.forward`; consecutive equal prompts of `alike` rows [B - 1] become one."""
    starts = torch.ones(len(prompts), dtype=torch.bool)
    padded = prompts.padded(pad_token, side="left")
    same = (padded[1:] == padded[:-1]).all(1) & (prompts.lengths[1:] == prompts.lengths[:-1]) & alike
    starts[1:] = ~same
    tokens = responses.padded(pad_token)
    tokens = nn.functional.pad(tokens, (0, max(0, 2 - tokens.shape[1])), value=pad_token)
    parts = (padded[starts], prompts.lengths[starts], starts.long().cumsum(0) - 1, tokens, responses.lengths)
    return tuple(part.to(device) for part in parts)


def first_rows(prompt_of: Tensor) -> Tensor:
    """Return [P]: the first of the consecutive rows of each prompt, of `inputs_of`."""
    counts = torch.bincount(prompt_of.cpu())
    return counts.cumsum(0) - counts
