"""Whether engines that train and engines that sample say the same: every pair that is installed, float32 on the CPU.

For each pair: greedy answers equal those of a plain transformers model, and the log-probabilities of sampled tokens
differ by less than the bound; then the trainer makes an update, its weights go into the rollout in place, and both are
asked again. Run by hand:  python -m benchmarks.engines_agree   (in the environment of `make test-engines`)
"""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.group import on_ranks
from benchmarks.ratio import Spread, conclude, options, parsed
from distflow.config.models import ROLLOUTS, TRAINERS, Engine, elsewhere, installed
from distflow.config.run import RoleRun
from distflow.data.batch import Batch, Ragged
from distflow.plan import Layout
from workers.engines import attention, engine_class
from workers.engines.devices import mesh_of
from workers.engines.embedded import build_model, build_tokenizer

BOUND = 1e-4
"""Of the difference of one token's log-probability in float32; bfloat16 has a bound of 0.1."""
LENGTH, END = 24, 2


def available(table: dict[str, Engine]) -> list[str]:
    return [name for name, engine in table.items() if not engine.packages or installed(engine) or elsewhere(engine)]


def prompts() -> Ragged:
    draw = torch.Generator().manual_seed(0)
    return Ragged.from_rows([torch.randint(5, 260, (length,), generator=draw) for length in (4, 9, 17, 6)])


@torch.no_grad()
def greedy(model: Any, prompt: Tensor) -> list[int]:
    """Return what a plain transformers model answers, token by token, without a cache."""
    tokens = prompt.tolist()
    for _ in range(LENGTH):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] == END:
            break
    return tokens[len(prompt) :]


class Pair:
    """One engine that trains and one that samples, from the same weights."""

    def __init__(self, trainer: str, rollout: str):
        self.model = build_model(270, 0, layers=2, hidden=64, heads=2, kv_heads=2).eval()
        settings = RoleRun(engine=trainer, rollout=rollout, learning_rate=1e-2,
                           generation={"max_new_tokens": LENGTH, "batch_invariant": rollout == "sglang"})
        mesh, mine = mesh_of(Layout(1), "cpu"), copy.deepcopy(self.model)
        mine.set_attn_implementation(attention.NAME)
        tokenizer = build_tokenizer(["one two"], vocab_size=270)
        self.rollout = engine_class(ROLLOUTS[rollout]).build(mine, tokenizer, settings, mesh, 0, [END])
        self.trainer = engine_class(TRAINERS[trainer])(mine, settings, mesh, 0, 10, True)

    def update(self) -> None:
        """Make a step that moves every weight, and load its weights into the rollout and the plain model."""
        rows = Batch(torch.arange(4), {"prompts": prompts(), "responses": prompts()})
        self.trainer.update(rows, lambda logprobs, *_: -logprobs.sum() / 10, 1.0, 0)
        self.rollout.load(self.trainer.export(self.rollout.dtype, self.rollout.weight_buffers()), self.trainer.version)
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, whole in self.trainer.export():
                own[name].copy_(whole)

    def difference(self) -> tuple[bool, float]:
        """Return whether greedy answers are equal, and the largest difference of a log-probability."""
        asked = prompts()
        answers = self.rollout.generate(asked, 1, torch.arange(4), key=1, temperature=0.0).tokens
        same = [row.tolist() for row in answers.rows] == [greedy(self.model, prompt) for prompt in asked.rows]
        samples = self.rollout.generate(asked, 4, torch.arange(16), key=2)
        trained = self.trainer.logprobs(asked.select(torch.arange(4).repeat_interleave(4)), samples.tokens, 1.0)
        return same, float((trained.values - samples.logprobs.values).abs().max())


def compare(trainer: str, rollout: str) -> list[tuple[bool, float]]:
    """Before and after an update."""
    if trainer == "megatron" and not torch.cuda.is_available():  # megatron-core wants CUDA; tests have what it takes
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
        from engines import megatron_on_cpu  # noqa: F401
    pair = Pair(trainer, rollout)
    try:
        before = pair.difference()
        pair.update()
        return [before, pair.difference()]
    finally:
        pair.rollout.close()


def main(arguments: list[str] | None = None) -> None:
    given = parsed(options(__doc__, repeats=1), arguments)
    pairs = [(trainer, rollout) for rollout in available(ROLLOUTS) for trainer in available(TRAINERS)]
    differences, equal = [], True
    for trainer, rollout in pairs[:1] if given.quick else pairs:
        for when, (same, apart) in zip(("before", "after"), on_ranks(1, compare, trainer, rollout), strict=True):
            print(f"{trainer} trains, {rollout} samples, {when} an update: greedy answers "
                  f"{'equal' if same else 'DIFFER'}, log-probabilities within {apart:.1e}", flush=True)
            differences.append(apart)
            equal &= same
    conclude(f"largest difference of a token's log-probability between trainer and rollout, {len(differences) // 2} "
             "pairs of engines, before and after an update in place", Spread(max(differences), min(differences),
                                                                             max(differences)), BOUND, unit="nats",
             holds=equal and all(map(math.isfinite, differences)), at_least=False)


if __name__ == "__main__":
    main()
