"""Writes files and folders whole or not at all, and waits for a folder whose file system is away for a while."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from distflow.errors import FolderUnavailable
from distflow.telemetry import events

AWAY = frozenset({errno.EROFS, errno.ESTALE, errno.EIO, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN,
                  errno.EREMOTEIO})
"""Errors of a file system that is away: a server restarts, or the kernel has made a mount read-only."""
_WITHOUT_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_ABANDONED = 3600.0  # seconds after which nobody writes to a partial file any more
_LOCK_POLL = 0.05  # seconds between two attempts to take a lock
_POLL = 0.5  # seconds between two attempts to write
REASON = "reason.txt"
"""File that says why a `.partial` folder was not taken."""


def write_atomically(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file whole or not at all, in place of an older one; of several writers at once, the last one's stays.
    Raises OSError: it cannot be written."""
    for left in path.parent.glob(f"{glob.escape(path.name)}.*.partial"):  # by a writer that was killed
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED:
                left.unlink()
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):  # it is there only if it could not be written to its end
            partial.unlink()


@contextlib.contextmanager
def locked(path: Path, limit: float = 30.0) -> Iterator[None]:
    """Hold the lock of a file that several processes read, change and replace. Where the file system has no `flock`
    there is none. Raises OSError: the folder cannot be written, or as TimeoutError another process has held the lock
    for more than `limit` seconds."""
    until = time.monotonic() + limit
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        while not _take(lock):
            if time.monotonic() > until:
                raise TimeoutError(errno.ETIMEDOUT, f"another process has held {lock.name} for {limit:g} s")
            time.sleep(_LOCK_POLL)
        yield


def _take(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _WITHOUT_FLOCK:
            raise
    return True


@contextlib.contextmanager
def replacing_folder(folder: Path, keeps: type[Exception] | tuple[()] = ()) -> Iterator[Path]:
    """Replace a folder by the one that the block writes, whose path it gets, once that is whole. If the block fails,
    the older folder stays as it was, and after an error of type `keeps` also what was written, with REASON."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # which a process left that was killed
    with contextlib.ExitStack() as failed:
        failed.callback(shutil.rmtree, partial, ignore_errors=True)  # others may need the room
        try:
            yield partial
        except keeps as error:
            failed.pop_all()
            (partial / REASON).write_text(f"{error}\n", encoding="utf-8")
            raise
        failed.pop_all()
    replace_folder(folder, partial)


def replace_folder(folder: Path, newer: Path) -> None:
    """Give a folder the place of an older one, which is removed only then."""
    older = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(older, ignore_errors=True)  # as above
    if folder.exists():
        folder.rename(older)
    newer.rename(folder)
    shutil.rmtree(older, ignore_errors=True)


def wait_until_writable(folder: Path, limit: float) -> None:
    """Wait while the file system of a folder is away. Raises FolderUnavailable: it is for more than `limit` seconds."""
    until, waits = time.monotonic() + limit, False
    while error := _error_of_writing(folder):
        if time.monotonic() > until:
            raise FolderUnavailable(f"{folder} could not be written for {limit:g} s: {error.strerror} (`wait_limit` in "
                                    "the run file). What was saved there is kept.")
        if not waits:
            events.show(f"{folder} cannot be written: {error.strerror}. It is waited for, for at most {limit:g} s "
                        "(`wait_limit` in the run file).", sys.stderr)
        waits = True
        time.sleep(_POLL)
    if waits:
        events.show(f"{folder} can be written again.", sys.stderr)


def _error_of_writing(folder: Path) -> OSError | None:
    """Return why no file can be written to a folder now, or if it is not there to the nearest one above it; None also
    if it is for another reason than that its file system is away."""
    name = f".writable-{secrets.token_hex(4)}"
    for each in (folder, *folder.absolute().parents):
        try:
            (each / name).touch()
            (each / name).unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            return error if error.errno in AWAY else None
        return None
    return None
