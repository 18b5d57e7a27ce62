"""One small algorithm in any layout: what its steps report and which weights they leave."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from distflow.config.load import load
from distflow.config.spec import Spec
from distflow.contracts.functions import load_function
from distflow.data.exchange import gather
from distflow.plan import Plan
from distflow.recovery.worker_process import WorkerContext
from distflow.telemetry.metrics import current
from planners import plan as make_plan
from workers.context import RankContext
from workers.loop import run_chain
from workers.train_context import TrainContext

DAG = """
name: small
imports: [preferring]
roles:
  actor: {trained: true}
  reference: {copy_of: actor}
nodes:
  rollout:   {role: actor,     type: MODEL_INFERENCE, function: generate, with: {group_size: 2}}
  old:       {role: actor,     type: MODEL_INFERENCE, function: logprobs, dependencies: [rollout]}
  reference: {role: reference, type: MODEL_INFERENCE, function: logprobs, dependencies: [rollout]}
  advantage: {role: actor,     type: COMPUTE, function: "preferring:prefer", dependencies: [rollout]}
  update:    {role: actor,     type: MODEL_TRAIN, function: policy_update, dependencies: [advantage, old, reference],
              with: {clip: 0.2, kl: 0.1}}
"""
PREFERRING = """
from distflow import Ragged, node
from torch import Tensor

@node(writes="advantages")
def prefer(responses: Ragged) -> Tensor:
    \"\"\"Even tokens are better than odd ones.\"\"\"
    liked = (responses.values % 2 == 0).float() - 0.5
    return liked.new_zeros(len(responses)).index_add(0, responses.row_of, liked)
"""
RUN = """
steps: 2
roles:
  actor:
    model: {architecture: qwen3, layers: 2, hidden: 128, heads: 4, kv_heads: 4}
    learning_rate: 1e-3
    generation: {max_new_tokens: 6}
    micro_batch_tokens: 64
data: {train: data.jsonl, batch: 5, max_prompt_tokens: 12, max_target_tokens: 8}
"""


def write(folder: Path) -> None:
    """The files of the algorithm."""
    (folder / "dag.yaml").write_text(DAG)
    (folder / "run.yaml").write_text(RUN)
    (folder / "preferring.py").write_text(PREFERRING)
    lines = ['{"question": "%s", "answer": "no"}' % ("why " * (1 + row % 3) + str(row)) for row in range(11)]
    (folder / "data.jsonl").write_text("\n".join(lines))


def train_context(spec: Spec, plan: Plan, folder: Path) -> TrainContext:
    """What this rank trains with, on the CPU; it writes no files."""
    group = SimpleNamespace(rank=dist.get_rank(), ranks=plan.ranks)
    silent = SimpleNamespace(set=lambda *doing, **more: None, rank=group.rank)
    functions = {task.node: load_function(task.function) for task in plan.tasks}
    context = RankContext(spec, plan, group, folder, "cpu", False, None, "", known_change=0)
    return TrainContext(context, WorkerContext(), silent, functions, writes=False)


def run_steps(folder: str, overrides: list[str]) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """What each step reports, with the rows that this rank trained on, and the weights after the last one, from the
    first rank that has them; for `run_ranks`. """
    if folder not in sys.path:
        sys.path.insert(0, folder)
    torch.manual_seed(0)
    spec = load(f"{folder}/dag.yaml", f"{folder}/run.yaml", overrides)
    current().collect(gather)
    ctx = train_context(spec, make_plan(spec, dist.get_world_size()), Path(folder))
    reports = []
    for step in range(spec.run.steps):
        ctx.begin(step)
        ctx.next_prompts()
        run_chain(ctx.chain, ctx.buffer, ctx.executor, ctx.draw_more)
        mine = len(ctx.buffer.step_columns["rollout", ctx.chain[-1].layout])
        reports.append({**current().collect(gather), "rows of this rank": mine, "resident": resident_bytes(ctx),
                        "held": parameters_of(ctx)})
    actor = ctx.roles["actor"]
    weights = {name: weight.clone() for name, weight in actor.engine.export()} if actor.has_engine else {}
    return reports, weights if dist.get_rank() == actor.writer else {}


def resident_bytes(ctx: TrainContext) -> dict[str, int]:
    """Bytes on the device of each model that trains or infers here, while no node computes with it."""
    return {name: sum(tensor.untyped_storage().nbytes() for tensor in role._trainer.resident())
            for name, role in ctx.roles.items() if role._trainer is not None}


def parameters_of(ctx: TrainContext) -> dict[str, int]:
    """How many numbers this rank holds of each model that trains or infers, and of each that samples."""
    found = {}
    for name, role in ctx.roles.items():
        if role.has_engine:
            found[name] = sum(shard.to_local().numel() for shard in role.engine.policy.model.parameters())
        if role.rollout is not None and not role.rollout.absent:
            found[f"{name}: rollout"] = sum(weight.numel() for weight in role.rollout.model.parameters())
    return found
