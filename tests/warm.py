"""Python commands that are forked from a process which has loaded what they need, with those that they start in turn.

`subprocess` starts a program by `_fork_exec`. Here that forks alone where the program is Python and ours: the command
line, torchrun, a rank. The parent, descriptors, session and signals are those of the command; its modules of ours are
loaded again; xdist's processes keep them. What a forked process cannot show is how a cold one starts.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread
import contextlib
import faulthandler
import gc
import logging
import multiprocessing.util
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from multiprocessing import resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

_PYTHON, _OPTIONS = sys.executable, ("-P", "-u")
_LOADED_AGAIN = ("distflow", "planners", "workers", "benchmarks")
_LIBRARY = [place for place in sys.path
            if place not in {*map(str, Path(__file__).parents), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}]
"""Where Python finds packages, whatever the folder and PYTHONPATH of a command."""
_XDIST = ["-c", "import sys;exec(eval(sys.stdin.readline()))"]  # `popen_bootstrapline` of execnet
_fork_exec = subprocess._fork_exec  # pyright: ignore[reportAttributeAccessIssue]


def command_of(words: list[str]) -> list[str]:
    """`-m MODULE ARGUMENTS`, `FILE ARGUMENTS` or `-c CODE ARGUMENTS` where words are a Python command that can be
    forked, else nothing."""
    if words[0] != _PYTHON:
        return []
    rest = [word for word in words[1:3] if word not in _OPTIONS] + words[3:]
    return rest if rest[0].endswith(".py") or rest[0] == "-c" or rest[0] == "-m" and _ours(rest[1]) else []


def _ours(module: str) -> bool:
    return module == "torch.distributed.run" or module.partition(".")[0] in _LOADED_AGAIN


def fork_or_execute(words: list[Any], executables: tuple[bytes, ...], close: bool, kept: tuple[int, ...],
                    folder: Any, variables: list[bytes] | None, *more: Any) -> int:
    """Stand for `subprocess._fork_exec`."""
    (stdin, _, _, stdout, _, stderr, _, told, _, session, group, *users, umask, prepare, _) = more
    line = command_of([os.fsdecode(word) for word in words])
    main = threading.current_thread() is threading.main_thread()
    # A fork of another thread frees what Python keeps of the main one: after some tests that ends it by SIGSEGV.
    if not (line and main) or (group, umask) != (-1, -1) or users != [None, None, None]:
        return _fork_exec(words, executables, close, kept, folder, variables, *more)
    known = {*_files().values()}
    if process := os.fork():
        return process
    try:
        forget_parent()
        if line != _XDIST:
            forget_modules()
        for number, given in enumerate((stdin, stdout, stderr)):
            if given != -1:
                os.dup2(given, number)
        if folder is not None:
            os.chdir(folder)
        if session:
            os.setsid()
        if prepare:
            prepare()
        if close:
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor, file in _files().items():
                # What a fork has at once and its parent has not are pipes of libuv, which each later fork renews.
                if file in known and descriptor not in {0, 1, 2, nothing, *kept} - {told}:
                    # Its number stays taken: an object of the parent's that is freed later closes it by number.
                    os.dup2(nothing, descriptor, inheritable=False)
            os.close(nothing)
        if variables is not None:
            os.environ.clear()
            os.environ.update(dict(os.fsdecode(each).split("=", 1) for each in variables))
        become(line)
    finally:
        traceback.print_exc()
        os._exit(255)


def _files() -> dict[int, str]:
    """What each descriptor of this process is open on."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def become(line: list[str]) -> NoReturn:
    """Be the Python of this command line in this process, which was forked and has its descriptors and variables."""
    threads = line == _XDIST or line[0].endswith("launch.py")  # of which a fork knows nothing
    subprocess._fork_exec = _fork_exec if threads else fork_or_execute  # pyright: ignore[reportAttributeAccessIssue]
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115 - as Python begins
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    module, code = line[0] == "-m", line[0] == "-c"
    sys.argv = line[1:] if module else ["-c", *line[2:]] if code else line
    search = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:] = [os.getcwd() if module or code else str(Path(line[0]).resolve().parent), *search, *_LIBRARY]
    random.seed()
    try:
        if code:
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(line[1], main.__dict__)
        elif module:
            runpy.run_module(line[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(line[0], run_name="__main__")
    finally:
        _leave(sys.exc_info()[1])


def forget_parent() -> None:
    """Undo what a process keeps over a fork and not over an execution: work at its end, and signal handlers."""
    faulthandler.disable()  # it has a descriptor, and so has multiprocessing: others may have their numbers now
    resource_tracker._resource_tracker._fd = resource_tracker._resource_tracker._pid = None
    weakref.finalize._registry.clear()  # pyright: ignore[reportAttributeAccessIssue]
    weakref.finalize._registered_with_atexit = False  # pyright: ignore[reportAttributeAccessIssue]
    sys.excepthook = sys.__excepthook__
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):  # pytest's, whose files are closed
        if isinstance(logger, logging.Logger):
            logger.handlers[:] = [each for each in logger.handlers if not type(each).__module__.startswith("_pytest")]
    atexit._clear()
    atexit.register(logging.shutdown)
    atexit.register(multiprocessing.util._exit_function)  # pyright: ignore[reportAttributeAccessIssue]
    concurrent.futures.thread._threads_queues.clear()  # its threads are gone, and one of them may be this one
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()  # a file of the parent's that is collected later would close a descriptor of another's


def forget_modules() -> None:
    """Have modules of ours loaded again."""
    for name in [name for name in sys.modules if _ours(name)]:
        del sys.modules[name]


def _leave(end: BaseException | None) -> NoReturn:
    """End as Python does, but for freeing its memory."""
    code = 0 if end is None else 1
    if isinstance(end, SystemExit):
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    elif end:
        sys.excepthook(type(end), end, end.__traceback__)
    with contextlib.suppress(OSError):
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    if isinstance(end, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 255)
