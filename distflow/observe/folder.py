"""What a run leaves: `runs/NAME/` with its configuration, plan, metrics, samples, TensorBoard events and summary."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

from distflow.schema.errors import InvalidInput, Mistake
from distflow.schema.plan import Plan
from distflow.schema.spec import Spec


def choose(output: str, dag: str, name: str | None) -> Path:
    """The folder of a new run; without a name, the first free one of `DAG-1`, `DAG-2`, …

    Raises:
        InvalidInput: the name is taken, or the folder could not be written.
    """
    root = Path(output)
    parent = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InvalidInput(Mistake(f"the run folder cannot be written: {parent} is "
                                   f"{'not writable' if parent.is_dir() else 'not a folder'}", None,
                                   "Name another one:  --set output=FOLDER"))
    if name is None:
        return next(root / f"{dag}-{number}" for number in range(1, 1_000_000) if not (root / f"{dag}-{number}").exists())
    if (root / name).exists():
        raise InvalidInput(Mistake(f"a run named `{name}` exists in {root}", None,
                                   f"Choose another --name, go on with it:  distflow resume {root / name}   or delete it."))
    return root / name


class RunFolder:
    """Writes a run's files; only rank 0 has one."""

    def __init__(self, path: Path, resumed_at: int | None = None):
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import; only rank 0 pays for it

        self.path = path
        if resumed_at is not None:
            for name in ("metrics.jsonl", "samples.jsonl"):
                _forget_after(path / name, resumed_at)
        self.metrics = (path / "metrics.jsonl").open("a")
        self.samples = (path / "samples.jsonl").open("a")
        self.board = SummaryWriter(str(path / "tensorboard"), purge_step=resumed_at)

    @staticmethod
    def create(path: Path, spec: Spec, plan: Plan, search: list[str]) -> None:
        """Make the folder, with everything that another process needs to repeat or resume this run.

        Args:
            search: where the modules of the user's own functions are found.
        """
        path.mkdir(parents=True)
        for kind, content in spec.resolved().items():
            (path / f"{kind}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        (path / "launch.json").write_text(json.dumps({"search": search}))
        (path / "plan.json").write_text(plan.to_json())

    def write_metrics(self, step: int, values: dict[str, float]) -> None:
        self.metrics.write(json.dumps({"step": step, **values}) + "\n")
        self.metrics.flush()
        for name, value in values.items():
            self.board.add_scalar(name, value, step)

    def write_samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            self.samples.write(json.dumps({"step": step, **row}, ensure_ascii=False) + "\n")
        self.samples.flush()

    def close(self, summary: dict[str, Any]) -> None:
        (self.path / "summary.json").write_text(json.dumps(summary, indent=1))
        self.metrics.close()
        self.samples.close()
        self.board.close()


def _forget_after(path: Path, step: int) -> None:
    """Drop the lines of steps that a resumed run will do again, and a torn last line."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except ValueError:
            continue
    path.write_text("".join(kept))
