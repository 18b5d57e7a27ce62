"""Files and folders of a run are whole, whoever else writes them and whatever the disk does."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import ROOT

from distflow.errors import FolderUnavailable
from distflow.telemetry import files
from distflow.telemetry.files import locked, replacing_folder, wait_until_writable, write_atomically


def test_write_atomically_replaces_a_file_whole_or_not_at_all(tmp_path):
    file = tmp_path / "token.json"
    write_atomically(file, "one", mode=0o600)
    with pytest.raises(TypeError):
        write_atomically(file, None, mode=0o600)  # pyright: ignore[reportArgumentType]
    assert file.read_text() == "one"
    write_atomically(file, "zwölf \ud800", mode=0o600)
    assert file.read_text(encoding="utf-8") == "zwölf ?"
    assert file.stat().st_mode & 0o777 == 0o600
    assert [*tmp_path.iterdir()] == [file]


def test_write_atomically_by_several_at_once_leaves_one_of_their_texts(tmp_path):
    file, texts = tmp_path / "plan.json", [letter * 100_000 for letter in "abcd"]
    start = threading.Barrier(len(texts))

    def write_often(text: str) -> None:
        start.wait()
        for _ in range(50):
            write_atomically(file, text)
            assert file.read_text() in texts

    with ThreadPoolExecutor(len(texts)) as threads:
        for job in [threads.submit(write_often, text) for text in texts]:
            job.result()
    assert [*tmp_path.iterdir()] == [file]


def test_locked_lets_processes_change_a_file_one_after_the_other(tmp_path):
    script = ("import sys; from pathlib import Path; from distflow.telemetry.files import locked, write_atomically\n"
              "file = Path(sys.argv[1])\n"
              "for _ in range(100):\n"
              "    with locked(file):\n"
              "        write_atomically(file, str(int(file.read_text()) + 1))")
    file = tmp_path / "count"
    file.write_text("0")
    running = [subprocess.Popen([sys.executable, "-c", script, str(file)], cwd=ROOT) for _ in range(3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert file.read_text() == "300"


def test_locked_names_a_process_that_keeps_the_lock(tmp_path):
    with locked(tmp_path / "count"), pytest.raises(TimeoutError, match=r"another process has held .*count.lock"), \
            locked(tmp_path / "count", 0.1):
        pass


def write_model(folder: Path, *names: str) -> None:
    folder.mkdir()
    for name in names:
        (folder / name).write_text("weights")


def test_replacing_folder_leaves_the_older_one_if_the_newer_is_not_whole(tmp_path):
    model = tmp_path / "model"
    write_model(model, "shard-1", "shard-2")
    (tmp_path / "model.partial").mkdir()  # of a process that was killed

    def write_half() -> None:
        with replacing_folder(model) as partial:
            write_model(partial, "shard-1")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"):
        write_half()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["model", "shard-1", "shard-2"]
    with replacing_folder(model) as partial:
        write_model(partial, "whole")
        assert sorted(path.name for path in model.iterdir()) == ["shard-1", "shard-2"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["model", "whole"], "no older shard is left"


@pytest.fixture
def mount(tmp_path):
    """A file system of its own, and a function that makes it read-only or writable."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "none", folder], check=False).returncode:
        pytest.skip("mounting needs root")
    yield folder, lambda mode: subprocess.run(["mount", "-o", f"remount,{mode}", folder], check=True)
    subprocess.run(["umount", "-l", folder], check=True)


def test_wait_until_writable_waits_for_a_read_only_file_system(mount, capsys, monkeypatch):
    folder, remount = mount
    remount("ro")
    waiting = threading.Event()
    monkeypatch.setattr(files.events, "show", lambda text, stream: (print(text), waiting.set()))
    with ThreadPoolExecutor(1) as threads:
        job = threads.submit(wait_until_writable, folder, 60.0)
        assert waiting.wait(60)
        remount("rw")
        job.result(60)
    assert [*folder.iterdir()] == []
    said = capsys.readouterr().out.splitlines()
    assert said == [f"{folder} cannot be written: Read-only file system. It is waited for, for at most 60 s "
                    "(`wait_limit` in the run file).", f"{folder} can be written again."]


def test_wait_until_writable_ends_after_the_limit(mount):
    folder, remount = mount
    remount("ro")
    for each in (folder, folder / "runs/removed"):
        with pytest.raises(FolderUnavailable, match=r"could not be written for 0.2 s: Read-only file system") as error:
            wait_until_writable(each, 0.2)
        assert not error.value.passing
