"""The tokens of the highest entropy, exact over all ranks, and the entropies that an engine gives."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from reported import reported

from distflow.config.load import load
from distflow.data.batch import Batch, Ragged
from distflow.data.exchange import gather
from distflow.errors import InvalidInput
from distflow.telemetry.metrics import current
from planners import plan
from workers.functions.entropy import high_entropy


class Summed:
    def total(self, values):
        if dist.is_initialized():
            dist.all_reduce(values)
        return values


def all_rows() -> Batch:
    """A thousand tokens of forty rows, of which every tenth is not trained, with many equal entropies."""
    generator = torch.Generator().manual_seed(1)
    values = torch.rand(1000, generator=generator).square() * 6
    values[torch.randperm(1000, generator=generator)[:300]] = 1.25
    tokens = Ragged(values, torch.full((40,), 25))
    mask = tokens.with_values(torch.arange(1000) % 10 != 3)
    return Batch(torch.arange(40), {"entropies": tokens, "mask": mask})


def chosen(quantile: float, ranks: int) -> tuple[list[bool], dict]:
    """Whether each of this rank's tokens is high, of rows dealt out in an uneven way."""
    rows = all_rows()
    mine = rows.slice(0, 7) if dist.get_rank() else rows.slice(7 if ranks > 1 else 0, 40)
    reported()
    found = high_entropy(Summed(), mine, quantile)["high_entropy"].values.tolist()
    return found, current().collect(gather)


@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.8, 0.999])
def test_the_highest_are_those_of_a_sorted_list_on_any_number_of_ranks(quantile):
    rows = all_rows()
    values, mask = rows["entropies"].values, rows["mask"].values
    count = math.ceil((1 - Fraction(str(quantile))) * int(mask.sum()))
    least = values[mask].sort(descending=True).values[count - 1]
    expected = (mask & (values >= least)).tolist()
    ((one, metrics),) = run_ranks(1, chosen, quantile, 1)
    (second, others), (first, _) = run_ranks(2, chosen, quantile, 2)
    assert one == first + second == expected
    assert metrics == others
    assert metrics["policy/entropy_bound"] == float(least)
    assert metrics["policy/high_entropy"] == pytest.approx(sum(expected) / 900)


def test_without_a_trained_token_none_is_high():
    rows = all_rows()
    none = rows.with_columns({"mask": rows["mask"].with_values(torch.zeros(1000, dtype=torch.bool))})
    assert not high_entropy(Summed(), none, 0.8)["high_entropy"].values.any()
    assert not len(high_entropy(Summed(), rows.slice(0, 0), 0.8)["high_entropy"].values)


def test_a_quantile_without_a_node_that_gives_entropies_is_refused_with_its_line():
    for value, says in ((0.8, "setting `entropy_quantile` needs column `actor_entropies`"), (1.0, "below 1, not 1.0")):
        with pytest.raises(InvalidInput) as caught:
            plan(load("grpo.yaml", None, [f"nodes.update.with.entropy_quantile={value}"]), 2)
        assert str(caught.value).startswith(f"--set nodes.update.with.entropy_quantile={value}: node `update`")
        assert says in str(caught.value)


@pytest.mark.parametrize("bits", [0x7FC0_0000, -0x40_0000, 0x7FFF_FFFF, -1])
def test_what_is_not_a_number_is_high_so_that_the_gradient_says_so(bits):
    """Whatever the bits, with a sign or without: counting must not end one rank before the others."""
    rows = all_rows()
    values, trained = rows["entropies"].values.clone(), rows["mask"].values
    broken = trained & (torch.arange(1000) % 250 == 0)
    values.view(torch.int32)[broken] = bits
    values[5] = -0.0
    found = high_entropy(Summed(), rows.with_columns({"entropies": rows["entropies"].with_values(values)}), 0.8)
    assert 0 < values[broken].isnan().sum() == broken.sum()
    assert found["high_entropy"].values[broken].all()
