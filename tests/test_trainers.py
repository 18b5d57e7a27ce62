"""Whole runs with a critic or frozen roles on ranks of their own (`first` of `layouts`): losses of one rank, faults."""

import pytest
from harness import ROOT, events_of, metrics_of
from test_modes import STRICT, require_equal

from distflow.telemetry.run_reader import RunReader

PPO = ("--dag", "ppo.yaml", "--run-file", "tiny.yaml", "seed=10", "steps=3", "checkpoint.every=2",
       "roles.actor.model.kv_heads=2")
"""With this seed each draw is 2.8e-6 or more from where another token would be drawn, in the runs with `LIKELY` too.
Rows that are computed in other company are rounded otherwise, by up to 4e-7."""
OF_CRITIC = ("value/loss", "value/grad_norm", "value/explained", "value/mean")


BRIEF = (ROOT / "dags/ppo.yaml").read_text().replace(
    "function: score, ", "function: score, with: {reward: brevity}, ") + "imports: [brevity]\n"


def steps_of(run):
    """The steps of a run, with what all trainers have reported."""
    return {step["step"]: step for step in RunReader(run).timed_steps()}


@pytest.fixture
def ppo(workspace, launch):
    """Start a run of PPO with a reward that tiny models get. Return its steps."""
    (workspace / "ppo.yaml").write_text(BRIEF)

    def run(ranks, name, *settings):
        launch(ranks, *PPO, *settings, "--name", name)
        return steps_of(workspace / f"runs/{name}")

    return run


@pytest.fixture
def together(run_once):
    """The folder of a run of PPO on one rank in mode sync."""
    return run_once(1, *PPO, "mode=sync", files=(("ppo.yaml", BRIEF),))


def test_layouts_let_a_critic_train_on_ranks_of_its_own(ppo, workspace, together):
    """In mode async. Its ranks are killed: one when the actor has trained and may have published, then one before it
    trains. The weights are those of a run without kills, bit for bit, as no row is computed with others. Mode sync:
    `test_rank_invariance.py`."""
    on_its_own = ("mode=async", *STRICT, "groups.rollout=1", "layouts={critic: {first: 1}}",
                  "roles.actor.generation.batch_rows=1")
    apart = ppo(4, "apart", *on_its_own)
    ppo(4, "killed", *on_its_own, "faults=[{kind: kill, group: trainer, rank: 1, phase: saving, step: 1}, "
        "{kind: kill, group: trainer, rank: 2, phase: training, step: 2}]")
    for run in ("apart", "killed"):
        require_equal(metrics_of(workspace / f"runs/{run}"), metrics_of(together), steps=(1, 2, 3))
    for step, values in steps_of(together).items():
        for metric in OF_CRITIC:
            assert apart[step][metric] == pytest.approx(values[metric], abs=1e-5, rel=1e-3), metric
    for role in ("actor", "critic"):
        calm, killed = ((workspace / f"runs/{run}/model-{role}/model.safetensors").read_bytes()
                        for run in ("apart", "killed"))
        assert calm == killed, role
    faults, failures, started = (events_of(workspace / "runs/killed", kind)
                                 for kind in ("fault_injected", "failure", "worker_started"))
    assert [(fault["rank"], fault["at_step"]) for fault in faults] == [(1, 1), (2, 2)]
    assert [(failure["group"], failure["verdict"]) for failure in failures] == [("trainer", "starts again")] * 2
    assert {event["rank"] for event in started if event["attempt"]} == {0, 1, 2}


SPLITS = {
    "semi_sync": (4, "mode=semi_sync", "groups.rollout=1", "staleness=0",
                  "layouts={critic: {first: 2}, update: {rows: [0, 1]}}"),  # ranks 0 to 2 sample
    "replicas": (4, "layouts={critic: {first: 2}}", "roles.actor.replicas=2"),
    "tokens": (3, "layouts={critic: {first: 2}, update: {cp: 2}}"),
    "matrices": (4, "layouts={critic: {first: 2, tp: 2}, update: {tp: 2}}")}


@pytest.mark.parametrize("case", SPLITS)
def test_layouts_first_goes_with_other_modes_and_splits(ppo, workspace, together, case):
    ranks, *settings = SPLITS[case]
    apart = ppo(ranks, "apart", *settings)
    require_equal(metrics_of(workspace / "runs/apart"), metrics_of(together), steps=(1, 2, 3))
    for step, values in steps_of(together).items():
        for metric in OF_CRITIC:
            assert apart[step][metric] == pytest.approx(values[metric], abs=1e-5, rel=1e-3), metric


LIKELY = """
import torch
from distflow import Ragged, node

@node(writes="rewards")
def likely(teacher_logprobs: Ragged) -> torch.Tensor:
    sums = torch.zeros(len(teacher_logprobs)).index_add(0, teacher_logprobs.row_of, teacher_logprobs.values)
    return sums / teacher_logprobs.lengths
"""
TEACHER = "  teacher:   {role: teacher, type: MODEL_INFERENCE, function: logprobs, dependencies: [rollout]}\n"
BESIDE = {
    "the critic": (2, "mode=sync", "layouts={critic: {first: 1}, reference: {first: 1}, teacher: {first: 1}}"),
    "the critic, async": (3, "mode=async", "groups.rollout=1", "layouts={critic: {first: 1}, teacher: {first: 1}}"),
    "each other, split": (3, "mode=sync", "layouts={reference: {first: 1, tp: 2}, teacher: {first: 1}}"),
    "each other, async": (4, "mode=async", "groups={rollout: 1, inference: {reference: 2, teacher: reference}}")}


@pytest.mark.parametrize("case", BESIDE)
def test_frozen_roles_may_be_beside_another(ppo, workspace, run_once, case):
    """On its ranks, of which one dies; the losses are those of one rank."""
    dag = BRIEF.replace("[brevity]", "[likely]").replace(
        "  reference: {copy_of: actor}\n", "  reference: {copy_of: actor}\n  teacher: {copy_of: actor}\n")
    reward = next(line for line in dag.splitlines() if line.startswith("  reward: "))
    judged = '  reward:    {role: reward, type: COMPUTE, function: "likely:likely", dependencies: [teacher]}'
    files = ("likely.py", LIKELY), ("ppo.yaml", dag.replace(reward, TEACHER + judged))
    for name, text in files:
        (workspace / name).write_text(text)
    ranks, *settings = BESIDE[case]
    where = "inference" if case == "each other, async" else "trainer"
    last = ranks - 1 - (case == "the critic, async")  # behind which a rank samples
    killed = f"faults=[{{kind: kill, group: {where}, rank: {last}, phase: inference, step: 2}}]"
    together = steps_of(run_once(1, *PPO, "mode=sync", files=files))
    apart = ppo(ranks, "apart", *STRICT, *settings, killed)
    assert together.keys() == apart.keys() == {1, 2, 3}
    for step, metric in ((step, metric) for step in together for metric in ("loss", "grad_norm", *OF_CRITIC)):
        assert apart[step]["response/fingerprint"] == together[step]["response/fingerprint"]
        assert apart[step][metric] == pytest.approx(together[step][metric], abs=1e-5, rel=1e-3), metric
    assert [event["verdict"] for event in events_of(workspace / "runs/apart", "failure")] == ["starts again"]
