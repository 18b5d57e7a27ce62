"""`distflow probe`: real devices, real transfers."""

from __future__ import annotations

import os

import pytest
import torch
from harness import ROOT, environment
from ranks import run_ranks

from distflow.cli import main
from distflow.config.load import load
from distflow.measurements import cluster_of_probes
from planners.heterogeneous.workload import problem_of
from workers import probe as worker_probe


def test_this_machine_can_be_planned_for(tmp_path, ready):
    file = tmp_path / "machines.yaml"
    done = ready.run(0, ("-m", "distflow.cli", "probe", "--ranks", "2", "--out", str(file)), ROOT, environment())
    assert done.returncode == 0, done.stderr
    assert f"{file}: 2 devices" in done.stdout
    text = file.read_text()
    assert text.startswith("# A measurement, not a data sheet: by  distflow probe  on 20")
    assert "1 machine, 2 ranks, links over gloo" in text
    problem = problem_of(load("grpo", None, None, str(file)))
    assert sum(problem.hardware.all) == 2
    for device_group in problem.hardware.device_groups:
        assert 1e8 < device_group.peak < 1e14
        assert 1e7 < device_group.bandwidth < 1e13
        assert device_group.inside.bandwidth > 0


def _on_two_machines() -> list:
    """As if each rank were on a machine of its own; the transfers are real."""
    import torch.distributed as dist

    os.environ["GROUP_RANK"] = str(dist.get_rank())
    worker_probe._BUDGET, worker_probe._LONG = 0.01, 0.0005
    try:
        devices, links = worker_probe.probe(torch.device("cpu"))
    finally:
        del os.environ["GROUP_RANK"]
    return [devices, links]


@pytest.mark.run
def test_ranks_of_several_machines_measure_the_links_between_them():
    (devices, links), *others = run_ranks(3, _on_two_machines)
    assert [device.machine for device in devices] == [0, 1, 2]
    assert links.keys() == {(0, 1), (0, 2), (1, 2)}
    assert all(link.gb_s > 0 and link.latency_us > 0 for link in links.values())
    assert all(other == [devices, links] for other in others)  # every rank knows all
    assert sum(kind["count"] for kind in cluster_of_probes(devices, links)["machines"].values()) == 3


@pytest.mark.parametrize(("arguments", "says"), [
    (("--out", "nowhere/machines.yaml"), "nowhere/machines.yaml cannot be written: there is no folder"),
    (("--out", "/proc/machines.yaml"), "/proc/machines.yaml cannot be written: /proc is not writable"),
    (("--ranks", "0"), "--ranks 0 probes nothing"),
])
def test_bad_input_is_refused_before_anything_starts(capsys, arguments, says):
    assert main(["probe", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_under_torchrun_there_are_as_many_ranks_as_it_has_started(capsys, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert main(["probe", "--ranks", "2"]) == 2
    assert "--nproc-per-node 2" in capsys.readouterr().err
