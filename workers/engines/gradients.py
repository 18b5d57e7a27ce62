"""The norm of gradients that lie on several meshes, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip(parameters: Iterable[Tensor], mesh: DeviceMesh, most: float, device: torch.device) -> float:
    """Scale the gradients so that their norm is at most `most`; returns the norm before. Collective over `mesh`.

    torch's own function refuses parameters of different meshes, as FSDP makes them beside tensor parallelism. Here each
    rank adds up the squares of its parts, those that several ranks have by their share, and one number is reduced.
    """
    parts: dict[int, list[Tensor]] = {}
    for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
        parts.setdefault(mesh.size() // _pieces(gradient), []).append(
            gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    squares = [torch.stack(torch._foreach_norm(locals_)).float().square().sum() / copies
               for copies, locals_ in parts.items()]
    total = torch.stack(squares).sum().to(device) if squares else torch.zeros((), device=device)
    for dimension in range(mesh.ndim):
        if mesh.size(dimension) > 1:
            dist.all_reduce(total, group=mesh.get_group(dimension))
    norm = float(total.sqrt())
    if norm > most:
        for locals_ in parts.values():
            torch._foreach_mul_(locals_, most / (norm + 1e-6))
    return norm


def _pieces(gradient: Tensor) -> int:
    """Into how many different parts it is cut."""
    if not isinstance(gradient, DTensor):
        return 1
    return math.prod(gradient.device_mesh.size(dimension) for dimension, placement in enumerate(gradient.placements)
                     if not placement.is_replicate())
