"""Greedy answers to held-out problems, and what they earn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from distflow.data.batch import Ragged
from distflow.data.exchange import gather
from distflow.data.records import open_records
from distflow.observe.metrics import Metrics
from distflow.schema.spec import Spec
from workers.encode import encode_prompts
from workers.eyes import eyes_of
from workers.functions.rewards import find_reward
from workers.roles import Role


@dataclass(frozen=True)
class _Share:
    """One rank's part of a validation set."""

    prompts: Ragged
    images: Ragged | None
    answers: list[str]
    cut: int
    """Prompts that lost their beginning."""


class Validator:
    """Each rank answers its share of each validation set. The questions are encoded once, at the start."""

    def __init__(self, spec: Spec, role: Role):
        self.role, self.reward = role, find_reward(spec.run.validation.reward)
        self.shares = {name: _share(spec, role, spec.data_path(path))
                       for name, path in spec.run.validation.data.items()}

    def run(self) -> dict[str, float]:
        """Mean reward by name of the set, `validation/NAME`; then `data/prompts_cut/NAME` where prompts were cut.

        Collective.
        """
        metrics = Metrics()
        for name, share in self.shares.items():
            samples = self.role.generate(share.prompts, torch.arange(len(share.answers)), temperature=0.0,
                                         images=share.images)
            texts = self.role.decode(samples.tokens)
            earned = [self.reward(text, answer) for text, answer in zip(texts, share.answers)]
            metrics.mean(f"validation/{name}", sum(earned), len(earned))
            metrics.add(f"data/prompts_cut/{name}", share.cut)
        values = metrics.collect(gather)
        rewards = {f"validation/{name}": values[f"validation/{name}"] for name in self.shares}
        return rewards | {name: value for name, value in values.items() if name not in rewards and value}


def _share(spec: Spec, role: Role, path: Path) -> _Share:
    records = open_records(path)
    mine = records.get(range(dist.get_rank(), len(records), dist.get_world_size()))
    prompts, images, cut = encode_prompts(role.tokenizer, spec.run.data, mine, eyes_of(role, spec.run.data, path))
    return _Share(prompts, images, [record[spec.run.data.answer] for record in mine], cut)
