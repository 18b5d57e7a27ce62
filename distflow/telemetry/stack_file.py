"""Python stacks of processes that crash or hang, for whoever has started them."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sysconfig
import time

from distflow.telemetry.processes import Child

_DUMP, _DUMP_ALL = signal.SIGRTMIN + 9, signal.SIGRTMIN + 10  # ask a process for the stack of a thread, and of all
_WRITE_TIMEOUT, _POLL_INTERVAL = 1.0, 0.02  # seconds that a process has to write its stack, and between two looks at it
_LONGEST = 2000  # characters of a stack that are read
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_LIBRARIES = tuple({sysconfig.get_path(each) for each in ("stdlib", "purelib", "platlib")} | {"<"})


class StackFile:
    """Python stack of a process, written by it when it crashes or is asked for it, and read by its parent.

    The interpreter writes it from within the signal, so it is also there when a call into a library never returns or
    holds Python's lock. Crashes have a file of their own: no request erases the stack of one, or passes for it. The
    files are anonymous memory, freed with their last process.
    """

    def __init__(self) -> None:
        self.file, self.requested = os.memfd_create("stack"), os.memfd_create("requested stack")

    def enable(self) -> None:
        """Let this process write its stack when it crashes or is asked for it."""
        faulthandler.enable(self.file)
        faulthandler.register(_DUMP, self.requested, all_threads=False)
        faulthandler.register(_DUMP_ALL, self.requested)
        os.register_at_fork(after_in_child=faulthandler.disable)  # another process's crash is none of this one

    def dump(self, process: Child) -> str:
        """Return the stack of a process that still runs: of the thread that gets signals, which is the main one if it
        can, then of all. "" if it writes none within a second."""
        return "\n\n".join(filter(None, (self._ask(process, number) for number in (_DUMP, _DUMP_ALL))))[:_LONGEST]

    def dump_main(self, process: Child) -> str:
        """Return the stack of the thread that gets signals alone, "" as for `dump`."""
        return self._ask(process, _DUMP)[:_LONGEST]

    def _ask(self, process: Child, number: int) -> str:
        os.ftruncate(self.requested, 0)
        os.lseek(self.requested, 0, os.SEEK_SET)
        process.signal(number)
        until, before = time.monotonic() + _WRITE_TIMEOUT, ""
        while time.monotonic() < until and process.poll(_POLL_INTERVAL) is None \
                and not before == (text := _stacks(self.requested)) > "":
            before = text
        return _stacks(self.requested)

    def read(self) -> str:
        """Return what a crash has written: the stack of each thread, the innermost call first; before all others that
        of the thread that crashed or, if that is none of Python's, of the main thread. "" if it has not crashed."""
        return _stacks(self.file)

    def close(self) -> None:
        os.close(self.file)
        os.close(self.requested)


def _stacks(file: int) -> str:
    text = os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")
    stacks = text.partition("\nExtension modules:")[0].strip().split("\n\n")  # the main thread's is the last
    first = next((stack for stack in stacks if stack.startswith("Current thread")), stacks[-1])
    return "\n\n".join([first, *(stack for stack in stacks if stack is not first)])[:_LONGEST]


def ignore_dumps() -> None:
    """Let processes that this one forks pass over a request for their stack that comes before `enable`."""
    for number in (_DUMP, _DUMP_ALL):
        signal.signal(number, signal.SIG_IGN)


def location_in(stack: str) -> str:
    """Return where a stack stands, as " in FILE, line N, in FUNCTION": its innermost call outside Python's library and
    installed packages; "" for an empty one."""
    frames = _FRAME.findall(stack.partition("\n\n")[0])
    path, line, function = next((each for each in frames if not each[0].startswith(_LIBRARIES)),
                                frames[0] if frames else ("", "", ""))
    return f" in {path}, line {line}, in {function}" if path else ""
