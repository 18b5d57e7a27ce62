"""Device and kernels of a process, meshes of layouts (one for all roles with one), and the precision of a role."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import rms_norm

from distflow.config.run import RoleRun
from distflow.data.exchange import default_group, gather_values
from distflow.errors import EngineError
from distflow.plan import SHARES_OUTERMOST, Layout

NAMES = ("dp", "pp", "cp", "tp")
"""Dimensions of a layout's mesh: adjacent ranks are in one tp group, the farthest apart in one dp group."""


PEAKS = {"H200 NVL": 835e12, "H200": 989e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12}
"""Dense bfloat16 FLOPs per second by NVIDIA's data sheets; the first name that is part of the device's is its own."""


def peak_of(name: str) -> float | None:
    """Return the FLOPs per second of the device of this name; None if it is not known."""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def choose(device: str, index: int = 0) -> None:
    """Choose this process's device, and how it attends there: never by cuDNN, which torch 2.11 and later take first on
    Hopper. With a mask its gradients have been NaN (pytorch #196678), and each new shape costs a plan of 25 to 35 ms.
    A test marked `gpu` tells when this may go."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    if device == "cuda":
        torch.cuda.set_device(index)


def ranks_of(layout: Layout) -> Tensor:
    """Return the ranks of a layout's shares with rows, by the dimensions `NAMES`."""
    ranks = torch.arange(layout.first, layout.last + 1)
    if layout.order == SHARES_OUTERMOST:
        ranks = ranks.reshape(layout.dp, layout.pp, layout.cp, layout.tp)
    else:
        ranks = ranks.reshape(layout.pp, layout.dp, layout.cp, layout.tp).transpose(0, 1).contiguous()
    return ranks[layout.active_shares]


@functools.lru_cache
def mesh_of(layout: Layout, device: str) -> DeviceMesh | None:
    """Return the mesh of a layout's shares with rows; None on other ranks. Collective over all ranks, which request
    meshes in the same order."""
    ranks = ranks_of(layout)
    groups = [group for axis in range(ranks.ndim) if (group := group_along(ranks, axis)) is not None]
    return DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=NAMES) if dist.get_rank() in ranks else None


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None]] = \
    weakref.WeakKeyDictionary()
"""Groups that were made within a group of all ranks, by the ranks of all that were made together."""


def group_along(ranks: Tensor, *axes: int) -> dist.ProcessGroup | None:
    """Return this rank's group along some axes of a mesh's ranks: the same one for the same ranks, since each has a
    thread that wakes a hundred times a second, and memory of the device. None for a rank that is not in the mesh.
    Collective over all ranks."""
    everyone = default_group()
    size = math.prod(ranks.shape[axis] for axis in axes)
    if size == everyone.size():
        return everyone
    others = [axis for axis in range(ranks.ndim) if axis not in axes]
    lists = sorted(ranks.permute(*others, *axes).reshape(-1, size).sort().values.tolist()) if size > 1 else \
        [[rank] for rank in range(everyone.size())]
    key, known = tuple(map(tuple, lists)), _groups.setdefault(everyone, {})
    if key not in known:
        limit = everyone._get_backend(torch.device("cpu")).options._timeout  # else the default of 30 minutes
        known[key] = cast(dist.ProcessGroup | None, dist.new_subgroups_by_enumeration(lists, timeout=limit)[0])
    return known[key]


@contextlib.contextmanager
def as_world(ranks: Tensor) -> Iterator[None]:
    """Make the group of some ranks, made before, torch's default one, for a library that takes all ranks to itself.
    All ranks call `renumber_groups` afterwards."""
    everyone, own = default_group(), group_along(ranks.flatten(), 0)
    c10d._update_default_pg(own)
    try:
        yield
    finally:
        c10d._update_default_pg(everyone)


def renumber_groups() -> None:
    """Have all ranks give new groups the same names, if some have made groups alone. Collective over all ranks."""
    c10d._world.group_count = max(gather_values(c10d._world.group_count))


def dimension(mesh: DeviceMesh, name: str) -> int:
    return mesh[name].size() if name in (mesh.mesh_dim_names or ()) else 1


def device_of(mesh: DeviceMesh) -> torch.device:
    on_gpu = mesh.device_type == "cuda"
    return torch.device(mesh.device_type, torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on `device`; it does not wait for what the device does, as a copy of pageable memory
    would."""
    pinned = device.type == "cuda" and torch.cuda.is_initialized() and tensor.is_cpu
    return tensor.pin_memory().to(device, non_blocking=True) if pinned else tensor.to(device)


def sharding_mesh(mesh: DeviceMesh, replicas: int = 1) -> DeviceMesh:
    """Return the mesh (replica, shard, tp) of FSDP: it shards parameters over dp and cp, in so many `replicas`. Of each
    group there is one by then (`make_sharding_groups`), or all ranks call this."""
    ranks = _sharding_ranks(mesh.mesh, dimension(mesh, "tp"), replicas)
    groups = [group for axis in range(ranks.ndim) if (group := group_along(ranks, axis)) is not None]
    return DeviceMesh.from_group(groups, mesh.device_type, ranks, mesh_dim_names=("replica", "shard", "tp"))


def make_sharding_groups(layout: Layout, replicas: int) -> None:
    """Make the groups of `sharding_mesh`. Collective over all ranks."""
    ranks = _sharding_ranks(ranks_of(layout), layout.tp, replicas)
    for axis in range(ranks.ndim):
        group_along(ranks, axis)


def _sharding_ranks(ranks: Tensor, tp: int, replicas: int) -> Tensor:
    shards = ranks.numel() // tp
    if shards % replicas:
        raise EngineError(f"replicas: {replicas} does not divide the {shards} ranks (dp × cp) with shards of "
                          f"the model. It may be any divisor, as  replicas: {math.gcd(shards, replicas)}")
    return ranks.reshape(replicas, shards // replicas, tp)


def is_half(settings: RoleRun, device: str) -> bool:
    return settings.dtype == "bfloat16" or (settings.dtype == "auto" and device == "cuda")


def dtype_of(settings: RoleRun, device: str) -> torch.dtype:
    return torch.bfloat16 if is_half(settings, device) else torch.float32


def convert(parameters: Iterable[nn.Parameter], dtype: torch.dtype, device: torch.device | None = None) -> None:
    """Convert parameters in place. Buffers stay float32: rounded rotary frequencies change the model."""
    for parameter in parameters:
        parameter.data = parameter.data.to(device, dtype)


def fuse_norms(model: nn.Module) -> int:
    """Compute root mean square norms of a model by torch's fused kernel, in place of the six of transformers' layers;
    return how many."""
    norms = [module for module in model.modules() if is_rms_norm(type(module))]
    for norm in norms:
        norm.__class__ = _fused(type(norm))
    return len(norms)


@functools.cache
def is_rms_norm(kind: type[nn.Module]) -> bool:
    """Return whether modules of a class normalise by the root mean square and scale by their weight, by trying one."""
    if not kind.__name__.endswith("RMSNorm"):
        return False
    try:
        with torch.device("cpu"):
            norm: Any = kind(8)
            norm.weight.data.copy_(torch.linspace(0.5, 2, 8))
            given = torch.linspace(-1, 3, 32).view(4, 8)
            return torch.allclose(norm(given), rms_norm(given, (8,), norm.weight, norm.variance_epsilon), atol=1e-6)
    except (AttributeError, TypeError, ValueError, RuntimeError):  # made, or scaled, in another way
        return False


@functools.cache
def _fused(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {"forward": _forward})


def _forward(norm: Any, states: Tensor) -> Tensor:
    return rms_norm(states, norm.weight.shape, norm.weight, norm.variance_epsilon)
