"""Real ranks for tests: processes with a gloo group, which several tests use one after the other."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib.util
import multiprocessing
import os
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fork_server import fork_process

from distflow.telemetry.stack_file import StackFile

_LIMIT = 240.0
_OURS = [Path(__file__).resolve().parents[1], *map(Path, sysconfig.get_paths().values())]
"""Folders with modules that a user does not write."""
_THREADS = 40  # gloo leaves one of each group that stays referenced, which wakes a hundred times a second
_pool: list[tuple[multiprocessing.Process, Connection]] = []
_stacks: dict[int, StackFile] = {}  # by pid
_calls = 0


class RankFailed(AssertionError):
    """A rank raised, or died. The message has its traceback."""


def run_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(*arguments)` on each of `ranks` processes that form a gloo group of their own; the results by rank.

    `function` lives at the top of its module, which is loaded from its file in each process.

    Raises:
        RankFailed: with the first error and its traceback. The ranks are then replaced, as others may wait for it.
    """
    import torch.distributed as dist

    global _calls
    _calls += 1
    _replace([each for each in _pool if not each[0].is_alive()])  # a test may have ended all processes below its own
    while len(_pool) < ranks:
        _pool.append(_start())
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = (store.port, _calls, ranks, function.__code__.co_filename, function.__qualname__, arguments)
    used = _pool[:ranks]
    for rank, (_, line) in enumerate(used):
        line.send((rank, *job))
    try:
        results = _results(used)
    except RankFailed:
        _replace(used)
        raise
    _replace([each for each in used if len(os.listdir(f"/proc/{each[0].pid}/task")) > _THREADS])
    return results


def _replace(used: list[tuple[multiprocessing.Process, Connection]]) -> None:
    """End these processes, so that new ones take their place."""
    for each in used:
        _pool.remove(each)
        _end(*each)


def end_processes() -> None:
    """End all ranks' processes, so that the next are new: torch's flight recorder keeps what it has recorded of groups
    that are gone, and their names come again."""
    while _pool:
        _end(*_pool.pop())


def _results(used: list[tuple[multiprocessing.Process, Connection]]) -> list[Any]:
    results: dict[int, Any] = {}
    lines = {line: rank for rank, (_, line) in enumerate(used)}
    while len(results) < len(used):
        ready = wait([line for line, rank in lines.items() if rank not in results], timeout=_LIMIT)
        if not ready:
            raise RankFailed(f"ranks {sorted(set(lines.values()) - set(results))} have not finished in {_LIMIT} s")
        for line in ready:
            rank = lines[line]
            try:
                good, value = line.recv()
            except EOFError:
                raise RankFailed("\n".join(_deaths(used))) from None
            if not good:
                raise RankFailed(_first_cause(used, rank, value))
            results[rank] = value
    return [results[rank] for rank in range(len(used))]


def _deaths(used: list[tuple[multiprocessing.Process, Connection]]) -> list[str]:
    """The exit status of each rank that has ended, with where it stood if it crashed."""
    for process, _ in used:
        process.join(1.0)
    return [f"rank {rank} died with exit code {process.exitcode}\n{_stacks[process.pid].read()}"
            for rank, (process, _) in enumerate(used) if process.exitcode is not None]


def _first_cause(used: list[tuple[multiprocessing.Process, Connection]], rank: int, error: str) -> str:
    """The error of a rank, or of another one if this one only lost its connection."""
    for number, (_, line) in enumerate(used):
        with contextlib.suppress(EOFError):
            good, value = line.recv() if number != rank and line.poll(2.0) else (True, None)
            if not good and "Connection" in error.splitlines()[-1] and "Connection" not in value.splitlines()[-1]:
                rank, error = number, value
    return f"rank {rank}:\n{error}"


def _start() -> tuple[multiprocessing.Process, Connection]:
    ours, theirs = multiprocessing.Pipe()
    stack = StackFile()
    process = fork_process(_serve, theirs, f"/proc/{os.getpid()}/fd/{stack.file}", daemon=True)
    _stacks[process.pid] = stack
    theirs.close()
    return process, ours


def _end(process: multiprocessing.Process, line: Connection) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.join()
    _stacks.pop(process.pid).close()
    line.close()


def _serve(line: Connection, stack: str) -> None:
    """One rank: jobs until the tests are over. A crash writes its Python stack to the file `stack`."""
    faulthandler.enable(open(stack, "w"))  # noqa: SIM115 - it stays open as long as the process lives
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError):
        while True:
            job = line.recv()
            try:
                line.send((True, _run(*job)))
            except BaseException:  # noqa: BLE001 - whatever a test raises belongs to the process that runs the tests
                line.send((False, traceback.format_exc()))


def _run(rank: int, port: int, call: int, ranks: int, path: str, name: str, arguments: tuple[Any, ...]) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(f"call{call}", store), rank=rank, world_size=ranks,
                            timeout=datetime.timedelta(seconds=_LIMIT / 2))
    dist.barrier()  # one that leaves before another has connected to it looks lost
    search_path, modules = sys.path[:], {*sys.modules}
    try:
        return getattr(_module(path), name)(*arguments)
    finally:
        dist.destroy_process_group()
        _forget_groups()
        forget_users(search_path, modules)


def _forget_groups() -> None:
    """What is kept by name or by mesh would be found again in the next job, whose groups are others. A real process has
    one job."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _redistribute, debug

        debug._clear_sharding_prop_cache()
        _redistribute._gen_transform_infos.cache_clear()
    if "workers.engines.devices" in sys.modules:
        sys.modules["workers.engines.devices"].mesh_of.cache_clear()


def forget_users(search_path: list[str], modules: set[str]) -> None:
    """Take back what was added to Python's path, and users' modules that were imported since: those of the next job may
    have the same names."""
    sys.path[:] = search_path
    for name in {*sys.modules} - modules:
        file = Path(getattr(sys.modules[name], "__file__", None) or __file__).resolve()
        if "site-packages" not in file.parts and not any(file.is_relative_to(folder) for folder in _OURS):
            del sys.modules[name]


def _module(path: str) -> Any:
    if path not in sys.modules:
        spec = importlib.util.spec_from_file_location(path, path)
        sys.modules[path] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[path])
    return sys.modules[path]
