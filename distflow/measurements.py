"""Measured devices, links and nodes: what `distflow probe` describes, and what calibrates the cost model.

    DeviceProbe, LinkProbe → cluster_of_probes    measurements of ranks, to a description of types, machines and links
    NodeTiming                                    what a node took on one rank, from which the cost model is calibrated

Devices whose rates all differ by less than `ALIKE` are of one type. Ranks keep their order: machines that are alike are
folded into one `count` only where they follow each other, and a machine with unlike devices is described as several.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from distflow.config.cluster import ZONE


@dataclass
class NodeTiming:
    """Wall-clock seconds and tokens of a node on one rank in one step; `read` counts a prompt that rows share once."""

    seconds: float = 0.0
    rows: int = 0
    prompt: int = 0
    read: int = 0
    response: int = 0
    longest: int = 0

    def add(self, other: NodeTiming) -> None:
        self.seconds += other.seconds
        self.rows += other.rows
        self.prompt += other.prompt
        self.read += other.read
        self.response += other.response
        self.longest = max(self.longest, other.longest)


ALIKE = 0.25
CPU = "cpu"
"""Name of a device that is a core."""
_NEAR = 0.5  # machines are in one zone if their link has at least this part of the best one's bandwidth
Ends = tuple[int, int]  # two ranks, the lower one first


@dataclass(frozen=True)
class DeviceProbe:
    """Measured device of a rank: its machine, counted in the order of ranks, and rates in the units of `Device`."""

    machine: int
    name: str
    tflops: dict[str, float]
    memory_gib: float
    memory_gb_s: float

    def alike(self, other: DeviceProbe) -> bool:
        if self.name == other.name == CPU and self.machine == other.machine:
            return True  # cores of one machine: what they differ by is what else the machine did
        rates = [(self.tflops[dtype], other.tflops[dtype]) for dtype in self.tflops]
        rates += [(getattr(self, key), getattr(other, key)) for key in ("memory_gib", "memory_gb_s")]
        return self.name == other.name and all(max(pair) < (1 + ALIKE) * min(pair) for pair in rates)


@dataclass(frozen=True)
class LinkProbe:
    """Measured link between two ranks, while the other ranks of the same two machines measured theirs."""

    gb_s: float
    latency_us: float


def cluster_of_probes(devices: Sequence[DeviceProbe], links: Mapping[Ends, LinkProbe]) -> dict[str, Any]:
    """Return a `Cluster` as a mapping. `devices` are by rank; `links` between neighbours in a machine, and between
    ranks of the same index in each pair of machines."""
    blocks = _blocks(devices)
    types = _types(devices)
    zones = _zones(blocks, devices, links)
    machines: dict[str, Any] = {}
    for same in _runs(blocks, lambda one, other: _foldable(one, other, devices, zones)):
        ranks = [rank for block in same for rank in block]
        inside = [link for ends, link in links.items() if any(set(ends) <= set(block) for block in same)]
        machines[f"machine{len(machines) + 1}"] = {
            "device": _type_of(devices[ranks[0]], types), "devices": len(same[0]), "count": len(same),
            "zone": zones[same[0][0]], **({"inside": _link(inside)} if len(same[0]) > 1 else {})}
    return {"measured": True, "machines": machines,
            "devices": {key: _device(members) for key, members in types.items()},
            **_between(blocks, devices, links, zones)}


def _blocks(devices: Sequence[DeviceProbe]) -> list[range]:
    """Return the runs of ranks that follow each other on one machine and have alike devices."""
    def same_block(one: int, other: int) -> bool:
        return devices[one].machine == devices[other].machine and devices[one].alike(devices[other])

    return [range(same[0], same[-1] + 1) for same in _runs(range(len(devices)), same_block)]


def _foldable(one: range, other: range, devices: Sequence[DeviceProbe], zones: Mapping[int, str]) -> bool:
    return len(one) == len(other) and zones[one[0]] == zones[other[0]] and devices[one[0]].alike(devices[other[0]])


def _runs(items: Sequence[Any], belongs: Callable[[Any, Any], bool]) -> list[list[Any]]:
    runs: list[list[Any]] = []
    for item in items:
        if runs and belongs(runs[-1][0], item):
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs


def _types(devices: Sequence[DeviceProbe]) -> dict[str, list[DeviceProbe]]:
    types: dict[str, list[DeviceProbe]] = {}
    for device in devices:
        same = next((members for members in types.values() if members[0].alike(device)), None)
        if same is not None:
            same.append(device)
            continue
        plain = re.sub(r"[^a-z0-9]+", "_", device.name.lower()).strip("_")
        names = [plain, *(f"{plain}_{number}" for number in range(2, len(types) + 2))]
        types[next(name for name in names if name not in types)] = [device]
    return types


def _type_of(device: DeviceProbe, types: Mapping[str, list[DeviceProbe]]) -> str:
    return next(name for name, members in types.items() if members[0].alike(device))


def _device(members: Sequence[DeviceProbe]) -> dict[str, Any]:
    return {"tflops": {dtype: _number([member.tflops[dtype] for member in members]) for dtype in members[0].tflops},
            **{key: _number([getattr(member, key) for member in members]) for key in ("memory_gib", "memory_gb_s")}}


def _pairs(blocks: Sequence[range], devices: Sequence[DeviceProbe], links: Mapping[Ends, LinkProbe]) -> \
        dict[Ends, list[LinkProbe]]:
    pairs = {}
    for index, one in enumerate(blocks):
        for other in blocks[index + 1:]:
            machines = {devices[one[0]].machine, devices[other[0]].machine}
            pairs[one[0], other[0]] = [link for ends, link in links.items()
                                       if {devices[end].machine for end in ends} == machines]
    return pairs


def _between_machines(ends: Ends, devices: Sequence[DeviceProbe]) -> bool:
    return devices[ends[0]].machine != devices[ends[1]].machine


def _zones(blocks: Sequence[range], devices: Sequence[DeviceProbe], links: Mapping[Ends, LinkProbe]) -> dict[int, str]:
    """Return the zone of each block, by its first rank: blocks are in one that links near to the best one join."""
    pairs = _pairs(blocks, devices, links)
    speeds = {ends: (sum(link.gb_s for link in measured), median(link.gb_s for link in measured))
              for ends, measured in pairs.items() if _between_machines(ends, devices)}
    best = [max(each) for each in zip(*speeds.values())]
    zone = {block[0]: number for number, block in enumerate(blocks)}
    for ends in pairs:
        if ends not in speeds or any(speed >= _NEAR * most for speed, most in zip(speeds[ends], best)):
            one, other = (zone[end] for end in ends)
            zone = {block: min(one, other) if number in (one, other) else number for block, number in zone.items()}
    numbers = sorted(set(zone.values()))
    return {block: ZONE if len(numbers) == 1 else f"{ZONE}{numbers.index(number) + 1}"
            for block, number in zone.items()}


def _between(blocks: Sequence[range], devices: Sequence[DeviceProbe], links: Mapping[Ends, LinkProbe],
             zones: Mapping[int, str]) -> dict[str, Any]:
    joined: dict[tuple[str, ...], list[dict[str, float]]] = {}
    for ends, measured in _pairs(blocks, devices, links).items():
        names = tuple(sorted({zones[end] for end in ends}))
        joined.setdefault(names if len(names) > 1 else (), []).append(_link(measured, _between_machines(ends, devices)))
    medians = {names: {key: _number([one[key] for one in each]) for key in ("gb_s", "latency_us")}
               for names, each in joined.items()}
    return {"links": {"-".join(names) or ZONE: link for names, link in medians.items()}} if medians else {}


def _link(measured: Sequence[LinkProbe], parallel: bool = False) -> dict[str, float]:
    speeds = [link.gb_s for link in measured]
    return {"gb_s": _number([sum(speeds)] if parallel else speeds),
            "latency_us": _number([link.latency_us for link in measured])}


def _number(values: Sequence[float]) -> float:
    return float(f"{median(values):.3g}")
