"""Starts child processes, reads the process table (/proc) and ends process trees.

    spawn(function)         a fork, which shares this process's memory       → `Child`
    spawn([program, …])     another program, as by subprocess.Popen          → `Child`
    Child.wait, .poll, .end its exit status; ask it to end, then kill it with its descendants
    kill_tree               a process and its descendants, whatever sessions they are in
    end_orphans             what a worker has left behind, adopted by this process (`adopt_orphans`)

The sandbox's launcher, which has no site packages and must start in milliseconds, imports this module too: hence
neither psutil nor, where it is not needed, subprocess.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import subprocess

AGENT = "DISTFLOW_AGENT"
"""Environment variable with torchrun's process id, if `distflow` has started it."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that may be sent to all processes of a run at once, and that its supervisors act on."""
_ROOT = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_TERM_TIMEOUT, _KILL_TIMEOUT, _STOP_TIMEOUT, _POLL_INTERVAL = 2.0, 5.0, 1.0, 0.02
"""Seconds that a process has to end after SIGTERM and after SIGKILL, and to stop; and between two looks."""
_spawned: set[int] = set()  # processes that `spawn` has started and that have not been waited for


class Child:
    """A process that `spawn` has started. `ended` is a descriptor that becomes readable when it ends; `stdin`, `stdout`
    and `stderr` are there if it is a program and they are pipes."""

    stdin: IO[Any]
    stdout: IO[Any]
    stderr: IO[Any]

    def __init__(self, pid: int, program: subprocess.Popen[Any] | None = None):
        self.pid, self.program = pid, program
        self.status: int | None = None
        self.ended = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self.ended)
        _spawned.add(pid)
        for name in ("stdin", "stdout", "stderr"):
            if pipe := getattr(program, name, None):
                setattr(self, name, pipe)

    def wait(self) -> int:
        """Wait for the end of the process, and return its exit status, negative for a signal."""
        if self.status is None:
            self.status = self.program.wait() if self.program else \
                os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            _spawned.discard(self.pid)
        return self.status

    def poll(self, seconds: float = 0.0) -> int | None:
        """Return the exit status; None if the process has not ended within `seconds`."""
        poll = select.poll()  # `select` takes no descriptor above 1023
        poll.register(self.ended, select.POLLIN)
        return self.wait() if self.status is not None or poll.poll(1000 * seconds) else None

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended. Waits for nothing, so that signal handlers may call it."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.ended, number)

    def end(self, seconds: float = 0.0) -> int:
        """End the process: by SIGTERM and SIGCONT if it has some `seconds` left, and then with its descendants by
        SIGKILL. Return its exit status."""
        if seconds:
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGCONT)
        if self.poll(seconds) is None:
            kill_tree(self.pid)
        return self.wait()


def python_environment() -> dict[str, str]:
    """Return this process's environment, with what a Python needs to import this tree."""
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def spawn(target: Callable[[], int | None] | Sequence[str], *, die_with_parent: int = signal.SIGKILL,
          session: bool = False, limits: Mapping[int, int] | None = None, oom_score: int = 0, **options: Any) -> Child:
    """Start a process.

    A function runs in a fork. It must not depend on threads or locks of this process. Its result is the exit status
    (None: 0); what it raises is printed, and the status is 1. Signals for all processes of a run (`SIGNALS`) do not end
    it, unless it says so: they are its parent's to act on.

    Args:
        target: the function, or a program with its arguments.
        die_with_parent: the signal that it gets when the thread ends that has started it; 0: it lives on. A program for
            which this or a limit is set is forked too: where this process has much memory, a program of ours should
            rather call `die_with` itself.
        session: gives it a session and a process group of its own.
        limits: resource limits, such as `{resource.RLIMIT_DATA: 1 << 30}`.
        oom_score: the kernel's out-of-memory killer prefers it, up to 1000 (proc(5), oom_score_adj).
        options: of a program, as for subprocess.Popen.

    Raises:
        OSError: it cannot be started.
    """
    prepare = partial(_prepare, os.getpid(), die_with_parent, limits or {}, oom_score)
    if not callable(target):
        import subprocess

        forked = bool(die_with_parent or limits or oom_score)
        program = subprocess.Popen(target, start_new_session=session, preexec_fn=prepare if forked else None, **options)
        return Child(program.pid, program)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the handlers of this process are not the fork's
    try:
        pid = os.fork()
        if not pid:
            _run(target, prepare, session)
        return Child(pid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _run(function: Callable[[], int | None], prepare: Callable[[], None], session: bool) -> NoReturn:
    status, done = 1, False
    try:
        _spawned.clear()
        prepare()
        if session:
            os.setsid()
        for number in SIGNALS:
            defy(number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        status, done = function() or 0, True
    finally:
        if not done:
            traceback.print_exception(*sys.exc_info())
        os._exit(status)


def defy(number: int) -> None:
    """Let a signal have no effect on this process; it still ends programs that this process executes."""
    signal.signal(number, lambda *_: None)
    signal.siginterrupt(number, False)


def _prepare(parent: int, number: int, limits: Mapping[int, int], oom_score: int) -> None:
    if number:
        die_with(parent, number)
    for limit, most in limits.items():
        resource.setrlimit(limit, (most, most))
    if oom_score:
        own = Path("/proc/self/oom_score_adj")
        with contextlib.suppress(OSError):  # another system, or a container that forbids it
            own.write_text(str(max(oom_score, int(own.read_text()))))


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its parent ends; exit at once if it has ended already."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def die_with_torchrun() -> None:
    """End with torchrun, if it has started this process: by SIGTERM, so that this process can end its children."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return  # started by a shell
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    agent = os.environ.get(AGENT)
    if agent and not Path(f"/proc/{agent}").exists():  # torchrun died while this process started
        os._exit(1)


def adopt_orphans() -> None:
    """Make this process the subreaper of its descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3):
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")


def began(process: int) -> int:
    """Return when a process began, in clock ticks since boot: with the pid it is unique. Raises OSError: no process."""
    return int(_facts(process)[19])


def alive(process: int, since: int) -> bool:
    """Return whether the process that began at `since` has not ended; a zombie has."""
    with contextlib.suppress(OSError):
        facts = _facts(process)
        return int(facts[19]) == since and facts[0] not in ("Z", "X")
    return False


def parent(process: int) -> int:
    """Return the pid of a process's parent. Raises OSError: there is no such process."""
    return int(_facts(process)[1])


def stopped(process: int) -> bool:
    """Return whether a process is stopped, by SIGSTOP or a debugger."""
    with contextlib.suppress(OSError):
        return _facts(process)[0] in ("T", "t")
    return False


def children(process: int) -> set[int]:
    """Return the processes that a process has started or adopted; none if it has ended."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            found.update(map(int, (thread / "children").read_text().split()))
    return found


def descendants(root: int, but: Collection[int] = ()) -> set[int]:
    """Return the living descendants of `root`, without those of `but` and their descendants. The result is complete
    only if `root` is a subreaper, to which orphans return."""
    parents: dict[int, int] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            state, its_parent, *_ = _facts(int(name))
            if state not in ("Z", "X"):
                parents[int(name)] = int(its_parent)
    found = {root}
    while more := {process for process, its_parent in parents.items() if its_parent in found}.difference(found, but):
        found |= more
    return found - {root}


def kill_tree(root: int, last: Sequence[int] = ()) -> set[int]:
    """Kill a process and its descendants; return them. Those of `last` are killed after all others, in this order; the
    last one may be this process."""
    return _kill(lambda: {root, *descendants(root)}, last)


def kill_descendants(root: int, but: Collection[int] = ()) -> set[int]:
    """Kill the descendants of a process, without those of `but` and their descendants; return those killed."""
    return _kill(lambda: descendants(root, but))


def kill_marked(name: str, value: str) -> None:
    """Kill each process that was started with this environment variable or has inherited it."""
    wanted = f"{name}={value}".encode()
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
                os.kill(int(process), signal.SIGKILL)


def _kill(find: Callable[[], set[int]], last: Sequence[int] = ()) -> set[int]:
    """Kill processes, all of them stopped first: none sees another end, or starts anything more."""
    killed: set[int] = set()
    _stop({*last}.difference({os.getpid()}))  # a supervisor would replace what is killed, or kill this process
    while new := find().difference(killed, last):
        _stop(new)
        killed |= new
    for process in (*killed, *last):
        _send(process, signal.SIGKILL)
    return killed


def _stop(processes: set[int]) -> None:
    """Stop processes, and wait until they stand still: one that is forking when the signal comes still has a child."""
    for process in processes:
        _send(process, signal.SIGSTOP)
    until = time.monotonic() + _STOP_TIMEOUT
    while any(_runs(process) for process in processes) and time.monotonic() < until:
        time.sleep(_POLL_INTERVAL / 10)


def _runs(process: int) -> bool:
    with contextlib.suppress(OSError):
        return _facts(process)[0] not in ("T", "t", "Z", "X")
    return False


def end_orphans(known: Collection[int]) -> set[int]:
    """End the children of this process that are neither known nor spawned, whatever session they are in: by SIGTERM and
    SIGCONT, and after a while with their descendants by SIGKILL. Return those that even SIGKILL has not ended in time:
    they wait in the kernel, as for a disk that does not answer."""
    deadline, signalled = time.monotonic() + _TERM_TIMEOUT, set()
    while left := _unreaped(children(os.getpid()) - _spawned.union(known)):
        over = time.monotonic() > deadline
        if time.monotonic() > deadline + _KILL_TIMEOUT:
            return left
        for each in left if over else left - signalled:
            if over:
                kill_tree(each)
            else:
                _send(each, signal.SIGTERM)
                _send(each, signal.SIGCONT)
        signalled |= left
        time.sleep(_POLL_INTERVAL)
    return set()


def _unreaped(processes: set[int]) -> set[int]:
    left = set()
    for each in processes:
        with contextlib.suppress(ChildProcessError):
            if not os.waitpid(each, os.WNOHANG)[0]:
                left.add(each)
    return left


def _send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _facts(process: int) -> list[str]:
    return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
