"""How many tokens of a task's columns count, and which seconds count as sampling."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import torch

from distflow.data.batch import Batch, Ragged
from distflow.plan import Layout, Task
from distflow.telemetry.metrics import Metrics, recording
from workers.engines.role_engines import RoleEngines
from workers.execution import SAMPLED, TrainExecutor, _distinct_tokens


def test_a_prompt_that_neighbours_share_is_read_once() -> None:
    rows = [[1, 2], [1, 2], [1, 3], [1, 3, 4], [1, 3, 4], [1, 2], [], [], [5], [5]]
    prompts = Ragged(torch.tensor(sum(rows, [])), torch.tensor([len(row) for row in rows]))
    assert _distinct_tokens(prompts) == 2 + 2 + 3 + 2 + 1
    assert _distinct_tokens(Ragged(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))) == 0


def test_waits_for_other_ranks_and_loading_of_weights_are_no_seconds_of_sampling(monkeypatch) -> None:
    """Before the engine is entered another rank is waited for and weights are loaded; afterwards memory is swapped."""
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    class Swap:
        @contextlib.contextmanager
        def sampling(self):
            now[0] += 50
            yield "the rollout"
            now[0] += 20

    def generate(engine, *, seconds: float):
        with engine.sampling() as rollout:
            assert rollout == "the rollout"
            now[0] += seconds
        return torch.zeros(3)

    role = RoleEngines.__new__(RoleEngines)
    role.shared_engine, role.rollout, role.engine_swap, role.sampling_seconds = None, object(), Swap(), 7.0
    role.draw, role.stream = 0, None
    task = Task("rollout", "actor", "MODEL_INFERENCE", "generate", {"seconds": 3.0}, (), ("column",), Layout(1),
                samples=True)
    status = SimpleNamespace(set=lambda *_: None, rank=0)
    executor = TrainExecutor(SimpleNamespace(chain=lambda rank: [task], early=None), {"rollout": generate},
                             {"actor": role}, 0, status, 0)
    metrics = Metrics()
    with recording(metrics):
        executor.run(task, Batch(torch.arange(3)))
    metrics.collect(lambda mine: [mine])
    assert metrics.of_ranks[0][SAMPLED] == (3.0, 3)
