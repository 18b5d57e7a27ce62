"""The device that a benchmark runs on: its name, its peak, its memory, and what drives it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def name_of(kind: str) -> str:
    """Return what the device calls itself."""
    return torch.cuda.get_device_name() if kind == "cuda" else f"CPU ({platform.machine()}, {os.cpu_count()} cores)"


def versions(kind: str) -> str:
    """Return the versions of torch, of what it was built for, and of the driver, with the limits that it knows."""
    if kind != "cuda":
        return f"torch {torch.__version__}"
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}, driver {_driver()}"


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    asked = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.split("\n")[0].strip() or "unknown"


def synchronize(kind: str) -> None:
    """Wait until the device has done what it was told."""
    if kind == "cuda":
        torch.cuda.synchronize()


def memory(kind: str) -> float:
    """Return the bytes of the device, or of the host for the CPU."""
    return torch.cuda.mem_get_info()[1] if kind == "cuda" else _meminfo("MemTotal")


def free(kind: str) -> int | None:
    """Return the bytes of the device that other processes may take, once torch keeps none for itself; not known on a
    CPU."""
    if kind != "cuda":
        return None
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def most_allocated(kind: str) -> int | None:
    """Return the bytes of the device that tensors had at the worst moment so far; not known on a CPU."""
    return torch.cuda.max_memory_allocated() if kind == "cuda" else None


def host_free() -> int:
    """Return the bytes of host memory to be had: by the kernel, and by the limit that the process is under."""
    limit, used = (Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current"))
    known = _meminfo("MemAvailable")
    if limit.is_file() and limit.read_text().strip() != "max":
        known = min(known, int(limit.read_text()) - int(used.read_text()))
    return known


def _meminfo(name: str) -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def held(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors, or of this rank's parts of them."""
    return sum(_storages(tensors))


def pinned(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of pinned host memory that torch takes for copies of them: it rounds each up to a power of
    two."""
    return sum(1 << (size - 1).bit_length() for size in _storages(tensors) if size)


def _storages(tensors: Iterable[Tensor]) -> list[int]:
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return list({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in local}.values())
