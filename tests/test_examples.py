"""The examples: short, without mistakes, and right. That they learn is shown in tests/dags/test_learning.py."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from harness import ROOT

from distflow.data.batch import Ragged
from distflow.schema.spec import load
from planners import plan

EXAMPLES = sorted((ROOT / "examples").glob("*/*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_one_file_and_less_than_thirty_lines_of_python(path):
    assert plan(load(str(path)), 2).ranks == 2
    assert sum(len(module.read_text().splitlines()) for module in path.parent.glob("*.py")) < 30


def test_the_optimal_baseline_weighs_rewards_by_length():
    spec = importlib.util.spec_from_file_location("opo", ROOT / "examples/opo/opo.py")
    opo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(opo)
    responses = Ragged.from_rows([torch.zeros(length) for length in (1, 3, 2, 0)])
    advantages = opo.optimal_baseline(torch.tensor([1.0, 0.0, 1.0, 2.0]), torch.tensor([7, 7, 2, 2]), responses)
    assert advantages.tolist() == [0.75, -0.25, 0.0, 1.0]
