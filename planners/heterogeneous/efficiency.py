"""Shares of their data sheets' rates that kinds of devices reach, fitted to public measurements.

They are fitted to 41 public figures: MPT-7B trained (LLM Foundry), LLaMA-7B sampled (NVIDIA's TensorRT-LLM 0.8)
and all-reduces over NVLink and between machines; `docs/mixed_hardware.md` says how well 231 others are predicted. Of
a cluster file with `measured: true`, as `probe` writes it, devices and links reach what was measured; `--from` fits to
runs what is left.
"""

from __future__ import annotations

from typing import NamedTuple

from distflow.config.cluster import Cluster


class Efficiency(NamedTuple):
    """Shares of peak arithmetic, of memory bandwidth, and of the bandwidth of links inside a machine; the rest is of a
    `DeviceGroup`. The defaults are of unknown devices; large training runs reach 0.44 to 0.52 of the peak end to end
    (Narayanan et al. 2021, table 1)."""

    compute: float = 0.5
    memory: float = 0.7
    links: float = 0.8
    launch: float = 0.0
    overhead: float = 0.0
    overlaps: bool = False
    attention: float = 1.0


def _gpu(compute: float, memory: float, links: float, attention: float) -> Efficiency:
    return Efficiency(compute, memory, links, launch=0.11e-3, overhead=105, overlaps=True, attention=attention)


OF_KINDS = {"h200": _gpu(0.59, 0.89, 1.0, 0.28), "h100": _gpu(0.61, 0.96, 1.0, 0.28),
            "a100": _gpu(0.82, 0.92, 0.78, 0.36), "l40s": _gpu(0.68, 0.83, 0.6, 0.36),
            "l4": _gpu(0.68, 0.83, 0.6, 0.36)}
"""By a part of a device's name. Of L4 no figure was found: it is taken to be like L40S, of its architecture; attention
of H200 to be like that of H100, and of L40S like that of A100."""
BETWEEN = 0.9
"""Share of the bandwidth between machines that collectives reach: of two public figures, which lie on either side."""


_MEASURED = {"compute": 0.84, "memory": 1.0, "links": 1.0}
"""Shares of measured rates that large tasks reach. Of the products of square matrices: A100 and H100 train at 0.80 and
0.61 of the peak (LLM Foundry's tables), and their products reach 0.87 and 0.80 of it (Bekman, Machine Learning
Engineering, compute/accelerator, maximum achievable matmul)."""


def efficiency_of(cluster: Cluster, name: str) -> Efficiency:
    """Return what a device reaches; `name` is that of its type."""
    known = next((found for kind, found in OF_KINDS.items() if kind in name.lower()), Efficiency())
    return known._replace(**_MEASURED) if cluster.measured else known
