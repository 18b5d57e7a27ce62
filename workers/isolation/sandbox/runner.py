"""Runs untrusted Python programs, as a model writes them, in a sandbox.

Linux only, on x86_64 and aarch64. `isolation()` tries once which kind works on this machine:

`namespaces` (root with CAP_SYS_ADMIN, or user namespaces; Linux 5.12)
    network: a namespace without interfaces, and `socket` is refused.
    files: a root with the interpreter, packages and system libraries, read-only, and an empty /tmp in memory.
    other processes: neither visible nor signalled.
    descendants: die with the namespace.
    disk: `disk_mib` for all files together.
`filters` (seccomp and Landlock; Linux 5.13), which works in most containers
    network: `socket` is refused.
    files: the same are readable and an empty folder is writable; of others only names and sizes are visible. Changing
        owner, mode, times or attributes and `truncate` are refused, for own files too.
    other processes: signals are refused, to its own children too.
    descendants: found as orphans of the launcher and killed; if the caller is root, by their user id too.
    disk: `disk_mib` for each file, without a limit on their number.

Both: a session of its own; no environment but some of Python's own; no capabilities; no input but `stdin`; no
open files of the caller; kernel limits on memory, CPU time, processes, open files and file size; no memory outside the
address space (System V and POSIX shared memory, semaphores and queues, memfd). If the caller is root, each program has
a user id of its own.

Not guaranteed: the memory limit applies to each of up to `processes` processes. CPU cores are shared. Unless the caller
is root, `processes` counts this program alone only from Linux 5.14 on. A hole in the kernel is a hole in the sandbox.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import json
import math
import os
import secrets
import selectors
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from distflow.errors import EngineError
from distflow.telemetry.processes import Child, spawn

KINDS = ("namespaces", "filters")
_END_TIMEOUT = 5.0  # seconds for the launcher to end everything before it is killed itself
_START_TIMEOUT = 10.0  # seconds for the program to start on a busy machine; not part of its own time
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
_PREFIX = "distflow-sandbox-"
_ROOT = str(Path(__file__).resolve().parents[3])
_LAUNCH = f"import sys; sys.path.append({_ROOT!r}); from workers.isolation.sandbox.launcher import main; main()"


@dataclass(frozen=True)
class Outcome:
    """How a program ended: `exited` (with `status`), `killed` (by signal -`status`), `time` or `output` (limits)."""

    ended: Literal["exited", "killed", "time", "output"]
    status: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def ok(self) -> bool:
        return self.ended == "exited" and self.status == 0


@dataclass(frozen=True)
class Limits:
    """Limits of a program. `memory_mib` is the address space of each process; `output_kib` is per stream."""

    seconds: float = 10.0
    memory_mib: int = 512
    processes: int = 16  # processes and threads
    disk_mib: int = 32
    output_kib: int = 256


def run_python(source: str, stdin: str = "", *, seconds: float = 10.0, memory_mib: int = 512, processes: int = 16,
               disk_mib: int = 32, output_kib: int = 256, network: Literal["deny", "allow"] = "deny",
               files: Literal["deny", "allow"] = "deny", kind: str | None = None) -> Outcome:
    """Run `source` as a program, with this environment's packages, in a sandbox; see the module for its guarantees.

    On return no process and no file of the program is left. If the caller is killed, no process is left, and with
    `filters` the next caller removes the folder. Blocks; thread-safe.

    Args:
        stdin: text on the program's standard input.
        seconds: limit of wall-clock time, and rounded up of CPU time.
        network: `allow` gives access to the machine's network.
        files: `allow` runs even if the kernel cannot keep the program from reading and changing the caller's files.
        kind: of the isolation; default: the better one that works here.

    Raises:
        EngineError: this kernel cannot isolate a program; says why, and what to allow. Nothing was run.
        OSError: this sandbox could not be created or ended, perhaps for lack of memory, processes or time.
    """
    limits = Limits(seconds, memory_mib, processes, disk_mib, output_kib)
    kind = kind or isolation(network, files)
    outcome = _run(source, stdin, limits, kind, network == "allow", files == "deny")
    if isinstance(outcome, str):
        raise OSError(f"the sandbox ({kind}) could not be made: {outcome}")
    return outcome


@functools.cache
def isolation(network: str = "deny", files: str = "deny") -> str:
    """Return the best kind that a trivial program has run in; raise EngineError if there is none."""
    reasons = {}
    for kind in KINDS:
        found = _run("print(6 * 7)", "", Limits(_START_TIMEOUT), kind, network == "allow", files == "deny")
        if isinstance(found, Outcome) and found.stdout == "42\n":
            return kind
        reasons[kind] = found if isinstance(found, str) else f"{found.ended} {found.status}: {found.stderr[-300:]}"
    why = "; ".join(f"{kind}: {reason}" for kind, reason in reasons.items())
    raise EngineError(f"programs cannot be isolated on this machine ({why}). Allow user namespaces, or in a container "
                      "Landlock and an interpreter that other users may read. To run them all the same:  files: allow  "
                      "lets them read and change this user's files,  network: allow  leaves them the network.")


def _run(source: str, stdin: str, limits: Limits, kind: str, network: bool, hide_files: bool) -> Outcome | str:
    with ExitStack() as stack:
        folder = stack.enter_context(_Folder()) if kind == "filters" else None
        connection, their_end = (stack.enter_context(each) for each in socket.socketpair())
        text, program = (stack.enter_context(_in_memory(each)) for each in (stdin, source))
        job = {"connection": their_end.fileno(), "source": program.fileno(), "kind": kind, "network": network,
               "folder": folder, "hide_files": hide_files, "readable": _readable(), "packages": _packages(),
               "standard_library": [sysconfig.get_path("stdlib"), f"{sysconfig.get_path('platstdlib')}/lib-dynload"],
               "executable": os.path.realpath(sys.executable), "cpu_seconds": math.ceil(limits.seconds),
               "memory": limits.memory_mib << 20, "processes": limits.processes, "disk": limits.disk_mib << 20}
        launcher = spawn([job["executable"], "-I", "-S", "-c", _LAUNCH, json.dumps(job)], die_with_parent=0,
                         session=True, stdin=text, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={}, cwd="/",
                         pass_fds=(their_end.fileno(), program.fileno()))
        stack.callback(launcher.wait)
        stack.callback(connection.close)  # upon which the launcher ends the program
        stack.enter_context(launcher.stdout)
        stack.enter_context(launcher.stderr)
        their_end.close()
        return _ProgramWatch(launcher, connection, limits).outcome()


class _ProgramWatch:
    """Reads the output of a program and its launcher until both end, and ends them at a limit."""

    def __init__(self, launcher: Child, connection: socket.socket, limits: Limits):
        self.launcher, self.connection, self.limits = launcher, connection, limits
        self.output = {"stdout": bytearray(), "stderr": bytearray(), "connection": bytearray()}
        self.started_at: float | None = None
        self.ended = ""
        self.deadline = time.monotonic() + _START_TIMEOUT

    def outcome(self) -> Outcome | str:
        with selectors.DefaultSelector() as selector:
            streams = {"stdout": self.launcher.stdout, "stderr": self.launcher.stderr, "connection": self.connection}
            for name, stream in streams.items():
                selector.register(stream, selectors.EVENT_READ, name)
            while selector.get_map():
                for key, _ in selector.select(max(0.0, self.deadline - time.monotonic())):
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fileobj)
                    self._receive(key.data, data)
                if time.monotonic() >= self.deadline:
                    self._end("time")
        seconds = time.monotonic() - (self.started_at or self.deadline)
        return self._outcome([json.loads(line) for line in self.output["connection"].splitlines()], seconds)

    def _receive(self, name: str, data: bytes) -> None:
        limit = self.limits.output_kib << 10
        self.output[name] += data[: max(0, limit + 1 - len(self.output[name]))]
        if name == "connection" and self.started_at is None and not self.ended and b"started" in self.output[name]:
            self.started_at = time.monotonic()
            self.deadline = self.started_at + self.limits.seconds
        if name != "connection" and len(self.output[name]) > limit and not self.ended:
            self._end("output")

    def _end(self, why: str) -> None:
        """Close the connection, upon which the launcher kills everything; kill the launcher if it does not."""
        if self.ended:
            self.launcher.signal(signal.SIGKILL)
            raise OSError(f"a sandboxed program has not ended {_END_TIMEOUT:.0f} s after it was killed: the machine is "
                          "very busy, or a process of it hangs in the kernel, of which `dmesg` would say more")
        self.ended = why
        self.deadline = time.monotonic() + _END_TIMEOUT
        self.connection.shutdown(socket.SHUT_WR)

    def _outcome(self, reports: list[dict[str, Any]], seconds: float) -> Outcome | str:
        fields = {name: value for report in reports for name, value in report.items()}
        texts = [bytes(self.output[name][: self.limits.output_kib << 10]).decode(errors="replace")
                 for name in ("stdout", "stderr")]
        if self.started_at is None and self.ended and "failed" not in fields:
            raise OSError(f"a sandbox has not come up within {_START_TIMEOUT:g} s: this machine is very busy")
        if "failed" in fields or self.started_at is None:
            return fields.get("failed") or f"it has not started: {texts[1][-300:] or 'no reason given'}"
        status = os.waitstatus_to_exitcode(fields.get("status", signal.SIGKILL))
        ended = self.ended or ("time" if status == -signal.SIGXCPU else "killed" if status < 0 else "exited")
        return Outcome(ended, status, *texts, seconds)  # type: ignore[arg-type]


def _in_memory(text: str) -> IO[bytes]:
    file = os.fdopen(os.memfd_create("text", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+b")
    file.write(text.encode(errors="surrogatepass"))
    file.seek(0)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW)  # a program keeps no memory in it
    return file


class _Folder:
    """Temporary folder that is removed with its contents, whatever their rights and depth. It is locked while its owner
    lives; the next process removes unlocked folders of owners that were killed."""

    def __enter__(self) -> str:
        _remove_abandoned(tempfile.gettempdir())
        self.path = tempfile.mkdtemp(prefix=_PREFIX)
        self.lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        return self.path

    def __exit__(self, *_: object) -> None:
        _remove(self.path)
        os.close(self.lock)


@functools.cache
def _remove_abandoned(folder: str) -> None:
    """Remove the folders of callers that were killed while a program ran; once per process."""
    for path in Path(folder).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, locked, or just removed
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if time.time() - os.fstat(lock).st_mtime > _START_TIMEOUT:  # a newer one may not be locked yet
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(str(path))
            finally:
                os.close(lock)


def _remove(path: str) -> None:
    """Remove a folder; inner ones are moved up first, since they may nest deeper than limits on files and paths."""
    mark, number = secrets.token_hex(8), itertools.count()
    while folders := _folders_alone(path):
        for folder in folders:
            for inner in _folders_alone(folder):
                os.rename(inner, f"{path}/{mark}-{next(number)}")
            os.rmdir(folder)
    os.rmdir(path)


def _folders_alone(path: str) -> list[str]:
    """Remove everything but folders from a folder; make these accessible and return them."""
    with os.scandir(path) as found:
        entries = list(found)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            os.chmod(entry.path, stat.S_IRWXU)
        else:
            os.unlink(entry.path)
    return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]


@functools.cache
def _packages() -> list[str]:
    """Return the folders of packages that this process imports from."""
    folders = [Path(path) for path in sys.path]
    return [str(folder.resolve()) for folder in folders
            if folder.name in ("site-packages", "dist-packages") and folder.is_dir()]


def _readable() -> list[str]:
    """Return what a program may read: the interpreter with its libraries and packages."""
    there = {*_interpreter(), *_packages()}
    return [path for path in sorted(there) if not any(path.startswith(f"{other}/") for other in there)]


@functools.cache
def _interpreter() -> list[str]:
    base = Path(sys.base_prefix)
    wanted = [Path(sys.executable).resolve(), base / "lib", base / "lib64", Path(sysconfig.get_path("stdlib")),
              *map(Path, _SYSTEM)]
    there = sorted({str(path) for path in wanted if path.exists()})
    return [path for path in there if not any(path.startswith(f"{other}/") for other in there)]
