"""Whole runs that have the samples, rewards and losses of one rank in mode sync, wherever they compute and whoever
dies: one table of all cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from harness import REWARD, ROOT, SEED_WITH_CLEAR_DRAWS, events_of, require_equal
from test_conversations import TOOLS, tools_dag
from test_critics import PPO as PPO_OF_GROUPS
from test_lora import LORA

from distflow.telemetry.run_reader import RunReader

TINY = ("--run-file", "tiny.yaml")
GRPO = ("--dag", "grpo.yaml", *TINY)
ASYNC = ("mode=async", "staleness=0")
ALONE = ("mode=semi_sync", "groups.rollout=0", "staleness=0")
UNEVEN = f"{REWARD}\n\n@reward\ndef uneven(completion, answer):\n" \
    "    return brevity(completion, answer) * (len(answer) % 2)\n"
"""So that some groups teach nothing."""
READ = (*GRPO, "nodes.update.with.kl=0.5", "steps=3")


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


def both_roles_learn(run: Path, steps: dict[int, dict[str, Any]]) -> None:
    assert all(step["grad_norm/train_solver"] > 0 < step["grad_norm/train_reviser"] for step in steps.values())


PPO = ("--dag", "ppo.yaml", *TINY, "seed=10", "steps=3", "roles.actor.model.kv_heads=2")
"""With this seed each draw is 2.8e-6 or more from where another token would be drawn, in the runs with `LIKELY` too.
Rows that are computed in other company are rounded otherwise, by up to 4e-7."""
LIKELY = """
import torch
from distflow import Ragged, node

@node(writes="rewards")
def likely(teacher_logprobs: Ragged) -> torch.Tensor:
    sums = torch.zeros(len(teacher_logprobs)).index_add(0, teacher_logprobs.row_of, teacher_logprobs.values)
    return sums / teacher_logprobs.lengths
"""
TEACHER = "  teacher:   {role: teacher, type: MODEL_INFERENCE, function: logprobs, dependencies: [rollout]}\n"
JUDGED = '  reward:    {role: reward, type: COMPUTE, function: "likely:likely", dependencies: [teacher]}'


def with_teacher() -> tuple[str, str]:
    """PPO whose reward is what a third frozen role thinks of a response."""
    name, dag = pays("ppo", "brevity")
    reward = next(line for line in dag.splitlines() if line.startswith("  reward: "))
    return name, dag.replace("[brevity]", "[likely]").replace(reward, TEACHER + JUDGED).replace(
        "  reference: {copy_of: actor}\n", "  reference: {copy_of: actor}\n  teacher: {copy_of: actor}\n")


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
                          (("talk.yaml", tools_dag(False)), ("tools.py", TOOLS)), check=talked),
    "trainers that leave a rank out": Case(
        3, (*READ, *SEED_WITH_CLEAR_DRAWS),
        (*ASYNC, "groups.rollout=1", "layouts={update: {rows: [0, 1]}, reference: {rows: [1, 0]}}")),
    "a critic on a rank of its own beside some ranks": Case(3, (*PPO_OF_GROUPS, *SEED_WITH_CLEAR_DRAWS), (
        "layouts={critic: {first: 2}, rollout: {rows: [1, 1]}, update: {rows: [0, 1]}, reference: {rows: [0, 1]}}",)),
    "adapters on some ranks": Case(3, (*LORA, *SEED_WITH_CLEAR_DRAWS), (
        "layouts={update: {rows: [0, 1, 1]}, reference: {rows: [0, 1, 0]}}",))}
for mode, ranks, settings in (
        ("semi_sync", 4, ("mode=semi_sync", "groups.rollout=1", "staleness=0",
                          "layouts={critic: {first: 2}, update: {rows: [0, 1]}}")),  # ranks 0 to 2 sample
        ("replicas", 4, ("layouts={critic: {first: 2}}", "roles.actor.replicas=2")),
        ("tokens", 3, ("layouts={critic: {first: 2}, update: {cp: 2}}",)),
        ("matrices", 4, ("layouts={critic: {first: 2, tp: 2}, update: {tp: 2}}",))):
    CASES[f"a critic on ranks of its own, {mode}"] = Case(ranks, PPO, settings, (pays("ppo", "brevity"),))
for beside, ranks, died, settings in (
        ("the critic", 2, {0, 1}, ("layouts={critic: {first: 1}, reference: {first: 1}, teacher: {first: 1}}",)),
        ("the critic, async", 3, {0, 1}, (*ASYNC, "groups.rollout=1",
                                          "layouts={critic: {first: 1}, teacher: {first: 1}}")),
        ("each other, split", 3, {0, 1, 2}, ("layouts={reference: {first: 1, tp: 2}, teacher: {first: 1}}",)),
        ("each other, async", 4, {3}, (*ASYNC,
                                       "groups={rollout: 1, inference: {reference: 2, teacher: reference}}"))):
    kill = f"{{kind: kill, group: {'inference' if died == {3} else 'trainer'}, rank: {max(died)}, " \
           "phase: inference, step: 2}"
    CASES[f"frozen roles beside {beside}, and one dies"] = Case(
        ranks, PPO, (*settings, f"faults=[{kill}]"), (("likely.py", LIKELY), with_teacher()), died)
for own, died in ((ASYNC, set()), (("mode=semi_sync", "staleness=0"), set()),
                  ((*ASYNC, "faults=[{kind: kill, group: rollout, phase: generating, step: 3}]"), {1})):
    CASES[f"two roles that sample in turn, {own[0]}{', and one dies' * bool(died)}"] = Case(
        2, ("--dag", "solver_reviser.yaml", *TINY), own, (pays("solver_reviser", "brevity"),), died, both_roles_learn)


def steps_of(run: Path) -> dict[int, dict[str, Any]]:
    """The steps of a run, with what all trainers have reported."""
    return {step["step"]: step for step in RunReader(run).timed_steps()}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.smoke if name in ("async", "semi_sync") else ())
                                  for name in CASES])
def test_run_equals_one_rank_in_mode_sync(launch, workspace, run_once, name):
    case, run = CASES[name], workspace / "runs/run"
    theirs = steps_of(run_once(1, *case.base, files=case.files))
    for file, text in case.files:
        (workspace / file).write_text(text)
    launch(case.ranks, *case.base, *case.own, "--name", "run")
    ours = steps_of(run)
    require_equal(ours, theirs)
    assert {event["rank"] for event in events_of(run, "worker_started") if event["attempt"]} == case.died
    assert {event["verdict"] for event in events_of(run, "failure")} <= {"starts again"}
    case.check(run, ours)
