"""Running a Python program that nobody has read: what a model wrote.

Linux only, on x86_64 and aarch64. `isolation()` finds out once which kind this machine can do:

`namespaces` (root with CAP_SYS_ADMIN, or user namespaces; Linux 5.12)
    network: a namespace without interfaces, and `socket` is refused.
    files: a root of its own with the interpreter, the system's libraries, both read-only, and an empty /tmp in memory.
    other processes: cannot be seen or signalled.
    descendants: die with the namespace, whatever they do.
    disk: all files together have `disk_mib`.
`filters` (seccomp and Landlock; Linux 5.13), which most containers can do
    network: `socket` is refused.
    files: the same can be read, and an empty folder written to; of others only names and sizes can be asked for.
        Refused with that, for its own files too: to change owner, mode, times or attributes, and `truncate`.
    other processes: signals to them are refused, those to its own children with them.
    descendants: found as orphans of the launcher and killed; if the caller is root, by their user id too.
    disk: each file has `disk_mib`; how many files there are is not limited. Shared memory and queues are refused.

In both: a session of its own; no environment but PYTHONHASHSEED and PYTHONUTF8; no capabilities and no way to gain any;
no input but `stdin`; no open files of the caller's; the kernel's limits on memory, processor time, processes, open
files and the size of a file. If the caller is root, each program has a user id of its own.

Not promised: the memory limit is for each process, so that `processes` of them may take as much each. Processor cores
are shared. For a caller other than root, `processes` counts this program alone only from Linux 5.14 on. A hole in the
kernel is a hole in the sandbox.
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

KINDS = ("namespaces", "filters")
_GRACE = 5.0
"""Seconds that the launcher gets to end what it started, before it is killed itself."""
_START = 10.0
"""Seconds until the program must have started, on a machine with much else to do; they do not count as its own."""
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
_PREFIX = "distflow-sandbox-"
_ROOT = str(Path(__file__).resolve().parents[3])
_LAUNCH = f"import sys; sys.path.append({_ROOT!r}); from workers.isolation.sandbox.launcher import main; main()"


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    `ended` is `exited` (by itself, with `status`), `killed` (by the signal -`status`), `time` (it took longer than it
    may, by the clock or in processor time) or `output` (it printed more than it may).
    """

    ended: Literal["exited", "killed", "time", "output"]
    status: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def ok(self) -> bool:
        """It came to its end without an error."""
        return self.ended == "exited" and self.status == 0


@dataclass(frozen=True)
class Limits:
    """What a program may use. `memory_mib` is of addresses, for each process; `output_kib` of each stream."""

    seconds: float = 10.0
    memory_mib: int = 512
    processes: int = 16
    """Processes and threads."""
    disk_mib: int = 32
    output_kib: int = 256


def run_python(source: str, stdin: str = "", *, seconds: float = 10.0, memory_mib: int = 512, processes: int = 16,
               disk_mib: int = 32, output_kib: int = 256, network: Literal["deny", "allow"] = "deny",
               files: Literal["deny", "allow"] = "deny", kind: str | None = None) -> Outcome:
    """Run `source` as a program, with the standard library alone, in a sandbox; see the module for what it guarantees.

    When it comes back nothing of the program is left: no process, no file. If the caller is killed meanwhile, no
    process; behind filters its folder stays until the next caller. It blocks its thread; several threads may call it.

    Args:
        stdin: what the program reads from its standard input.
        seconds: by the clock; its processor time is limited to as much, rounded up.
        network: `allow` leaves it the machine's network.
        files: `allow` runs it even where the kernel cannot keep it from reading and changing the caller's files.
        kind: of the isolation; by default the better one of those that work here.

    Raises:
        EngineError: this kernel cannot isolate a program; says why, and what to allow. Nothing was run.
        OSError: this sandbox could not be made or ended, for want of memory, processes or time perhaps. Others can.
    """
    limits = Limits(seconds, memory_mib, processes, disk_mib, output_kib)
    kind = kind or isolation(network, files)
    outcome = _run(source, stdin, limits, kind, network == "allow", files == "deny")
    if isinstance(outcome, str):
        raise OSError(f"the sandbox ({kind}) could not be made: {outcome}")
    return outcome


@functools.cache
def isolation(network: str = "deny", files: str = "deny") -> str:
    """The kind of isolation that works here, the best first; tried once, with a program that does nothing.

    Raises:
        EngineError: none does.
        OSError: it could not be found out, as the machine is too busy.
    """
    reasons = {}
    for kind in KINDS:
        found = _run("print(6 * 7)", "", Limits(_START), kind, network == "allow", files == "deny")
        if isinstance(found, Outcome) and found.stdout == "42\n":
            return kind
        reasons[kind] = found if isinstance(found, str) else f"{found.ended} {found.status}: {found.stderr[-300:]}"
    why = "; ".join(f"{kind}: {reason}" for kind, reason in reasons.items())
    raise EngineError(f"programs cannot be isolated on this machine ({why}). Allow user namespaces, or in a container "
                      "Landlock and an interpreter that other users may read. To run them all the same:  files: allow  "
                      "lets them read and change this user's files,  network: allow  leaves them the network.")


def _run(source: str, stdin: str, limits: Limits, kind: str, network: bool, hide_files: bool) -> Outcome | str:
    """The outcome, or why the sandbox could not be made."""
    with ExitStack() as stack:
        folder = stack.enter_context(_Folder()) if kind == "filters" else None
        line, end = (stack.enter_context(each) for each in socket.socketpair())
        text, program = (stack.enter_context(_in_memory(each)) for each in (stdin, source))
        job = {"line": end.fileno(), "source": program.fileno(), "kind": kind, "network": network, "folder": folder,
               "hide_files": hide_files, "readable": _interpreter(), "executable": os.path.realpath(sys.executable),
               "cpu_seconds": math.ceil(limits.seconds), "memory": limits.memory_mib << 20,
               "processes": limits.processes, "disk": limits.disk_mib << 20}
        launcher = subprocess.Popen([job["executable"], "-I", "-S", "-c", _LAUNCH, json.dumps(job)], stdin=text,
                                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={}, cwd="/",
                                    pass_fds=(end.fileno(), program.fileno()), start_new_session=True)
        stack.enter_context(launcher)
        end.close()
        return _ProgramWatch(launcher, line, limits).outcome()


class _ProgramWatch:
    """Reads what a program and its launcher say until both are gone, and pulls the leash when it is time to."""

    def __init__(self, launcher: subprocess.Popen, line: socket.socket, limits: Limits):
        self.launcher, self.line, self.limits = launcher, line, limits
        self.said = {"stdout": bytearray(), "stderr": bytearray(), "line": bytearray()}
        self.began: float | None = None
        self.ended = ""
        self.deadline = time.monotonic() + _START

    def outcome(self) -> Outcome | str:
        with selectors.DefaultSelector() as selector:
            streams = {"stdout": self.launcher.stdout, "stderr": self.launcher.stderr, "line": self.line}
            for name, stream in streams.items():
                selector.register(stream, selectors.EVENT_READ, name)
            while selector.get_map():
                for key, _ in selector.select(max(0.0, self.deadline - time.monotonic())):
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fileobj)
                    self._hear(key.data, data)
                if time.monotonic() >= self.deadline:
                    self._end("time")
        seconds = time.monotonic() - (self.began or self.deadline)
        return self._judge([json.loads(line) for line in self.said["line"].splitlines()], seconds)

    def _hear(self, name: str, data: bytes) -> None:
        limit = self.limits.output_kib << 10
        self.said[name] += data[: max(0, limit + 1 - len(self.said[name]))]
        if name == "line" and self.began is None and not self.ended and b"started" in self.said[name]:
            self.began = time.monotonic()
            self.deadline = self.began + self.limits.seconds
        if name != "line" and len(self.said[name]) > limit and not self.ended:
            self._end("output")

    def _end(self, why: str) -> None:
        """Pull the leash: the launcher kills all and leaves. One that has not done so in time is killed itself."""
        if self.ended:
            self.launcher.kill()
            raise OSError(f"a sandboxed program has not ended {_GRACE:.0f} s after it was killed: this machine is very "
                          "busy, or a process of it hangs in the kernel, of which `dmesg` would say more")
        self.ended = why
        self.deadline = time.monotonic() + _GRACE
        self.line.shutdown(socket.SHUT_WR)

    def _judge(self, reports: list[dict[str, Any]], seconds: float) -> Outcome | str:
        said = {name: value for report in reports for name, value in report.items()}
        texts = [bytes(self.said[name][: self.limits.output_kib << 10]).decode(errors="replace")
                 for name in ("stdout", "stderr")]
        if self.began is None and self.ended and "failed" not in said:
            raise OSError(f"a sandbox has not come up within {_START:g} s: this machine is very busy")
        if "failed" in said or self.began is None:
            return said.get("failed") or f"it has not started: {texts[1][-300:] or 'no reason given'}"
        status = os.waitstatus_to_exitcode(said.get("status", signal.SIGKILL))
        ended = self.ended or ("time" if status == -signal.SIGXCPU else "killed" if status < 0 else "exited")
        return Outcome(ended, status, *texts, seconds)  # type: ignore[arg-type]


def _in_memory(text: str) -> IO[bytes]:
    """A file that lies on no disk, ready to be read."""
    file = os.fdopen(os.memfd_create("text"), "r+b")
    file.write(text.encode(errors="surrogatepass"))
    file.seek(0)
    return file


class _Folder:
    """An empty folder that goes away with all that is in it, whatever rights and depth it was given.

    It is locked as long as its owner lives. What an owner left that was killed, the next process finds unlocked.
    """

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
def _remove_abandoned(place: str) -> None:
    """Once in a process: the folders here of callers that were killed while a program ran."""
    for path in Path(place).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # it is another user's, or locked, or was just removed
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if time.time() - os.fstat(lock).st_mtime > _START:  # a younger one may be about to be locked
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(str(path))
            finally:
                os.close(lock)


def _remove(path: str) -> None:
    """A folder and what is in it. Folders in it are moved up, so that there may be more of them in each other than
    this process has open files, and than a path has room for."""
    mark, number = secrets.token_hex(8), itertools.count()
    while folders := _folders_alone(path):
        for folder in folders:
            for inner in _folders_alone(folder):
                os.rename(inner, f"{path}/{mark}-{next(number)}")
            os.rmdir(folder)
    os.rmdir(path)


def _folders_alone(path: str) -> list[str]:
    """The folders in a folder, which may be entered now; all else there is removed."""
    with os.scandir(path) as found:
        entries = list(found)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            os.chmod(entry.path, stat.S_IRWXU)
        else:
            os.unlink(entry.path)
    return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]


@functools.cache
def _interpreter() -> list[str]:
    """What an interpreter needs of the file system; nothing that lies below something else of it."""
    base = Path(sys.base_prefix)
    wanted = [Path(sys.executable).resolve(), base / "lib", base / "lib64", Path(sysconfig.get_path("stdlib")),
              *map(Path, _SYSTEM)]
    there = sorted({str(path) for path in wanted if path.exists()})
    return [path for path in there if not any(path.startswith(f"{other}/") for other in there)]
