"""Launcher process between the caller of `run_python` and the program: isolates, starts and ends the program.

    launcher ── init (process 1 of its namespace) ── program …      kind "namespaces"
    launcher ── program …                                           kind "filters"

The launcher kills everything when the program has ended and when the caller closes the connection or dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import signal
import sys
from typing import Any

from distflow.telemetry.processes import adopt_orphans, die_with, kill_descendants
from workers.isolation.sandbox import kernel, landlock, seccomp

_NEW_ROOT = "/proc"  # root's mount point: exists everywhere, holds nothing that the program needs
_FIRST_USER = 1_000_000_000  # A caller that is root gives each program a user id of its own: this plus the process id
_NOBODY = 65534
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_VARIABLES = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Threads of libraries count towards the program's limits of processes and memory."""
_START = """\
__import__("builtins").exit = __import__("builtins").quit = __import__("sys").exit
__file__ = __import__("sys").argv[0] = {path!r}
exec(compile(open(__file__, "rb").read(), __file__, "exec"))
"""  # without `site`, which else defines `exit` and `quit`
_OWN_PROCESSES = 3  # processes of the sandbox itself, which count towards the program's limit

Job = dict[str, Any]


def main() -> None:
    job = json.loads(sys.argv[1])
    for name in ("connection", "source"):
        os.set_inheritable(job[name], False)
    job["user"] = _FIRST_USER + os.getpid() if os.geteuid() == 0 else None
    try:
        child = _start_in_namespaces(job) if job["kind"] == "namespaces" else _start_behind_filters(job)
    except OSError as error:
        _report(job, failed=str(error))
        os._exit(1)
    ended = os.pidfd_open(child)
    waiting = select.poll()  # `select` takes no descriptor above 1023, which the caller's connection may be
    for file in (ended, job["connection"]):
        waiting.register(file, select.POLLIN)
    if ended not in dict(waiting.poll()):
        os.kill(child, signal.SIGKILL)
    if job["kind"] == "namespaces":
        os.waitpid(child, 0)  # returns when all processes of the namespace have ended
    else:
        _, status = os.waitpid(child, 0)
        _end_descendants(job["user"])
        _report(job, status=status)
    os._exit(0)


def _report(job: Job, **fields: Any) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(job["connection"], json.dumps(fields).encode() + b"\n")


def _start_in_namespaces(job: Job) -> int:
    flags = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    flags |= 0 if job["network"] else kernel.CLONE_NEWNET
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(flags if user == 0 else flags | kernel.CLONE_NEWUSER)
    if user:
        mapped = {"setgroups": "deny", "uid_map": f"{_NOBODY} {user} 1", "gid_map": f"{_NOBODY} {group} 1"}
        for name, text in mapped.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    child = os.fork()
    if child:
        return child
    try:
        _run_init(job)
    except OSError as error:
        _report(job, failed=str(error))
    os._exit(1)


def _run_init(job: Job) -> None:
    """Run as process 1: when it ends, the kernel kills all others of the namespace."""
    _build_root(job)
    _drop_rights(job["user"])
    die_with(os.getppid())
    program = os.fork()
    if not program:
        _exec_program(job, "/tmp/main.py")
    while True:
        process, status = os.wait()
        if process == program:
            _report(job, status=status)
            os._exit(0)


def _build_root(job: Job) -> None:
    """Build a root with the interpreter, three devices and an empty /tmp, the only writable folder."""
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", _NEW_ROOT, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    os.mkdir(f"{_NEW_ROOT}/tmp")
    kernel.mount("tmpfs", f"{_NEW_ROOT}/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV,
                 f"size={job['disk']},nr_inodes=4096,mode=1777")
    for path in (*job["readable"], *_DEVICES):
        _mount_read_only(path, _NEW_ROOT + path)
    kernel.change_root(_NEW_ROOT)
    kernel.mount(None, "/", None,
                 kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV)
    os.chdir("/tmp")


def _mount_read_only(path: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT, 0o644))
    kernel.bind_read_only(path, target)


def _start_behind_filters(job: Job) -> int:
    adopt_orphans()
    child = os.fork()
    if child:
        return child
    try:
        if job["user"] is not None:
            os.chown(job["folder"], job["user"], job["user"])
        os.chdir(job["folder"])
        _drop_rights(job["user"])
        die_with(os.getppid())
        _exec_program(job, "main.py")
    except OSError as error:
        _report(job, failed=str(error))
    os._exit(1)


def _drop_rights(user: int | None) -> None:
    if user is not None:
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)  # in a user namespace with few user ids
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1))


def _exec_program(job: Job, path: str) -> None:
    try:
        with open(job["source"], "rb") as source, open(path, "wb") as file:
            file.write(source.read())
        behind_filters = job["kind"] == "filters"
        if behind_filters:
            if job["hide_files"] or landlock.version():
                landlock.confine([*job["readable"], *_DEVICES], ["."])
            os.setsid()
        _limit(job)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        _report(job, started=True)
        seccomp.confine(job["network"], alone=behind_filters)
        path_of_modules = ":".join([*job["standard_library"], *job["packages"]])  # as `site` has them
        os.execve(job["executable"], ["python", "-s", "-S", "-B", "-c", _START.format(path=path)],
                  {**_VARIABLES, "PYTHONPATH": path_of_modules})
    except OSError as error:
        _report(job, failed=str(error))
    os._exit(1)


def _limit(job: Job) -> None:
    limits = {"AS": job["memory"], "FSIZE": job["disk"], "NPROC": job["processes"] + _OWN_PROCESSES, "NOFILE": 64,
              "CORE": 0, "MSGQUEUE": 0, "MEMLOCK": 0}
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (job["cpu_seconds"], job["cpu_seconds"] + 1))


def _end_descendants(user: int | None) -> None:
    """Kill what the program has left behind. Orphans become children of this process, a subreaper."""
    while _reaped():
        if user is not None:
            _kill_all_of(user)
        kill_descendants(os.getpid())


def _kill_all_of(user: int) -> None:
    """Kill all processes of this user id at once, however fast they fork, from a process with that id."""
    if os.fork():
        return
    try:
        os.setresuid(user, user, user)
        os.kill(-1, signal.SIGKILL)
    finally:
        os._exit(0)


def _reaped() -> bool:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False
