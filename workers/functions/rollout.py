"""Sampling answers."""

from __future__ import annotations

import torch
from torch import Tensor

from distflow import Ragged, node
from distflow.observe.metrics import current
from workers.roles import Role


@node(type="MODEL_INFERENCE", writes=("responses", "rollout_logprobs", "versions", "completions"),
      repeats="group_size", default_for="actor", bounds={"max_new_tokens": ">= 1"})
def generate(engine: Role, prompts: Ragged, row: Tensor, images: Ragged | None = None, *, group_size: int = 1,
             max_new_tokens: int | None = None) -> tuple[Ragged, Ragged, Ragged, list[str]]:
    """`group_size` sampled answers to each prompt: tokens, their log-probabilities, the weights' version, the text."""
    ids = (row[:, None] * group_size + row.new_tensor(range(group_size))).flatten()
    samples = engine.generate(prompts, ids, group_size, max_new_tokens, images=images)
    metrics, lengths = current(), samples.tokens.lengths
    note_lengths(prompts.lengths, lengths)
    metrics.mean_of("response/truncated", ~samples.finished)
    metrics.add("tokens", lengths.sum())
    metrics.add("response/fingerprint", fingerprint(samples.tokens, ids))
    return samples.tokens, samples.logprobs, samples.versions, engine.decode(samples.tokens)


def note_lengths(prompts_P: Tensor, responses_B: Tensor) -> None:
    """Report how many tokens prompts and responses have, and how many responses there are."""
    metrics = current()
    for name, lengths in (("prompt/length", prompts_P), ("response/length", responses_B)):
        metrics.mean_of(name, lengths)
        metrics.extremes_of(name, lengths)
    metrics.add("samples", len(responses_B))


def fingerprint(tokens: Ragged, ids: Tensor) -> int:
    """A number that is the same for the same samples on any number of ranks (and differs for others, almost surely)."""
    place = torch.arange(len(tokens.values)) - tokens.offsets[:-1][tokens.row_of]
    mixed = (ids[tokens.row_of] * 1_000_003 + place) * 1_000_003 + tokens.values
    return int((mixed * 2_654_435_761 % 1_000_003).sum())
