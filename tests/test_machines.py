"""Machines that start apart: each is a torchrun of its own here, with which the others share nothing but the store, the
network and the run's folder."""

from __future__ import annotations

import json
import signal
from functools import partial

import pytest
from harness import metrics_of

from benchmarks.cluster import Cluster
from distflow import launch
from distflow.options import load_spec
from distflow.recovery.membership import MACHINES
from distflow.store.clients import open_store
from planners import plan
from workers.elastic import ElasticAgent

STEPS, SOME, FEW = 90, 50, 20
STEADY = """
import time

from distflow import reward

@reward
def brevity(completion, answer):
    time.sleep(0.01)
    return 1.0 / (1 + len(completion))
"""
"""So that a run is not over before a machine has come."""
QUICK = ("--set", "robust={machine_silence: 10}", "--set", f"steps={STEPS}", "--set", "checkpoint={every: 4, keep: 3}")


@pytest.fixture
def cluster(workspace, etcd_of):
    clusters = []
    (workspace / "brevity.py").write_text(STEADY)

    def begin(*arguments: str, store: str = "") -> Cluster:
        run = ("--dag", "grpo.yaml", "--run-file", "tiny.yaml", "--name", "apart", *QUICK, *arguments)
        clusters.append(Cluster(workspace, workspace / "runs/apart", run, store or etcd_of(1).address("apart")))
        return clusters[-1]

    yield begin
    for each in clusters:
        each.close()


ASYNC = ("--set", "mode=async", "--set", "groups.rollout=2", "--machines", "2:3")


def test_an_etcd_that_loses_a_member_and_then_stands_still_ends_no_run(cluster, etcd_of):
    """Steps go on meanwhile, nothing is decided, and afterwards the machines end together."""
    etcd = etcd_of(3)
    run = cluster("--machines", "2", "--set", "steps=40", store=etcd.address("grpo-1"))
    for name in ("one", "two"):
        run.start(name)
    run.wait_for_step(2)
    etcd.processes[0].kill()
    run.wait_for_step(5)
    for member in (1, 2):
        etcd.signal(member, signal.SIGSTOP)
    run.wait_for_step(25)
    for member in (1, 2):
        etcd.signal(member, signal.SIGCONT)
    assert set(run.wait_for_exit().values()) == {0}, run.logs()
    assert run.events("failure") == []


def test_a_machine_that_samples_is_lost_and_another_takes_its_place(cluster):
    run = cluster(*ASYNC)
    for name in ("one", "two", "three"):
        run.start(name)
    run.wait_for_step(2)
    run.kill(next(name for name in run.machines if name not in run.machines_that_logged("step 2/")))
    run.start("four")
    run.wait_until(lambda: "has taken its place" in str(run.events("failure")))
    assert set(run.wait_for_exit().values()) == {0}, run.logs()
    assert sorted(metrics_of(run.run)) == list(range(1, STEPS + 1))
    assert not [event for event in run.events("failure") if event["group"] == "the machines"]


def test_a_machine_that_trains_is_lost_and_one_that_samples_takes_its_place(cluster):
    """The third one samples on, and what was in the dock is sampled again. There is no checkpoint: the trainer goes on
    from the copy in another machine's memory."""
    run = cluster(*ASYNC, "--set", "staleness=3", "--set", "checkpoint={every: 0}", "--set",
                  f"steps={SOME}")
    for name in ("one", "two", "three"):
        run.start(name)
    run.wait_until(lambda: {event["rank"] for event in run.events("worker_caught_up")} >= {0, 1, 2})
    run.wait_until(lambda: run.machines_that_logged("step 2/"))
    lost, = run.machines_that_logged("step 2/")
    run.kill(lost)
    assert set(run.wait_for_exit().values()) == {0}, run.logs()
    assert sorted(metrics_of(run.run)) == list(range(1, SOME + 1))
    assert {event["group"] for event in run.events("failure")} == {"trainer"}
    restored, = run.events("state_restored")
    assert restored["source"] == "peer replica"
    assert restored["of_step"] >= 1
    assert [event["rank"] for event in run.events("worker_ready")].count(2) == 1


def test_a_machine_that_trains_is_lost_with_its_first_heir_and_the_next_one_takes_its_place(cluster):
    """The copy of the state was in that heir's memory: the trainer goes on from the newest checkpoint."""
    run = cluster("--set", "mode=async", "--set", "groups.rollout=3", "--machines", "2:4")
    for name in ("one", "two", "three", "four"):
        run.start(name)
    run.wait_until(lambda: {event["rank"] for event in run.events("worker_caught_up")} >= {0, 1, 2, 3})
    run.wait_for_step(10)
    members = json.loads(open_store(run.address, 30.0).below(MACHINES).get("0/members") or "")
    names = {machine.pid: name for name, machine in run.machines.items()}
    for member in members[:2]:
        run.kill(names[int(member.split()[2])])
    assert set(run.wait_for_exit().values()) == {0}, run.logs()
    assert sorted(metrics_of(run.run)) == list(range(1, STEPS + 1))
    assert {event["group"] for event in run.events("failure")} == {"trainer"}
    restored, = run.events("state_restored")
    assert restored["of_step"] >= 4, "all ranks begin anew without a checkpoint"


def test_a_machine_that_trains_is_lost_and_a_spare_one_fills_its_place(cluster):
    """In mode sync each of two ranks has a piece of the state."""
    training, fault = 2, "faults=[{kind: machine, step: 7, phase: training, rank: 0}]"
    run = cluster("--machines", "2", "--set", "checkpoint={every: 0}", "--set", f"steps={FEW}", "--set", fault)
    for name in ("one", "two", "three"):
        run.start(name)
    run.wait_until(run.ended_machines)
    lost, = run.ended_machines()
    assert "step 6/" in (run.cwd / f"{lost}.log").read_text()
    run.kill(lost)
    assert set(run.wait_for_exit().values()) == {0}, run.logs()
    assert sorted(metrics_of(run.run)) == list(range(1, FEW + 1))
    assert [event["group"] for event in run.events("failure")][-1] == "the machines"
    assert "has given no sign of life for 10 s" in run.events("failure")[-1]["what"]
    restored = run.events("state_restored")
    assert len(restored) == training
    assert {event["source"] for event in restored} == {"peer replica"}
    assert len({event["of_step"] for event in restored}) == 1
    assert restored[0]["of_step"] >= 4


def test_where_all_ranks_train_the_others_go_on_without_one_and_with_one_more(cluster):
    """Mode sync: the ranks are those of the machines that are there."""
    run = cluster("--machines", "1:2")
    run.start("one")
    run.wait_for_step(4)
    run.start("two")
    run.wait_until(lambda: any(event["rank"] == 1 for event in run.events("worker_caught_up")))
    run.kill("one")
    assert run.wait_for_exit() == {"two": 0}, run.logs()
    assert sorted(metrics_of(run.run)) == list(range(1, STEPS + 1))
    said = [event["what"] for event in run.events("failure") if event["group"] == "the machines"]
    assert ["has come" in said[0], "no sign of life" in said[1], len(said)] == [True, True, 2]
    assert {event["source"] for event in run.events("state_restored")} == {"disk"}, "the pieces were of other ranks"


MISTAKES = {
    "no etcd": (("--store", "etcd://127.0.0.1:1/run", "--machines", "2"), {}, "there is no etcd at etcd://127.0.0.1:1"),
    "no --store": (("--machines", "2"), {}, "--store and --machines go together"),
    "no run": (("--store", "etcd://127.0.0.1:1", "--machines", "2"), {}, "as  etcd://10.0.0.1:2379/grpo-1"),
    "in process": (("--store", "HERE", "--machines", "2", "--in-process"), {}, "are for one machine"),
    "fewer": (("--store", "HERE", "--machines", "1:2", "--set", "layouts={rollout: {rows: [1, 1]}}"), {},
              "Start 2 ranks"),
    "a TCPStore": (("--store", "127.0.0.1:29400", "--machines", "2"), {}, "--store etcd://10.0.0.1:2379/grpo-1"),
    "a span": (("--store", "HERE", "--machines", "3:2"), {}, "--machines 3:4"),
    "another token": (("--store", "HERE", "--machines", "2"), {"DISTFLOW_TOKEN": "of another run …"},
                      "has another token"),
    "a short token": (("--store", "HERE", "--machines", "2"), {"DISTFLOW_TOKEN": "guessed"}, "and could be guessed"),
    "no token": (("--store", "HERE", "--machines", "2"), {"DISTFLOW_TOKEN": ""}, "export DISTFLOW_TOKEN="),
    "too few": (("--store", "HERE", "--machines", "1:3", "--set", "mode=async"), {}, "Write  --machines 2:3"),
    "another run": (("--store", "HERE", "--machines", "2", "--set", "seed=7"), {}, "the store is of another run"),
    "other ranks": (("--store", "HERE", "--machines", "1"), {"LOCAL_WORLD_SIZE": "2"}, "they have 1, this one 2"),
}


@pytest.mark.parametrize(("arguments", "variables", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told_with_its_correction(workspace, etcd, monkeypatch, capsys, arguments, variables, expected):
    monkeypatch.chdir(workspace)
    monkeypatch.setattr("workers.elastic._STORE_TIMEOUT", 2.0)
    address = etcd.address()
    known = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "DISTFLOW_TOKEN": "the token of the run"}
    for name, value in (known | variables).items():
        monkeypatch.setenv(name, value)
    run = ("--dag", "grpo.yaml", "--run-file", "tiny.yaml")
    spec = load_spec(launch.parser().parse_args(run))
    with monkeypatch.context() as first:  # whoever comes first says what the run is
        first.setenv("LOCAL_WORLD_SIZE", "1")
        first.setenv("DISTFLOW_TOKEN", "the token of the run")
        ElasticAgent(address, "2", partial(plan, spec), spec.run.robust)
    assert launch.main([*run, *(address if each == "HERE" else each for each in arguments)]) == 2
    assert expected in capsys.readouterr().err
