"""The process between the caller of `run_python` and the program: makes the walls, starts the program, ends all of it.

    launcher ── init (process 1 of its namespace) ── program …      kind "namespaces"
    launcher ── program …                                           kind "filters"

The launcher ends everything when the program is over and when the caller closes its end of their line or dies.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import select
import signal
import sys
from typing import Any

from workers.isolation.sandbox import kernel, landlock, seccomp
from workers.isolation.sandbox.processes import kill_descendants

_ROOT = "/proc"
"""Where the program's root is put together: a folder that is there everywhere and holds nothing that it needs."""
_FIRST_USER = 1_000_000_000
"""Root gives each program a user id of its own, above all that people have, by the number of its process."""
_NOBODY = 65534
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_LEFT = 3
"""Processes of the sandbox itself, which the kernel counts with the program's."""

Job = dict[str, Any]


def main() -> None:
    """Run the job that the first argument describes as JSON (see `workers.isolation.sandbox.runner`)."""
    job = json.loads(sys.argv[1])
    for name in ("line", "source"):
        os.set_inheritable(job[name], False)
    job["user"] = _FIRST_USER + os.getpid() if os.geteuid() == 0 else None
    try:
        child = _start_in_namespaces(job) if job["kind"] == "namespaces" else _start_behind_filters(job)
    except OSError as error:
        _report(job, failed=str(error))
        os._exit(1)
    ended = os.pidfd_open(child)
    waiting = select.poll()  # `select` knows no file above 1023, and the line has its number in the caller
    for file in (ended, job["line"]):
        waiting.register(file, select.POLLIN)
    if ended not in dict(waiting.poll()):
        os.kill(child, signal.SIGKILL)
    if job["kind"] == "namespaces":
        os.waitpid(child, 0)  # comes back when all processes of the namespace are gone
    else:
        _, status = os.waitpid(child, 0)
        _end_descendants(job["user"])
        _report(job, status=status)
    os._exit(0)


def _report(job: Job, **said: Any) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(job["line"], json.dumps(said).encode() + b"\n")


def _start_in_namespaces(job: Job) -> int:
    flags = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    flags |= 0 if job["network"] else kernel.CLONE_NEWNET
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(flags if user == 0 else flags | kernel.CLONE_NEWUSER)
    if user:
        mapped = {"setgroups": "deny", "uid_map": f"{_NOBODY} {user} 1", "gid_map": f"{_NOBODY} {group} 1"}
        for name, line in mapped.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    child = os.fork()
    if child:
        return child
    try:
        _be_init(job)
    except OSError as error:
        _report(job, failed=str(error))
    os._exit(1)


def _be_init(job: Job) -> None:
    """Process 1: with its end the kernel ends all others of the namespace."""
    _build_root(job)
    _give_up_rights(job["user"])
    kernel.flag(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    program = os.fork()
    if not program:
        _become_program(job, "/tmp/main.py")
    while True:
        process, status = os.wait()
        if process == program:
            _report(job, status=status)
            os._exit(0)


def _build_root(job: Job) -> None:
    """A root that holds the interpreter, three devices and an empty /tmp, and is written to nowhere else."""
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", _ROOT, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    os.mkdir(f"{_ROOT}/tmp")
    kernel.mount("tmpfs", f"{_ROOT}/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV,
                 f"size={job['disk']},nr_inodes=4096,mode=1777")
    for path in (*job["readable"], *_DEVICES):
        _show(path, _ROOT + path)
    kernel.change_root(_ROOT)
    kernel.mount(None, "/", None,
                 kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV)
    os.chdir("/tmp")


def _show(path: str, target: str) -> None:
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
    kernel.flag(kernel.PR_SET_CHILD_SUBREAPER)
    child = os.fork()
    if child:
        return child
    try:
        if job["user"] is not None:
            os.chown(job["folder"], job["user"], job["user"])
        os.chdir(job["folder"])
        _give_up_rights(job["user"])
        kernel.flag(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        _become_program(job, "main.py")
    except OSError as error:
        _report(job, failed=str(error))
    os._exit(1)


def _give_up_rights(user: int | None) -> None:
    if user is not None:
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)  # this root has few user ids of its own
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    kernel.drop_capabilities()
    kernel.flag(kernel.PR_SET_NO_NEW_PRIVS)


def _become_program(job: Job, path: str) -> None:
    """Never comes back; the caller hears what failed."""
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
        os.execve(job["executable"], ["python", "-s", "-S", "-B", path], {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"})
    except OSError as error:
        _report(job, failed=str(error))
    os._exit(1)


def _limit(job: Job) -> None:
    limits = {"AS": job["memory"], "FSIZE": job["disk"], "NPROC": job["processes"] + _LEFT, "NOFILE": 64, "CORE": 0,
              "MSGQUEUE": 0, "MEMLOCK": 0}
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (job["cpu_seconds"], job["cpu_seconds"] + 1))


def _end_descendants(user: int | None) -> None:
    """Kill what the program left behind. Orphans become children of this process, wherever they hide."""
    while _reaped():
        if user is not None:
            _kill_all_of(user)
        kill_descendants(os.getpid())


def _kill_all_of(user: int) -> None:
    """At once all that has this user id, however fast it forks; by a process that takes that id for it."""
    if os.fork():
        return
    try:
        os.setresuid(user, user, user)
        os.kill(-1, signal.SIGKILL)
    finally:
        os._exit(0)


def _reaped() -> bool:
    """Whether a child is left; those that have ended are not."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False
