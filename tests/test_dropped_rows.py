"""Whole runs that drop rows and draw prompts again: the same on any number of ranks, and after a resume."""

import pytest

FILTERS = """
import torch
from torch import Tensor
from distflow import node

@node(writes="keep")
def lose_some(row: Tensor, completions: list[str]) -> Tensor:
    '''A sample in five has no reward.'''
    return row % 5 != 3

@node(writes="keep", refills="draws", keep_together="group")
def even_prompts(group: Tensor, rewards: Tensor, *, draws: int = 4) -> Tensor:
    return group % 3 != 1

@node(writes="keep")
def nothing(row: Tensor) -> Tensor:
    return torch.zeros(len(row), dtype=torch.bool)
"""
DAG = """
name: filtered
roles:
  actor: {trained: true}
  reference: {copy_of: actor}
imports: [brevity, filters]
nodes:
  rollout:   {role: actor,     type: MODEL_INFERENCE, function: generate, with: {group_size: 4}}
  reward:    {role: reward,    type: COMPUTE,         function: score, with: {reward: brevity}, dependencies: [rollout]}
  lost:      {role: reward,    type: COMPUTE,         function: lose_some,       dependencies: [rollout]}
  filter:    {role: actor,     type: COMPUTE,         function: even_prompts,    dependencies: [reward, lost]}
  reference: {role: reference, type: MODEL_INFERENCE, function: logprobs,        dependencies: [rollout]}
  advantage: {role: actor,     type: COMPUTE,         function: group_advantage, dependencies: [filter]}
  update:    {role: actor,     type: MODEL_TRAIN,     function: policy_update,   dependencies: [advantage, reference],
              with: {clip: 0.2, kl: 0.001}}
"""
RUN = ("--dag", "filtered.yaml", "--run-file", "tiny.yaml", "steps=4")


@pytest.fixture(autouse=True)
def files(workspace):
    (workspace / "filters.py").write_text(FILTERS)
    (workspace / "filtered.yaml").write_text(DAG)


def test_a_step_that_loses_all_rows_trains_nothing_and_says_so(launch, workspace):
    done = launch(2, *RUN, "--name", "none", "steps=2", "nodes.lost.function=nothing")
    assert "step 1: node `filter` left 0 of 4 prompts in 4 draws; the step went on with them" in done.stdout
    lines = (workspace / "runs/none/metrics.jsonl").read_text()
    assert '"filter/filter/prompts_short": 4' in lines
    assert '"grad_norm"' not in lines
    assert done.stdout.count("node `lost` has dropped all 16 rows, so that the step trains nothing") == 1
    assert (workspace / "runs/none/events.jsonl").read_text().count('"event": "all_dropped"') == 1
