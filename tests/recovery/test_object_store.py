"""Copies of checkpoints in an object store: S3 over HTTP, by moto's server, and a folder and memory by fsspec.

Transfers are killed where their standard output, a pipe that nobody reads on, holds them.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import signal
import sys
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from harness import metrics_of

from distflow.cli import main
from distflow.config.shipped import SHIPPED
from distflow.errors import CheckpointError, InvalidInput
from distflow.recovery import generations, object_store
from distflow.recovery.checkpoint_files import (
    GENERATION,
    checkpoint_of,
    complete_checkpoints,
    find_damage,
    set_aside,
    step_of,
    write_progress,
)
from distflow.recovery.generations import TrainerGeneration
from distflow.recovery.object_store import Uploads, _Copies, _outcome, _transfer, fetch, fetch_once, require_free
from distflow.telemetry import events
from distflow.telemetry.files import locked

pytestmark = pytest.mark.usefixtures("forked")  # S3's packages take seconds to load
_MANY = 400
"""Shards of which a transfer prints more than a pipe holds (64 KiB)."""
FIRST, SECOND = TrainerGeneration(1, 0, 0, "a"), TrainerGeneration(2, 0, 0, "b")


@pytest.fixture(scope="module")
def s3():
    """`s3()`: the address of a new bucket."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    import boto3

    before = dict(os.environ)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "tests", "AWS_MAX_ATTEMPTS": "1",
                   "AWS_SECRET_ACCESS_KEY": "tests", "AWS_DEFAULT_REGION": "us-east-1",
                   "AWS_EC2_METADATA_DISABLED": "true"}
    client, number = boto3.client("s3"), iter(range(1000))

    def bucket() -> str:
        name = f"bucket-{next(number)}"
        client.create_bucket(Bucket=name)
        return f"s3://{name}/distflow"

    yield bucket
    server.stop()
    os.environ.clear()
    os.environ.update(before)


both_stores = pytest.mark.parametrize("to", ["file", "s3"], indirect=True)
"""For what the stores do; what distflow makes of it is the same for both."""


@pytest.fixture
def to(request, tmp_path):
    """A value of `checkpoint.to`."""
    return request.getfixturevalue("s3")() if getattr(request, "param", "") == "s3" else f"file://{tmp_path}/store"


@pytest.fixture
def run(tmp_path):
    """The folder of a run that has begun."""
    folder = tmp_path / "runs/grpo-1"
    (folder / "best/model").mkdir(parents=True)
    (folder / "best/model/model.safetensors").write_bytes(b"the best so far")
    for name, text in {"launch.json": '{"torchrun": "one"}', "run.yaml": f"output: {tmp_path / 'elsewhere'}\n",
                       "plan.json": '{"ranks": 1}', "metrics.jsonl": '{"step": 1}\n'}.items():
        (folder / name).write_text(text)
    return folder


def save(run: Path, step: int, generation: TrainerGeneration = FIRST, shards: int = 0) -> Path:
    """Write a checkpoint as a trainer does, with so many small shards more."""
    folder = checkpoint_of(run / "checkpoints", step)
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(os.urandom(100_000))
    for number in range(shards):
        (folder / f"__0_{'1' * 200}{number:03}.distcp").write_bytes(b"shard")
    (folder / ".metadata").write_bytes(b"of torch")
    write_progress(folder, {"step": step, GENERATION: list(generation)}, {})
    return folder


def upload(run: Path, to: str, generation: TrainerGeneration = FIRST) -> str:
    """Upload in a process, as a run does; return why that has failed."""
    return _outcome(_transfer("upload", object_store.url_of(run, to), str(run), str(generation)))[1]


def steps_in(run: Path, to: str) -> list[int]:
    return [each.age.step for each in _Copies(object_store.url_of(run, to)).whole()]


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@both_stores
def test_another_machine_fetches_what_was_uploaded(run, to, tmp_path):
    require_free(run, to)
    save(run, 2)
    newest = save(run, 4)
    assert upload(run, to) == ""
    fetched = fetch(object_store.url_of(run, to))
    assert fetched == tmp_path / "elsewhere/grpo-1"
    assert [step_of(each) for each in complete_checkpoints(fetched / "checkpoints")] == [4]
    assert content_of(fetched / "checkpoints/step-00000004") == content_of(newest)
    for name in ("launch.json", "run.yaml", "plan.json", "metrics.jsonl", "best/model/model.safetensors"):
        assert (fetched / name).read_bytes() == (run / name).read_bytes()
    claimed = generations.claim(fetched / "checkpoints", "a new job", 0, 0)
    assert claimed > FIRST
    save(fetched, 6, claimed)
    assert upload(fetched, to, claimed) == ""
    assert steps_in(run, to) == [4, 6]


def test_memory_file_system_holds_a_checkpoint_too(run, tmp_path):
    copies = _Copies("memory://bucket/grpo-1")
    copies.require_free()
    newest = save(run, 4)
    copies.upload(run, FIRST)
    fetched = copies.fetch(None)
    assert content_of(fetched / "checkpoints/step-00000004") == content_of(newest)
    with pytest.raises(InvalidInput, match="checkpoints of a run already"):
        copies.require_free()


@both_stores
def test_pruned_and_set_aside_checkpoints_leave_the_store(run, to):
    for step in (2, 4, 6):
        save(run, step)
        assert upload(run, to) == ""
    assert steps_in(run, to) == [2, 4, 6]
    shutil.rmtree(checkpoint_of(run / "checkpoints", 2))
    save(run, 8)
    assert upload(run, to) == ""
    assert steps_in(run, to) == [4, 6, 8]
    assert set_aside(run / "checkpoints", 6) == 4
    assert upload(run, to) == ""
    assert steps_in(run, to) == [4]
    assert len(_Copies(object_store.url_of(run, to)).folders()) == 1, "nothing is left of the others"


@both_stores
def test_killed_upload_leaves_the_older_checkpoint(run, to):
    """More is printed than a pipe holds: the transfer stands still before its end, and is killed there."""
    old = content_of(save(run, 2))
    assert upload(run, to) == ""
    shutil.rmtree(run / "best")
    save(run, 4, shards=_MANY)
    transfer = _transfer("upload", object_store.url_of(run, to), str(run), str(FIRST))
    for _ in range(20):
        assert "step-00000004" in transfer.stdout.readline()
    os.kill(transfer.pid, signal.SIGKILL)
    assert transfer.wait() == -signal.SIGKILL
    transfer.stdout.close()
    transfer.stderr.close()
    there = _Copies(object_store.url_of(run, to)).folders()
    torn = next(files for name, files in there.items() if name.startswith("step-00000004"))
    assert "progress.json" not in torn
    assert steps_in(run, to) == [2]
    fetched = fetch(object_store.url_of(run, to))
    assert content_of(fetched / "checkpoints/step-00000002") == old
    assert not (fetched / "checkpoints/step-00000004").exists()
    if to.startswith("file"):  # so many files by HTTP take long
        assert upload(run, to) == ""
        assert steps_in(run, to) == [2, 4]


def test_killed_fetch_leaves_no_checkpoint_and_is_repeated(run, tmp_path):
    to = f"file://{tmp_path}/store"
    save(run, 2, shards=_MANY)
    assert upload(run, to) == ""
    transfer = _transfer("fetch", object_store.url_of(run, to))
    transfer.stdout.readline()
    os.kill(transfer.pid, signal.SIGKILL)
    transfer.wait()
    transfer.stdout.close()
    transfer.stderr.close()
    assert complete_checkpoints(tmp_path / "elsewhere/grpo-1/checkpoints") == []
    fetched = fetch(object_store.url_of(run, to))
    assert [step_of(each) for each in complete_checkpoints(fetched / "checkpoints")] == [2]


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[5000] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(("damaged", "left"), [([4], [2, 4]), ([2, 4], [4]), ([6], [2, 4]), ([4, 6], [2, 4])])
def test_damaged_checkpoint_on_disk_is_fetched_again(run, to, damaged, left, capsys):
    """Step 6 is not in the store."""
    save(run, 2)
    good = content_of(save(run, 4))
    assert upload(run, to) == ""
    for step in damaged:
        damage((checkpoint_of(run / "checkpoints", step) if step < 6 else save(run, 6)) / "__0_0.distcp")
    fetch(object_store.url_of(run, to), run)
    usable = [each for each in complete_checkpoints(run / "checkpoints") if not find_damage(each)]
    assert [step_of(each) for each in usable] == left
    assert content_of(run / "checkpoints/step-00000004") == good
    assert f"step-{damaged[-1]:08} is damaged: __0_0.distcp is not what was written" in capsys.readouterr().err


def test_damaged_copy_is_passed_over_for_the_one_before(run, tmp_path, capsys):
    save(run, 2)
    assert upload(run, f"file://{tmp_path}/store") == ""
    save(run, 4)
    assert upload(run, f"file://{tmp_path}/store") == ""
    damage(next((tmp_path / "store/grpo-1").glob("step-00000004*/__0_0.distcp")))
    fetched = fetch(f"file://{tmp_path}/store/grpo-1")
    assert [step_of(each) for each in complete_checkpoints(fetched / "checkpoints")] == [2]
    assert "__0_0.distcp is not what was written" in capsys.readouterr().err
    assert find_damage(fetched / "checkpoints/step-00000002") == ""


def test_machine_that_was_cut_off_removes_nothing_of_a_newer_trainer(run, to):
    save(run, 2)
    assert upload(run, to) == ""
    other = fetch(object_store.url_of(run, to))
    save(other, 4, SECOND)
    assert upload(other, to, SECOND) == ""
    save(run, 6)
    assert "a newer trainer" in upload(run, to)
    assert steps_in(run, to) == [2, 4]
    fetch(object_store.url_of(run, to), run)
    assert [step_of(each) for each in complete_checkpoints(run / "checkpoints")] == [2, 4], "its step 6 is set aside"
    assert content_of(run / "checkpoints/step-00000004") == content_of(other / "checkpoints/step-00000004")


def test_folder_that_has_the_newest_is_left_as_it_is(run, to):
    save(run, 2)
    assert upload(run, to) == ""
    save(run, 4)
    before = content_of(run)
    fetch(object_store.url_of(run, to), run)
    assert content_of(run) == before


def test_another_run_of_that_name_is_refused(run, to):
    save(run, 2)
    assert upload(run, to) == ""
    (run / "launch.json").write_text('{"torchrun": "two"}')
    shutil.rmtree(run / "checkpoints")
    save(run, 9)
    assert "checkpoints of another run than" in upload(run, to)
    assert steps_in(run, to) == [2]
    with pytest.raises(InvalidInput, match="another run"):
        fetch(object_store.url_of(run, to), run)
    with pytest.raises(InvalidInput, match="distflow resume .*grpo-1   or choose another --name"):
        require_free(run, to)


def test_failed_upload_is_said_and_made_up_for(run, tmp_path, monkeypatch):
    monkeypatch.setattr(object_store, "_DELAYS", (0.0,))
    events.current().open(run / "events.jsonl", 0)
    checkpoint, said = save(run, 2), io.StringIO()
    uploads = Uploads(run, to := f"file://{checkpoint}/progress.json")
    with redirect_stderr(said):
        uploads.begin(FIRST)
        assert uploads.over(60.0)
    assert f"step 2 was not copied to {to}/grpo-1: {to}/grpo-1/step-00000002." in said.getvalue()
    assert "NotADirectoryError: [Errno 20] Not a directory" in said.getvalue()
    assert f"distflow resume {run}" in said.getvalue()
    assert find_damage(checkpoint) == ""
    uploads.url = object_store.url_of(run, to := f"file://{tmp_path}/store")
    uploads.begin(FIRST)
    assert uploads.over(60.0)
    assert steps_in(run, to) == [2]
    told = [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert told == ["checkpoint_upload_failed", "checkpoint_uploaded"]


def test_upload_without_credentials_names_bucket_and_cause(run, s3, monkeypatch):
    to = s3()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(InvalidInput, match=rf"{to}/grpo-1.*: NoCredentialsError"):
        require_free(run, to)


def test_store_that_has_nothing_is_said(tmp_path):
    with pytest.raises(InvalidInput, match="grpo-7 has no whole checkpoint"):
        fetch(f"file://{tmp_path}/grpo-7")


def test_fetch_writes_only_files_of_the_checkpoint_and_known_files_of_its_run(run, tmp_path):
    copies = _Copies("memory://hostile/grpo-1")
    save(run, 4)
    copies.upload(run, FIRST)
    name = copies.whole()[0].name
    for key in (f"{name}/run/../../../outside", f"{name}/run/./samples.jsonl", f"{name}/run//etc/absolute",
                f"{name}/../outside", f"{name}/run/generations/9-9-9-z", f"{name}/run/checkpoints/step-00000009/x",
                f"{name}/run/log.a/b.json", f"{name}/run/best/../../outside", f"{name}/unrecorded.distcp"):
        copies.fs.pipe_file(f"{copies.root}/{key}", b"planted")
    fetched = copies.fetch(None)
    shutil.rmtree(run)
    assert sorted(content_of(tmp_path)) == sorted(f"elsewhere/grpo-1/{each}" for each in (
        "best/model/model.safetensors", "checkpoints/step-00000004/.metadata",
        "checkpoints/step-00000004/__0_0.distcp", "checkpoints/step-00000004/progress.json",
        "generations/1-0-0-a", "launch.json", "metrics.jsonl", "plan.json", "run.yaml"))
    assert b"planted" not in content_of(fetched).values()


def test_upload_leaves_folders_of_others_in_the_store(run, tmp_path):
    model = tmp_path / "store/grpo-1/step-100/model.safetensors"
    model.parent.mkdir(parents=True)
    model.touch()
    save(run, 2)
    assert upload(run, f"file://{tmp_path}/store") == ""
    assert model.exists()


class Counted(_Copies):
    """Counts by how many signs of life a transfer renews its limit, after the last file too."""

    signs = 0

    def _moved(self, *_, **__) -> None:
        super()._moved()
        self.signs += 1

    def _get_file(self, *arguments) -> None:
        super()._get_file(*arguments)
        self.signs_of_files, self.signs = self.signs, 0


def test_transfer_of_a_long_file_renews_its_time_limit(run, tmp_path):
    copies, large = Counted(f"file://{tmp_path}/store/grpo-1"), save(run, 2) / "__0_0.distcp"
    large.write_bytes(bytes(20 << 20))
    copies._put_file("step-00000002.1-0-0-a.ff", large.name, large)
    blocks = (20 << 20) // copies.fs.blocksize
    assert blocks > 1
    assert copies.signs > blocks
    copies._get_file("step-00000002.1-0-0-a.ff", large.name, tmp_path / "fetched", 20 << 20)
    assert copies.signs_of_files > 2 * blocks


def test_comparison_of_checksums_renews_the_time_limit(run, tmp_path):
    save(run, 2)
    copies = Counted(f"file://{tmp_path}/store/grpo-1")
    copies.upload(run, FIRST)
    copies.fetch(None)
    assert copies.signs >= 2, "one for each file of the checkpoint"


def test_file_that_is_fetched_in_part_is_an_error(run, tmp_path):
    save(run, 2)
    copies = _Copies(f"file://{tmp_path}/store/grpo-1")
    copies.upload(run, FIRST)
    copy = copies.whole()[0]
    os.truncate(tmp_path / "store/grpo-1" / copy.name / "run/best/model/model.safetensors", 3)
    with pytest.raises(CheckpointError, match="best/model/model.safetensors has 15 bytes, of which 3 were fetched"):
        copies._fetch(copy, tmp_path / "elsewhere/grpo-1")


def test_fetch_leaves_what_another_machine_is_fetching(run, tmp_path):
    save(run, 2)
    assert upload(run, f"file://{tmp_path}/store") == ""
    name = _Copies(f"file://{tmp_path}/store/grpo-1").whole()[0].name
    other = tmp_path / f"elsewhere/grpo-1/checkpoints/{name}.partial"
    other.mkdir(parents=True)
    fetch(f"file://{tmp_path}/store/grpo-1")
    assert other.exists()


def test_fetch_that_another_process_holds_up_is_a_sentence(run, tmp_path, monkeypatch):
    monkeypatch.setattr(object_store, "_FETCH_TIMEOUT", 0.0)
    with locked(run), pytest.raises(InvalidInput, match="no checkpoint could be fetched .* another process has held"):
        fetch_once(run, f"file://{tmp_path}/store")


def test_upload_that_cannot_start_is_said(run, tmp_path, monkeypatch):
    events.current().open(run / "events.jsonl", 0)
    save(run, 2)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    uploads = Uploads(run, f"file://{tmp_path}/store")
    uploads.begin(FIRST)
    assert uploads.over(60.0)
    assert uploads.current is None
    told = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [(each["event"], each["of_step"]) for each in told] == [("checkpoint_upload_failed", 2)]
    assert "no-python" in told[0]["why"]


@pytest.mark.parametrize("url", ["sftp://user:hunter2@host/folder", "user:hunter2@host/folder"])
def test_address_with_a_password_is_refused_without_showing_it(url, tmp_path, capsys):
    with pytest.raises(InvalidInput, match="password") as refused:
        fetch(url)
    assert "hunter2" not in str(refused.value)
    (tmp_path / "run.yaml").write_text(f"checkpoint:\n  to: {url}\n")
    assert main(["validate", "grpo", "--run-file", str(tmp_path / "run.yaml")]) == 2
    assert main(["validate", "grpo", "--set", f"checkpoint.to={url}"]) == 2
    shown = capsys.readouterr().err
    assert shown.count("an address with a password") == 2
    assert "hunter2" not in shown


def test_plan_for_other_machines_needs_no_file_system_here(tmp_path, monkeypatch, capsys):
    if importlib.util.find_spec("gcsfs"):
        pytest.skip("gcsfs is installed")
    monkeypatch.chdir(tmp_path)
    setting = ("--set", "checkpoint.to=gs://bucket/runs")
    assert main(["plan", "grpo", *setting]) == 0
    assert main(["validate", "grpo", *setting]) == 2
    assert "pip install gcsfs" in capsys.readouterr().err
    with pytest.raises(InvalidInput, match="pip install gcsfs"):
        fetch("gs://bucket/runs/grpo-1")


def test_export_of_a_folder_does_not_ask_the_store(run, tmp_path, capsys):
    shutil.copy(SHIPPED / "grpo.yaml", run / "dag.yaml")
    (run / "launch.json").write_text('{"search": []}')
    embedded = (SHIPPED / "runs/embedded.yaml").read_text()
    (run / "run.yaml").write_text(embedded.replace("checkpoint: {", f"checkpoint: {{to: 'file://{tmp_path}/store', "))
    save(run, 2)
    shutil.copytree(run, other := tmp_path / "other/grpo-1")
    save(other, 4, SECOND)
    assert upload(other, f"file://{tmp_path}/store", SECOND) == ""
    assert main(["export", str(run), str(run / "best/exported")]) == 2
    assert "that the run itself writes" in capsys.readouterr().err
    assert [step_of(each) for each in complete_checkpoints(run / "checkpoints")] == [2]


def test_run_continues_on_an_empty_machine(launch, workspace, tmp_path_factory, monkeypatch, request):
    """A run is killed after its last checkpoint, with its folder; another one that is never killed ends alike."""
    try:
        to = request.getfixturevalue("s3")()
    except pytest.skip.Exception:
        to = f"file://{workspace}/store"
    run = ("--dag", "grpo.yaml", "--run-file", "tiny.yaml", "validation={data: {heldout: train.jsonl}, best: true}")
    launch(2, *run, "--name", "whole", "steps=6")
    launch(2, *run, "--name", "moved", "steps=4", f"checkpoint={{every: 2, keep: 1, to: '{to}'}}")
    assert steps_in(workspace / "runs/moved", to) == [4]
    shutil.move(workspace / "runs/moved", workspace / "lost")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    assert main(["resume", f"{to}/moved", "--set", "steps=6"]) == 0
    whole, moved = (metrics_of(folder) for folder in (workspace / "runs/whole", elsewhere / "runs/moved"))
    assert {step: values["loss"] for step, values in moved.items()} == {
        step: values["loss"] for step, values in whole.items()}
    models = [folder / "model/model.safetensors" for folder in (workspace / "runs/whole", elsewhere / "runs/moved")]
    assert models[0].read_bytes() == models[1].read_bytes()
    assert (elsewhere / "runs/moved/best/model").is_dir()
    assert steps_in(elsewhere / "runs/moved", to) == [6]
    empty = tmp_path_factory.mktemp("export")
    monkeypatch.chdir(empty)
    assert main(["export", f"{to}/moved", "exported"]) == 0
    assert (empty / "exported/model/model.safetensors").read_bytes() == models[0].read_bytes()
