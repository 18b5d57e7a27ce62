"""Sampling nodes: sampled answers, greedy answers as a baseline, and prompts made from other nodes' columns."""

from __future__ import annotations

import torch
from pydantic import PositiveInt
from torch import Tensor

from distflow.contracts.decorators import Template, node
from distflow.data.batch import Ragged
from distflow.telemetry.metrics import current
from workers.engines.chat import prompt_tokens
from workers.engines.role_engines import RoleEngines


@node(type="MODEL_INFERENCE", writes=("greedy_responses", "greedy_completions"), samples=True)
def greedy(engine: RoleEngines, prompts: Ragged, row: Tensor, *,
           max_new_tokens: PositiveInt | None = None) -> tuple[Ragged, list[str]]:
    """Generate the greedy answer to each prompt, as tokens and as text."""
    samples = engine.generate(prompts, row, 1, max_new_tokens, temperature=0.0)
    current().mean_of("greedy/length", samples.tokens.lengths)
    return samples.tokens, engine.decode(samples.tokens)


@node(type="MODEL_INFERENCE", writes="{role}_prompts", row_wise=True, tokenizer_only=True)
def ask(engine: RoleEngines, *, template: Template, max_prompt_tokens: PositiveInt = 1024,
        **columns: list[str]) -> Ragged:
    """Make prompts for a role: the template filled with each row's columns, as a question by the role's chat template.
    A longer one than `max_prompt_tokens` loses its beginning."""
    texts = [template.format(**dict(zip(columns, row))) for row in zip(*columns.values())]
    rows = [torch.tensor(prompt_tokens(engine.tokenizer, text, **engine.template_options), dtype=torch.int64)
            for text in texts]
    current().add(f"{engine.name}/prompts_cut", sum(len(row) > max_prompt_tokens for row in rows))
    return Ragged.from_rows([row[-max_prompt_tokens:] for row in rows])


@node(type="MODEL_INFERENCE", repeats="group_size", default_for="actor",
      writes=("responses", "rollout_logprobs", "versions", "completions", "finished", "routed_experts"))
def generate(engine: RoleEngines, prompts: Ragged, row: Tensor, images: Ragged | None = None, *, group_size: int = 1,
             max_new_tokens: PositiveInt | None = None) -> tuple[Ragged, Ragged, Ragged, list[str], Tensor, Ragged]:
    """Sample `group_size` answers to each prompt: tokens, their log-probabilities, the weights' version, the text,
    whether it came to its end instead of being cut off [B] bool, and with `generation.routing_replay` the experts
    chosen for each token."""
    ids = (row[:, None] * group_size + row.new_tensor(range(group_size))).flatten()
    samples = engine.generate(prompts, ids, group_size, max_new_tokens, images=images)
    metrics, lengths = current(), samples.tokens.lengths
    note_lengths(prompts.lengths, lengths)
    metrics.mean_of("response/truncated", ~samples.finished)
    metrics.add("tokens", lengths.sum())
    metrics.add("response/fingerprint", fingerprint(samples.tokens, ids))
    experts = engine.routed_experts(samples.experts, prompts.lengths.repeat_interleave(group_size), lengths)
    return (samples.tokens, samples.logprobs, samples.versions,  # pyright: ignore[reportReturnType]  # last if planned
            engine.decode(samples.tokens), samples.finished, *experts)


def note_lengths(prompts_P: Tensor, responses_B: Tensor) -> None:
    metrics = current()
    for name, lengths in (("prompt/length", prompts_P), ("response/length", responses_B)):
        metrics.mean_of(name, lengths)
        metrics.extremes_of(name, lengths)
    metrics.add("samples", len(responses_B))


def fingerprint(tokens: Ragged, ids: Tensor) -> int:
    """Return a number that is equal for equal samples on any number of ranks."""
    position = torch.arange(len(tokens.values)) - tokens.offsets[:-1][tokens.row_of]
    mixed = (ids[tokens.row_of] * 1_000_003 + position) * 1_000_003 + tokens.values
    return int((mixed * 2_654_435_761 % 1_000_003).sum())
