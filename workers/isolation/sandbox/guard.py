"""A process that does nothing but watch over its child: what that leaves behind ends with it, and all with the rank.

The child runs code of others, which may hang or be killed, so that it cannot tidy up itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from workers.isolation.sandbox import kernel
from workers.isolation.sandbox.memory_limit import LookSchedule, SharedMemoryUse
from workers.isolation.sandbox.processes import kill_descendants

_NEWS = {signal.SIGCHLD, signal.SIGTERM}
"""What the guard waits for: the end of a child, and that of who started it. Neither interrupts what it does."""


def fork_from_guard(parent: int, shared: int | None = None) -> None:
    """Come back in a child of this process, which becomes its guard, and ends as the child does.

    Args:
        parent: the process that has started this one; the child and all that stems from it end with it, even if it
            is killed.
        shared: bytes of shared memory beyond which the child is killed; None: any number.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, as it may be inherited, it would not be sent
    signal.pthread_sigmask(signal.SIG_BLOCK, _NEWS)
    kernel.flag(kernel.PR_SET_CHILD_SUBREAPER)
    kernel.flag(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(0)  # it ended before that could be noticed
    guard, child = os.getpid(), os.fork()
    if child:
        _guard(child, shared)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _NEWS)
    kernel.flag(kernel.PR_SET_CHILD_SUBREAPER)
    kernel.flag(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(0)


def _guard(child: int, shared: int | None) -> None:
    """Never comes back."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # or the child's end could not be noticed by its pipes
    ended: dict[int, int] = {}
    while child not in ended and _next(child, shared) == signal.SIGCHLD:
        ended |= _reaped()
    kill_descendants(os.getpid())
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    status = ended.get(child, 0)
    if os.WIFSIGNALED(status):
        if (number := os.WTERMSIG(status)) != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _NEWS)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _next(child: int, shared: int | None) -> int:
    """Wait for news, and meanwhile see to it that the child and its descendants share no more memory than they may."""
    if shared is None:
        return signal.sigwait(_NEWS)
    memory, looks = SharedMemoryUse(child, shared), LookSchedule()
    while (news := signal.sigtimedwait(_NEWS, looks.pause)) is None:
        with looks.look():
            if memory.exceeded():
                print(f"process {child} and its descendants have more shared memory than {shared / 2**30:g} GiB, and "
                      "are ended", file=sys.stderr, flush=True)
                os.kill(child, signal.SIGKILL)
    return news.si_signo


def _reaped() -> dict[int, int]:
    """The status of each child that has ended."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended
