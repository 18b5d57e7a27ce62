"""Which ranks talk to which: the process groups of a layout, made once for all roles that have it."""

from __future__ import annotations

import functools
import math

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distflow.errors import EngineError
from distflow.plan import Layout

NAMES = ("dp", "pp", "cp", "tp")
"""The dimensions of a layout's mesh: neighbours split a layer's matrices, the furthest apart are other shares."""


@functools.lru_cache
def mesh_of(layout: Layout, device: str) -> DeviceMesh:
    """Collective: every rank asks for the meshes in the same order."""
    return init_device_mesh(device, (layout.dp, layout.pp, layout.cp, layout.tp), mesh_dim_names=NAMES)


def dimension(mesh: DeviceMesh, name: str) -> int:
    """How many ranks the mesh has along a dimension; 1 if it has none of that name."""
    return mesh[name].size() if name in (mesh.mesh_dim_names or ()) else 1


def shard_mesh(mesh: DeviceMesh, replicas: int = 1) -> DeviceMesh:
    """The ranks between which FSDP divides each parameter: those of dp, and of cp too, which need the same ones.

    With `replicas` it has two dimensions: so many times, and over how many ranks. Collective.

    Raises:
        EngineError: the ranks cannot be divided so.
    """
    ranks = mesh["dp"] if mesh.mesh_dim_names else mesh
    if dimension(mesh, "cp") > 1:
        ranks = mesh["dp", "cp"]._flatten("dp_cp")
    if ranks.size() % replicas:
        raise EngineError(f"replicas: {replicas} does not divide the {ranks.size()} ranks (dp × cp) with shards of "
                          f"the model. It may be any divisor, as  replicas: {math.gcd(ranks.size(), replicas)}")
    return ranks if replicas == 1 else ranks._unflatten(0, (replicas, ranks.size() // replicas), ("replica", "shard"))
