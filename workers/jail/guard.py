"""A process that does nothing but watch over its child: what that leaves behind ends with it, and all with the rank.

The child runs code of others, which may hang or be killed, so that it cannot tidy up itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from workers.jail import kernel
from workers.jail.processes import kill_descendants


def fork_from_guard(parent: int) -> None:
    """Come back in a child of this process, which becomes its guard, and ends as the child does.

    Args:
        parent: the process that has started this one; the child and all that stems from it end with it, even if it
            is killed.
    """
    signal.signal(signal.SIGTERM, _leave)
    kernel.flag(kernel.PR_SET_CHILD_SUBREAPER)
    kernel.flag(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(0)  # it ended before that could be noticed
    guard, child = os.getpid(), os.fork()
    if child:
        _guard(child)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    kernel.flag(kernel.PR_SET_CHILD_SUBREAPER)
    kernel.flag(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(0)


def _leave(*_: object) -> None:
    sys.exit()


def _guard(child: int) -> None:
    """Never comes back."""
    status = 0
    try:
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # or the child's end could not be noticed by its pipes
        process = 0
        while process != child:
            process, status = os.wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        kill_descendants(os.getpid())
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
        if os.WIFSIGNALED(status):
            if (number := os.WTERMSIG(status)) != signal.SIGKILL:
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        os._exit(os.waitstatus_to_exitcode(status))
