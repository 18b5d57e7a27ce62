"""Measures in the shapes that other projects publish their figures for, and shows ours next to theirs.

    nano-vllm    decoding of 256 requests of unlike lengths, as its `bench.py` draws them: seed 0, prompts and answers
                 of 100 to 1,024 tokens each, temperature 0.6, ends ignored, one warm-up. 133,966 tokens are sampled
    prime-rl     a training step on rows of 8,192 and 16,384 tokens, recomputed, in bfloat16 on a GPU, one row at a
                 time, by SFT's loss, and by that of PPO on rows of 16,384 and 65,536; for Qwen3-4B with adapters of
                 rank 16

Figures of others are theirs, on their hardware: `source` says which. With the tiny shape the same rows are drawn a
64th as long, which only shows that the parts run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch

from benchmarks.device import most_allocated
from benchmarks.parts import Bench, Part, said, shown
from benchmarks.shapes import TRAINING
from distflow.config.dag import Role
from distflow.config.run import Lora, RoleRun
from distflow.data.batch import Batch
from workers.engines.adapters import attach
from workers.engines.fsdp import FSDPEngine
from workers.engines.rollout import SampledRow
from workers.functions.losses import surrogate
from workers.functions.updates import PolicyLoss

THEIRS = {
    ("nano-vllm", "0.5B"): "24,121 tokens/s (nano-vllm-triton#1), 17,711 (vLLM 0.10.2, nano-vllm#245)",
    ("nano-vllm", "Qwen3-0.6B"):
        "10,009 tokens/s (nano-vllm-triton#1), 8,588 (vLLM 0.10, A800), 9,530 (vLLM 0.21, A100)",
    ("prime-rl", "Qwen3-0.6B", 8192): "26,005 tokens/s, MFU 16.8%, 31.7 GiB (one H100, FA3, benchmarks/baselines)",
    ("prime-rl", "Qwen3-0.6B", 16384): "25,486 tokens/s, MFU 23.7%, 52.8 GiB (one H100, FA3, benchmarks/baselines)",
    ("prime-rl", "Qwen3-0.6B", 65536, "RL"): "10,147 tokens/s, MFU 26.8% (one H100, RL step, benchmarks/baselines)",
    ("prime-rl", "Qwen3-4B", 16384, "RL"): "6,229 tokens/s (one H100, RL step, LoRA of rank 16, benchmarks/baselines)",
}
OF_PROJECT = {"nano-vllm": ["0.5B", "Qwen3-0.6B"], "prime-rl": ["Qwen3-0.6B", "Qwen3-4B"]}
"""Shapes that a project has published figures for."""
_REQUESTS, _SHORTEST, _LONGEST, _WORDS, _TEMPERATURE = 256, 100, 1024, 10_000, 0.6
_ROWS, _TINY = 4, 64
_TINY_REQUESTS = 8


def requests(count: int, divisor: int, words: int) -> list[tuple[list[int], int]]:
    """Return prompts as tokens, and the length of each answer, as nano-vllm's `bench.py` draws them."""
    draw = random.Random(0)
    prompts = [[draw.randint(0, words) for _ in range(draw.randint(_SHORTEST, _LONGEST) // divisor)]
               for _ in range(count)]
    return [(prompt, draw.randint(_SHORTEST, _LONGEST) // divisor) for prompt in prompts]


def nano_vllm(bench: Bench) -> Iterator[Part]:
    """Decode the requests; slots are filled again as rows end."""
    tiny = bench.shape.name == "tiny"
    drawn = requests(_TINY_REQUESTS if tiny else _REQUESTS, _TINY if tiny else 1,
                     min(_WORDS, bench.shape.sizes.vocabulary - 1))
    rollout, sampled = bench.rollout(bench.shape), sum(length for _, length in drawn)

    def decode() -> None:
        session = rollout.session(0, _TEMPERATURE)
        for number, (prompt, length) in enumerate(drawn):
            session.add([SampledRow(number, torch.tensor(prompt), len(prompt), length)])
        left = 0
        while left < len(drawn):
            left += len(session.step())

    rates = {"tokens_per_second": [sampled / each for each in bench.repeated(decode)]}
    yield Part("requests", f"{len(drawn)} requests, {sampled:,} tokens sampled: {said(rates)}"
               + _beside("nano-vllm", bench.shape.name), rates)


def prime_rl(bench: Bench) -> Iterator[Part]:
    """Train on long rows, one at a time, each layer's activations computed again."""
    adapters = Lora(rank=16, alpha=32) if bench.shape.name == "Qwen3-4B" else None
    short = _TINY if bench.shape.name == "tiny" else 1
    rows = [(16384, "RL")] if adapters else [(8192, "SFT"), (16384, "SFT"), (16384, "RL"), (65536, "RL")]
    longest = max(length for length, _ in rows) // short
    settings = RoleRun(micro_batch_tokens=longest, recompute=True, learning_rate=1e-6, dtype="auto", lora=adapters)
    model = bench.model(bench.shape)
    if adapters:
        attach(model, adapters, 0)
    trainer = FSDPEngine(model, settings, bench.mesh, pad_token=0, steps=10, role=Role(trained=True))
    for length, kind in rows:
        yield _long_rows(bench, trainer, length // short, kind)


def _long_rows(bench: Bench, trainer: FSDPEngine, length: int, kind: str) -> Part:
    count = max(1, min(_ROWS, _ROWS * 16384 // (length * (_TINY if bench.shape.name == "tiny" else 1))))
    responses = bench.tokens(count, length - 1)
    columns = {name: responses.with_values(torch.zeros(len(responses.values)))
               for name in ("old", "behaviour", "advantages", "weights")}
    columns["mask"] = responses.with_values(torch.ones(len(responses.values), dtype=torch.bool))
    columns["weights"].values.fill_(1 / len(responses.values))
    columns["advantages"].values.fill_(1.0)
    batch = Batch(torch.arange(count), {"prompts": bench.tokens(count, 1), "responses": responses,
                                        **(columns if kind == "RL" else {})})
    loss = PolicyLoss(surrogate("ppo", 0.2, None, None), 0.0, "k3", 1.0) if kind == "RL" else \
        lambda logprobs, *_: -logprobs.sum() / len(responses.values)
    seconds = bench.repeated(lambda: trainer.update(batch, loss, 1.0, 0))
    rates = bench.rates(seconds, count * length, TRAINING * count * bench.shape.flops(1, length - 1))
    most = most_allocated(bench.kind)
    at_most = "" if most is None else f"; at most {shown(most)} allocated"
    name = f"rows of {length}" + ", RL" * (kind == "RL")
    return Part(name, f"training step ({kind}) on {count} rows of {length:,} tokens, one at a time: {said(rates)}"
                f"{at_most}" + _beside("prime-rl", bench.shape.name, length, *(["RL"] if kind == "RL" else [])), rates)


def _beside(*key: str | int) -> str:
    return f". Theirs: {THEIRS[key]}" if key in THEIRS else ""


PUBLISHED: dict[str, Callable[[Bench], Iterator[Part]]] = {"nano-vllm": nano_vllm, "prime-rl": prime_rl}
