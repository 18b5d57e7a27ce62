"""Generation by a transformers model: prompts are read once for all their samples, finished rows leave the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from distflow.data.batch import Ragged
from distflow.schema.run import Generation
from workers.engines.sampling import pick, uniform

_LEAVE_SHARE = 8
"""Finished rows are taken out once they are an eighth of the batch: taking them out copies the cache."""
_ROOM = 16
"""Tokens that a row may grow by before its keys and values move to a larger place."""


@dataclass(frozen=True)
class Samples:
    """What generation returns, row by row: `tokens` and their `logprobs`, and whether each row came to its end [B]."""

    tokens: Ragged
    logprobs: Ragged
    finished: Tensor

    @staticmethod
    def concat(parts: list[Samples]) -> Samples:
        tokens = Ragged.from_rows([row for part in parts for row in part.tokens.rows])
        values = torch.cat([part.logprobs.values for part in parts]) if parts else torch.empty(0)
        finished = torch.cat([part.finished for part in parts]) if parts else torch.empty(0, dtype=torch.bool)
        return Samples(tokens, tokens.with_values(values), finished)


class HFRollout:
    """A plain transformers model that samples. Its weights are replaced in place, never reloaded."""

    def __init__(self, model: PreTrainedModel, generation: Generation, pad_token: int, end_tokens: list[int]):
        self.model = model.eval().requires_grad_(False)
        self.generation, self.pad_token = generation, pad_token
        self.end_tokens = torch.tensor(end_tokens, device=model.device)

    def weights(self) -> dict[str, Tensor]:
        """The parameters by name, for an update in place."""
        return dict(self.model.named_parameters())

    @torch.inference_mode()
    def generate(self, prompts: Ragged, repeats: int, ids: Tensor, key: int, temperature: float | None = None,
                 max_new_tokens: int | None = None) -> Samples:
        """`repeats` samples for each prompt.

        Args:
            prompts: [P] rows of tokens.
            ids: [P * repeats] row ids; with `key` they decide the randomness.
            temperature, max_new_tokens: instead of the role's own; temperature 0 is greedy.
        """
        at_once = max(1, self.generation.batch_rows // repeats)
        parts = []
        for start in range(0, len(prompts), at_once):
            stop = min(start + at_once, len(prompts))
            decoder = _Decoder(self, prompts.slice(start, stop), repeats, ids[start * repeats : stop * repeats], key)
            parts.append(decoder.run(self.generation.temperature if temperature is None else temperature,
                                     self.generation.max_new_tokens if max_new_tokens is None else max_new_tokens))
        return Samples.concat(parts)


class _Decoder:
    """One batch of rows from prompt to end."""

    def __init__(self, engine: HFRollout, prompts: Ragged, repeats: int, ids: Tensor, key: int):
        self.engine, self.model, self.key = engine, engine.model, key
        device = self.model.device
        self.ids = ids.to(device)
        tokens = prompts.padded(engine.pad_token, side="left").to(device)
        lengths = prompts.lengths.to(device)
        mask = (torch.arange(tokens.shape[1], device=device) >= tokens.shape[1] - lengths[:, None]).long()
        output = self.model(tokens, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), use_cache=True,
                            logits_to_keep=1)
        sample_of = torch.arange(len(prompts), device=device).repeat_interleave(repeats)
        self.cache = _roomy(output.past_key_values, sample_of)
        self.logits, self.mask, self.position = output.logits[sample_of, -1], mask[sample_of], lengths[sample_of]

    def run(self, temperature: float, max_new_tokens: int) -> Samples:
        rows, device = len(self.ids), self.model.device
        noise = uniform(self.key, self.ids, torch.arange(max_new_tokens, device=device)[:, None])
        tokens = torch.zeros(max_new_tokens, rows, dtype=torch.int64, device=device)
        logprobs = torch.zeros(max_new_tokens, rows, device=device)
        ended = torch.zeros(rows, dtype=torch.bool, device=device)
        live = torch.arange(rows, device=device)
        """Rows of the batch that the model still computes; what it adds to an ended one is dropped at last."""
        for step in range(max_new_tokens):
            chosen, tokens_logprobs = pick(self.logits, noise[step, live], temperature, self.engine.generation.top_k,
                                           self.engine.generation.top_p)
            tokens[step, live], logprobs[step, live] = chosen, tokens_logprobs
            ended |= self._is_end(chosen)
            count = len(live) - int(ended.sum())
            if count == 0 or step == max_new_tokens - 1:
                break
            if (len(live) - count) * _LEAVE_SHARE >= len(live):
                kept = (~ended).nonzero().squeeze(1)
                live, chosen, ended = live[kept], chosen[kept], ended[kept]
                self._leave(kept)
            self._advance(chosen)
        ends = self._is_end(tokens)
        finished = ends.any(0)
        lengths = torch.where(finished, ends.int().argmax(0) + 1, max_new_tokens).cpu()
        ragged = Ragged.from_padded(tokens.T.cpu(), lengths)
        return Samples(ragged, Ragged.from_padded(logprobs.T.cpu(), lengths), finished.cpu())

    def _is_end(self, tokens: Tensor) -> Tensor:
        return (tokens[..., None] == self.engine.end_tokens).any(-1)

    def _leave(self, kept: Tensor) -> None:
        self.cache.batch_select_indices(kept)
        self.mask, self.position = self.mask[kept], self.position[kept]

    def _advance(self, chosen: Tensor) -> None:
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        output = self.model(chosen[:, None], attention_mask=self.mask, position_ids=self.position[:, None],
                            past_key_values=self.cache, use_cache=True)
        self.logits, self.position = output.logits[:, -1], self.position + 1


class _Roomy(DynamicLayer):
    """Keys and values of a layer with room for more, so that a new token does not copy all old ones."""

    def __init__(self, layer: DynamicLayer, rows: Tensor):
        super().__init__()
        self.dtype, self.device, self.is_initialized = layer.dtype, layer.device, True
        self._keep(layer.keys, layer.values, rows)

    def _keep(self, keys: Tensor, values: Tensor, rows: Tensor) -> None:
        used = keys.shape[2]
        self.room = keys.new_empty(2, len(rows), keys.shape[1], used + _ROOM, keys.shape[3])
        for room, old in zip(self.room, (keys, values)):
            room[:, :, :used] = old[rows]
        self.keys, self.values = self.room[0, :, :, :used], self.room[1, :, :, :used]

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        used, now = self.keys.shape[2], self.keys.shape[2] + key_states.shape[2]
        if now > self.room.shape[3]:
            self._keep(self.keys, self.values, torch.arange(len(self.keys), device=self.keys.device))
        self.room[0, :, :, used:now], self.room[1, :, :, used:now] = key_states, value_states
        self.keys, self.values = self.room[0, :, :, :now], self.room[1, :, :, :now]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        self._keep(self.keys, self.values, indices)


def _roomy(cache: Cache, rows: Tensor) -> Cache:
    """The cache with each of `rows`, with room to grow where its layers are plain ones."""
    if any(type(layer) is not DynamicLayer for layer in cache.layers):
        cache.batch_select_indices(rows)
    else:
        cache.layers = [_Roomy(layer, rows) for layer in cache.layers]
    return cache
