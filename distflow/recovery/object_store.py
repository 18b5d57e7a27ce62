"""Copies a run's checkpoints to an object store, and fetches the newest one where it is missing (`checkpoint.to`).

    TO/RUN/step-NNNNNNNN.GENERATION.SEAL/     the files of a checkpoint, and below `run/` those that a resume needs
                                        progress.json, its commit record, is written last: without it nothing counts

A copy gets a name that no other content has, so that none is ever written over. The store mirrors the run folder: what
is pruned or set aside there is removed here, but never what a newer trainer has written (`generations.py`).

Each transfer is a process, `python -m distflow.recovery.object_store PARENT COMMAND URL …`: whatever the library of a
file system raises ends that process and not the run, and one that hangs can be ended. Credentials are those that the
library finds, as in its environment variables.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from distflow.config.extras import file_system_line, require_file_system
from distflow.errors import CheckpointError, Diagnostic, DistflowError, InvalidInput, Superseded, quoted
from distflow.recovery import generations
from distflow.recovery.checkpoint_files import (
    CHECKSUM,
    FILES,
    GENERATION,
    PROGRESS,
    checkpoint_of,
    complete_checkpoints,
    find_damage,
    parse_progress,
    read_progress,
    set_aside,
    step_of,
)
from distflow.recovery.generations import TrainerGeneration
from distflow.telemetry import events
from distflow.telemetry.files import locked, replace_folder
from distflow.telemetry.processes import SIGNALS, Child, defy, die_with, python_environment, spawn
from distflow.telemetry.run_folder import agent
from distflow.telemetry.run_lock import in_use, refusal

_DELAYS = (2.0, 8.0, 30.0)
"""Seconds before each further attempt of an upload."""
_SILENCE = 300.0
"""Seconds in which nothing moves until a transfer is ended."""
_STOP_TIMEOUT = 10.0
"""Seconds that a run that is told to end leaves to an upload."""
_FETCH_TIMEOUT = 3600.0
"""Seconds that other ranks of a machine wait for the one that fetches."""
_WHY = "\0"
"""Stands before the reason of a failure in what a transfer prints."""
_OURS = re.compile(r"step-\d+\.\d+-\d+-\d+-\w*\.[0-9a-f]*")
"""Folders of copies; others in the store are left as they are."""
_RUN = "run/"
_RUN_FILES = ("launch.json", "dag.yaml", "run.yaml", "cluster.yaml", "plan.json", "metrics.jsonl", "validation.jsonl",
              "samples.jsonl", "events.jsonl", "log.*.json", "best/**/*")
"""Files that a resume continues, or that nobody can write again. No others are fetched into a run folder."""


class _Age(NamedTuple):
    """Age of a checkpoint: a later trainer's is newer, whatever its step."""

    generation: TrainerGeneration
    step: int


@dataclass(frozen=True)
class _Copy:
    """A whole checkpoint in the store. files: sizes by name of those that a fetch takes."""

    name: str
    age: _Age
    files: Mapping[str, int]


class _Copies:
    """The checkpoints of one run in an object store."""

    def __init__(self, url: str):
        from fsspec.core import url_to_fs
        from fsspec.spec import AbstractFileSystem

        self.url = self.place = url.rstrip("/")
        """`place`: address of the object that is read or written now."""
        local = url.startswith(("file://", "local://"))
        self.fs, root = url_to_fs(self.url, **({"auto_mkdir": True} if local else {}))
        self.root, self.moved = root.rstrip("/"), time.monotonic()
        self.put, self.get = self.fs.put_file, self.fs.get_file
        if not self.fs.async_impl:  # such as of folders, and SFTP, may say nothing until a file has been copied
            self.put = partial(AbstractFileSystem.put_file, self.fs)
            self.get = partial(AbstractFileSystem.get_file, self.fs)

    def end_if_stuck(self) -> None:
        """End this process once nothing has moved for a while. Runs in a thread."""
        while (waited := time.monotonic() - self.moved) < _SILENCE:
            time.sleep(_SILENCE - waited)
        print(f"{_WHY}{self.place}: nothing has moved for {_SILENCE:g} s", file=sys.stderr, flush=True)
        os._exit(1)

    def folders(self) -> dict[str, dict[str, int]]:
        """Return the sizes of our files by folder and name, whole or not, without names that leave their folder."""
        self.place, found = self.url, dict[str, dict[str, int]]()
        self.fs.invalidate_cache()
        for path, info in self.fs.find(self.root, detail=True).items():
            folder, slash, name = path.removeprefix(f"{self.root}/").partition("/")
            if slash and _OURS.fullmatch(folder) and not {"", ".", ".."} & {*name.split("/")}:
                found.setdefault(folder, {})[name] = info["size"]
        return found

    def whole(self) -> list[_Copy]:
        """Return the whole checkpoints, oldest first."""
        found = []
        for name, files in self.folders().items():
            progress = parse_progress(self._read(name, PROGRESS)) if PROGRESS in files else None
            if (progress and name == _name_of(progress) and
                    all(files.get(each, -1) >= size for each, size in progress[FILES].items())):
                taken = {each for each in progress[FILES] if not each.startswith(_RUN)} | {PROGRESS}
                found.append(_Copy(name, _age(progress), {each: size for each, size in files.items()
                                                          if each in taken or _is_of_run(each)}))
        return sorted(found, key=lambda each: each.age)

    def require_free(self) -> None:
        """Write and remove an object. Raises InvalidInput: the store has a run of that name."""
        there = self.whole()
        if there:
            raise InvalidInput(Diagnostic(f"{self.url} has checkpoints of a run already", None,
                                          f"Continue it:  distflow resume {quoted(self.url)}   or choose another "
                                          "--name"))
        self._key("", ".writable")
        self.fs.pipe_file(f"{self.root}/.writable", b"")
        self.fs.rm_file(f"{self.root}/.writable")

    def upload(self, run: Path, mine: TrainerGeneration) -> None:
        """Copy the newest checkpoint of a run folder, and remove those that the folder no longer has. Raises
        Superseded: a newer trainer has written here; CheckpointError: another run has."""
        there = self.whole()
        self._require_same_run(run, there)
        if there and there[-1].age.generation > mine:
            raise Superseded(f"{self.url} has a checkpoint of a newer trainer, which continues the run: "
                             f"{there[-1].name}. This one copies nothing more there.")
        local = {_name(each): each for each in complete_checkpoints(run / "checkpoints")}
        newest = next(reversed(local), None)
        if newest and newest not in [each.name for each in there]:
            self._put(run, local[newest], newest)
        for name in self.folders():
            if name not in local and TrainerGeneration.of(name) <= mine:
                self._remove(name)

    def fetch(self, run: Path | None) -> Path:
        """Fetch the newest checkpoint, unless the run folder has it or a newer one, undamaged. Return the folder, by
        default OUTPUT/RUN as its run file says. Raises InvalidInput: there is none."""
        there = self.whole()
        if run is None:
            if not there:
                raise InvalidInput(f"{self.url} has no whole checkpoint")
            run = self._folder_of(there[-1])
            if held := in_use(run):
                raise refusal(run, held)
        elif in_use(run):
            return run  # by a rank on another machine, which has fetched
        if complete_checkpoints(run / "checkpoints"):
            self._require_same_run(run, there)
        newest = self._newest_undamaged(run) if there else None
        for copy in reversed(there):
            if newest is not None and newest >= copy.age or self._fetch(copy, run):
                break
        return run

    def _newest_undamaged(self, run: Path) -> _Age | None:
        """Return the age of the newest undamaged checkpoint of a run folder."""
        for checkpoint in reversed(complete_checkpoints(run / "checkpoints")):
            if not (wrong := find_damage(checkpoint, moved=self._moved)):
                return _age(read_progress(checkpoint) or {}, step_of(checkpoint))
            print(f"{checkpoint} is damaged: {wrong}.", file=sys.stderr, flush=True)
        return None

    def _folder_of(self, copy: _Copy) -> Path:
        import yaml

        settings = yaml.safe_load(self._read(copy.name, f"{_RUN}run.yaml"))
        return Path(settings.get("output", "runs"), self.url.rpartition("/")[2])

    def _require_same_run(self, run: Path, there: list[_Copy]) -> None:
        """Raise CheckpointError if the newest copy is of another run that had the same name."""
        own = run / "launch.json"  # which names the torchrun that began the run
        if there and self._read(there[-1].name, f"{_RUN}launch.json") != own.read_bytes():
            raise CheckpointError(f"{self.url} has checkpoints of another run than {run}. Name another place:  "
                                  "--set checkpoint.to=URL")

    def _put(self, run: Path, checkpoint: Path, name: str) -> None:
        progress = read_progress(checkpoint)
        if progress is None:
            raise CheckpointError(f"{checkpoint} is damaged, or was removed since")
        written, best = self.folders().get(name, {}), _best(run)
        files = {each: checkpoint / each for each in progress[FILES]}
        for each, path in {**_run_files(run), **files}.items():
            if each in files and written.get(each) == progress[FILES][each]:
                continue  # by an attempt that was cut off
            self._put_file(name, each, path)
        if _best(run) != best:
            raise CheckpointError(f"{run / 'best'} was replaced while it was copied")
        written = self.folders().get(name, {})
        if short := [each for each, size in progress[FILES].items() if written.get(each) != size]:
            raise CheckpointError(f"{self._key(name, short[0])} has {written.get(short[0], 0)} bytes instead of "
                                  f"{progress[FILES][short[0]]}")
        self._put_file(name, PROGRESS, checkpoint / PROGRESS)

    def _put_file(self, name: str, file: str, path: Path) -> None:
        print(self._key(name, file), flush=True)
        self.put(str(path), f"{self.root}/{name}/{file}", callback=self._callback())

    def _remove(self, name: str) -> None:
        self._key(name, PROGRESS)
        with contextlib.suppress(FileNotFoundError):  # it was not whole
            self.fs.rm_file(f"{self.root}/{name}/{PROGRESS}")
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(f"{self.root}/{name}", recursive=True)

    def _fetch(self, copy: _Copy, run: Path) -> bool:
        """Fetch a checkpoint and the files of its run; return whether it is undamaged."""
        final = checkpoint_of(run / "checkpoints", copy.age.step)
        # Of this process alone: a file system that all machines see may have no locks.
        written = final.with_name(f"{copy.name}.{socket.gethostname()}-{os.getpid()}.partial")
        shutil.rmtree(written, ignore_errors=True)
        for file, size in sorted(copy.files.items(), key=lambda each: each[0] == PROGRESS):
            self._get_file(copy.name, file, written / file, size)
        if wrong := find_damage(written, moved=self._moved):
            print(f"{self.url}/{copy.name} is damaged: {wrong}. It is passed over for the one before it.",
                  file=sys.stderr, flush=True)
            shutil.rmtree(written)
            return False
        if read_progress(final) == read_progress(written) and not find_damage(final, moved=self._moved):
            shutil.rmtree(written)  # another machine was faster
            return True
        for file in copy.files:
            if file.startswith(_RUN) and not file.startswith(f"{_RUN}best/"):
                (written / file).replace(run / file.removeprefix(_RUN))
        if (written / _RUN / "best").exists():
            replace_folder(run / "best", written / _RUN / "best")
        shutil.rmtree(written / _RUN, ignore_errors=True)
        generations.adopt(run / "checkpoints", copy.age.generation)
        set_aside(run / "checkpoints", copy.age.step)
        if final.exists():  # torn, or it would have been set aside
            shutil.rmtree(final)
        written.rename(final)
        return True

    def _get_file(self, name: str, file: str, path: Path, size: int) -> None:
        print(self._key(name, file), flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.get(f"{self.root}/{name}/{file}", str(path), callback=self._callback())
        if (fetched := path.stat().st_size) != size:
            raise CheckpointError(f"{self.place} has {size} bytes, of which {fetched} were fetched. Try again.")

    def _read(self, name: str, file: str) -> bytes:
        self._key(name, file)
        return self.fs.cat_file(f"{self.root}/{name}/{file}")

    def _key(self, name: str, file: str) -> str:
        """Note the object of the transfer that begins; return its address."""
        self._moved()
        self.place = "/".join(filter(None, (self.url, name, file)))
        return self.place

    def _callback(self) -> Any:
        from fsspec.callbacks import Callback

        return Callback(hooks={"moved": self._moved})

    def _moved(self, *_: Any, **__: Any) -> None:
        self.moved = time.monotonic()


def _is_of_run(file: str) -> bool:
    """Return whether a file of a copy is one that `_RUN_FILES` names."""
    name = file.removeprefix(_RUN)
    return name != file and (name.startswith("best/") or "/" not in name and
                             any(fnmatch.fnmatchcase(name, pattern) for pattern in _RUN_FILES))


def _run_files(run: Path) -> dict[str, Path]:
    found = (path for pattern in _RUN_FILES for path in sorted(run.glob(pattern)) if path.is_file())
    return {f"{_RUN}{path.relative_to(run)}": path for path in found}


def _best(run: Path) -> list[tuple[str, int]]:
    """Return the files of the best model and their inodes, which change when it is replaced."""
    return [(name, path.stat().st_ino) for name, path in _run_files(run).items() if name.startswith(f"{_RUN}best/")]


def _age(progress: Mapping[str, Any], step: int = 0) -> _Age:
    return _Age(TrainerGeneration(*progress.get(GENERATION, ())), progress.get("step", step))


def _name(checkpoint: Path) -> str:
    """Return the name of a checkpoint's copy, which tells its content, too."""
    return _name_of({"step": step_of(checkpoint), **(read_progress(checkpoint) or {})})


def _name_of(progress: Mapping[str, Any]) -> str:
    age = _age(progress)
    return f"{checkpoint_of(Path(), age.step).name}.{age.generation}.{progress.get(CHECKSUM, '')[:8]}"


class Uploads:
    """Uploads of a run folder's newest checkpoint, one at a time, in a thread of its own. One that fails costs the run
    a warning; the next one makes up for it."""

    def __init__(self, run: Path, to: str):
        self.run, self.url = run, url_of(run, to)
        self.pool, self.job = ThreadPoolExecutor(1, "upload"), None
        self.job: Future[None] | None
        self.current: Path | None = None
        """Checkpoint that is being read."""
        self.mirrored: list[str] = []
        self.transfer: Child | None = None
        self.closed = threading.Event()

    def begin(self, generation: TrainerGeneration) -> None:
        """Begin to make the store like the run folder, after the upload in progress."""
        self.job = self.pool.submit(self._upload, generation)

    def over(self, seconds: float) -> bool:
        """Return whether all uploads have ended, after at most so many `seconds`. The last one ends last: there is one
        thread."""
        until = time.monotonic() + seconds
        while self.job and not self.job.done():
            if time.monotonic() > until:
                return False
            self.closed.wait(min(0.05, seconds))
        return True

    def stop(self) -> None:
        """End the upload in progress if it takes longer than a run that is told to end can wait."""
        if not self.over(_STOP_TIMEOUT):
            self.closed.set()
            if self.transfer:
                self.transfer.end()

    def _upload(self, generation: TrainerGeneration) -> None:
        step, began = 0, time.monotonic()
        try:
            checkpoints = complete_checkpoints(self.run / "checkpoints")
            names = [_name(each) for each in checkpoints]
            if names == self.mirrored:
                return
            self.current = checkpoints[-1] if checkpoints else None
            step = step_of(self.current) if self.current else 0
            if not (why := self._attempt(generation)):
                self.mirrored = names
        except (CheckpointError, OSError) as error:  # it cannot be read, or no process can be started
            why = str(error)
        finally:
            self.current = None
        if why:
            self._report(step, why)
        else:
            events.record("checkpoint_uploaded", of_step=step, to=self.url, seconds=round(time.monotonic() - began, 3))

    def _report(self, step: int, why: str) -> None:
        why = f"the checkpoint of step {step} was not copied to {self.url}: {why}"
        events.record("checkpoint_upload_failed", of_step=step, why=why)
        events.show(f"warning: {why}\nIt is kept in {self.run / 'checkpoints'}, and older copies are kept as they are. "
                    "The next checkpoint is copied in its place, also after  distflow resume "
                    f"{quoted(self.run)}", sys.stderr)

    def _attempt(self, generation: TrainerGeneration) -> str:
        """Return why no attempt was successful; empty if one was."""
        why = ""
        for delay in (0.0, *_DELAYS):
            if self.closed.wait(delay):
                return why or "the run was told to end"
            self.transfer = _transfer("upload", self.url, str(self.run), str(generation))
            why = _outcome(self.transfer)[1]
            if not why:
                break
        return why


def url_of(run: Path, to: str) -> str:
    """Return where the checkpoints of a run are in an object store."""
    return f"{to.rstrip('/')}/{run.name}"


def require_free(run: Path, to: str) -> None:
    """Raise InvalidInput if an object store cannot be written, or has checkpoints under the name of a new run."""
    if why := _outcome(_transfer("require_free", url_of(run, to)))[1]:
        raise InvalidInput(Diagnostic(f"`checkpoint.to` cannot be used: {why}", None,
                                      "Name another place:  --set checkpoint.to=URL   or none:  "
                                      "--set checkpoint.to=null"))


def fetch(url: str, run: Path | None = None) -> Path:
    """Fetch the newest checkpoint of a run, unless its folder has it or a newer one. Return the folder, which is
    OUTPUT/RUN by default. Raises InvalidInput: there is none, or the store does not answer."""
    try:
        require_file_system(url)
    except ValueError as error:
        raise InvalidInput(str(error)) from None
    if line := file_system_line(url):
        raise InvalidInput(f"{url} needs a package that is not installed:  {line}")
    print(f"looking for a checkpoint in {url}", file=sys.stderr, flush=True)
    printed, why = _outcome(_transfer("fetch", url, *([str(run)] if run else [])))
    if why:
        without = f"   To go on without the store:  --set checkpoint.to=null  (and `distflow resume {quoted(run)}`)" \
            if run else ""
        raise InvalidInput(Diagnostic(f"no checkpoint could be fetched: {why}", None,
                                      f"Look for it:  python -m fsspec ls {quoted(url)}{without}"))
    return Path(printed.splitlines()[-1])


def fetch_once(run: Path, to: str) -> None:
    """Fetch as `fetch` does, in one process of all that a torchrun has started here; the others wait for it."""
    fetched = run.with_name(f".{run.name}.fetched")
    try:
        run.parent.mkdir(parents=True, exist_ok=True)
        with locked(run, _FETCH_TIMEOUT):
            if not fetched.exists() or fetched.read_text() != agent():
                fetch(url_of(run, to), run)
                fetched.write_text(agent())
    except OSError as error:
        raise InvalidInput(f"no checkpoint could be fetched to {run}: {error.strerror}. End the process that fetches, "
                           "or name another folder:  --set output=FOLDER") from error


def _transfer(command: str, *arguments: str) -> Child:
    line = [sys.executable, "-P", "-m", __name__, str(os.getpid()), command, *arguments]
    return spawn(line, die_with_parent=0, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                 env=python_environment(), text=True, errors="replace")


def _outcome(transfer: Child) -> tuple[str, str]:
    """Return what a transfer has printed, and why it has failed, which is empty if it has not."""
    assert transfer.program
    printed, errors = transfer.program.communicate()
    if transfer.wait() == 0:
        if errors.strip():  # about damaged checkpoints, or of a library
            events.show(errors.strip(), sys.stderr)
        return printed, ""
    why = errors.rpartition(_WHY)[2].strip() if _WHY in errors else "\n".join(errors.strip().splitlines()[-1:])
    return printed, why or f"the transfer ended with status {transfer.wait()} at {printed.strip().splitlines()[-1:]}"


def _main(parent: str, command: str, url: str, *arguments: str) -> None:
    die_with(int(parent))
    copies = _Copies(url)

    def explain(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
        told = isinstance(error, DistflowError)
        why = str(error) if told else f"{copies.place}: {kind.__name__}: {error}"
        print(f"{_WHY}{why}", file=sys.stderr, flush=True)

    sys.excepthook = explain
    threading.Thread(target=copies.end_if_stuck, daemon=True).start()
    if command == "upload":
        for number in SIGNALS:  # of a terminal, to all processes of a run: it ends its uploads itself
            defy(number)
        copies.upload(Path(arguments[0]), TrainerGeneration.of(arguments[1]))
    elif command == "fetch":
        print(copies.fetch(Path(*arguments) if arguments else None))
    else:
        copies.require_free()


if __name__ == "__main__":
    _main(*sys.argv[1:])
