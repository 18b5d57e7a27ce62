"""From a cluster file to sites and ways."""

from __future__ import annotations

import math

from distflow.schema.cluster import Cluster, Link
from planners.heterogeneous.problem import Hardware, Site, Way

_GIB, _GB, _TERA, _MICRO = 2**30, 1e9, 1e12, 1e-6
_POOLS = 4096
"""Up to so many pools each machine is a site of its own; beyond, alike machines are folded into one."""


def hardware_of(cluster: Cluster, dtype: str = "bfloat16", fold: bool | None = None) -> Hardware:
    """The sites of a cluster that passed `check_cluster`.

    Args:
        dtype: whose peak rate counts; where a device does not say it, the one that it says.
        fold: whether machines that are alike are one site; default: if there are many.
    """
    if fold is None:
        fold = math.prod((kind.devices + 1) ** kind.count for kind in cluster.machines.values()) > _POOLS
    kinds = [(kind, number) for kind, said in cluster.machines.items() for number in range(1 if fold else said.count)]
    sites = tuple(_site(cluster, kind, number, fold, dtype) for kind, number in kinds)
    between = tuple(tuple(_between(cluster, one, other) for other, _ in kinds) for one, _ in kinds)
    return Hardware(sites, between)


def _site(cluster: Cluster, name: str, number: int, fold: bool, dtype: str) -> Site:
    kind = cluster.machines[name]
    machines = kind.count if fold else 1
    device = cluster.devices[kind.device]
    inside = cluster.inside(name) or Link(gb_s=device.memory_gb_s)
    peak = device.tflops.get(dtype) or next(iter(device.tflops.values()))
    name = name if fold or kind.count == 1 else f"{name}.{number + 1}"
    return Site(name, kind.device, kind.zone, machines, kind.devices, peak * _TERA, device.memory_gib * _GIB,
                device.memory_gb_s * _GB, kind.host_gb_s * _GB, _way(inside))


def _between(cluster: Cluster, one: str, other: str) -> Way:
    """The way between machines of two kinds, or of one that has several, at what both can send."""
    link = cluster.between(one, other) or Link(gb_s=1.0)
    limits = [cluster.machines[name].network_gb_s or math.inf for name in (one, other)]
    return Way(link.latency_us * _MICRO, min(link.gb_s, *limits) * _GB)


def _way(link: Link) -> Way:
    return Way(link.latency_us * _MICRO, link.gb_s * _GB)
