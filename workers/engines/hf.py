"""Generation by a transformers model: prompts are read once for all their samples, finished rows leave the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distflow.data.batch import Ragged
from distflow.schema.run import Generation
from workers.engines.sampling import pick, uniform

_LEAVE_SHARE = 8
"""Finished rows are taken out once they are an eighth of the batch: taking them out copies the cache."""


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
                                     max_new_tokens or self.generation.max_new_tokens))
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
        self.cache = output.past_key_values
        self.cache.batch_select_indices(sample_of)
        self.logits, self.mask, self.position = output.logits[sample_of, -1], mask[sample_of], lengths[sample_of]

    def run(self, temperature: float, max_new_tokens: int) -> Samples:
        rows, device = len(self.ids), self.model.device
        tokens = torch.zeros(rows, max_new_tokens, dtype=torch.int64, device=device)
        logprobs = torch.zeros(rows, max_new_tokens, device=device)
        lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        finished = torch.zeros(rows, dtype=torch.bool, device=device)
        live = torch.arange(rows, device=device)
        """Rows of the batch that the model still computes; some of them may be finished already."""
        for step in range(max_new_tokens):
            noise = uniform(self.key, self.ids[live], step)
            chosen, chosen_logprobs = pick(self.logits, noise, temperature, self.engine.generation.top_k,
                                           self.engine.generation.top_p)
            going = ~finished[live]
            tokens[live[going], step], logprobs[live[going], step] = chosen[going], chosen_logprobs[going]
            lengths[live[going]] = step + 1
            finished[live[going]] = torch.isin(chosen[going], self.engine.end_tokens)
            going = ~finished[live]
            count = int(going.sum())
            if count == 0 or step == max_new_tokens - 1:
                break
            if (len(live) - count) * _LEAVE_SHARE >= len(live):
                kept = going.nonzero().squeeze(1)
                live, chosen = live[kept], chosen[kept]
                self._leave(kept)
            self._advance(chosen)
        lengths = lengths.cpu()
        ragged = Ragged.from_padded(tokens.cpu(), lengths)
        return Samples(ragged, Ragged.from_padded(logprobs.cpu(), lengths), finished.cpu())

    def _leave(self, kept: Tensor) -> None:
        self.cache.batch_select_indices(kept)
        self.mask, self.position = self.mask[kept], self.position[kept]

    def _advance(self, chosen: Tensor) -> None:
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        output = self.model(chosen[:, None], attention_mask=self.mask, position_ids=self.position[:, None],
                            past_key_values=self.cache, use_cache=True)
        self.logits, self.position = output.logits[:, -1], self.position + 1
