"""Whole runs whose ranks sample and train apart: the same DAGs, the same samples, weights that are pulled."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest
import torch
from harness import REWARD, ROOT, SEED_WITH_CLEAR_DRAWS, environment, metrics_of
from safetensors.torch import load_file

from distflow.data.dataloader import REPEATS
from distflow.telemetry.run_reader import RunReader

ASYNC = ("--run-file", "tiny.yaml", "--set", "mode=async")
GRPO = ("--dag", "grpo.yaml", *ASYNC)
GROUP = 8  # samples of a prompt
STRICT = ("--set", "staleness=0")


def require_equal(ours, theirs, steps=(1, 2, 3, 4)):
    """The same samples, and the same training on them."""
    assert set(ours) >= set(steps)
    for step in steps:
        assert ours[step]["response/fingerprint"] == theirs[step]["response/fingerprint"]
        assert ours[step]["reward/mean"] == pytest.approx(theirs[step]["reward/mean"], abs=1e-9)
        assert ours[step]["loss"] == pytest.approx(theirs[step]["loss"], abs=1e-5)
        assert ours[step]["grad_norm"] == pytest.approx(theirs[step]["grad_norm"], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("settings", [pytest.param((), id="whole", marks=pytest.mark.smoke),
                                      pytest.param(("--set", "roles.actor.lora={rank: 4}"), id="adapters")])
def test_without_staleness_it_is_sync_sample_for_sample(launch, workspace, settings):
    launch(1, *GRPO, *SEED_WITH_CLEAR_DRAWS, *settings, "--name", "sync", "--set", "mode=sync")
    launch(4, *GRPO, *SEED_WITH_CLEAR_DRAWS, *settings, *STRICT, "--name", "apart")
    sync, apart = (metrics_of(workspace / f"runs/{name}") for name in ("sync", "apart"))
    require_equal(apart, sync)
    assert all(step["mismatch/logprob_max"] < 1e-5 and step["staleness/max"] == 0 for step in apart.values())
    events = [json.loads(line) for line in (workspace / "runs/apart/events.jsonl").read_text().splitlines()]
    pulled = {event["rank"]: event["version"] for event in events if event["event"] == "weights_pulled"}
    assert pulled.keys() == {2, 3}, "each rank that samples pulls for itself"


def test_a_frozen_model_has_ranks_of_its_own_or_those_that_sample_and_a_death_stops_nobody(launch, workspace):
    """One of the two ranks that shard it is killed while they compute prompts of the second step, or one of those that
    sample: nobody else starts again, and the losses stay."""
    more = ("--set", "nodes.update.with.kl=0.5", "--set", "steps=3")
    launch(1, *GRPO, *more, "--name", "sync", "--set", "mode=sync")
    launch(4, *GRPO, *more, *STRICT, "--set", "groups={rollout: 1, inference: {reference: 2}}", "--set",
           "layouts.reference={dp: 2, rows: [3, 1]}", "--set",
           "faults=[{kind: kill, group: inference, phase: inference, step: 2}]", "--name", "apart")
    sync, apart = (metrics_of(workspace / f"runs/{name}") for name in ("sync", "apart"))
    require_equal(apart, sync, steps=(1, 2, 3))
    for step in (2, 3):
        assert apart[step]["policy/kl_reference"] == pytest.approx(sync[step]["policy/kl_reference"], abs=1e-5)
    assert all(step["inference/reference/rows"] == 32 for step in apart.values())
    assert all({"seconds/reference", "waiting/reference"} <= step.keys() for step in apart.values())
    events = [json.loads(line) for line in (workspace / "runs/apart/events.jsonl").read_text().splitlines()]
    failure, = (event for event in events if event["event"] == "failure")
    assert (failure["group"], failure["ranks"], failure["verdict"]) == ("inference reference 0", [2, 3], "starts again")
    assert {event["rank"] for event in events if event["event"] == "worker_started" and event["attempt"]} == {2, 3}
    launch(3, *GRPO, *more, *STRICT, "--set", "groups={rollout: 2, inference: {reference: rollout}}", "--set",
           "faults=[{kind: kill, group: rollout, rank: 1, phase: generating, step: 2}]", "--name", "with samples")
    beside = metrics_of(workspace / "runs/with samples")
    require_equal(beside, sync, steps=(1, 2, 3))
    for step in (2, 3):
        assert beside[step]["policy/kl_reference"] == pytest.approx(sync[step]["policy/kl_reference"], abs=1e-5)
    assert all("seconds/reference" in step for step in beside.values())
    events = [json.loads(line) for line in (workspace / "runs/with samples/events.jsonl").read_text().splitlines()]
    assert {event["rank"] for event in events if event["event"] == "worker_started" and event["attempt"]} == {1}


@pytest.mark.smoke
def test_those_that_train_may_sample_too(launch, workspace):
    """Until some of a step is done; what they have begun then, others end (how much that is, is a matter of time). At
    this rate rounding does not decide what is sampled."""
    semi = ("--set", "mode=semi_sync", "--set", "groups.rollout=1")
    long = ("--set", "roles.actor.generation.max_new_tokens=96", "--set", "data.batch=8", "--set", "steps=2",
            "--set", "roles.actor.learning_rate=1e-6")
    launch(1, *GRPO, *long, "--name", "sync", "--set", "mode=sync")
    launch(3, *GRPO, *long, *semi, *STRICT, "--set", "roles.actor.generation.batch_rows=8", "--name", "semi")
    sync, shared = (metrics_of(workspace / f"runs/{name}") for name in ("sync", "semi"))
    require_equal(shared, sync, steps=(1, 2))


def test_those_that_train_sample_ahead_too(launch, workspace):
    semi = ("--set", "mode=semi_sync", "--set", "groups.rollout=1")
    launch(2, *GRPO, *semi, "--name", "ahead", "--set", "staleness=2", "--set", "steps=8", "--set", "switch_at=0.4")
    steps = metrics_of(workspace / "runs/ahead")
    assert len(steps) == 8
    assert all(step["staleness/max"] <= 2 for step in steps.values())


@pytest.mark.parametrize("ranks", [1, 2])
def test_those_that_train_do_all_the_sampling(launch, workspace, ranks):
    """With staleness 0 as in mode sync; beyond that they train while rows are under way, and go on with these."""
    alone = ("--set", "mode=semi_sync", "--set", "groups.rollout=0")
    launch(1, *GRPO, *SEED_WITH_CLEAR_DRAWS, "--name", "sync", "--set", "mode=sync")
    launch(ranks, *GRPO, *SEED_WITH_CLEAR_DRAWS, *alone, *STRICT, "--name", "alone")
    require_equal(*(metrics_of(workspace / f"runs/{name}") for name in ("alone", "sync")))
    tail = ("--set", "steps=6", "--set", "roles.actor.generation={max_new_tokens: 200, stop: ['7', '3', '1']}", "--set",
            "roles.actor.model.layers=12")
    for on_stale in ("wait", "drop"):
        launch(ranks, *GRPO, *alone, *tail, "--set", f"on_stale={on_stale}", "--set", "all_samples=true", "--set",
               "faults=[{kind: kill, group: trainer, phase: training, step: 4}]", "--name", on_stale)
        steps = metrics_of(workspace / f"runs/{on_stale}")
        assert len(steps) == 6
        assert max(step["staleness/max"] for step in steps.values()) == 1
        written = (json.loads(line) for file in sorted((workspace / f"runs/{on_stale}/samples").glob("*.jsonl"))
                   for line in file.read_text().splitlines())
        prompts = Counter(row["row"] // GROUP % REPEATS for row in written)
        assert {*prompts.values()} == {GROUP}
        assert len(prompts) == 6 * 4
        events = (workspace / f"runs/{on_stale}/events.jsonl").read_text()
        assert "weights_pulled" not in events
        assert '"failure"' in events
    assert sum(step.get("response/continued", 0) for step in steps.values()) > 0, "a step takes what is done first"


def test_models_look_at_prompts_that_are_done_while_others_are_sampled(launch, workspace):
    """With rows for one prompt at a time: reference and critic have all but the last one behind them by then."""
    shipped = (ROOT / "dags/ppo.yaml").read_text()
    (workspace / "ppo.yaml").write_text(
        shipped.replace("function: score, ", "function: score, with: {reward: brevity}, ") + "imports: [brevity]\n")
    ppo = ("--dag", "ppo.yaml", *ASYNC, *STRICT, "--set", "roles.actor.generation.batch_rows=8",
           "--set", "groups.rollout=1", "--set", "steps=3", "--set", "layouts.update.tp=2", "--set",
           "roles.actor.model.kv_heads=2")
    launch(3, *ppo, "--name", "fused")
    launch(3, *ppo, "--name", "waits", "--set", "fuse=false")
    fused, waits = (metrics_of(workspace / f"runs/{name}") for name in ("fused", "waits"))
    require_equal(fused, waits, steps=(1, 2, 3))
    for node in ("reference", "values"):
        hidden = [step[f"seconds/{node}/hidden"] for step in fused.values()]
        assert sum(hidden) > 0, "no prompt was done before the last one"
        assert all(part <= step[f"seconds/{node}"] for part, step in zip(hidden, fused.values()))
        assert not any(f"seconds/{node}/hidden" in step for step in waits.values())


def test_draws_of_a_filter_and_samples_of_two_kinds_cross_too(launch, workspace):
    """DAPO draws again until enough groups are left, of which some teach nothing; ReMax has an answer for each prompt
    beside its samples."""
    (workspace / "brevity.py").write_text(REWARD + "\n\n@reward\ndef uneven(completion, answer):\n"
                                          "    return brevity(completion, answer) * (len(answer) % 2)\n")
    for name in ("dapo", "remax"):
        shipped = (ROOT / f"dags/{name}.yaml").read_text()
        brief = shipped.replace("function: score,", "function: score, with: {reward: uneven},")
        (workspace / f"{name}.yaml").write_text(brief + "imports: [brevity]\n")
        dag = ("--dag", f"{name}.yaml", *ASYNC, "--set", "steps=3")
        launch(1, *dag, "--name", f"{name}_sync", "--set", "mode=sync")
        launch(2, *dag, *STRICT, "--name", f"{name}_apart")
        sync, apart = (metrics_of(workspace / f"runs/{name}_{mode}") for mode in ("sync", "apart"))
        require_equal(apart, sync, steps=(1, 2, 3))
    assert max(step["filter/filter/draws"] for step in metrics_of(workspace / "runs/dapo_apart").values()) > 1


VALIDATED = ("--set", "validation={data: {held: train.jsonl}, every: 2, reward: brevity, samples: 2, temperature: 1.0, "
             "best: true}")


def test_rollouts_validate_the_weights_that_the_trainer_would_have(launch, workspace):
    """And the trainer has no engine that samples. Of each step it is the same to the last answer; one is of the last
    step, for which the run waits; the models of the best one are kept."""
    launch(1, *GRPO, *VALIDATED, "--name", "sync", "--set", "mode=sync")
    launch(2, *GRPO, *VALIDATED, *STRICT, "--name", "apart")
    sync, apart = ({values["step"]: values for values in RunReader(workspace / f"runs/{name}").steps()}
                   for name in ("sync", "apart"))
    for step in (0, 2, 4):
        for name in ("validation/held", "validation_low/held"):
            assert apart[step][name] == pytest.approx(sync[step][name], abs=1e-9), (step, name)
    answers = [(workspace / f"runs/{name}/validation.jsonl").read_text() for name in ("sync", "apart")]
    assert answers[0] == answers[1]
    events = [json.loads(line) for line in (workspace / "runs/apart/events.jsonl").read_text().splitlines()]
    assert [(each["asked_after"], each["of_step"]) for each in events if each["event"] == "validated"] == [
        (step, step) for step in (0, 2, 4)]
    weights = [load_file(workspace / f"runs/{name}/best/model/model.safetensors") for name in ("sync", "apart")]
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-5) for name in weights[0])
    assert not list((workspace / "runs/apart").glob("candidates/*"))


def test_a_run_may_end_while_rows_are_under_way(launch, workspace):
    """The trainer has reached its goal; the others had begun with what would have come."""
    (workspace / "held.jsonl").write_text((workspace / "train.jsonl").read_text())
    launch(2, *GRPO, "--name", "early", "--set", "staleness=3", "--set", "steps=9", "--set", "validation.every=2",
           "--set", "validation.data.held=held.jsonl", "--set", "validation.reward=brevity", "--set",
           "validation.stop_at=0.0", "--set", "roles.actor.generation.batch_rows=8")
    assert len(metrics_of(workspace / "runs/early")) < 9
    exported = subprocess.run([sys.executable, "-m", "distflow.cli", "export", "runs/early", "out"], cwd=workspace,
                              env=environment(), capture_output=True, text=True, check=False)
    assert exported.returncode == 0, exported.stderr
    assert (workspace / "out/model/config.json").is_file()


@pytest.mark.parametrize(("on_new_weights", "on_stale"), [("continue", "wait"), ("restart", "drop")])
def test_staleness_keeps_its_bound(launch, workspace, on_new_weights, on_stale):
    """And each prompt is trained on once, also where those that are done first come first."""
    launch(3, *GRPO, "--name", "ahead", "--set", "staleness=2", "--set", "steps=8", "--set", "groups.rollout=2",
           "--set", f"on_new_weights={on_new_weights}", "--set", f"on_stale={on_stale}", "--set", "samples=1000")
    steps = metrics_of(workspace / "runs/ahead")
    assert len(steps) == 8
    stale = [steps[step]["staleness/max"] for step in sorted(steps)]
    assert stale[0] == 0
    assert 1 <= max(stale) <= 2
    rows = [row["row"] for row in RunReader(workspace / "runs/ahead").rows("samples")]
    prompts = Counter(row // GROUP % REPEATS for row in rows)
    assert prompts == dict.fromkeys(range(len(rows) // GROUP), GROUP)


def test_an_error_where_samples_are_made_ends_the_run_and_is_said(launch, workspace):
    (workspace / "brevity.py").write_text(
        "from distflow import node\nimport torch\n\n@node(writes='rewards')\ndef brittle(completions: list[str]):\n"
        "    raise ZeroDivisionError('no completion is perfect')\n")
    dag = (workspace / "grpo.yaml").read_text()
    (workspace / "grpo.yaml").write_text(dag.replace("function: score, with: {reward: brevity}", "function: brittle"))
    done = launch(2, *GRPO, "--name", "broken", code=None)
    assert done.returncode != 0
    assert "ZeroDivisionError: no completion is perfect" in done.stderr
