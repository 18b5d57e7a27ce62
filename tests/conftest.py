"""Fixtures: a folder with a tiny run, and a way to launch it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import REWARD, ROOT, TINY, command, environment
from hypothesis import settings
from ready import Ready

settings.register_profile("distflow", derandomize=True, deadline=None)  # the same examples each time, however slow
settings.load_profile("distflow")


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A folder with ten problems, a tiny run file, and a reward that a random model earns too."""
    lines = (ROOT / "dags/data/arithmetic/train.jsonl").read_text().splitlines()[:10]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "brevity.py").write_text(REWARD)
    (tmp_path / "grpo.yaml").write_text(
        (ROOT / "dags/grpo.yaml").read_text().replace("function: score, ", "function: score, with: {reward: brevity}, ")
        + "imports: [brevity]\n")
    return tmp_path


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of this process alone; real collectives."""
    import torch.distributed as dist  # most tests need no torch here

    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def ready() -> Ready:
    return Ready()


@pytest.fixture
def launch(workspace: Path, ready: Ready) -> Callable[..., subprocess.CompletedProcess]:
    """Run to the end in the workspace: `launch(2, "--dag", "grpo.yaml", …)`; fails the test unless `code` is met.

    With `torchrun` it is torchrun that starts the ranks, else a process that has loaded what they need.
    """

    def run(ranks: int, *arguments: str, code: int | None = 0, torchrun: bool = False) -> subprocess.CompletedProcess:
        if torchrun:
            done = subprocess.run(command(ranks, *arguments), cwd=workspace, env=environment(), capture_output=True,
                                  text=True, timeout=300, check=False)
        else:
            done = ready.run(ranks, arguments, workspace, environment(), timeout=300)
        assert code is None or done.returncode == code, done.stdout[-2000:] + done.stderr[-6000:]
        return done

    return run
