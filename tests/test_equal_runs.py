"""Whole runs that have the samples, rewards and losses of one rank in mode sync, wherever they compute and whoever
dies: one table of all cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from harness import REWARD, ROOT, SEED_WITH_CLEAR_DRAWS, events_of, metrics_of
from test_conversations import TOOLS, tools_dag

TINY = ("--run-file", "tiny.yaml")
GRPO = ("--dag", "grpo.yaml", *TINY)
ASYNC = ("mode=async", "staleness=0")
ALONE = ("mode=semi_sync", "groups.rollout=0", "staleness=0")
UNEVEN = f"{REWARD}\n\n@reward\ndef uneven(completion, answer):\n" \
    "    return brevity(completion, answer) * (len(answer) % 2)\n"
"""So that some groups teach nothing."""
READ = (*GRPO, "nodes.update.with.kl=0.5", "steps=3")
METRICS = ("reward/mean", "environment/reward", "loss", "grad_norm", "policy/kl_reference", "value/loss")


def pays(dag: str, reward: str) -> tuple[str, str]:
    """The file of a shipped DAG with this reward."""
    text = (ROOT / f"dags/{dag}.yaml").read_text().replace("function: score,",
                                                           f"function: score, with: {{reward: {reward}}},")
    return f"{dag}.yaml", text + "imports: [brevity]\n"


def pulled_by_each(run: Path, steps: dict[int, dict[str, Any]]) -> None:
    assert all(step["mismatch/logprob_max"] < 1e-5 and step["staleness/max"] == 0 for step in steps.values())
    assert {event["rank"] for event in events_of(run, "weights_pulled")} == {2, 3}, "each rank that samples"


def hidden(run: Path, steps: dict[int, dict[str, Any]]) -> None:
    seconds = [(step[f"seconds/{node}/hidden"], step[f"seconds/{node}"]) for step in steps.values()
               for node in ("reference", "values")]
    assert any(part > 0 for part, _ in seconds), "no prompt was done before the last one"
    assert all(part <= whole for part, whole in seconds)


def draws_again(run: Path, steps: dict[int, dict[str, Any]]) -> None:
    assert max(step["filter/filter/draws"] for step in steps.values()) > 1


def talked(run: Path, steps: dict[int, dict[str, Any]]) -> None:
    assert {(step["staleness/max"], step["environment/turns"]) for step in steps.values()} == {(0, 3)}
    assert max(step["mismatch/logprob_max"] for step in steps.values()) < 1e-4
    assert [file.name for file in sorted(run.glob("trajectories/*"))] == ["rank1.jsonl", "rank2.jsonl"]


@dataclass(frozen=True)
class Case:
    """A run on so many ranks: arguments that the plain run has too, and its own; the ranks whose workers die."""

    ranks: int
    base: tuple[str, ...]
    own: tuple[str, ...]
    files: tuple[tuple[str, str], ...] = ()
    died: set[int] = field(default_factory=set)
    check: Callable[[Path, dict[int, dict[str, Any]]], None] = lambda run, steps: None


CASES = {
    "async": Case(4, (*GRPO, *SEED_WITH_CLEAR_DRAWS), ASYNC, check=pulled_by_each),
    "async, adapters": Case(4, (*GRPO, *SEED_WITH_CLEAR_DRAWS, "roles.actor.lora={rank: 4}"), ASYNC,
                            check=pulled_by_each),
    "a reference on ranks of its own, of which one dies": Case(
        4, READ, (*ASYNC, "groups={rollout: 1, inference: {reference: 2}}", "layouts.reference={dp: 2, rows: [3, 1]}",
                  "faults=[{kind: kill, group: inference, phase: inference, step: 2}]"), died={2, 3}),
    "a reference on ranks that sample, of which one dies": Case(
        3, READ, (*ASYNC, "groups={rollout: 2, inference: {reference: rollout}}",
                  "faults=[{kind: kill, group: rollout, rank: 1, phase: generating, step: 2}]"), died={1}),
    "semi_sync": Case(  # at this rate rounding does not decide what is sampled
        3, (*GRPO, "roles.actor.generation.max_new_tokens=96", "data.batch=8", "steps=2",
            "roles.actor.learning_rate=1e-6"),
        ("mode=semi_sync", "groups.rollout=1", "staleness=0", "roles.actor.generation.batch_rows=8")),
    "one rank does all": Case(1, (*GRPO, *SEED_WITH_CLEAR_DRAWS), ALONE),
    "two ranks do all": Case(2, (*GRPO, *SEED_WITH_CLEAR_DRAWS), ALONE),
    "models look at prompts while others are sampled": Case(
        3, ("--dag", "ppo.yaml", *TINY, "roles.actor.model.kv_heads=2", "steps=3"),
        (*ASYNC, "groups.rollout=1", "roles.actor.generation.batch_rows=8", "layouts.update.tp=2"),
        (pays("ppo", "brevity"),), check=hidden),
    "a filter draws again": Case(2, ("--dag", "dapo.yaml", *TINY, "steps=3"), ASYNC,
                                 (pays("dapo", "uneven"), ("brevity.py", UNEVEN)), check=draws_again),
    "samples of two kinds": Case(2, ("--dag", "remax.yaml", *TINY, "steps=3"), ASYNC,
                                 (pays("remax", "uneven"), ("brevity.py", UNEVEN))),
    "conversations": Case(3, ("--dag", "talk.yaml", *TINY, "steps=3", "data.batch=5"), (*ASYNC, "groups.rollout=2"),
                          (("talk.yaml", tools_dag(False)), ("tools.py", TOOLS)), check=talked)}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.smoke if name in ("async", "semi_sync") else ())
                                  for name in CASES])
def test_run_equals_one_rank_in_mode_sync(launch, workspace, run_once, name):
    case, run = CASES[name], workspace / "runs/run"
    theirs = metrics_of(run_once(1, *case.base, files=case.files))
    for file, text in case.files:
        (workspace / file).write_text(text)
    launch(case.ranks, *case.base, *case.own, "--name", "run")
    ours = metrics_of(run)
    assert ours.keys() == theirs.keys()
    for step, line in theirs.items():
        assert ours[step]["response/fingerprint"] == line["response/fingerprint"], step
        for metric in METRICS:
            close = pytest.approx(line[metric], rel=1e-3, abs=1e-5) if metric in line else None
            assert ours[step].get(metric) == close, (step, metric)
    assert {event["rank"] for event in events_of(run, "worker_started") if event["attempt"]} == case.died
    assert {event["verdict"] for event in events_of(run, "failure")} <= {"starts again"}
    case.check(run, ours)
