"""The number of ranks and the layout of nodes change nothing of what is sampled and learned: one table of all cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT
from harness import metrics_of as steps_of
from safetensors.torch import load_file
from test_conversations import TOOLS, tools_dag
from test_critics import ONLINE, PPO, REWARD_MODEL, write_pairs
from test_critics import PAIRS as WITH_PAIRS
from test_dropped_rows import DAG as FILTERED
from test_dropped_rows import FILTERS
from test_images import SEEING, write_pictures
from test_lora import ADAPTERS, LORA

Steps = dict[int, dict[str, Any]]
"""Metrics of a run by step."""

EXACT = ("response/fingerprint", "filter/")
CLOSE = ("loss", "value/loss", "value/mean", "preference/margin", "preference/pairs", "environment/reward",
         "reward/mean", "policy/entropy_bound", "mismatch/effective_samples", "mismatch/perplexity_ratio")
RELATIVE = ("grad_norm", "value/grad_norm")
"""Beginnings of the names of metrics that are compared: equal, within 1e-5, and within a thousandth."""

TINY = ("--run-file", "tiny.yaml")
GRPO = ("--dag", "grpo.yaml", *TINY)
CORRECTED = """
name: corrected
imports: [brevity]
roles:
  actor: {trained: true}
nodes:
  rollout:   {role: actor,  type: MODEL_INFERENCE, function: generate, with: {group_size: 4}}
  old:       {role: actor,  type: MODEL_INFERENCE, function: logprobs,             dependencies: [rollout]}
  weigh:     {role: actor,  type: COMPUTE,         function: truncated_importance, dependencies: [old],
              with: {level: token, cap: 5.0}}
  reject:    {role: actor,  type: COMPUTE,         function: reject_mismatch,      dependencies: [weigh]}
  reward:    {role: reward, type: COMPUTE,         function: score,                dependencies: [rollout],
              with: {reward: brevity}}
  advantage: {role: actor,  type: COMPUTE,         function: group_advantage,      dependencies: [reward]}
  update:    {role: actor,  type: MODEL_TRAIN,     function: policy_update,        dependencies: [advantage, reject],
              with: {mini_batches: 2}}
"""
ANSWERS = """
from distflow import reward

@reward
def short(completion, answer):
    return 1.0 / (1 + len(completion))

@reward
def echo(completion, answer):
    return float(len(completion))
"""


def moved(*nodes: str) -> tuple[str, ...]:
    """Settings by which some nodes run on one rank, so that rows move."""
    return tuple(f"--set=layouts.{node}.dp=1" for node in nodes)


def rows_moved(runs: list[Steps], folder: Path) -> None:
    for step, metrics in runs[-1].items():
        assert metrics["data/bytes_sent"] > 0
        assert "data/bytes_sent" not in runs[1][step]


def images_moved(runs: list[Steps], folder: Path) -> None:
    assert all(metrics["data/bytes_sent"] > 0 for metrics in runs[1].values())


def corrections_are_neutral(runs: list[Steps], folder: Path) -> None:
    first = runs[0][1]
    assert first["importance/mean"] == pytest.approx(1.0, abs=1e-4)
    assert first["importance/rejected"] == first["importance/truncated"] == 0.0


def baselines_agree(runs: list[Steps], folder: Path) -> None:
    assert runs[0][1]["reward/mean/baseline"] > 0


def adapters_alone_move(runs: list[Steps], folder: Path) -> None:
    """A reference that is the base under the adapters gives what a model of its own gives."""
    _, two, two_models = runs
    for step, metrics in two.items():
        assert metrics["loss"] == two_models[step]["loss"]
        assert metrics.get("weights/bytes") == (ADAPTERS * 4 if step > 1 else None)  # none before an update
    assert any(metrics["policy/kl_reference"] > 1e-5 for metrics in two.values())


def prompts_are_drawn_again(runs: list[Steps], folder: Path) -> None:
    """Two of three prompts stay, so a batch of four draws twice and four prompts are trained, less a fifth of rows."""
    for metrics in runs[0].values():
        assert metrics["filter/filter/draws"] == 2
        assert metrics["filter/filter/prompts_short"] == 0
        assert metrics["filter/lost/dropped"] > 0


def few_tokens_are_learnt(runs: list[Steps], folder: Path) -> None:
    assert all(0.2 <= metrics["policy/high_entropy"] < 0.3 for metrics in runs[0].values())


def three_turns(runs: list[Steps], folder: Path) -> None:
    assert all(metrics["environment/turns"] == 3 for metrics in runs[0].values())


def each_role_learns(runs: list[Steps], folder: Path) -> None:
    for metrics in runs[0].values():
        assert metrics["reward/mean/solved"] <= 1 < metrics["reward/mean/revised"]
        assert metrics["grad_norm/train_solver"] > 0 < metrics["grad_norm/train_reviser"]
    models = [load_file(folder / f"run0/model-{role}/model.safetensors") for role in ("actor", "reviser")]
    assert any(not models[0][name].equal(models[1][name]) for name in models[0])


@dataclass(frozen=True)
class Case:
    """A DAG with settings; `more` are the further settings of each run: of one on one rank first, then of two ranks."""

    dag: tuple[str, ...]
    steps: int = 3
    batch: int = 5
    more: tuple[tuple[str, ...], ...] = ((), ())
    check: Callable[[list[Steps], Path], None] = lambda runs, folder: None


SEEN = ((), ("--set", "roles.actor.micro_batch_tokens=16", *moved("rollout", "reference", "reward", "advantage")))
OWN_REFERENCE = ("--set", "roles.reference={model: {architecture: qwen3, layers: 2, hidden: 64, heads: 2, "
                 "kv_heads: 1}}")
CASES = {
    "grpo": Case(GRPO, more=((), (), moved("reward", "advantage", "reference")), check=rows_moved),
    "corrected": Case(("--dag", "corrected.yaml", *TINY), 2, check=corrections_are_neutral),
    "high entropy": Case(("--dag", "entropy.yaml", *TINY), more=(
        (), (), ("--set", "roles.actor.micro_batch_tokens=40", *moved("entropies"))), check=few_tokens_are_learnt),
    "remax": Case(("--dag", "remax_brief.yaml", *TINY), 2, check=baselines_agree),
    "ppo": Case(PPO, more=((), ("--set", "layouts={critic: {first: 1}}"))),
    "dpo": Case(("--dag", "dpo.yaml", *WITH_PAIRS)),
    "reward model": Case(REWARD_MODEL),
    "online dpo": Case(ONLINE),
    "adapters": Case(LORA, 4, more=((), (), OWN_REFERENCE), check=adapters_alone_move),
    "dropped rows": Case(("--dag", "filtered.yaml", *TINY), 4, 4, ((), (), moved("lost", "filter", "reference")),
                         prompts_are_drawn_again),
    "conversations": Case(("--dag", "tools.yaml", *TINY), check=three_turns),
    "two roles": Case(("--dag", "pair.yaml", *TINY), 2, 3, check=each_role_learns),
    "images": Case(("--dag", "grpo.yaml", *SEEING), 4, more=SEEN, check=images_moved),
    "images, adapters": Case(("--dag", "grpo.yaml", *SEEING, "--set", "roles.actor.lora={rank: 4}"), 4, more=SEEN,
                             check=images_moved),
}


def with_brief_reward(name: str) -> str:
    """A shipped DAG with several answers to a prompt and a reward that a model with random weights earns."""
    text = (ROOT / f"dags/{name}.yaml").read_text().replace("group_size: 1}", "group_size: 4}")
    return text.replace("function: score,", "function: score, with: {reward: brevity},") + "imports: [brevity]\n"


@pytest.fixture
def folder(workspace):
    """The workspace with the files of all cases."""
    pair = (ROOT / "dags/solver_reviser.yaml").read_text() + "imports: [answers]\n"
    for node, reward in (("solve", "short"), ("revise", "echo")):
        pair = pair.replace(f"function: score, dependencies: [{node}]",
                            f"function: score, with: {{reward: {reward}}}, dependencies: [{node}]")
    entropy = with_brief_reward("grpo").replace("  advantage: {", """  entropies: {role: actor, type: MODEL_INFERENCE,
              function: entropies, dependencies: [rollout]}
  advantage: {""").replace("[advantage, reference]", "[advantage, reference, entropies]").replace(
        "kl: 0.001}", "kl: 0.001, entropy_quantile: 0.8}")
    texts = {"corrected.yaml": CORRECTED, "remax_brief.yaml": with_brief_reward("remax"), "filters.py": FILTERS,
             "entropy.yaml": entropy,
             "filtered.yaml": FILTERED, "tools.py": TOOLS, "tools.yaml": tools_dag(trouble=False),
             "answers.py": ANSWERS, "pair.yaml": pair}
    for name, text in texts.items():
        (workspace / name).write_text(text)
    write_pairs(workspace)
    return workspace


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.smoke if name == "grpo" else ())
                                  for name in CASES])
def test_one_and_two_ranks_compute_the_same(launch, folder, name):
    case = CASES[name]
    if SEEING[-1] in case.dag:
        write_pictures(folder)
    for run, more in enumerate(case.more):
        launch(2 if run else 1, *case.dag, "--name", f"run{run}", "--set", f"steps={case.steps}", "--set",
               f"data.batch={case.batch}", *more, torchrun=name == "grpo" and run == 1)
    runs = [steps_of(folder / f"runs/run{run}") for run in range(len(case.more))]
    assert set(runs[0]) == set(range(1, case.steps + 1))
    for other in runs[1:]:
        require_equal(other, runs[0])
    case.check(runs, folder / "runs")


def require_equal(found: Steps, expected: Steps) -> None:
    for step, metrics in expected.items():
        compared = [metric for metric in metrics if metric.startswith((*EXACT, *CLOSE, *RELATIVE))]
        assert any(metric.startswith(("grad_norm", "value/grad_norm")) and metrics[metric] > 0 for metric in compared)
        for metric in compared:
            close = {"rel": 1e-3, "abs": 1e-5} if metric.startswith(RELATIVE) else {"abs": 1e-5}
            wanted = metrics[metric] if metric.startswith(EXACT) else pytest.approx(metrics[metric], **close)
            assert found[step][metric] == wanted, (step, metric)
        assert all(value < 1e-4 for metric, value in found[step].items() if metric.startswith("mismatch/logprob_max"))
