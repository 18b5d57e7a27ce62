"""Runs at Weights & Biases (offline), MLflow and Prometheus: the real libraries, read back from what they wrote."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import ROOT, environment

from distflow.cli import main
from distflow.errors import InvalidInput
from distflow.telemetry.loggers import LOGGERS, Logger, send
from distflow.telemetry.run_reader import RunReader

_BLOCK = 32768


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "mine-1"
    made.mkdir()
    (made / "run.yaml").write_text("roles: {actor: {learning_rate: 0.1}}\n")
    write(made, range(1, 4))
    return made


def write(folder: Path, steps: range) -> None:
    with (folder / "metrics.jsonl").open("a") as metrics, (folder / "samples.jsonl").open("a") as samples:
        for step in steps:
            metrics.write(json.dumps({"step": step, "reward/mean": step / 10, "loss": None}) + "\n")
            metrics.write(json.dumps({"step": step, "validation/held": step / 20}) + "\n")
            row = {"step": step, "questions": "How many?", "rewards": 1.0, "parts": {"a": 1}}
            samples.write(json.dumps(row) + "\n")


def at_once(_: float) -> bool:
    return True


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


def test_wandb_has_each_step_once_also_of_a_resumed_run(folder) -> None:
    pytest.importorskip("wandb")
    settings = {"project": "tests", "mode": "offline"}
    assert send(RunReader(folder), "wandb", settings, at_once) == 3
    write(folder, range(4, 6))
    sent_in_a_second_of_its_own()
    assert send(RunReader(folder), "wandb", settings, at_once) == 2
    with (folder / "metrics.jsonl").open("a") as metrics:
        for line in ({"step": 6, "staleness/tokens/1": 8.0}, {"step": 7, "loss": 0.1},
                     {"step": 6, "validation/held": 0.6}, {"step": 7, "validation/held": 0.7}):
            metrics.write(json.dumps(line) + "\n")
    sent_in_a_second_of_its_own()
    assert send(RunReader(folder), "wandb", settings, at_once) == 2
    steps = history(folder)
    assert sorted(steps) == [1, 2, 3, 4, 5, 6, 7, 8]
    late = [(steps[row]["validated_step"], steps[row]["validation/held"]) for row in (7, 8)]
    assert late == [(6, 0.6), (7, 0.7)], "which came after the metrics of step 7"
    assert steps[4]["reward/mean"] == 0.4
    assert steps[6]["staleness/tokens/values"] == [0.0, 8.0], "a histogram"
    assert steps[4]["validation/held"] == 0.2
    assert "loss" not in steps[4], "null is no number"
    assert steps[2]["samples/_type"] == "table-file"
    ids = {record.run.run_id for record in offline_records(folder) if record.WhichOneof("record_type") == "run"}
    assert len(ids) == 1, "a resumed run goes on under its id"


def test_mlflow_has_metrics_settings_and_samples(folder, tmp_path, monkeypatch) -> None:
    client_of = pytest.importorskip("mlflow").MlflowClient
    monkeypatch.chdir(tmp_path)  # where MLflow keeps tables
    uri = "sqlite:///mlflow.db"  # as the page has it
    client = client_of(uri)
    settings = {"uri": uri, "experiment": "tests"}
    assert send(RunReader(folder), "mlflow", settings, at_once) == 3
    write(folder, range(4, 6))
    assert send(RunReader(folder), "mlflow", settings, at_once) == 2
    experiment = client.get_experiment_by_name("tests")
    run, = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "mine-1"
    assert run.data.params == {"roles.actor.learning_rate": "0.1"}
    values = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(each.step, each.value) for each in values] == [(step, step / 10) for step in range(1, 6)]


def test_trackio_has_each_step_once_also_of_a_resumed_run(folder, tmp_path) -> None:
    """It reads where its files are when it is imported."""
    pytest.importorskip("trackio")
    script = (f"import sys\nfrom pathlib import Path\nfrom distflow.telemetry.loggers import send\n"
              f"from distflow.telemetry.run_reader import RunReader\nfolder = Path({str(folder)!r})\n"
              "print('sent', send(RunReader(folder), 'trackio', {'project': 'tests'}, lambda seconds: True))\n")
    read = ("import json\nfrom trackio.sqlite_storage import SQLiteStorage\n"
            "runs = SQLiteStorage.get_runs('tests')\n"
            "print(json.dumps([runs, SQLiteStorage.get_logs('tests', runs[0])], default=str))\n")

    def run(text: str) -> str:
        own = {**environment(), "PYTHONPATH": str(ROOT), "TRACKIO_DIR": str(tmp_path / "trackio")}
        done = subprocess.run([sys.executable, "-c", text], env=own, capture_output=True, text=True, timeout=120,
                              check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "sent 3\n" in run(script)
    write(folder, range(4, 6))
    assert "sent 2\n" in run(script)
    runs, logs = json.loads(run(read).splitlines()[-1])
    assert runs == ["mine-1"]
    assert [(line["step"], line["reward/mean"]) for line in logs if "reward/mean" in line] == [
        (step, step / 10) for step in range(1, 6)]
    assert [line["step"] for line in logs if "samples" in line] == [1, 2, 3, 4, 5]


def test_prometheus_shows_the_newest_step(folder) -> None:
    pytest.importorskip("prometheus_client")
    seen: list[str] = []

    def ended(_: float) -> bool:
        if (address := json.loads((folder / "loggers.json").read_text())["prometheus"]) and len(seen) < 2:
            seen.append(httpx.get(address).text)
        return len(seen) == 2

    send(RunReader(folder), "prometheus", {}, ended)
    assert 'distflow_reward_mean{run="mine-1"} 0.3' in seen[1]
    assert 'distflow_step{run="mine-1"} 3.0' in seen[1]


class Noted(Logger):
    """Keeps what it is sent."""

    def __init__(self, *_: Any):
        self.sent.clear()

    sent: list[tuple[int, Any]] = []

    def metrics(self, step, values) -> None:
        self.sent.append((step, dict(values)))

    def samples(self, step, rows) -> None:
        self.sent.append((step, len(rows)))

    def close(self) -> None:
        pass


def test_what_comes_after_a_look_is_sent_with_the_next_one(tmp_path, monkeypatch) -> None:
    """A step is validated long after its metrics were written, perhaps after those of newer steps, and its samples come
    just before these."""
    monkeypatch.setitem(LOGGERS, "noted", Noted)
    parts = iter([("samples", {"step": 1, "rewards": 1.0}), ("metrics", {"step": 1, "loss": 0.1}),
                  ("metrics", {"step": 1, "validation/held": 0.5}), ("metrics", {"step": 2, "loss": 0.2}),
                  ("metrics", {"step": 3, "loss": 0.3}), ("metrics", {"step": 2, "validation/held": 0.6})])

    def ended(_: float) -> bool:
        """Write one more line before each look."""
        if (part := next(parts, None)) is not None:
            with (tmp_path / f"{part[0]}.jsonl").open("a") as file:
                file.write(json.dumps(part[1]) + "\n")
        return part is None

    assert send(RunReader(tmp_path), "noted", {}, ended) == 3
    assert Noted.sent == [(1, {"loss": 0.1}), (1, 1), (1, {"validation/held": 0.5}), (2, {"loss": 0.2}),
                          (3, {"loss": 0.3}), (2, {"validation/held": 0.6})]
    assert send(RunReader(tmp_path), "noted", {}, at_once) == 0
    assert Noted.sent == []


def test_a_port_that_is_taken_is_one_message(folder) -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidInput, match=f"at 127.0.0.1:{port}: Address already in use. Choose another port"):
            send(RunReader(folder), "prometheus", {"port": port}, lambda seconds: True)


@pytest.mark.parametrize(("log", "said"), [
    ("[wandbb]", "wandb"), ("[{wandb: {projct: x}}]", "project"), ("[{prometheus: {port: 99999}}]", "port")])
def test_mistakes_are_told_with_what_was_meant(capsys, log, said) -> None:
    assert main(["validate", "grpo", "--set", f"log={log}"]) == 2
    assert said in capsys.readouterr().err


def test_a_run_is_logged_while_it_goes_on_and_one_that_fails_costs_nothing(launch, workspace) -> None:
    """Prometheus' address is another machine's, which ends its process; the file of Weights & Biases is whole."""
    pytest.importorskip("wandb")
    pytest.importorskip("prometheus_client")
    taken = "{prometheus: {port: 1, host: 203.0.113.1}}"  # an address that no machine has (RFC 5737)
    done = launch(2, "--dag", "grpo.yaml", "--run-file", "tiny.yaml", "--name", "logged", "--set",
                  f"log=[{{wandb: {{mode: offline}}}}, {taken}]")
    folder = workspace / "runs/logged"
    assert sorted(history(folder)) == [1, 2, 3, 4]
    assert "`prometheus` of `log` has failed" in done.stderr
    assert not (folder / "tensorboard").exists()


def test_a_run_is_sent_later(launch, workspace) -> None:
    pytest.importorskip("wandb")
    launch(1, "--dag", "grpo.yaml", "--run-file", "tiny.yaml", "--name", "later")
    done = subprocess.run([sys.executable, "-m", "distflow", "log", "runs/later", "--to", "wandb"], cwd=workspace,
                          env={**environment(), "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline"}, capture_output=True,
                          text=True, check=False)
    assert done.stdout.splitlines()[-1] == "sent 4 steps to wandb", done.stderr
    assert (workspace / "runs/later/tensorboard").is_dir()
