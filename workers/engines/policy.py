"""Log-probabilities of responses by a causal language model that reads each prompt once for all its responses.

The prompt's keys and values are computed once and shared by its responses, with gradients: for G responses of R tokens
to a prompt of P tokens, P + G·R tokens pass through the model instead of G·(P + R). They are packed into one row,
without padding; where layers have windows, with images, and on a CPU where it costs less, prompts and responses are
padded.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from distflow.data.batch import Ragged
from distflow.errors import EngineError
from workers.engines.attention import NAME, NO_MASK
from workers.engines.capabilities import head_is_alone, prepare
from workers.engines.context_parallel import ContextParallelCache
from workers.engines.devices import on_device
from workers.engines.packing import Packing
from workers.engines.routing import RouterBalance
from workers.engines.vision import position_inputs
from workers.engines.vocabulary import score, score_logits, top_logprobs, top_logprobs_of

Read = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
_PADDING = 1.25  # computed tokens for each true one, from which on packing is faster on a CPU


@dataclass(frozen=True, eq=False)
class PackedRows:
    """How padded rows are packed into one, by indices on the model's device."""

    packing: Packing
    prompt_tokens: Tensor  # of prompts [P, L], flat
    response_tokens: Tensor  # of responses with `after_last` columns of padding, flat
    outputs: Tensor  # packed tokens after which the head is applied
    asked: Tensor  # what it is asked there, of responses as above, flat
    positions: Tensor  # [1, T]
    weights: Tensor  # [1, T], for a load-balancing loss: rows that have each token: responses of a prompt, else 1


class SharedPrompt(nn.Module):
    """Base of the heads: a transformers model with one forward pass for training and inference. Responses are computed
    in up to `chunks` pieces, to save padding; 1 where layers communicate when called."""

    after_last = 0  # 1 for a head that is also applied after the last token of each response

    def __init__(self, model: PreTrainedModel, chunks: int = 4, context: ContextParallelCache | None = None):
        super().__init__()
        self.model, self.chunks, self.context = model, chunks, context
        self.capabilities = prepare(model)
        self.packs = context is None and self.capabilities.packs and model.config._attn_implementation == NAME
        self.balance: RouterBalance | None = None  # set where a load-balancing loss is asked for

    def run(self, tokens: Tensor, only_last: bool = False, **places) -> tuple[Tensor, Cache]:
        """Return the head's input at each token [B, L, D] (`only_last`: [B, 1, D]), and the keys and values."""
        raise NotImplementedError

    def run_rows(self, places: Tensor, tokens: Tensor, **inputs: Any) -> Tensor:
        """Return the head's input [N, D] at the `places` [B, L], bool, of whole rows of tokens [B, L]."""
        return self.model.base_model(tokens, use_cache=False, **inputs).last_hidden_state[places]

    def run_packed(self, places: Tensor, tokens: Tensor, **inputs: Any) -> Tensor:
        """Return the head's input [N, D] at the `places` [N] of packed tokens [1, T]."""
        return self.model.base_model(tokens, use_cache=False, **inputs).last_hidden_state[0].index_select(0, places)

    def read(self, outputs: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, ...]:
        """Return the head's values [N] for `outputs` [N, D] and the next `tokens` [N] (any token after the last), or
        the tokens [N, K] that might be next."""
        raise NotImplementedError

    def read_top(self, outputs: Tensor, tokens: Tensor, temperature: float, count: int) -> tuple[Tensor, Tensor]:
        """Return the `count` most probable next tokens [N, count], and their log-probabilities."""
        raise NotImplementedError

    def forward(self, prompts: Tensor, prompt_lengths: Tensor, prompt_of: Tensor, responses: Tensor,
                response_lengths: Tensor, temperature: float = 1.0, images: dict[str, Tensor] | None = None,
                candidates: Tensor | None = None, top: int = 0, packed: PackedRows | None = None,
                plain: bool = False) -> tuple[Tensor, ...]:
        """Return the values of `read` for all responses back to back, before each token (see `after_last`).

        Args:
            prompts: [P, L] tokens, padded on the left; prompt_lengths: [P]. prompt_of: [B], each response's prompt.
            responses: [B, R] tokens, R at least 2, padded on the right; response_lengths: [B].
            images: see `vision.image_inputs`.
            candidates: [B, R, K] tokens that are read in place of the responses' own.
            top: read the `top` most probable tokens, by `read_top`.
            packed: what `pack` has returned for these lengths.
            plain: compute whole rows by the model's own code, whatever the model has earned.
        """
        of_top = {"count": top} if top else {}
        read = functools.partial(self.read_top if top else self.read, temperature=temperature, **of_top)
        asked = responses if candidates is None else candidates
        if plain or self.capabilities.plain:
            return self._forward_plain(prompts, prompt_lengths, prompt_of, responses, response_lengths, asked, read,
                                       images)
        if self.context:
            return _forward_split_rows(self, self.context, prompts, prompt_lengths, prompt_of, responses,
                                       response_lengths, asked, read)
        if self.packs and not images and (self.chunks == 1 or prompts.is_cuda or
                                          self._is_padding_wasteful(prompts, prompt_lengths, response_lengths)):
            packed = packed or self.pack(prompts, prompt_lengths, prompt_of, responses, response_lengths)
            return self._forward_packed(packed, prompts, responses, asked, read)
        return self._forward_padded(prompts, prompt_lengths, prompt_of, responses, response_lengths, asked, read,
                                    images)

    def _forward_padded(self, prompts: Tensor, prompt_lengths: Tensor, prompt_of: Tensor, responses: Tensor,
                        response_lengths: Tensor, asked: Tensor, read: Read,
                        images: dict[str, Tensor] | None) -> tuple[Tensor, ...]:
        width = prompts.shape[1]
        mask = (torch.arange(width, device=prompts.device) >= width - prompt_lengths[:, None]).long()
        places, following = position_inputs(self.model, prompts, mask, images or {})
        if self.balance:
            self.balance.weights = mask * torch.bincount(prompt_of, minlength=len(prompts))[:, None]
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
            next_tokens = _padded(asked[rows, : tokens.shape[1]], self.after_last)
            pieces.append(read(outputs[valid], next_tokens[valid]))
            order_of.append((starts[rows, None] + steps)[valid])
        back = torch.argsort(torch.cat(order_of))
        return tuple(torch.cat(parts)[back] for parts in zip(*pieces))

    def _forward_plain(self, prompts: Tensor, prompt_lengths: Tensor, prompt_of: Tensor, responses: Tensor,
                       response_lengths: Tensor, asked: Tensor, read: Read,
                       images: dict[str, Tensor] | None) -> tuple[Tensor, ...]:
        """Compute `forward` with rows as a model of any kind reads them: whole, and padded on the right, where nothing
        before sees it."""
        if images:
            raise EngineError(f"{type(self.model).__name__} {self.capabilities.plain}, and such models are computed "
                              "without images here")
        first, before = prompts.shape[1] - prompt_lengths[prompt_of, None], prompt_lengths[prompt_of, None]
        columns = torch.arange(int((before + response_lengths[:, None]).max()), device=prompts.device)
        tokens = torch.cat([prompts[prompt_of], responses], 1)
        source = torch.where(columns < before, first + columns, prompts.shape[1] + columns - before)
        there = columns < before + response_lengths[:, None]
        tokens = tokens.gather(1, source.clamp(max=tokens.shape[1] - 1)).where(there, 0)
        counts = response_lengths[:, None] + self.after_last
        places = {"position_ids": columns.where(there, 0)} if self.capabilities.own_length else {}
        if self.balance:
            self.balance.weights = there
        masked = {} if there.all() else {"attention_mask": there.long()}
        outputs = self.run_rows((columns >= before - 1) & (columns < before - 1 + counts), tokens, **places, **masked)
        steps = torch.arange(responses.shape[1] + self.after_last, device=prompts.device)
        return read(outputs, _padded(asked, self.after_last)[steps < counts])

    def _is_padding_wasteful(self, prompts: Tensor, prompt_lengths: Tensor, response_lengths: Tensor) -> bool:
        """Return whether padding costs more than packing does on a CPU."""
        parts = response_lengths.sort().values.chunk(min(self.chunks, len(response_lengths)))
        padded = prompts.numel() + sum(len(part) * int(part[-1]) for part in parts)
        return padded > _PADDING * int(prompt_lengths.sum() + response_lengths.sum())

    def pack(self, prompts: Tensor, prompt_lengths: Tensor, prompt_of: Tensor, responses: Tensor,
             response_lengths: Tensor, device: torch.device | None = None) -> PackedRows:
        """Return how rows are packed, see `forward`, for a model on `device` (None: that of the rows). It waits for
        lengths that are not on the CPU."""
        device, more = device or prompts.device, self.after_last
        prompt_lengths, prompt_of, response_lengths = (part.cpu() for part in (
            prompt_lengths, prompt_of, response_lengths))
        columns, steps = torch.arange(prompts.shape[1]), torch.arange(responses.shape[1] + more)
        counts = response_lengths + more
        rest = self.rest_of(response_lengths)
        last, before = prompt_lengths.cumsum(0)[prompt_of] - 1, int(prompt_lengths.sum()) + rest.cumsum(0) - rest
        # A response's first value is read at the prompt's end, the others at its own tokens.
        places = torch.where(steps == 0, last[:, None], before[:, None] + steps - 1)
        valid = steps < counts[:, None]
        packing = Packing(prompt_lengths.tolist(), prompt_of.tolist(), rest.tolist(), device)
        of_prompts, of_responses = columns >= len(columns) - prompt_lengths[:, None], steps < rest[:, None]
        weights = torch.cat([torch.bincount(prompt_of, minlength=len(prompts)).repeat_interleave(prompt_lengths),
                             torch.ones(int(rest.sum()), dtype=torch.int64)]) if self.balance else torch.empty(0)
        return PackedRows(packing, *(on_device(part, device) for part in (
            _places(of_prompts), _places(of_responses), places[valid], _places(valid), packing.positions()[None],
            weights[None])))

    def rest_of(self, response_lengths: Tensor) -> Tensor:
        """Return [B]: the tokens that the model reads after the prompt. The last one is read for a head that is applied
        there, and for a load-balancing loss, which is over whole rows."""
        return response_lengths if self.after_last or self.balance else (response_lengths - 1).clamp(min=0)

    def _forward_packed(self, packed: PackedRows, prompts: Tensor, responses: Tensor, asked: Tensor,
                        read: Read) -> tuple[Tensor, ...]:
        """Compute `forward` without padding, all tokens in one row."""
        tokens = torch.cat([prompts.flatten().index_select(0, packed.prompt_tokens),
                            _padded(responses, self.after_last).flatten().index_select(0, packed.response_tokens)])
        if self.balance:
            self.balance.weights = packed.weights
        outputs = self.run_packed(packed.outputs, tokens[None], position_ids=packed.positions,
                                  attention_pattern=packed.packing, attention_mask=tokens.new_empty(NO_MASK))
        return read(outputs, _padded(asked, self.after_last).flatten(0, 1).index_select(0, packed.asked))

    def _after_prompt(self, tokens: Tensor, lengths: Tensor, following: Tensor, mask: Tensor, first: Tensor,
                      cache: Cache) -> Tensor:
        """Return [B, R + after_last, D]: the outputs at the prompt's end and at each token, the last one if needed."""
        seen_tokens = tokens if self.after_last or self.balance else tokens[:, :-1]
        steps = torch.arange(seen_tokens.shape[1], device=tokens.device)
        seen = torch.cat([mask, (steps < lengths[:, None]).long()], 1)
        if self.balance:
            self.balance.weights = seen[:, mask.shape[1] :]
        rest, _ = self.run(seen_tokens, attention_mask=seen, position_ids=following[:, None] + steps,
                           past_key_values=cache)
        return torch.cat([first, rest], 1)[:, : tokens.shape[1] + self.after_last]


def _forward_split_rows(policy: SharedPrompt, context: ContextParallelCache, prompts: Tensor, prompt_lengths: Tensor,
                        prompt_of: Tensor, responses: Tensor, response_lengths: Tensor, asked: Tensor,
                        read: Read) -> tuple[Tensor, ...]:
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
    if policy.balance:
        policy.balance.weights = there[:, own]
    states, _ = policy.run(tokens[:, own], attention_mask=mask[:, None], past_key_values=context,
                           position_ids=(own - begins[:, None]).clamp(min=0))
    following = asked.new_zeros(*tokens.shape, *asked.shape[2:])
    following[:, last : last + asked.shape[1]] = asked
    return tuple(context.join(_scatter(here, part))[wanted] for part in read(states[here], following[:, own][here]))


def _places(where: Tensor) -> Tensor:
    return where.flatten().nonzero().squeeze(1)


def _scatter(where: Tensor, values: Tensor) -> Tensor:
    """Return the values [N, …] at the places `where` [B, w] that is True, and 0 elsewhere."""
    table = values.new_zeros(*where.shape, *values.shape[1:])
    return table.index_put(where.nonzero(as_tuple=True), values)


def _padded(tokens: Tensor, more: int) -> Tensor:
    """Return [B, R, …] with `more` columns of 0."""
    return torch.cat([tokens, tokens.new_zeros(len(tokens), more, *tokens.shape[2:])], 1) if more else tokens


class Policy(SharedPrompt):
    """Vocabulary head: `logprobs` [T] of all response tokens, and `entropies` [T], both float32."""

    def __init__(self, model: PreTrainedModel, chunks: int = 4, context: ContextParallelCache | None = None):
        super().__init__(model, chunks, context)
        self.head_alone = head_is_alone(model)
        """Whether the head is a plain matrix, applied to some tokens at a time to save memory."""

    def run(self, tokens: Tensor, only_last: bool = False, **places) -> tuple[Tensor, Cache]:
        if self.head_alone:
            return last_states(self.model, tokens, only_last, **places)
        output = self.model(tokens, use_cache=True, logits_to_keep=int(only_last), **places)
        return output.logits, output.past_key_values

    def run_rows(self, places: Tensor, tokens: Tensor, **inputs: Any) -> Tensor:
        if self.head_alone:
            return super().run_rows(places, tokens, **inputs)
        kept = _places(places.any(0))
        if "logits_to_keep" not in inspect.signature(self.model.forward).parameters:
            return self.model(tokens, use_cache=False, **inputs).logits[places]
        return self.model(tokens, use_cache=False, logits_to_keep=kept, **inputs).logits[places[:, kept]]

    def run_packed(self, places: Tensor, tokens: Tensor, **inputs: Any) -> Tensor:
        if self.head_alone:
            return super().run_packed(places, tokens, **inputs)
        return self.model(tokens, use_cache=False, logits_to_keep=places, **inputs).logits[0]

    def read(self, outputs: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        if self.head_alone:
            return score(outputs, cast(nn.Linear, self.model.get_output_embeddings()), tokens, temperature or 1.0)
        return score_logits(outputs.float() / (temperature or 1.0), tokens)

    def read_top(self, outputs: Tensor, tokens: Tensor, temperature: float, count: int) -> tuple[Tensor, Tensor]:
        if self.head_alone:
            return top_logprobs(outputs, cast(nn.Linear, self.model.get_output_embeddings()), count, temperature or 1.0)
        return top_logprobs_of(outputs.float() / (temperature or 1.0), count)


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
    return tuple(on_device(part, device) for part in parts)


def first_rows(prompt_of: Tensor) -> Tensor:
    """Return [P]: the first of the consecutive rows of each prompt, of `inputs_of`."""
    counts = torch.bincount(prompt_of.cpu())
    return counts.cumsum(0) - counts
