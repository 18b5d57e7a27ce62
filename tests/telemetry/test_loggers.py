"""Runs at Weights & Biases (offline) and MLflow: the real libraries, read back from what they wrote."""

from __future__ import annotations

import json
import math
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distflow.cli import main
from distflow.telemetry.loggers import LOGGERS, LoggedRun, Logger, Loggers

_BLOCK = 32768


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "mine-1"
    made.mkdir()
    (made / "run.yaml").write_text("roles: {actor: {learning_rate: 0.1}}\n")
    return made


def send(folder: Path, settings: dict[str, dict[str, Any]], steps: range) -> None:
    loggers = Loggers(folder, settings)
    for step in steps:
        loggers.samples(step, [{"step": step, "questions": "How many?", "rewards": 1.0, "parts": {"a": 1}}])
        loggers.metrics(step, {"reward/mean": step / 10, "loss": math.nan})
        loggers.metrics(step, {"validation/held": step / 20})
    loggers.close()


def offline_records(folder: Path) -> Iterator[Any]:
    """What Weights & Biases has written. Its file is a log like LevelDB's, of protobuf messages."""
    from wandb.proto import wandb_internal_pb2

    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, at, message = file.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if (left := _BLOCK - at % _BLOCK) < 7:
                at += left
                continue
            size, kind = struct.unpack_from("<HB", data, at + 4)
            message += data[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):  # whole, or the last part
                record = wandb_internal_pb2.Record()
                record.ParseFromString(message)
                message = b""
                yield record


def history(folder: Path) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for record in offline_records(folder):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            found.setdefault(items["_step"], {}).update(items)
    return found


def sent_in_a_second_of_its_own() -> None:
    """W&B names the folder of an offline run by the second in which it begins."""
    began = int(time.time())
    while int(time.time()) == began:
        time.sleep(0.01)


def test_wandb_has_each_step_once_also_of_a_resumed_run(folder):
    pytest.importorskip("wandb")
    settings = {"wandb": {"project": "tests", "mode": "offline"}}
    send(folder, settings, range(1, 4))
    sent_in_a_second_of_its_own()
    send(folder, settings, range(3, 6))
    sent_in_a_second_of_its_own()
    loggers = Loggers(folder, settings)
    for step, values in ((6, {"staleness/tokens/1": 8.0}), (7, {"loss": 0.1}), (6, {"validation/held": 0.6}),
                         (7, {"validation/held": 0.7})):
        loggers.metrics(step, values)
    loggers.close()
    steps = history(folder)
    assert sorted(steps) == [1, 2, 3, 4, 5, 6, 7, 8]
    late = [(steps[row]["validated_step"], steps[row]["validation/held"]) for row in (7, 8)]
    assert late == [(6, 0.6), (7, 0.7)], "which came after the metrics of step 7"
    assert steps[4]["reward/mean"] == 0.4
    assert steps[6]["staleness/tokens/values"] == [0.0, 8.0], "a histogram"
    assert steps[4]["validation/held"] == 0.2
    assert "loss" not in steps[4], "what is not finite is no number"
    assert steps[2]["samples/_type"] == "table-file"
    ids = {record.run.run_id for record in offline_records(folder) if record.WhichOneof("record_type") == "run"}
    assert len(ids) == 1, "a resumed run goes on under its id"


def test_mlflow_has_metrics_settings_and_samples(folder, tmp_path, monkeypatch):
    client_of = pytest.importorskip("mlflow").MlflowClient
    monkeypatch.chdir(tmp_path)  # where MLflow keeps tables
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "tests")
    client, settings = client_of(), {"mlflow": {}}
    send(folder, settings, range(1, 4))
    send(folder, settings, range(3, 6))
    experiment = client.get_experiment_by_name("tests")
    run, = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "mine-1"
    assert run.data.params == {"roles.actor.learning_rate": "0.1"}
    values = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(each.step, each.value) for each in values] == [(step, step / 10) for step in range(1, 6)]


class Noted(Logger):
    """Keeps what it is sent."""

    sent: list[tuple[str, int, Any]] = []

    def __init__(self, run: LoggedRun):
        self.id = "noted"
        self.sent.clear()

    def metrics(self, step, values) -> None:
        self.sent.append(("metrics", step, values))

    def samples(self, step, rows) -> None:
        self.sent.append(("samples", step, rows))

    def close(self) -> None:
        pass


class Stuck(Noted):
    """Is at its first line until `over` is set."""

    begun, over = threading.Event(), threading.Event()

    def metrics(self, step, values) -> None:
        self.begun.set()
        self.over.wait()
        super().metrics(step, values)


class Failing(Noted):
    sent = []  # its thread clears it when it begins

    def metrics(self, step, values) -> None:
        raise ConnectionError("no network")


def test_loggers_send_each_series_in_order_and_no_step_again(tmp_path, monkeypatch):
    """A step is validated long after its metrics were written, perhaps after those of newer steps."""
    monkeypatch.setitem(LOGGERS, "noted", Noted)
    loggers = Loggers(tmp_path, {"noted": {}})
    loggers.samples(1, [{"rewards": 1.0, "tokens": {"texts": ["a"]}}])
    for step, values in ((1, {"loss": 0.1}), (2, {"loss": 0.2}), (1, {"validation/held": 0.5})):
        loggers.metrics(step, values)
    loggers.close()
    assert Noted.sent == [("samples", 1, [{"rewards": 1.0}]), ("metrics", 1, {"loss": 0.1}),
                          ("metrics", 2, {"loss": 0.2}), ("metrics", 1, {"validation/held": 0.5})]
    resumed = Loggers(tmp_path, {"noted": {}}, redone=2)
    for step in (2, 3):
        resumed.metrics(step, {"loss": step / 10})
    resumed.close()
    assert Noted.sent == [("metrics", 3, {"loss": 0.3})]


def test_a_logger_that_fails_is_one_warning_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(LOGGERS, "failing", Failing)
    monkeypatch.setitem(LOGGERS, "noted", Noted)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    loggers = Loggers(tmp_path, {"failing": {}, "noted": {}})
    loggers.metrics(1, {"loss": 0.1})
    loggers.threads[0].join()
    loggers.metrics(2, {"loss": 0.2})
    loggers.close()
    assert [step for _, step, _ in Noted.sent] == [1, 2]
    assert capsys.readouterr().err.count("`failing` of `log` has failed") == 1


def test_a_logger_that_is_stuck_blocks_nothing_and_its_queue_is_bounded(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(LOGGERS, "stuck", Stuck)
    monkeypatch.setattr("distflow.telemetry.loggers._ROOM", 3)
    monkeypatch.setattr("distflow.telemetry.loggers._DRAIN", 0.1)
    loggers = Loggers(tmp_path, {"stuck": {}})
    loggers.metrics(0, {})
    Stuck.begun.wait()
    for step in range(1, 9):
        loggers.metrics(step, {})
    loggers.close()
    Stuck.over.set()
    loggers.threads[0].join()
    assert [step for _, step, _ in Stuck.sent] == [0, 1, 2, 3]
    assert capsys.readouterr().err.count("`stuck` of `log` is 3 lines behind") == 1


@pytest.mark.parametrize(("log", "said"), [("[wandbb]", "wandb"), ("[{wandb: {projct: x}}]", "project")])
def test_mistakes_are_told_with_what_was_meant(capsys, log, said):
    assert main(["validate", "grpo", "--set", f"log={log}"]) == 2
    assert said in capsys.readouterr().err


def test_a_run_is_logged_while_it_goes_on_and_one_that_fails_costs_nothing(launch, workspace, monkeypatch):
    """MLflow's store cannot be made; the file of Weights & Biases is whole."""
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////dev/null/mlflow.db")
    done = launch(2, "--dag", "grpo.yaml", "--run-file", "tiny.yaml", "--name", "logged", "--set",
                  "log=[{wandb: {mode: offline}}, mlflow]")
    folder = workspace / "runs/logged"
    assert sorted(history(folder)) == [1, 2, 3, 4]
    assert "`mlflow` of `log` has failed" in done.stderr
    assert not (folder / "tensorboard").exists()
