"""Starts and reads runs from Python, in a script or a notebook.

    started = distflow.run("grpo", run="my_run.yaml", set={"steps": 100}, ranks=2)
    started.wait().metrics["reward/mean"].plot()
    distflow.load("runs/grpo-1").samples

A run is the same as that of `distflow run`, in processes of its own: this process may do something else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.errors import DistflowError
from distflow.telemetry.processes import Child, python_environment, spawn
from distflow.telemetry.run_reader import RunReader
from distflow.telemetry.screen import fitting

if TYPE_CHECKING:
    from pandas import DataFrame

_KEPT_LINES = 40  # of the output of a run, for the error of one that fails


class RunFailed(DistflowError):
    """A run has ended before its last step. The message has the end of its output."""


def run(dag: str, run: str | None = None, *, set: Mapping[str, Any] | None = None, ranks: int | None = None,
        name: str | None = None, cluster: str | None = None, quiet: bool = False) -> RunHandle:
    """Check a DAG and start a run of it on this machine; return at once.

    The arguments are those of `distflow run`. If this process ends, the run ends too, after the step under way and with
    a checkpoint.

    Args:
        dag: a file, or the name of a shipped DAG, as `grpo`.
        run: the run file; default: the shipped one, for a tiny model on CPUs.
        set: values that override those of the files, by their keys, as `{"roles.actor.learning_rate": 1e-6}`.
        ranks: number of processes, one for each GPU.
        quiet: do not print what the run says.

    Raises:
        InvalidInput: a mistake in one of these, with its line and a proposal; nothing has been started.
    """
    from distflow.options import check
    from distflow.telemetry.run_folder import choose

    overrides = [f"{key}={json.dumps(value)}" for key, value in (set or {}).items()]
    options = argparse.Namespace(dag=dag, dag_file=None, run=run, overrides=overrides, cluster=cluster,
                                 name=name, ranks=ranks)
    spec, checked = check(options)
    folder = choose(spec.run.output, checked.name, name)
    given = [("--run-file", run), ("--cluster", cluster), ("--name", folder.name),
             ("--ranks", str(checked.ranks)), *(("--set", override) for override in overrides)]
    arguments = ["run", dag, *(part for flag, value in given if value for part in (flag, value))]
    return RunHandle(folder, _start(arguments), quiet)


def load(folder: str | os.PathLike[str]) -> RunHandle:
    """Return a run that has been started elsewhere, going on or not. Raises InvalidInput: it is no run's folder."""
    return RunHandle(RunReader.of(Path(folder), 'distflow.load("runs/grpo-1")').folder)


def _start(arguments: list[str]) -> Child:
    # In a session of its own: an interrupt in a notebook is for the cell that waits, not for the run.
    return spawn([sys.executable, "-u", "-P", "-m", "distflow.cli", *arguments], die_with_parent=signal.SIGTERM,
                 session=True, env=python_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                 errors="replace")


class RunHandle:
    """A run's folder, and its process if `run` has started it. Tables are read each time."""

    def __init__(self, folder: Path, process: Child | None = None, quiet: bool = False):
        self.folder, self.process, self._files = folder, process, RunReader(folder)
        self._output: deque[str] = deque(maxlen=_KEPT_LINES)
        self._reader = threading.Thread(target=self._read_output, args=(quiet,), daemon=True)
        if process is not None:
            self._reader.start()

    def __repr__(self) -> str:
        state = "is going on" if self.running else "has ended" if self.summary else "has not come to its end"
        return f"<run {self.folder}: {state}>"

    @property
    def running(self) -> bool:
        from distflow.telemetry.run_lock import in_use

        return self.process.poll() is None if self.process is not None else in_use(self.folder) is not None

    @property
    def metrics(self) -> DataFrame:
        """Metrics with a row for each step, and a column for each metric (docs/metrics.md)."""
        table = self._table(self._files.steps())
        return table.set_index("step") if len(table) else table

    @property
    def samples(self) -> DataFrame:
        """Samples that the run has written, of training: prompts, answers, rewards, advantages."""
        return self._table(self._files.rows("samples"))

    @property
    def validation(self) -> DataFrame:
        return self._table(self._files.rows("validation"))

    @property
    def events(self) -> DataFrame:
        """What has happened beside the steps: failures, restarts, pulls, checkpoints."""
        return self._table(self._files.rows("events"))

    @property
    def summary(self) -> dict[str, Any]:
        """Results of a run that has finished; empty before."""
        return self._files.summary

    def report(self, file: str | os.PathLike[str] | None = None) -> Path:
        """Write a page with curves, samples, failures and settings, and return its path."""
        from distflow.telemetry.report import write_report

        path = Path(file) if file else self.folder / "report.html"
        write_report([self.folder], path)
        return path

    def wait(self, seconds: float | None = None) -> RunHandle:
        """Wait for the end of a run that `run` has started; an interrupt ends the wait, not the run. Raises RunFailed:
        it ended before its last step; TimeoutError: it is still running after `seconds`."""
        if self.process is None:
            raise DistflowError(f"{self.folder} was not started by this process, which cannot wait for it; `running` "
                                "says whether it goes on")
        status = self.process.wait() if seconds is None else self.process.poll(seconds)
        if status is None:
            raise TimeoutError(f"{self.folder} is still running after {seconds:g} s")
        self._reader.join()
        if status:
            raise RunFailed(f"{self.folder} ended with exit code {status}. Its last lines:\n" + "".join(self._output))
        return self

    def stop(self) -> None:
        """End the run after the step under way, with a checkpoint, and wait for that."""
        if self.process is not None:
            self.process.signal(signal.SIGTERM)
            self.process.wait()
            self._reader.join()

    @staticmethod
    def _table(rows: Sequence[Mapping[str, Any]]) -> DataFrame:
        from pandas import DataFrame

        return DataFrame(list(rows))

    def _read_output(self, quiet: bool) -> None:
        assert self.process is not None
        for line in self.process.stdout:
            self._output.append(line)
            if not quiet:
                print(fitting(line, sys.stdout), end="", flush=True)
