"""Shares of their data sheets' rates that kinds of devices reach, fitted to public measurements.

They are fitted to 41 public figures: MPT-7B trained (LLM Foundry), LLaMA-7B sampled (NVIDIA's TensorRT-LLM 0.8)
and all-reduces over NVLink and between machines; `docs/mixed_hardware.md` says how well 231 others are predicted. A
cluster file's own `efficiency` of a device or a link comes first, which `probe` writes since its rates are measured,
and `--from` fits to runs what is left.
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


def efficiency_of(cluster: Cluster, name: str) -> Efficiency:
    given = cluster.devices[name].efficiency
    known = next((found for kind, found in OF_KINDS.items() if kind in name.lower()), Efficiency())
    return known._replace(**given.model_dump(exclude_none=True)) if given else known
