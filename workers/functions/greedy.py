"""The answer that a model gives when nothing is left to chance: a baseline for what it samples."""

from __future__ import annotations

from torch import Tensor

from distflow import Ragged, node
from distflow.observe.metrics import current
from workers.roles import Role


@node(type="MODEL_INFERENCE", writes=("greedy_responses", "greedy_completions"), samples=True,
      bounds={"max_new_tokens": ">= 1"})
def greedy(engine: Role, prompts: Ragged, row: Tensor, *,
           max_new_tokens: int | None = None) -> tuple[Ragged, list[str]]:
    """The likeliest answer to each prompt, token by token, as tokens and as text.

    One per prompt: it repeats no rows, so that what is made of it can be read beside the samples of a node that does.
    """
    samples = engine.generate(prompts, row, 1, max_new_tokens, temperature=0.0)
    current().mean_of("greedy/length", samples.tokens.lengths)
    return samples.tokens, engine.decode(samples.tokens)
