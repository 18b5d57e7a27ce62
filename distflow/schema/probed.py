"""From what was measured of devices and links to a cluster description: what `distflow probe` writes.

Devices whose rates all differ by less than `ALIKE` are of one type. Ranks keep their order: machines that are alike are
folded into one `count` only where they follow each other, and a machine with unlike devices is described as several,
linked as its devices are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from distflow.schema.cluster import ZONE

ALIKE = 0.25
_NEAR = 0.5
"""Machines stand in one zone if their link has at least this part of the best one's bandwidth."""
Ends = tuple[int, int]
"""Two ranks, the lower one first."""


@dataclass(frozen=True)
class Probed:
    """A rank's device: the machine that it is in, counted in the order of ranks, and rates in the units of `Device`."""

    machine: int
    name: str
    tflops: dict[str, float]
    memory_gib: float
    memory_gb_s: float
    host_gb_s: float

    def alike(self, other: Probed) -> bool:
        rates = [(self.tflops[dtype], other.tflops[dtype]) for dtype in self.tflops]
        rates += [(getattr(self, key), getattr(other, key)) for key in ("memory_gib", "memory_gb_s", "host_gb_s")]
        return self.name == other.name and all(max(pair) < (1 + ALIKE) * min(pair) for pair in rates)


@dataclass(frozen=True)
class Linked:
    """What was measured between two ranks, while as many others of the same two machines measured too."""

    gb_s: float
    latency_us: float


def described(name: str, devices: Sequence[Probed], links: Mapping[Ends, Linked]) -> dict[str, Any]:
    """A `Cluster`, as a mapping.

    Args:
        devices: by rank.
        links: between neighbours in a machine, and between ranks at the same place of each pair of machines.
    """
    blocks = _blocks(devices)
    types = _types(devices)
    zones = _zones(blocks, devices, links)
    machines: dict[str, Any] = {}
    for same in _runs(blocks, lambda one, other: _foldable(one, other, devices, zones)):
        ranks = [rank for block in same for rank in block]
        inside = [link for ends, link in links.items() if any(set(ends) <= set(block) for block in same)]
        machines[f"machine{len(machines) + 1}"] = {
            "device": _type_of(devices[ranks[0]], types), "devices": len(same[0]), "count": len(same),
            "zone": zones[same[0][0]], "host_gb_s": _number([devices[rank].host_gb_s for rank in ranks]),
            **({"inside": _link(inside)} if len(same[0]) > 1 else {})}
    return {"name": name, "devices": {key: _device(members) for key, members in types.items()}, "machines": machines,
            **_between(blocks, devices, links, zones)}


def _blocks(devices: Sequence[Probed]) -> list[range]:
    """Ranks that follow each other on one machine and have alike devices."""
    def together(one: int, other: int) -> bool:
        return devices[one].machine == devices[other].machine and devices[one].alike(devices[other])

    return [range(same[0], same[-1] + 1) for same in _runs(range(len(devices)), together)]


def _foldable(one: range, other: range, devices: Sequence[Probed], zones: Mapping[int, str]) -> bool:
    return len(one) == len(other) and zones[one[0]] == zones[other[0]] and devices[one[0]].alike(devices[other[0]])


def _runs(items: Sequence[Any], together: Callable[[Any, Any], bool]) -> list[list[Any]]:
    """Items that follow each other and go together with the first of their run."""
    found: list[list[Any]] = []
    for item in items:
        if found and together(found[-1][0], item):
            found[-1].append(item)
        else:
            found.append([item])
    return found


def _types(devices: Sequence[Probed]) -> dict[str, list[Probed]]:
    """The devices of each type, by a name that says what they are."""
    found: dict[str, list[Probed]] = {}
    for device in devices:
        same = next((members for members in found.values() if members[0].alike(device)), None)
        if same is not None:
            same.append(device)
            continue
        plain = re.sub(r"[^a-z0-9]+", "_", device.name.lower()).strip("_")
        names = [plain, *(f"{plain}_{number}" for number in range(2, len(found) + 2))]
        found[next(name for name in names if name not in found)] = [device]
    return found


def _type_of(device: Probed, types: Mapping[str, list[Probed]]) -> str:
    return next(name for name, members in types.items() if members[0].alike(device))


def _device(members: Sequence[Probed]) -> dict[str, Any]:
    return {"tflops": {dtype: _number([member.tflops[dtype] for member in members]) for dtype in members[0].tflops},
            **{key: _number([getattr(member, key) for member in members]) for key in ("memory_gib", "memory_gb_s")}}


def _pairs(blocks: Sequence[range], devices: Sequence[Probed], links: Mapping[Ends, Linked]) -> \
        dict[Ends, list[Linked]]:
    """What was measured between two blocks, which are named by their first ranks: between their machines, or within
    the one that both are parts of."""
    found = {}
    for place, one in enumerate(blocks):
        for other in blocks[place + 1:]:
            machines = {devices[one[0]].machine, devices[other[0]].machine}
            found[one[0], other[0]] = [link for ends, link in links.items()
                                       if {devices[end].machine for end in ends} == machines]
    return found


def _apart(ends: Ends, devices: Sequence[Probed]) -> bool:
    return devices[ends[0]].machine != devices[ends[1]].machine


def _zones(blocks: Sequence[range], devices: Sequence[Probed], links: Mapping[Ends, Linked]) -> dict[int, str]:
    """Of each block, by its first rank: those that good links join are in one zone. A link is good if all devices
    together get much through it, or if each of them does, however few they are."""
    pairs = _pairs(blocks, devices, links)
    speeds = {ends: (sum(link.gb_s for link in measured), median(link.gb_s for link in measured))
              for ends, measured in pairs.items() if _apart(ends, devices)}
    best = [max(each) for each in zip(*speeds.values())]
    zone = {block[0]: number for number, block in enumerate(blocks)}
    for ends in pairs:
        if ends not in speeds or any(speed >= _NEAR * most for speed, most in zip(speeds[ends], best)):
            one, other = (zone[end] for end in ends)
            zone = {block: min(one, other) if at in (one, other) else at for block, at in zone.items()}
    numbers = sorted(set(zone.values()))
    return {block: ZONE if len(numbers) == 1 else f"{ZONE}{numbers.index(at) + 1}" for block, at in zone.items()}


def _between(blocks: Sequence[range], devices: Sequence[Probed], links: Mapping[Ends, Linked],
             zones: Mapping[int, str]) -> dict[str, Any]:
    """`links` of a zone and `paths` between zones: medians over their pairs of machines."""
    found: dict[tuple[str, ...], list[dict[str, float]]] = {}
    for ends, measured in _pairs(blocks, devices, links).items():
        places = tuple(sorted({zones[end] for end in ends}))
        found.setdefault(places if len(places) > 1 else (), []).append(_link(measured, _apart(ends, devices)))
    joined = {places: {key: _number([one[key] for one in each]) for key in ("gb_s", "latency_us")}
              for places, each in found.items()}
    paths = [{"between": list(places), **link} for places, link in joined.items() if places]
    return {**({"links": {"zone": joined[()]}} if () in joined else {}), **({"paths": paths} if paths else {})}


def _link(measured: Sequence[Linked], together: bool = False) -> dict[str, float]:
    """The usual one, or (`together`) what those that were measured at the same time have in all."""
    speeds = [link.gb_s for link in measured]
    return {"gb_s": _number([sum(speeds)] if together else speeds),
            "latency_us": _number([link.latency_us for link in measured])}


def _number(values: Sequence[float]) -> float:
    """The median, to three digits."""
    return float(f"{median(values):.3g}")
