"""Sends the metrics and samples of a run to other programs: `log: [tensorboard, wandb, …]` of the run file.

    wandb        Weights & Biases; samples as a table. `{wandb: {project: mine, mode: offline}}`
    mlflow       an MLflow experiment; samples as a table. `{mlflow: {uri: sqlite:///mlflow.db}}`
    trackio      a local project of trackio; samples as a table. `{trackio: {project: mine}}`
    prometheus   the newest step, for scrapes of http://127.0.0.1:PORT/metrics. `{prometheus: {port: 9400}}`

Each has a process of its own, which reads what the run writes to its folder: no step waits for a network, and one that
fails costs the run nothing. `distflow log RUN --to NAME` sends what is missing later, as from a machine with a network.
A resumed run goes on under the same id, which stands in RUN/loggers.json. `run_folder` writes TensorBoard's.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distflow.errors import InvalidInput
from distflow.telemetry import events, files
from distflow.telemetry.processes import python_environment, spawn
from distflow.telemetry.run_reader import Row, RunReader, histograms, is_validation, numbers

_EVERY = 1.0  # seconds between two looks at the files
_EXIT_TIMEOUT = 60.0  # seconds at the end of a run for what is left
_FILE = "loggers.json"


class Logger(ABC):
    """One program that metrics go to. It raises whatever its library raises."""

    @abstractmethod
    def metrics(self, step: int, values: Mapping[str, float]) -> None: ...

    def samples(self, step: int, rows: Sequence[Row]) -> None:  # noqa: B027 - some take numbers only
        """Write rows as a table."""

    @abstractmethod
    def close(self) -> None: ...


class WandbLogger(Logger):
    def __init__(self, folder: Path, config: Mapping[str, Any], project: str = "distflow", entity: str | None = None,
                 group: str | None = None, tags: Sequence[str] = (), mode: str | None = None):
        import wandb

        self.wandb = wandb
        known = _known(folder).get("wandb")
        self.run = wandb.init(project=project, entity=entity, group=group, tags=list(tags), name=folder.name, id=known,
                              resume="allow", dir=str(folder.absolute()), config=dict(config), mode=mode,  # pyright: ignore[reportArgumentType]
                              settings=wandb.Settings(console="off", silent=True))
        _keep(folder, "wandb", self.run.id)
        self.run.define_metric("validation*", step_metric="validated_step")
        self.validated = -1

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        row = max(step, self.run.step)  # it drops what comes for an earlier one
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

    def close(self) -> None:
        self.run.finish()
        self.wandb.teardown()  # only then all is in its file


class MlflowLogger(Logger):
    def __init__(self, folder: Path, config: Mapping[str, Any], uri: str | None = None, experiment: str = "distflow"):
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self.client, self.metric = MlflowClient(uri), Metric
        known = _known(folder).get("mlflow")
        if known is None:
            found = self.client.get_experiment_by_name(experiment)
            number = found.experiment_id if found else self.client.create_experiment(experiment)
            known = self.client.create_run(number, run_name=folder.name).info.run_id
            settings = [Param(_name(key), str(value)[:500]) for key, value in config.items()]
            for first in range(0, len(settings), 100):  # no request takes more
                self.client.log_batch(known, params=settings[first : first + 100])
            _keep(folder, "mlflow", known)
        self.run = known

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        entries = [self.metric(_name(name), value, round(1000 * time.time()), step) for name, value in values.items()]
        for first in range(0, len(entries), 1000):
            self.client.log_batch(self.run, metrics=entries[first : first + 1000])

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        columns, cells = _table(rows)
        self.client.log_table(self.run, dict(zip(columns, map(list, zip(*cells)))), f"samples/{step:06d}.json")

    def close(self) -> None:
        self.client.set_terminated(self.run)


class TrackioLogger(Logger):
    def __init__(self, folder: Path, config: Mapping[str, Any], project: str = "distflow", group: str | None = None,
                 server: str | None = None):
        import trackio

        self.trackio = trackio
        again = "must" if "trackio" in _known(folder) else "never"
        self.run = trackio.init(project, folder.name, group=group, server_url=server, config=dict(config), resume=again,
                                embed=False, auto_log_gpu=False, auto_log_cpu=False)
        _keep(folder, "trackio", project)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        columns, cells = _table(rows)
        self.run.log({"samples": self.trackio.Table(columns=columns, data=cells)}, step=step)

    def close(self) -> None:
        self.run.finish()


class PrometheusLogger(Logger):
    def __init__(self, folder: Path, config: Mapping[str, Any], port: int = 0, host: str = "127.0.0.1"):
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        self.registry, self.gauge, self.name, self.newest = CollectorRegistry(), Gauge, folder.name, 0
        self.gauges: dict[str, Gauge] = {}
        try:
            self.server, self.thread = start_http_server(port, host, self.registry)
        except OSError as error:
            raise InvalidInput(f"no page for Prometheus can be served at {host}:{port}: {error.strerror}. Choose "
                               "another port, or 0 for one that is free:  log: [{prometheus: {port: 0}}]") from None
        address = f"http://{host}:{self.server.server_port}/metrics"
        _keep(folder, "prometheus", address)
        events.show(f"{folder.name}: metrics for Prometheus at {address}")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.newest = max(step, self.newest)
        for name, value in {**values, "step": self.newest}.items():
            if name not in self.gauges:
                metric = "distflow_" + re.sub(r"\W", "_", name)
                self.gauges[name] = self.gauge(metric, name, ["run"], registry=self.registry)
            self.gauges[name].labels(self.name).set(value)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


LOGGERS: dict[str, Callable[..., Logger]] = {"wandb": WandbLogger, "mlflow": MlflowLogger, "trackio": TrackioLogger,
                                             "prometheus": PrometheusLogger}


def send(run: RunReader, name: str, settings: Mapping[str, Any], ended: Callable[[float], bool]) -> int:
    """Send the lines of a run to a logger as they come, none of them twice; return the number of steps. `ended`: waits
    for so many seconds and returns whether the run has ended; what is written by then is still sent."""
    folder, sent_steps = run.folder, set[int]()
    with _only_one(folder, name):
        logger = LOGGERS[name](folder, run.settings(), **settings)
        metrics, samples, rows = run.tail("metrics"), run.tail("samples"), dict[int, list[Row]]()
        sent: Any = _known(folder).get(f"{name} sent", {})  # a step and a count, in runs of older versions
        sent = sent if isinstance(sent, dict) else dict.fromkeys(("steps", "validation"), sent[0])
        last: dict[str, int] = {"steps": -1, "validation": -1, **sent}
        over = False
        while not over:
            over = ended(_EVERY)
            lines = list(metrics.new())
            for row in samples.new():  # the samples of a step are written before its metrics
                rows.setdefault(row["step"], []).append({name: row[name] for name in row if name != "tokens"})
            for line in lines:
                step, kind = line.pop("step"), "validation" if is_validation(line) else "steps"
                shown = rows.pop(step, None)
                if step > last[kind]:
                    logger.metrics(step, numbers(line))
                    if shown:
                        logger.samples(step, shown)
                    last[kind] = step
                    sent_steps.add(step)
            _keep(folder, f"{name} sent", last)
        logger.close()
    return len(sent_steps)


@contextlib.contextmanager
def _only_one(folder: Path, name: str) -> Iterator[None]:
    """Wait until no other process sends this run to the logger: that of an earlier worker may have steps left."""
    with (folder / f"log.{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class LogProcesses:
    """Processes that send a run that goes on, one for each logger. They end with this one, once all is sent."""

    def __init__(self, folder: Path, names: Iterable[str]):
        self.folder, self.children = folder, {name: spawn(
            [sys.executable, "-P", "-m", "distflow.cli", "log", str(folder), "--to", name, "--follow"],
            die_with_parent=0,
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=python_environment())
            for name in names}

    def check(self) -> None:
        """Warn of those that have failed, once."""
        for name in [name for name, child in self.children.items() if child.poll()]:
            del self.children[name]
            events.show(f"warning: `{name}` of `log` has failed, as said above; the run goes on. Later:  distflow log "
                        f"{self.folder} --to {name}", sys.stderr)

    def close(self) -> None:
        """Let them send what is left, for a while."""
        for child in self.children.values():
            child.stdin.close()
        for child in self.children.values():
            if child.poll(_EXIT_TIMEOUT) is None:
                child.end()
        self.check()


def _known(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return json.loads((folder / _FILE).read_text(encoding="utf-8"))
    return {}


def _keep(folder: Path, name: str, value: Any) -> None:
    """Write a value into the run's file, which several loggers share."""
    with files.locked(folder / _FILE):
        files.write_atomically(folder / _FILE, json.dumps({**_known(folder), name: value}))


def _name(text: str) -> str:
    """Return a name that MLflow takes."""
    return re.sub(r"[^\w./ -]", "_", text)[:250]


def _table(rows: Sequence[Row]) -> tuple[list[Any], list[Any]]:
    """Return the columns of samples, which need not be the same in all, and the cells of each."""
    columns = [*dict.fromkeys(name for row in rows for name in row)]
    return columns, [[_cell(row.get(name)) for name in columns] for row in rows]


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float | bool) else json.dumps(value)
