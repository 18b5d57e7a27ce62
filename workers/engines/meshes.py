"""Which ranks talk to which: the process groups of a layout, made once for all roles that have it."""

from __future__ import annotations

import functools

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distflow.schema.plan import Layout

NAMES = ("dp", "pp", "cp", "tp")
"""The dimensions of a layout's mesh: neighbours split a layer's matrices, the furthest apart are other shares."""


@functools.lru_cache
def mesh_of(layout: Layout, device: str) -> DeviceMesh:
    """Collective: every rank asks for the meshes in the same order."""
    return init_device_mesh(device, (layout.dp, layout.pp, layout.cp, layout.tp), mesh_dim_names=NAMES)
