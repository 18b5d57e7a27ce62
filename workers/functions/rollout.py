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
from workers.isolation.rewards import LONGEST_MARK, ends_in_thoughts


@node(type="MODEL_INFERENCE", samples=True,
      writes=("greedy_responses", "greedy_completions", "greedy_completions.cut_thoughts"))
def greedy(engine: RoleEngines, prompts: Ragged, row: Tensor, *,
           max_new_tokens: PositiveInt | None = None) -> tuple[Ragged, list[str], Tensor]:
    """Generate the greedy answer to each prompt, as tokens and as text, and whether it was cut off within thoughts."""
    samples = engine.generate(prompts, row, 1, max_new_tokens, temperature=0.0)
    current().mean_of("greedy/length", samples.tokens.lengths)
    texts = engine.decode(samples.tokens)
    return samples.tokens, texts, cut_thoughts(engine, prompts, texts, samples.finished)


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
      writes=("responses", "rollout_logprobs", "versions", "completions", "finished",
              "completions.cut_thoughts", "routed_experts"))
def generate(engine: RoleEngines, prompts: Ragged, row: Tensor, images: Ragged | None = None, *, group_size: int = 1,
             max_new_tokens: PositiveInt | None = None,
             ) -> tuple[Ragged, Ragged, Ragged, list[str], Tensor, Tensor, Ragged]:
    """Sample `group_size` answers to each prompt: tokens, their log-probabilities, the weights' version, the text,
    whether it came to its end instead of being cut off [B] bool, whether it was cut off within its thoughts [B] bool,
    and with `generation.routing_replay` the experts chosen for each token."""
    ids = (row[:, None] * group_size + row.new_tensor(range(group_size))).flatten()
    samples = engine.generate(prompts, ids, group_size, max_new_tokens, images=images)
    metrics, lengths = current(), samples.tokens.lengths
    note_lengths(prompts.lengths, lengths)
    metrics.mean_of("response/truncated", ~samples.finished)
    metrics.add("tokens", lengths.sum())
    metrics.add("response/fingerprint", fingerprint(samples.tokens, ids))
    experts = engine.routed_experts(samples.experts, prompts.lengths.repeat_interleave(group_size), lengths)
    texts = engine.decode(samples.tokens)
    return (samples.tokens, samples.logprobs, samples.versions,  # pyright: ignore[reportReturnType]  # last if planned
            texts, samples.finished, cut_thoughts(engine, prompts, texts, samples.finished), *experts)


def cut_thoughts(engine: RoleEngines, prompts: Ragged, texts: list[str], finished: Tensor) -> Tensor:
    """Return whether each answer was cut off within thoughts, which may begin at the end of its prompt. All prompts
    have as many answers, one after the other."""
    cut, asked = [row for row, ended in enumerate(finished.tolist()) if not ended], prompts.rows
    ends = engine.decode(Ragged.from_rows([asked[row * len(asked) // len(texts)][-LONGEST_MARK:] for row in cut]))
    result = torch.zeros(len(texts), dtype=torch.bool)
    result[cut] = torch.tensor([ends_in_thoughts(end, texts[row]) for end, row in zip(ends, cut)], dtype=torch.bool)
    return result


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
