"""Guard process: watches one child, kills what the child leaves behind, and ends everything with the rank.

The child runs users' code, which may hang or be killed, so it cannot clean up after itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from workers.isolation.sandbox import kernel
from workers.isolation.sandbox.memory_limit import PollSchedule, SharedMemoryUse
from workers.isolation.sandbox.processes import kill_descendants

_SIGNALS = {signal.SIGCHLD, signal.SIGTERM}
"""Signals of a child's end and of the starter's end; blocked, so that neither interrupts the guard."""


def fork_from_guard(parent: int, shared: int | None = None) -> None:
    """Fork; return in the child, while this process becomes its guard and exits with the child's status.

    Args:
        parent: the process that has started this one; when it ends, even by SIGKILL, so do the child and all its
            descendants.
        shared: bytes of shared memory beyond which the child is killed; None: no limit.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited "ignore" would keep it from being sent
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    kernel.flag(kernel.PR_SET_CHILD_SUBREAPER)
    kernel.flag(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(0)  # the parent ended before the signal was set up
    guard, child = os.getpid(), os.fork()
    if child:
        _watch(child, shared)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    kernel.flag(kernel.PR_SET_CHILD_SUBREAPER)
    kernel.flag(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(0)


def _watch(child: int, shared: int | None) -> None:
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # else the child's pipes would stay open beyond its end
    ended: dict[int, int] = {}
    while child not in ended and _wait(child, shared) == signal.SIGCHLD:
        ended |= _reaped()
    kill_descendants(os.getpid())
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    status = ended.get(child, 0)
    if os.WIFSIGNALED(status):
        if (number := os.WTERMSIG(status)) != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _wait(child: int, shared: int | None) -> int:
    """Wait for a signal, and kill the child if it and its descendants exceed their shared memory meanwhile."""
    if shared is None:
        return signal.sigwait(_SIGNALS)
    memory, schedule = SharedMemoryUse(child, shared), PollSchedule()
    while (signal_info := signal.sigtimedwait(_SIGNALS, schedule.pause)) is None:
        with schedule.poll():
            if memory.exceeded():
                print(f"process {child} and its descendants have more shared memory than {shared / 2**30:g} GiB, and "
                      "are ended", file=sys.stderr, flush=True)
                os.kill(child, signal.SIGKILL)
    return signal_info.si_signo


def _reaped() -> dict[int, int]:
    """Return the wait status of each child that has ended."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended
