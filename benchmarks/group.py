"""Ranks for a benchmark: processes with a process group on loopback, which run one function and end."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contender import kilobytes
from workers.engines.devices import choose

_SOON = 0.02


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any, device: str = "cpu") -> Any:
    """Return what `function(*arguments)` gives on rank 0 of `ranks`. With the device `cuda` each has a GPU of its own.

    Raises:
        RuntimeError: a rank failed; its traceback has been printed.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="group-") as folder:
        processes = [context.Process(target=_rank, args=(rank, ranks, f"{folder}/store", theirs, function, arguments,
                                                         device)) for rank in range(ranks)]
        for process in processes:
            process.start()
        theirs.close()
        try:
            result = ours.recv()
        except EOFError:
            raise RuntimeError("a rank failed; see above") from None
        for process in processes:
            process.join()
    return result


def _rank(rank: int, ranks: int, store: str, line: Connection, function: Callable[..., Any],
          arguments: tuple[Any, ...], device: str) -> None:
    torch.set_num_threads(1)
    choose(device, rank)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    result = function(*arguments)
    if rank == 0:
        line.send(result)
    dist.all_reduce(torch.zeros(1))
    dist.destroy_process_group()


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
