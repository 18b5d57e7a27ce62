"""Generation by a transformers model: prompts are read once for all their samples, rows join and leave at any time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from distflow.data.batch import Ragged
from distflow.schema.errors import EngineError
from distflow.schema.run import Generation
from workers.engines.decoding import Row, Session


@dataclass(frozen=True)
class Samples:
    """What generation returns, row by row: `tokens` with their `logprobs` and the `versions` (int32) of the weights
    that sampled them, and whether each row came to its end [B]."""

    tokens: Ragged
    logprobs: Ragged
    versions: Ragged
    finished: Tensor

    @staticmethod
    def of(rows: list[Row]) -> Samples:
        """The last turn of each row."""
        tokens = Ragged.from_rows([row.tokens for row in rows])
        values = {"logprobs": torch.empty(0), "versions": torch.empty(0, dtype=torch.int32)}
        values = {name: torch.cat([getattr(row, name) for row in rows]) if rows else empty
                  for name, empty in values.items()}
        return Samples(tokens, tokens.with_values(values["logprobs"]), tokens.with_values(values["versions"]),
                       torch.tensor([row.finished for row in rows], dtype=torch.bool))


class HFRollout:
    """A plain transformers model that samples. Its weights are replaced in place, never reloaded.

    Raises:
        EngineError: a layer keeps something else than keys and values, so that rows could not come and go.
    """

    def __init__(self, model: PreTrainedModel, generation: Generation, pad_token: int, end_tokens: list[int]):
        self.model = model.eval().requires_grad_(False)
        self.generation, self.pad_token = generation, pad_token
        self.end_tokens = torch.tensor(end_tokens, device=model.device)
        self.version = -1
        """Of the weights, by their trainer's count; -1 as long as nobody says."""
        other = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers
                 if not isinstance(layer, DynamicLayer)}
        if other:
            raise EngineError(f"{type(model).__name__} keeps {', '.join(sorted(other))} between tokens, not keys and "
                              "values alone; generation by transformers cannot let its rows come and go")

    def weights(self) -> dict[str, Tensor]:
        """The parameters by name, for an update in place."""
        return dict(self.model.named_parameters())

    def generate(self, prompts: Ragged, repeats: int, ids: Tensor, key: int, temperature: float | None = None,
                 max_new_tokens: int | None = None, images: Ragged | None = None) -> Samples:
        """`repeats` samples for each prompt.

        Args:
            prompts: [P] rows of tokens.
            ids: [P * repeats] row ids; with `key` they decide the randomness.
            temperature, max_new_tokens: instead of the role's own; temperature 0 is greedy.
            images: [P] what each prompt shows.
        """
        session = self.session(key, temperature)
        rows = self.rows(prompts, repeats, ids, max_new_tokens, images)
        for start in range(0, len(rows), repeats):
            session.add(rows[start : start + repeats])
        while session.busy:
            session.step()
        return Samples.of(rows)

    def session(self, key: int, temperature: float | None = None, keeps: bool = False) -> Session:
        """See `Session`."""
        return Session(self, key, self.generation.temperature if temperature is None else temperature, keeps)

    def rows(self, prompts: Ragged, repeats: int, ids: Tensor, max_new_tokens: int | None = None,
             images: Ragged | None = None) -> list[Row]:
        """`repeats` rows for each prompt, which they share."""
        limit = self.generation.max_new_tokens if max_new_tokens is None else max_new_tokens
        shown = images.rows if images is not None else [None] * len(prompts)
        return [Row(id, prompt, len(prompt), limit, images=image) for prompt, image, ids_of_prompt in zip(
            prompts.rows, shown, ids.reshape(-1, repeats).tolist()) for id in ids_of_prompt]
