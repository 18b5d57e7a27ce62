"""Evaluation metrics per problem: mean@k and pass@k."""

from __future__ import annotations

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from distflow.contracts.decorators import node
from distflow.telemetry.accuracy import pass_at
from distflow.telemetry.metrics import current


@node(keep_together="group")
def tally(rewards: Tensor, group: Tensor, questions: list[str], answers: list[str], completions: list[str], *,
          samples: PositiveInt = 1, threshold: PositiveFloat = 1.0) -> None:
    """Report mean@k, the mean reward of each problem's k = `samples` answers, and pass@k for k = 1, 2, 4, … `samples`.

    An answer is right if its reward is at least `threshold`. No pass@k for problems with fewer than k answers left.
    """
    ks = [2**power for power in range(samples.bit_length()) if 2**power < samples] + [samples]
    order = torch.argsort(group)
    for earned in rewards[order].split(torch.unique(group, return_counts=True)[1].tolist()):
        right = int((earned >= threshold).sum())  # of one type: as a double, 0.9 is more than a reward of 0.9
        _report(f"mean@{samples}", float(earned.double().mean()))
        for k in (k for k in ks if k <= len(earned)):
            _report(f"pass@{k}", pass_at(k, len(earned), right))


def _report(name: str, value: float) -> None:
    current().mean(f"evaluation/{name}", value)
    current().mean(f"evaluation/{name}/squared", value * value)
    current().add(f"evaluation/{name}/problems", 1)
