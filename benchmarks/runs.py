"""Runs that benchmarks start by torchrun: their command line, what they are started with, and their steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.control_group import joining

ROOT = Path(__file__).resolve().parents[1]


def torchrun(ranks: int, *program: str | Path, python: str | Path = sys.executable, restarts: int = 0) -> list[str]:
    """Return the command that starts so many ranks of a program."""
    return [str(python), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
            f"--max-restarts={restarts}", *map(str, program)]


def run_command(dag: str | Path, run_file: str | Path, name: str, ranks: int, settings: Sequence[str],
                restarts: int = 0) -> list[str]:
    """Return the command that starts a run."""
    return torchrun(ranks, ROOT / "distflow/launch.py", "--dag", dag, "--run-file", run_file, "--name", name,
                    *with_set(settings), restarts=restarts)


def with_set(settings: Sequence[str]) -> list[str]:
    """Return settings as words of a command line."""
    return [word for setting in settings for word in ("--set", setting)]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a run: one thread a rank, no downloads."""
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | more


def run_once(scratch: Path, name: str, dag: Path, run_file: str, ranks: int, settings: Sequence[str],
             restarts: int = 0, group: Path | None = None) -> Path:
    """Run once, in a control group if there is one, where torchrun may start again; return the run's folder.

    Raises:
        SystemExit: it failed; shows its last lines.
    """
    command = run_command(dag, run_file, name, ranks, (f"output={scratch}", *settings), restarts)
    command = [*joining(group), *command] if group else command
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment())
    if done.returncode:
        raise SystemExit(f"{done.stdout[-2000:]}{done.stderr[-6000:]}\nthis command failed: {' '.join(command)}")
    return scratch / name


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of the steps that a run has done so far."""
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")] \
        if file.is_file() else []
    return [line for line in lines if "seconds" in line]
