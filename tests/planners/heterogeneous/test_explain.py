"""What `--explain` says of a placement: weights and memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from distflow.config.load import load
from distflow.config.spec import Spec
from planners.heterogeneous.efficiency import BETWEEN
from planners.heterogeneous.explain import (
    memory_of,
    weight_syncs,
)
from planners.heterogeneous.layouts import CostedProblem
from planners.heterogeneous.search import search
from planners.heterogeneous.workload import problem_of

MODEL = "{architecture: qwen3, layers: 4, hidden: 512, heads: 8, kv_heads: 4}"
SIZES = [f"roles.actor.model={MODEL}", "data.batch=64"]
CLUSTER = {"name": "unlike", "links": {"zone": {"gb_s": 1, "latency_us": 10}},
           "devices": {name: {"tflops": {"float32": speed}, "memory_gib": 16, "memory_gb_s": 100 * speed}
                       for name, speed in (("whole", 3), ("third", 1))},
           "machines": {"quick": {"device": "whole", "devices": 2, "count": 2, "inside": {"gb_s": 10}},
                        "slow": {"device": "third", "devices": 2, "inside": {"gb_s": 10}}}}


@pytest.fixture
def spec_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    return lambda *more: load("grpo", None, [*SIZES, *more], "cluster.yaml")


def placed(spec: Spec):
    costed = CostedProblem(problem_of(spec))
    *_, last = search(costed.problem, budget=400, costed=costed)
    assert last.placement
    return costed, last.placement


def test_weights_and_memory(spec_of):
    spec = spec_of()
    costed, placement = placed(spec)
    sync, = weight_syncs(costed, placement)
    parameters = costed.problem.tasks[0].parameters
    assert (sync.source, sync.target, sync.nbytes) == ("update", "rollout", 2 * parameters)  # auto: counted as halves
    assert sync.seconds == pytest.approx(sync.nbytes / (1e9 * BETWEEN), rel=0.01)
    memory = list(memory_of(costed, placement))
    assert {task for task, *_ in memory} == {"rollout", "reference", "update"}
    assert all(0 < fills <= room == 0.9 * 16 * 2**30 for *_, fills, room in memory)
