"""The scripts of `deploy/slurm/` on a real Slurm with two nodes, where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from harness import ROOT, environment, metrics_of
from slurm_cluster import SlurmCluster, missing

pytestmark = [pytest.mark.run, pytest.mark.skipif(bool(missing()), reason=missing())]
LONG = ("--set", "steps=100000", "--set", "checkpoint.every=100000")


NODES = ("one", "two", "three")


@pytest.fixture(scope="module")
def slurm():
    search = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        cluster = SlurmCluster(Path(folder), {**environment(), **search}, NODES)
        try:
            cluster.wait_until_idle()
            yield cluster
        finally:
            cluster.close()


def steps(run: Path) -> int:
    """How many are written, while the run goes on."""
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def checkpoints(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())


def test_a_job_that_reaches_its_time_limit_goes_on_from_its_checkpoint(slurm, workspace):
    line = ("--gpus-per-node=1", "--time=20", str(ROOT / "deploy/slurm/train.sbatch"), "--dag", "grpo.yaml",
            "--run-file", "tiny.yaml", *LONG)
    job = slurm.submit(*line, cwd=workspace)
    run, log = workspace / f"runs/distflow-{job}", workspace / f"distflow-{job}.log"
    slurm.until(lambda: steps(run) >= 2, log)
    slurm.ask("scancel", "--batch", "--signal=USR1", job)  # as Slurm does some minutes before the limit
    slurm.until(lambda: slurm.state(job) == "PENDING", log)
    first, = checkpoints(run)
    slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now+3")  # not two minutes later
    slurm.until(lambda: steps(run) >= first + 2, log)
    slurm.ask("scancel", "--signal=TERM", job)  # for good
    slurm.until(lambda: slurm.state(job) == "FAILED", log)
    last = checkpoints(run)[-1]
    assert sorted(metrics_of(run)) == list(range(1, last + 1)), "no step is lost or done twice"
    assert last > first


def test_a_job_that_is_printed_runs_to_its_end_in_groups_on_two_machines(slurm, workspace):
    arguments = ("--ranks", "2", "--name", "printed", "--set", "mode=async", "--set", "groups.rollout=1", "--slurm",
                 "gpus-per-node=0", "time=20")
    line = [sys.executable, "-m", "distflow.cli", "run", "grpo.yaml", "--run", "tiny.yaml", *arguments]
    done = subprocess.run(line, cwd=workspace, env=slurm.environment, capture_output=True, text=True, check=True)
    (workspace / "job.sbatch").write_text(done.stdout)
    assert "to start at" in slurm.ask("sbatch", "--test-only", str(workspace / "job.sbatch"))
    job = slurm.submit("job.sbatch", cwd=workspace)
    log = workspace / f"grpo-{job}.log"
    slurm.until(lambda: slurm.state(job) not in ("PENDING", "RUNNING", "COMPLETING"), log)
    assert slurm.state(job) == "COMPLETED", log.read_text()
    assert len(metrics_of(workspace / "runs/printed")) == 4
    assert json.loads((workspace / "runs/printed/summary.json").read_text())["ranks"] == 2


def test_a_node_that_is_lost_is_replaced_while_the_others_go_on(slurm, workspace, etcd):
    """Each machine is a task of an array: Slurm queues that of the lost node again, and it joins when a node comes."""
    arguments = ("--name", "apart", *LONG, "--set", "mode=async", "--set", "groups.rollout=2", "--set",
                 "robust.machine_silence=10", "--slurm", "gpus-per-node=1", "time=20", "machines=2:3",
                 f"store={etcd.address('apart')}")
    line = [sys.executable, "-m", "distflow.cli", "run", "grpo.yaml", "--run", "tiny.yaml", *arguments]
    done = subprocess.run(line, cwd=workspace, env=slurm.environment, capture_output=True, text=True, check=True)
    (workspace / "job.sbatch").write_text(done.stdout)
    job = slurm.submit("--export=ALL,DISTFLOW_TOKEN=of-this-test-alone,GLOO_SOCKET_IFNAME=lo", "job.sbatch",
                       cwd=workspace)
    run = workspace / "runs/apart"
    logs = {task: workspace / f"grpo-{job}-{task}.log" for task in range(1, 4)}
    slurm.until(lambda: any(log.exists() and "step 1/" in log.read_text() for log in logs.values()), logs[1])
    sampling = next(task for task, log in logs.items() if "step 1/" not in log.read_text())
    slurm.kill(slurm.ask("squeue", "-h", "-o", "%N", "-j", f"{job}_{sampling}"))
    lost, = {*NODES} - slurm.daemons.keys()
    slurm.until(lambda: slurm.state(f"{job}_{sampling}") == "PENDING", logs[sampling])
    before = steps(run)
    slurm.ask("scontrol", "update", f"JobId={job}_{sampling}", "StartTime=now+3")  # not two minutes later
    slurm.start(lost)
    slurm.until(lambda: "has taken its place" in (run / "events.jsonl").read_text(), logs[sampling])
    slurm.until(lambda: steps(run) >= before + 2, logs[1])
    failures = [line for line in map(json.loads, (run / "events.jsonl").read_text().splitlines())
                if line["event"] == "failure"]
    assert [each["group"] for each in failures if each["group"] in ("trainer", "the machines")] == []
    done = sorted(metrics_of(run))  # the run goes on
    assert done == list(range(1, len(done) + 1)), "no step is lost or done twice"
    slurm.ask("scancel", job)
