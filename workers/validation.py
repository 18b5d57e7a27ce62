"""Greedy answers to held-out problems, and what they earn."""

from __future__ import annotations

import torch
import torch.distributed as dist

from distflow.data.batch import Ragged
from distflow.data.exchange import gather
from distflow.data.records import Records, open_records
from distflow.observe.metrics import Metrics
from distflow.schema.spec import Spec
from workers.encode import encoder
from workers.functions.rewards import find_reward
from workers.roles import Role


class Validator:
    """Each rank answers its share of each validation set."""

    def __init__(self, spec: Spec, role: Role):
        self.settings, self.role = spec.run.validation, role
        self.reward = find_reward(self.settings.reward)
        self.encode, self.answer_field = encoder(role.tokenizer, spec.run.data), spec.run.data.answer
        self.sets: dict[str, Records] = {name: open_records(spec.data_path(path))
                                         for name, path in self.settings.data.items()}

    def run(self) -> dict[str, float]:
        """Mean reward by name of the set: `validation/NAME`. Collective."""
        metrics, rank, ranks = Metrics(), dist.get_rank(), dist.get_world_size()
        for name, records in self.sets.items():
            mine = records.get(range(rank, len(records), ranks))
            prompts = self.encode(mine)["prompts"] if mine else Ragged.from_rows([])
            samples = self.role.generate(prompts, torch.arange(len(mine)), temperature=0.0)
            earned = [self.reward(text, record[self.answer_field])
                      for text, record in zip(self.role.decode(samples.tokens), mine)]
            metrics.mean(f"validation/{name}", sum(earned), len(earned))
        values = metrics.collect(gather)
        return {f"validation/{name}": values[f"validation/{name}"] for name in self.sets}
