"""What `--explain` and `--lose` say of a placement: alternatives, weights, memory, price, and a machine less."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from distflow.cli import main
from distflow.config.load import load
from distflow.config.spec import Spec
from distflow.config.yaml_source import dump
from distflow.errors import InvalidInput
from planners.heterogeneous.alternatives import (
    MACHINE_HOURS,
    alternatives,
    chosen_machine,
    hours_of,
    loss_of,
    machines_of,
    memory_of,
    price_of_samples,
    share_of_training,
    steps_again,
    weight_syncs,
)
from planners.heterogeneous.efficiency import BETWEEN
from planners.heterogeneous.layouts import CostedProblem
from planners.heterogeneous.plan_file import digests_of, ranks_of
from planners.heterogeneous.runnable import runnable
from planners.heterogeneous.workload import problem_of

MODEL = "{architecture: qwen3, layers: 4, hidden: 512, heads: 8, kv_heads: 4, head_dim: 64}"
SIZES = [f"roles.actor.model={MODEL}", "data.batch=64"]
CLUSTER = {"name": "unlike", "links": {"zone": {"gb_s": 1, "latency_us": 10}, "inside": {"gb_s": 10}},
           "devices": {name: {"tflops": {"float32": speed}, "memory_gib": 16, "memory_gb_s": 100 * speed}
                       for name, speed in (("whole", 3), ("third", 1))},
           "machines": {"quick": {"device": "whole", "devices": 2, "count": 2, "price_per_hour": 6.0},
                        "slow": {"device": "third", "devices": 2, "price_per_hour": 1.5}}}


@pytest.fixture
def spec_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    return lambda *more: load("grpo", None, [*SIZES, *more], "cluster.yaml")


def placed(spec: Spec):
    costed = CostedProblem(problem_of(spec))
    return costed, runnable(spec, costed)


def test_alternatives_are_costed_by_the_same_model(spec_of):
    costed, placement = placed(spec_of())
    found = dict(alternatives(costed, placement))
    assert [*found] == ["all tasks in one group", "each task in a group of its own",
                        "this placement with equal shares"]
    assert found["this placement with equal shares"] > 1.2 * placement.seconds, "a slow machine has as many rows"
    together = costed.placement((tuple(range(len(costed.problem.tasks))),), (costed.problem.hardware.all,))
    assert found["all tasks in one group"] == together.seconds
    assert together.seconds <= placement.seconds * (1 + 1e-9), "rounded"
    assert placement.seconds < found["each task in a group of its own"] < math.inf


def test_weights_memory_and_price(spec_of):
    spec = spec_of()
    costed, placement = placed(spec)
    sync, = weight_syncs(costed, placement)
    parameters = costed.problem.tasks[0].parameters
    assert (sync.source, sync.target, sync.nbytes) == ("update", "rollout", 2 * parameters)  # auto: counted as halves
    assert sync.seconds == pytest.approx(sync.nbytes / (1e9 * BETWEEN), rel=0.01)
    memory = list(memory_of(costed, placement))
    assert {task for task, *_ in memory} == {"rollout", "reference", "update"}
    assert all(0 < fills <= room == 0.9 * 16 * 2**30 for *_, fills, room in memory)
    price, made_for = price_of_samples(costed, spec.cluster, 10.0), digests_of(spec, costed.problem)
    assert price == pytest.approx((2 * 6.0 + 1.5) / 3600 * 10.0 / 512 * 1000)
    spec.cluster.machines["slow"] = spec.cluster.machines["slow"].model_copy(update={"price_per_hour": None})
    assert price_of_samples(costed, spec.cluster, 10.0) is None
    assert digests_of(spec, costed.problem) == made_for, "a plan stays good when prices change"


def test_a_lost_machine_restarts_what_was_on_it(spec_of):
    spec = spec_of()
    costed, placement = placed(spec)
    assert machines_of(spec.cluster) == [("quick:1", range(2)), ("quick:2", range(2, 4)), ("slow:1", range(4, 6))]
    lost = loss_of(costed, placement, spec, 1)
    assert lost.restarts == "all 6 ranks: mode sync runs one chain"
    assert (lost.work, lost.detecting) == (placement.seconds / 2, spec.run.robust.machine_silence)
    assert lost.seconds == lost.work + lost.detecting + lost.fetching
    assert lost.fetching > 0
    spec = spec_of("mode=async")
    costed, placement = placed(spec)
    ranks = ranks_of(costed.problem, placement.subsets)
    losses = [loss_of(costed, placement, spec, index, ranks) for index in range(3)]
    named = [", ".join(costed.problem.tasks[task].name for task in group) for group in placement.grouping]
    (training, trains), (sampling, samples) = (next((own, names) for names, own in zip(named, ranks) if node in names)
                                               for node in ("update", "rollout"))
    for (_, own), loss in zip(machines_of(spec.cluster), losses):
        assert (f"all {len(training)} ranks of {trains}" in loss.restarts) == bool({*own} & {*training})
        alone = len({*own} & {*sampling})
        assert (f"{alone} of {len(sampling)} ranks of {samples}" in loss.restarts) == bool(alone)
        if alone == len(own):
            assert loss.work == pytest.approx(placement.seconds / 2 * alone / len(sampling))
            assert loss.detecting == pytest.approx(30 * alone / len(sampling))


def test_without_a_copy_of_the_state_half_of_the_steps_between_checkpoints_are_lost(spec_of):
    off = ("robust.snapshots=false", "robust.peer_replica=false")
    for each in off:
        spec = spec_of(each, "checkpoint.every=40", "robust.machine_silence=12")
        costed, placement = placed(spec)
        lost = loss_of(costed, placement, spec, 1)
        assert (lost.work, lost.detecting) == (20 * placement.seconds, 12)
    nothing = spec_of(off[1], "checkpoint.every=0")
    assert steps_again(nothing) == loss_of(costed, placement, nothing, 1).work == math.inf
    assert steps_again(spec_of("checkpoint.every=0")) == 0.5, "a second machine has the state"


def test_the_rate_of_interruptions_is_llama_3s(spec_of):
    assert abs(MACHINE_HOURS - 6334.6) < 0.1
    costed, placement = placed(spec_of())
    losses = [loss_of(costed, placement, spec_of(), index) for index in range(3)]
    lost = sum(loss.seconds + 60 for loss in losses)
    assert share_of_training(losses, 1.0, 60) == pytest.approx(3600 / (3600 + lost))
    assert [hours_of(loss) for loss in losses] == [MACHINE_HOURS * 8 / 2] * 3, "machines of two devices fail less"
    assert share_of_training(losses, None) == share_of_training(losses, 4 * MACHINE_HOURS)


def test_a_machine_is_named_or_counted(spec_of):
    cluster = spec_of().cluster
    assert [chosen_machine(cluster, text) for text in ("quick:2", "machine:3", "slow:1")] == [1, 2, 2]
    for text in ("quick:3", "machine:4", "machine:0", "quick", "slwo:1"):
        with pytest.raises(InvalidInput, match=f"--lose {text}: cluster `unlike` has no such machine"):
            chosen_machine(cluster, text)


def test_explain_and_lose_say_all_of_it(spec_of, capsys):
    sizes = [word for each in SIZES for word in ("--set", each)]
    spec_of()
    assert main(["plan", "mixed", "grpo", "--cluster", "cluster.yaml", *sizes, "--explain", "--lose", "machine:2",
                 "--runnable", "--starting", "60", "--out", "plan.yaml"]) == 0
    printed = capsys.readouterr().out
    for part in ("simple alternatives", "can be run: yes", "update → rollout", "a thousand samples cost ",
                 "of 14.4 GiB", "if quick:2 is lost", "starts again: all 6 ranks", "60 s to start processes",
                 "if quick:2 is lost (assumes --store)", "30.00 s until it is noticed",
                 "share of time that trains 99.9", "every 6,335 h · 8 / its devices (Llama 3"):
        assert part in printed, part
    said = yaml.safe_load(Path("plan.yaml").read_text())
    said["tasks"]["reference"] |= {"dp": 3, "pp": 2, "layers": [2, 2], "shares": [
        {"count": 1, "rows": 171, "stages": [name, name]} for name in ("quick.1", "quick.2", "slow")]}
    Path("plan.yaml").write_text(dump(said))
    assert main(["plan", "explain", "grpo", "--cluster", "cluster.yaml", *sizes, "--plan", "plan.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "can be run: no; node `reference`" in printed
    assert "a plan that can be run takes" in printed
    explain = ["plan", "explain", "grpo", "--cluster", "cluster.yaml", *sizes, "--plan", "plan.yaml", "--lose",
               "slow:1"]
    assert main([*explain, "--interruptions-hours", "0"]) == 2
    assert main(explain) == 0
    assert "without the start of processes (--starting)" in capsys.readouterr().out
    assert main([*explain, "--set", "robust.peer_replica=false", "--set", "checkpoint.every=0"]) == 0
    printed = capsys.readouterr().out
    assert "there is nothing to go on from, with checkpoint.every=0" in printed
    assert "share of time that trains: unknown" in printed
