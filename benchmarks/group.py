"""Processes for a benchmark: they answer by methods, and some have a process group on loopback."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contender import kilobytes
from workers.engines.devices import choose

_SOON = 0.02


class Served:
    """Processes, each of which answers by the methods of an object of its own. A method that raises ends its process,
    which prints the traceback.

    Raises:
        RuntimeError: by any method: a process has ended.
    """

    def __init__(self, make: Callable[..., Any], each: Iterable[tuple[Any, ...]] = ()):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self.make, self.processes = make, list[BaseProcess]()
        self.lines, self.context = list[Connection](), multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([__name__])  # torch is imported once, not once a process
        for given in each:
            self._start(given)
        self.answers()

    def add(self, *given: Any) -> None:
        """Start one more, with these arguments of `make`."""
        self._start(given)
        self.answer(-1)

    def order(self, number: int, do: str, *given: Any) -> None:
        """Call a method there, and do something else until `answer`."""
        self.lines[number].send((do, given))

    def answer(self, number: int) -> Any:
        try:
            return self.lines[number].recv()
        except EOFError:
            raise RuntimeError("a process failed; see above") from None

    def answers(self) -> list[Any]:
        return [self.answer(number) for number in range(len(self.lines))]

    def ask(self, number: int, do: str, *given: Any) -> Any:
        self.order(number, do, *given)
        return self.answer(number)

    def ask_all(self, do: str, *given: Any) -> list[Any]:
        """Call the same method everywhere at once."""
        for number in range(len(self.lines)):
            self.order(number, do, *given)
        return self.answers()

    def close(self) -> None:
        for line in self.lines:
            line.close()
        for process in self.processes:
            process.join()

    def _start(self, given: tuple[Any, ...]) -> None:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(theirs, self.make, given))
        process.start()
        theirs.close()
        self.processes.append(process)
        self.lines.append(ours)


def _serve(line: Connection, make: Callable[..., Any], given: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    target = make(*given)
    line.send(None)
    with contextlib.suppress(EOFError):
        while True:
            do, arguments = line.recv()
            line.send(getattr(target, do)(*arguments))
    target.close()


class Rank:
    """One of `ranks` in a process group, whose store is a file. With the device `cuda` each has a GPU of its own."""

    def __init__(self, rank: int, ranks: int, store: str, device: str = "cpu"):
        self.rank = rank
        choose(device, rank)
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Return what a function gives on rank 0, once it has ended on every rank."""
        result = function(*arguments)
        dist.all_reduce(torch.zeros(1))
        return result if self.rank == 0 else None

    def close(self) -> None:
        dist.destroy_process_group()


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any, device: str = "cpu") -> Any:
    """Return what `function(*arguments)` gives on rank 0 of `ranks`.

    Raises:
        RuntimeError: a rank failed; its traceback has been printed.
    """
    with tempfile.TemporaryDirectory(prefix="group-") as folder:
        served = Served(Rank, [(rank, ranks, f"{folder}/store", device) for rank in range(ranks)])
        result, *_ = served.ask_all("call", function, arguments)
        served.close()
    return result


def begin_together() -> float:
    """Return the moment at which all ranks leave: a barrier lets them go milliseconds apart. The clock is the
    machine's."""
    moment = torch.tensor([time.perf_counter() + _SOON], dtype=torch.float64)
    dist.all_reduce(moment, dist.ReduceOp.MAX)
    time.sleep(max(0.0, moment.item() - time.perf_counter()))
    return moment.item()


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds until the last rank is done; all begin at one moment."""
    moment = begin_together()
    work()
    end = torch.tensor([time.perf_counter()], dtype=torch.float64)
    dist.all_reduce(end, dist.ReduceOp.MAX)
    return end.item() - moment


def peak_over(work: Callable[[], Any]) -> int:
    """Return the bytes by which this process's memory grew at most while it worked (VmHWM, set back before)."""
    Path("/proc/self/clear_refs").write_text("5")
    before = kilobytes("self", "VmRSS")
    work()
    return 1024 * (kilobytes("self", "VmHWM") - before)
