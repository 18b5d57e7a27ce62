"""How many tokens of a task's columns count, which seconds count as sampling, and what runs on each prompt alone."""

from __future__ import annotations

import threading
from collections import defaultdict
from types import SimpleNamespace

import torch

from distflow.config.load import load
from distflow.data.batch import Batch, Ragged, encode_text
from distflow.plan import RowLineage
from distflow.telemetry.metrics import Metrics, recording
from planners import plan
from workers.execution import _distinct_tokens
from workers.rollout import RolloutExecutor


def test_a_prompt_that_neighbours_share_is_read_once() -> None:
    rows = [[1, 2], [1, 2], [1, 3], [1, 3, 4], [1, 3, 4], [1, 2], [], [], [5], [5]]
    prompts = Ragged(torch.tensor(sum(rows, [])), torch.tensor([len(row) for row in rows]))
    assert _distinct_tokens(prompts) == 2 + 2 + 3 + 2 + 1
    assert _distinct_tokens(Ragged(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))) == 0


def test_ranks_that_sample_read_each_prompt_alone_and_reward_all_together() -> None:
    """So that what a model says of a row does not depend on which prompts came beside it; rewards run side by side."""
    spec = load("grpo", None, ["mode=async", "groups.inference={reference: rollout}"], None)
    chain = {task.node: task for task in plan(spec, 2).groups[1].plan.tasks}
    calls, phases, seconds = [], [], defaultdict(float)
    engine = SimpleNamespace(idle_phase="waiting", gpu=None)

    def logprobs(role, prompts: Ragged, responses: Ragged) -> Ragged:
        phases.append(engine.idle_phase)
        calls.append(("reference", len(prompts)))
        return responses.with_values(responses.values.float() * 2)

    def score(**columns: object) -> tuple:
        calls.append(("reward", len(next(iter(columns.values())))))
        return tuple(torch.zeros(24) for _ in chain["reward"].writes)

    role = SimpleNamespace(stream=None, of_draw=lambda draw: role)
    ctx = SimpleNamespace(plan=plan(spec, 2).groups[1].plan, functions={"reference": logprobs, "reward": score},
                          roles={"reference": role, "reward": role, "actor": role}, spec=spec, doing="",
                          lineage=RowLineage(chain.values(), plan(spec, 2).groups[1].plan.source),
                          engines={"actor": engine}, computing=threading.Lock(), head=[chain["rollout"]],
                          seconds_of=lambda step: seconds)
    rows = Ragged(torch.arange(72), torch.full((24,), 3))
    inputs = Batch(torch.arange(8, 32), {"prompts": rows, "responses": rows})
    read = {column.parameter: encode_text(["text"] * 24) if column.form == "list[str]" else torch.arange(24)
            for column in chain["reward"].reads}
    executor = RolloutExecutor(ctx, 1, None)
    with recording(Metrics()):
        columns, ids = executor.run(chain["reference"], inputs)
        executor.run(chain["reward"], inputs.with_columns(read))
    assert torch.equal(columns["reference_logprobs"].values, torch.arange(72) * 2.0)
    assert torch.equal(ids, inputs.ids)
    assert calls == [("reference", 8)] * 3 + [("reward", 24)], "a prompt has 8 samples"
    assert (phases, engine.idle_phase) == (["inference"] * 3, "waiting")
    assert seconds.keys() == {"reference", "reward"}
