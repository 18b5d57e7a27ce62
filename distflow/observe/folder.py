"""What a run leaves: `runs/NAME/` with its configuration, plan, metrics, samples, TensorBoard events and summary."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import yaml

from distflow.robust.processes import began
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
        folders = (root / f"{dag}-{number}" for number in itertools.count(1))
        return next(folder for folder in folders if not folder.exists())
    if (root / name).exists():
        raise _exists(root / name)
    return root / name


def of_torchrun(output: str) -> Path | None:
    """The folder that the torchrun above this process has made before; None if it has made none."""
    mine = agent()
    found = (place.parent for place in Path(output).glob("*/launch.json")
             if json.loads(place.read_text()).get("torchrun") == mine)
    return next(found, None)


def agent() -> str:
    """The torchrun above this process, which no other of this machine is: its run's id may be that of many."""
    parent = os.getppid()
    return f"{os.environ.get('TORCHELASTIC_RUN_ID')} {socket.gethostname()} {parent} {began(parent)}"


def _remove(made: list[Path]) -> None:
    """A run's folder with all that is in it, and those above that were made for it if nobody else uses them."""
    shutil.rmtree(made[0], ignore_errors=True)
    with contextlib.suppress(OSError):
        for folder in made[1:]:
            folder.rmdir()


def _exists(path: Path) -> InvalidInput:
    hint = f"Choose another --name, go on with it:  distflow resume {path}   or delete it."
    return InvalidInput(Mistake(f"a run named `{path.name}` exists in {path.parent}", None, hint))


class RunFolder:
    """Writes a run's files; only rank 0 has one."""

    def __init__(self, path: Path, resumed_at: int | None = None, again: bool = False):
        """`again`: the last step before `resumed_at` is validated once more."""
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import; only rank 0 pays for it

        self.path = path
        if resumed_at is not None:
            for name in ("metrics.jsonl", "samples.jsonl"):
                forget_after(path / name, resumed_at, again)
        self.metrics = append(path / "metrics.jsonl")
        self.samples = append(path / "samples.jsonl")
        redone = None if resumed_at is None else resumed_at + 1
        self.board = SummaryWriter(str(path / "tensorboard"), purge_step=redone)

    @staticmethod
    @contextlib.contextmanager
    def created(path: Path, spec: Spec, plan: Plan, search: list[str],
                torchrun: str = "") -> Iterator[Callable[[], None]]:
        """Make the folder, with everything that another process needs to repeat or resume this run.

        What happens in the block belongs to the start: if it fails, all that was made is taken away again, by what
        the block is given.

        Args:
            search: where the modules of the user's own functions are found.
            torchrun: the `agent` that has started this run.

        Raises:
            InvalidInput: another run took the name since it was chosen, or the folder cannot be made.
        """
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            raise _exists(path) from None
        except OSError as error:
            raise InvalidInput(f"the run folder cannot be made: {error}") from None
        with contextlib.ExitStack() as failed:
            failed.callback(_remove, missing)
            (path / "launch.json").write_text(json.dumps({"search": search, "torchrun": torchrun}))
            RunFolder.describe(path, spec, plan)
            yield lambda: _remove(missing)
            failed.pop_all()

    @staticmethod
    def describe(path: Path, spec: Spec, plan: Plan) -> None:
        """Write what is in force, at the start and when a resume overrides some of it. A file is old or new, whole."""
        texts = {f"{kind}.yaml": yaml.safe_dump(content, sort_keys=False) for kind, content in spec.resolved().items()}
        for name, text in {**texts, "plan.json": plan.to_json()}.items():
            partial = path / f"{name}.partial"
            partial.write_text(text)
            partial.replace(path / name)

    def write_metrics(self, step: int, values: dict[str, float]) -> None:
        """One line. What is not a finite number is null there, which JSON has, and itself in TensorBoard."""
        self.metrics.write(json.dumps({"step": step, **finite(values)}) + "\n")
        self.metrics.flush()
        for name, value in values.items():
            self.board.add_scalar(name, value, step)

    def write_samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """One line a row."""
        for row in rows:
            self.samples.write(json.dumps({"step": step, **finite(row)}, ensure_ascii=False) + "\n")
        self.samples.flush()

    def close(self, facts: dict[str, Any]) -> None:
        """Write the summary, which says that the run came to its end: what all steps say, and `facts`."""
        self.metrics.close()
        self.samples.close()
        self.board.close()
        with (self.path / "metrics.jsonl").open(encoding="utf-8") as lines:
            summary = {**summarize([json.loads(line) for line in lines]), **facts}
        (self.path / "summary.json").write_text(json.dumps(finite(summary), indent=1))


def summarize(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """A run in a few numbers, from all its metrics lines. The accuracies are those of the first validation set."""
    steps = [line for line in lines if "seconds" in line]
    tokens, seconds = (sum(line.get(name) or 0.0 for line in steps) for name in ("tokens", "seconds"))
    curves: dict[str, list[float]] = {}
    for line in lines:
        for name, value in line.items():
            if name.startswith("validation/"):
                curves.setdefault(name.removeprefix("validation/"), []).append(value)
    first = next(iter(curves.values()), [None])
    return {"steps": steps[-1]["step"] if steps else 0, "accuracy_before": first[0], "accuracy_after": first[-1],
            "accuracy": curves, "seconds_in_steps": round(seconds, 3),
            "tokens_per_second": round(tokens / seconds, 1) if seconds else None}


def append(path: Path) -> TextIO:
    """The file, to be written to at its end."""
    # Half of a surrogate pair, which UTF-8 cannot hold, becomes `\udXXX`: JSON's own way to write it.
    return path.open("a", encoding="utf-8", errors="backslashreplace")


def finite(value: Any) -> Any:
    """`value` with None for each NaN and infinity in it."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def forget_after(path: Path, step: int, validation: bool = False) -> None:
    """Drop the lines of steps that a resumed run will do again, with `validation` also those of the step's validation,
    and a torn last line."""
    if not path.exists():
        return
    rest = path.with_suffix(".rest")
    with path.open("rb") as old, rest.open("wb") as new:  # as bytes: text has more line ends than JSON Lines
        new.writelines(line for line in old if _step_of(line) <= step - (validation and b'"validation/' in line))
    rest.replace(path)


def _step_of(line: bytes) -> float:
    try:
        record = json.loads(line)
    except ValueError:
        return math.inf
    step = record.get("step") if isinstance(record, dict) and line.endswith(b"\n") else None
    return step if isinstance(step, int) else math.inf
