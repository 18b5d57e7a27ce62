"""Sends the metrics and samples of a run to other programs: `log: [tensorboard, wandb, …]` of the run file.

    tensorboard  files in RUN/tensorboard, by torch's own writer
    wandb        Weights & Biases; samples as a table. `{wandb: {project: mine, mode: offline}}`
    mlflow       an MLflow experiment, at MLFLOW_TRACKING_URI; samples as a table

Each has a queue and a thread in the process that writes the run's folder. No step waits for a network or a disk: a
queue that is full takes nothing more, and a logger that fails costs the run a warning. A resumed run continues under
the same id, which stands in RUN/log.NAME.json with the last step that was sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distflow.telemetry import events, files
from distflow.telemetry.run_reader import Row, RunReader, histograms, is_validation, numbers

_ROOM = 1000
"""Lines that wait for a logger; more are left out."""
_DRAIN = 20.0
"""Seconds at the end of a run for what is left; a logger that works needs few of them."""


@dataclass(frozen=True)
class LoggedRun:
    """Run as a logger sees it. id: what an earlier worker of the run got from the logger, or ""; redone: first step
    that a resumed run repeats."""

    folder: Path
    settings: Mapping[str, str]
    id: str
    redone: int | None


class Logger(ABC):
    """One program that metrics go to. It raises whatever its library raises."""

    id = ""  # by which a resumed run is continued
    replaces = False  # whether a step that is repeated replaces what was written of it

    @abstractmethod
    def metrics(self, step: int, values: Mapping[str, float]) -> None: ...

    @abstractmethod
    def samples(self, step: int, rows: Sequence[Row]) -> None: ...

    def alert(self, step: int, text: str) -> None:  # noqa: B027 - some have none
        """Send what the detectors of learning have found in a step."""

    @abstractmethod
    def close(self) -> None: ...


_FIRST = {"validation": "1_validation", "reward": "2_reward"}
"""Names of groups of metrics in TensorBoard, which sorts groups by name."""


class TensorboardLogger(Logger):
    replaces = True

    def __init__(self, run: LoggedRun):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.redone)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        plain, counted = histograms(values)
        for name, value in plain.items():
            group, slash, rest = name.partition("/")
            self.writer.add_scalar(f"{_FIRST.get(group, group)}{slash}{rest}", value, step)
        for name, counts in counted.items():
            self._histogram(name, counts, step)
        self.writer.flush()

    def _histogram(self, name: str, counts: dict[int, float], step: int) -> None:
        """Write a histogram with a bar for each whole number from 0 on."""
        bars = [counts.get(number, 0.0) for number in range(max(counts) + 1)]
        total, first, squares = (sum(number**power * count for number, count in counts.items()) for power in range(3))
        self.writer.add_histogram_raw(name, -0.5, max(counts) + 0.5, total, first, squares,
                                      [number + 0.5 for number in range(len(bars))], bars, step)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        text = "\n\n---\n\n".join(map(_as_text, rows))
        self.writer.add_text("samples", text.encode(errors="backslashreplace").decode(), step)

    def close(self) -> None:
        self.writer.close()


class WandbLogger(Logger):
    def __init__(self, run: LoggedRun, project: str = "distflow", mode: str | None = None):
        import wandb

        self.wandb = wandb
        self.run = wandb.init(project=project, name=run.folder.name, id=run.id or None,
                              resume="allow", dir=str(run.folder.absolute()),
                              config=dict(run.settings), mode=mode,  # pyright: ignore[reportArgumentType]
                              settings=wandb.Settings(console="off", silent=True))
        self.id = self.run.id
        self.run.define_metric("validation*", step_metric="validated_step")
        self.validated = -1

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        row = max(step, self.run.step)  # it drops what comes for an earlier one
        values = numbers(dict(values))
        if is_validation(values):
            row = self.validated = max(row, self.validated + 1)
            values = {**values, "validated_step": step}
        plain, counted = histograms(values)
        bars = {name: self.wandb.Histogram(np_histogram=(  # pyright: ignore[reportArgumentType]
            [counts.get(number, 0.0) for number in range(max(counts) + 1)],
            [number - 0.5 for number in range(max(counts) + 2)])) for name, counts in counted.items()}
        self.run.log({**plain, **bars}, step=row)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        columns, cells = _table(rows)
        self.run.log({"samples": self.wandb.Table(columns=columns, data=cells)}, step=max(step, self.run.step))

    def alert(self, step: int, text: str) -> None:
        self.run.alert(title=f"{self.run.name}, step {step}", text=text, level="WARN")

    def close(self) -> None:
        self.run.finish()
        self.wandb.teardown()  # only then all is in its file


class MlflowLogger(Logger):
    def __init__(self, run: LoggedRun):
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self.client, self.metric, self.id = MlflowClient(), Metric, run.id
        if not self.id:
            experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "distflow"
            found = self.client.get_experiment_by_name(experiment)
            number = found.experiment_id if found else self.client.create_experiment(experiment)
            self.id = self.client.create_run(number, run_name=run.folder.name).info.run_id
            settings = [Param(_name(key), str(value)[:500]) for key, value in run.settings.items()]
            for first in range(0, len(settings), 100):  # no request takes more
                self.client.log_batch(self.id, params=settings[first : first + 100])

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        entries = [self.metric(_name(name), value, round(1000 * time.time()), step)
                   for name, value in numbers(dict(values)).items()]
        for first in range(0, len(entries), 1000):
            self.client.log_batch(self.id, metrics=entries[first : first + 1000])

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        columns, cells = _table(rows)
        self.client.log_table(self.id, dict(zip(columns, map(list, zip(*cells)))), f"samples/{step:06d}.json")

    def alert(self, step: int, text: str) -> None:
        self.client.set_tag(self.id, f"alert.step_{step}", text)

    def close(self) -> None:
        self.client.set_terminated(self.id)


LOGGERS: dict[str, Callable[..., Logger]] = {"tensorboard": TensorboardLogger, "wandb": WandbLogger,
                                             "mlflow": MlflowLogger}


class LoggerThread(threading.Thread):
    """Thread of one logger. An error of its library ends it, with a traceback on standard error."""

    def __init__(self, folder: Path, logger: str, settings: Mapping[str, Any], redone: int | None):
        super().__init__(name=f"log: {logger}", daemon=True)
        self.folder, self.logger, self.settings, self.redone = folder, logger, settings, redone
        self.lines = queue.SimpleQueue[tuple[str, int, Any] | None]()
        self.warned = self.done = False
        self.start()

    def put(self, kind: str, step: int, content: Any) -> None:
        """Have `metrics`, `samples` or an `alert` of a step sent."""
        if not self.is_alive():
            self.warn("has failed, as said above")
        elif self.lines.qsize() >= _ROOM:
            self.warn(f"is {_ROOM} lines behind; what comes until it has caught up is left out")
        else:
            self.lines.put((kind, step, content))

    def warn(self, what: str) -> None:
        if not self.warned and not self.done:
            events.show(f"warning: `{self.logger}` of `log` {what}; the run goes on, and its folder has all of it.",
                        sys.stderr)
        self.warned = True

    def run(self) -> None:
        file, known = self.folder / f"log.{self.logger}.json", dict[str, Any]()
        with contextlib.suppress(OSError, ValueError):
            known = json.loads(file.read_text(encoding="utf-8"))
        run = LoggedRun(self.folder, RunReader(self.folder).settings(), known.get("id", ""), self.redone)
        logger = LOGGERS[self.logger](run, **self.settings)
        while (line := self.lines.get()) is not None:
            kind, step, content = line
            series = "validation" if kind == "metrics" and is_validation(content) else kind
            if not logger.replaces and step <= known.get(series, -1):
                continue
            getattr(logger, kind)(step, content)
            known |= {"id": logger.id, series: step}
            if not logger.replaces:
                with contextlib.suppress(OSError):  # a full disk: a resumed run is another one there
                    files.write_atomically(file, json.dumps(known))
        logger.close()
        self.done = True


class Loggers:
    """Loggers of a run; only the process that writes the run's folder has them. `settings`: by name."""

    def __init__(self, folder: Path, settings: Mapping[str, Mapping[str, Any]], redone: int | None = None):
        self.threads = [LoggerThread(folder, name, each, redone) for name, each in settings.items()]

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        for thread in self.threads:
            thread.put("metrics", step, dict(values))

    def alert(self, step: int, text: str) -> None:
        for thread in self.threads:
            thread.put("alert", step, text)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """Send rows as a table, without what they have for each token."""
        shown = [{name: row[name] for name in row if name != "tokens"} for row in rows]
        for thread in self.threads if shown else ():
            thread.put("samples", step, shown)

    def close(self) -> None:
        """Let them send what is left, for a while."""
        for thread in self.threads:
            thread.lines.put(None)
        until = time.monotonic() + _DRAIN
        for thread in self.threads:
            thread.join(max(0.0, until - time.monotonic()))
            late = f"has not sent everything after {_DRAIN:g} s"
            thread.warn(late if thread.is_alive() else "has failed, as said above")


def _as_text(row: Row) -> str:
    """Return a sample as Markdown: its numbers in a line, then its texts."""
    texts = {name: value for name, value in row.items() if isinstance(value, str)}
    others = "  ".join(f"{name} {value}" for name, value in row.items() if name not in texts)
    blocks = [f"**{name}**\n\n" + "\n".join(f"    {line}" for line in value.splitlines())
              for name, value in texts.items()]
    return "\n\n".join([others, *blocks])


def _name(text: str) -> str:
    """Return a name that MLflow takes."""
    return re.sub(r"[^\w./ -]", "_", text)[:250]


def _table(rows: Sequence[Row]) -> tuple[list[Any], list[Any]]:
    """Return the columns of samples, which need not be the same in all, and the cells of each."""
    columns = [*dict.fromkeys(name for row in rows for name in row)]
    return columns, [[_cell(row.get(name)) for name in columns] for row in rows]


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float | bool) else json.dumps(value)
