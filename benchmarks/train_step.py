"""Tokens per second of our training step against a bare FSDP2 loop on the same model and rows.

The bare loop is what one writes by hand: `fully_shard`, sequences of prompt and response padded to the longest of a
micro-batch, log-softmax, backward, clipping, fused AdamW. Ours is `FSDPEngine.update`. Rows are groups of responses to
one prompt, as GRPO has them, or one response a prompt, where sharing the prompt saves nothing.
Run by hand:  python -m benchmarks.train_step
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.group import on_ranks, timed
from benchmarks.ratio import Spread, conclude, interleaved, least, options, parsed, ratios
from distflow.config.dag import Role
from distflow.config.run import RoleRun
from distflow.data.batch import Batch, Ragged
from workers.engines import attention
from workers.engines.embedded import build_model
from workers.engines.fsdp import FSDPEngine

GOAL = 0.95
TOKENS = 8192
"""Budget of a micro-batch, in tokens without padding."""


@dataclass(frozen=True)
class Case:
    """Rows of a step on each rank."""

    name: str
    prompts: int
    group: int
    prompt: int
    response: int


CASES = [Case("groups of 8", 16, 8, 64, 64), Case("one response a prompt", 96, 1, 32, 96)]


def rows(case: Case) -> Batch:
    """Ragged rows: prompts and responses between half and all of their longest."""
    draw = torch.Generator().manual_seed(dist.get_rank())

    def ragged(count: int, longest: int) -> Ragged:
        lengths = torch.randint(longest // 2, longest + 1, (count,), generator=draw).tolist()
        return Ragged.from_rows([torch.randint(5, 500, (length,), generator=draw) for length in lengths])

    prompts = ragged(case.prompts, case.prompt).select(torch.arange(case.prompts).repeat_interleave(case.group))
    return Batch(torch.arange(len(prompts)), {"prompts": prompts, "responses": ragged(len(prompts), case.response)})


class Bare:
    """The loop by hand."""

    def __init__(self, model: nn.Module):
        self.model = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0,
                                           fused=True)

    def update(self, batch: Batch) -> float:
        prompts, responses = batch["prompts"], batch["responses"]
        size = max(1, TOKENS // int((prompts.lengths + responses.lengths).double().mean()))
        pieces = [batch.slice(start, min(start + size, len(batch))) for start in range(0, len(batch), size)]
        for index, piece in enumerate(pieces):
            self.model.set_requires_gradient_sync(index == len(pieces) - 1)
            (-self._logprobs(piece).sum() / 1000 * dist.get_world_size()).backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).full_tensor()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def _logprobs(self, piece: Batch) -> Tensor:
        whole = [torch.cat(pair) for pair in zip(piece["prompts"].rows, piece["responses"].rows)]
        tokens = nn.utils.rnn.pad_sequence(whole, batch_first=True)
        lengths = torch.tensor([len(row) for row in whole])
        position = torch.arange(tokens.shape[1])
        output = self.model(tokens, attention_mask=(position < lengths[:, None]).long(), use_cache=False)
        logprobs = output.logits[:, :-1].float().log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
        answer = (position >= piece["prompts"].lengths[:, None]) & (position < lengths[:, None])
        return logprobs[answer[:, 1:]]


def measure(case: Case, sizes: dict[str, int], repeats: int) -> list[dict[str, float]]:
    """Return the seconds of a step of each side, and the gradient norms that must agree."""
    model = build_model(512, 0, **sizes)
    mesh, batch = init_device_mesh("cpu", (dist.get_world_size(),)), rows(case)
    bare, ours = Bare(copy.deepcopy(model)), copy.deepcopy(model)
    ours.set_attn_implementation(attention.NAME)
    settings = RoleRun(learning_rate=1e-4, micro_batch_tokens=TOKENS)
    engine = FSDPEngine(ours, settings, mesh, pad_token=0, steps=10, role=Role(trained=True))
    norms: dict[str, float] = {}

    def by_us() -> None:
        norms["ours"] = engine.update(batch, lambda logprobs, *_: -logprobs.sum() / 1000, 1.0, 0)["grad_norm"]

    def by_hand() -> None:
        norms["bare"] = bare.update(batch)

    for work in (by_us, by_hand):
        work()
    if abs(norms["ours"] / norms["bare"] - 1) > 1e-3:
        raise SystemExit(f"the two sides do not compute the same: gradient norms {norms}")
    return interleaved({"ours": lambda _: timed(by_us), "bare": lambda _: timed(by_hand)}, repeats)


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    given = parsed(parser, arguments)
    sizes: dict[str, Any] = {"layers": 2} if given.quick else {"layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4}
    found = list[Spread]()
    for case in CASES:
        pairs = on_ranks(given.ranks, measure, case, sizes, given.repeats)
        found.append(ratios(pairs, "bare", "ours", float))
        print(f"{case.name}: {case.prompts} prompts × {case.group} on each of {given.ranks} ranks: ours has "
              f"{found[-1]} times the tokens per second of the bare loop", flush=True)
    conclude("training step against a bare FSDP2 loop, tokens per second, the worse of two kinds of rows", least(found),
             GOAL)


if __name__ == "__main__":
    main()
