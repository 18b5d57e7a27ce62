"""Bytes that the planner predicts, and that the databuffer counts when rows are as long as the run allows."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
import yaml
from harness import ROOT
from ranks import run_ranks

from distflow.config.load import load
from distflow.data.batch import Batch, Ragged, encode_text
from distflow.data.databuffer import Databuffer
from distflow.data.exchange import gather
from distflow.plan import SOURCE, Plan
from distflow.telemetry.metrics import Metrics
from planners import plan as make_plan
from planners.transfers import bytes_through_ranks

ROWS, PROMPT, RESPONSE, GROUP = 96, 50, 70, 4


def of_length(rows: int, length: int, dtype: torch.dtype = torch.int64) -> Ragged:
    return Ragged(torch.ones(rows * length, dtype=dtype), torch.full((rows,), length))


def written(name: str, rows: int):
    """Columns at their longest, as the functions of `grpo.yaml` write them."""
    if name == "completions":
        return encode_text("abcd" * RESPONSE for _ in range(rows))
    if name in ("rewards", "advantages"):
        return torch.ones(rows)
    if name in ("keep", "completions.cut_thoughts"):
        return torch.ones(rows, dtype=torch.bool)
    forms = {"responses": torch.int64, "versions": torch.int32}
    return of_length(rows, RESPONSE, forms.get(name, torch.float32))


def one_step(plan: Plan) -> dict[str, float]:
    rank, metrics = dist.get_rank(), Metrics()
    buffer = Databuffer(plan, rank, metrics)
    share = plan.source.share(rank)
    first, last = (0, 0) if share is None else (ROWS * part // plan.source.dp for part in (share, share + 1))
    ids = torch.arange(first, last)
    answers = encode_text("abcd" * PROMPT for _ in ids)
    buffer.start(Batch(ids, {"prompts": of_length(len(ids), PROMPT), "answers": answers, "group": ids}))
    for task in plan.tasks:
        inputs = buffer.take(task)
        ids = inputs.repeat(task.repeats).ids
        buffer.put(task, {name: written(name, len(ids)) for name in task.writes} if len(ids) else {}, ids)
    return metrics.collect(gather)


@pytest.mark.parametrize(("layouts", "moved"), [
    ({"reward": {"dp": 1}, "advantage": {"dp": 3}}, {"rollout/reward", "reward/advantage", "advantage/update",
                                                     "source/reward", "source/advantage"}),
    ({"reward": {"dp": 2}}, {"rollout/reward", "reward/advantage", "source/reward"}),
])
def test_the_plan_expects_what_is_moved(tmp_path, layouts, moved):
    run = {"steps": 1, "roles": {"actor": {"model": {"architecture": "qwen3"},
                                           "generation": {"max_new_tokens": RESPONSE}}},
           "data": {"train": "data.jsonl", "batch": ROWS, "max_prompt_tokens": PROMPT, "max_target_tokens": PROMPT},
           "layouts": layouts}
    (tmp_path / "data.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    spec = load(str(ROOT / "dags/grpo.yaml"), str(tmp_path / "run.yaml"), [f"nodes.rollout.with.group_size={GROUP}"])
    plan = make_plan(spec, 4)
    metrics = run_ranks(4, one_step, plan)[0]
    expected = {f"{move.producer}/{task.node}": move for task in plan.tasks for move in task.transfers
                if move.bytes_per_step}
    assert set(expected) == moved
    assert {name.removeprefix("data/bytes/") for name in metrics if name.startswith("data/bytes/")} == moved
    layouts = {SOURCE: plan.source} | {task.node: task.layout for task in plan.tasks}
    for edge, move in expected.items():
        copies = min(GROUP, layouts[edge.partition("/")[2]].dp) if move.producer == SOURCE else 1
        moves = metrics[f"data/bytes/{edge}"]  # of a prompt whose samples are in one share, only one copy
        assert 0.95 / copies * move.bytes_per_step <= moves <= 1.05 * move.bytes_per_step, edge
    through: Counter[int] = Counter()
    for edge, move in expected.items():
        reader = layouts[edge.partition("/")[2]]
        through.update(bytes_through_ranks(move.bytes_per_step, layouts[move.producer], reader))
    assert 0.75 < metrics["data/bytes_of_busiest_rank"] / max(through.values()) < 1.05
