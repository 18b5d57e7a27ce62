"""How many ranks a command starts: as many as it is told, as the run had, or as the machine has GPUs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from harness import environment

from distflow.options import gpu_count

SMI = """#!/bin/sh
echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'
echo '  MIG 1g.18gb Device 0: (UUID: MIG-1)'
echo 'GPU 1: NVIDIA H200 (UUID: GPU-2)'
echo 'GPU 2: NVIDIA H200 (UUID: GPU-3)'
"""


@pytest.fixture
def three_gpus(tmp_path, monkeypatch):
    """A driver's program that lists three."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(("visible", "count"), [
    (None, 3), ("", 0), ("-1", 0), ("1", 1), ("0, 2", 2), ("0,-1,2", 1), ("GPU-1,MIG-2", 2), ("none", 0)])
def test_gpus_that_may_be_used(three_gpus, monkeypatch, visible, count):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_count() == count


def test_without_the_drivers_program_its_folder_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_count(tmp_path / "gpus") == 0
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    assert gpu_count(tmp_path / "gpus") == 2


def said(workspace, *arguments: str, code: int = 0) -> str:
    done = subprocess.run([sys.executable, "-m", "distflow.cli", *arguments], cwd=workspace, env=environment(),
                          capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def test_a_run_takes_all_gpus_unless_it_is_told(three_gpus, workspace):
    line = ("validate", "grpo.yaml", "--run", "tiny.yaml")
    assert "on 3 ranks: no mistakes" in said(workspace, *line)
    assert "on 1 rank: no mistakes" in said(workspace, *line, "--ranks", "1")
    assert "on 2 ranks: no mistakes" in said(workspace, *line, "--set", "ranks=2")


def test_a_resume_on_too_few_gpus_says_what_to_do(three_gpus, launch, workspace, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    launch(2, "--dag", "sft.yaml", "--run-file", "tiny.yaml", "--name", "my two", "--set", "steps=2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    text = said(workspace, "resume", "runs/my two", "--set", "steps=4", code=2)
    assert "runs/my two had 2 ranks, and this machine has 1 GPUs. Go on with fewer:  --ranks 1" in text
    assert "distflow/launch.py --resume 'runs/my two'  on all" in text
