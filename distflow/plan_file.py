"""From what was measured of devices and links to a cluster description: what `distflow probe` writes.

Devices whose rates all differ by less than `ALIKE` are of one type. Ranks keep their order: machines that are alike are
folded into one `count` only where they follow each other, and a machine with unlike devices is described as several,
linked as its devices are.

A plan for mixed hardware as a file: what `distflow plan --out` writes and reads again.

It belongs to one DAG, one cluster and one amount of work, and says their digests; for another it is refused.

What a run shows of its nodes: on which rank they took how long, and for how much.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from distflow.config.cluster import ZONE
from distflow.config.yaml_source import Document, YamlSource, check
from distflow.errors import Diagnostic, InvalidInput


class Digests(Document):
    """Of what a plan was made for."""

    dag: str
    cluster: str
    work: str
    """Models, rows, lengths and mode."""


class PlacedGroup(Document):
    """Works that take turns on the same devices: how many of each kind of machine, and their ranks, which count through
    the machines in the order of the cluster file."""

    tasks: list[str] = Field(min_length=1)
    devices: dict[str, PositiveInt]
    ranks: list[NonNegativeInt] = Field(min_length=1)


class PlacedShares(Document):
    """`count` data-parallel shares of `rows` rows each, and the machines of their stages."""

    count: PositiveInt
    rows: NonNegativeInt
    stages: list[str] = Field(min_length=1)


class PlacedTask(Document):
    """How a work is split, the seconds that the cost model says it takes, and those to bring its state from host memory
    and back where it takes turns."""

    dp: PositiveInt
    tp: PositiveInt = 1
    pp: PositiveInt = 1
    ep: PositiveInt = 1
    micro_rows: PositiveInt = 1
    layers: list[PositiveInt] = Field(min_length=1)
    shares: list[PlacedShares] = Field(min_length=1)
    seconds: NonNegativeFloat
    swap_seconds: NonNegativeFloat = 0.0


class PlacedPlan(Document):
    """`seconds` of an iteration and the `bound` below which no plan can come, both by the cost model; `rest_seconds`
    come to them that no task takes, as runs have shown."""

    made_for: Digests
    solver: str
    seconds: PositiveFloat
    bound: NonNegativeFloat
    rest_seconds: NonNegativeFloat = 0.0
    groups: list[PlacedGroup] = Field(min_length=1)
    tasks: dict[str, PlacedTask] = Field(min_length=1)


def digest(said: Any) -> str:
    """16 hexadecimal digits of what can be written as JSON."""
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def placed_plan(source: YamlSource, expected: Digests) -> PlacedPlan:
    """The plan of a file.

    Raises:
        InvalidInput: it is no plan, or one for another DAG, cluster or amount of work.
    """
    found, mistakes = check(PlacedPlan, source)
    if mistakes or found is None:
        raise InvalidInput(mistakes)
    names = {"dag": "DAG", "cluster": "cluster", "work": "amount of work (models, rows, lengths or mode)"}
    others = [Diagnostic(f"this plan is for another {name}: its digest is {getattr(found.made_for, key)}, and here "
                         f"{getattr(expected, key)}", source.spot(("made_for", key)),
                         "Plan again:  distflow plan DAG --cluster FILE --solver hybrid --out FILE")
              for key, name in names.items() if getattr(found.made_for, key) != getattr(expected, key)]
    if others:
        raise InvalidInput(others)
    return found


@dataclass
class NodeTiming:
    """What a node took on one rank in one step: seconds on the clock; its rows, the tokens of their prompts, and of
    those where a prompt that rows share counts once; the tokens of their responses, and of the longest one."""

    seconds: float = 0.0
    rows: int = 0
    prompt: int = 0
    read: int = 0
    response: int = 0
    longest: int = 0

    def add(self, other: NodeTiming) -> None:
        """A further draw of the same step."""
        self.seconds += other.seconds
        self.rows += other.rows
        self.prompt += other.prompt
        self.read += other.read
        self.response += other.response
        self.longest = max(self.longest, other.longest)


ALIKE = 0.25
_NEAR = 0.5
"""Machines stand in one zone if their link has at least this part of the best one's bandwidth."""
Ends = tuple[int, int]
"""Two ranks, the lower one first."""


@dataclass(frozen=True)
class DeviceProbe:
    """A rank's device: the machine that it is in, counted in the order of ranks, and rates in the units of `Device`."""

    machine: int
    name: str
    tflops: dict[str, float]
    memory_gib: float
    memory_gb_s: float
    host_gb_s: float

    def alike(self, other: DeviceProbe) -> bool:
        rates = [(self.tflops[dtype], other.tflops[dtype]) for dtype in self.tflops]
        rates += [(getattr(self, key), getattr(other, key)) for key in ("memory_gib", "memory_gb_s", "host_gb_s")]
        return self.name == other.name and all(max(pair) < (1 + ALIKE) * min(pair) for pair in rates)


@dataclass(frozen=True)
class LinkProbe:
    """What was measured between two ranks, while as many others of the same two machines measured too."""

    gb_s: float
    latency_us: float


def described(name: str, devices: Sequence[DeviceProbe], links: Mapping[Ends, LinkProbe]) -> dict[str, Any]:
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


def _blocks(devices: Sequence[DeviceProbe]) -> list[range]:
    """Ranks that follow each other on one machine and have alike devices."""
    def together(one: int, other: int) -> bool:
        return devices[one].machine == devices[other].machine and devices[one].alike(devices[other])

    return [range(same[0], same[-1] + 1) for same in _runs(range(len(devices)), together)]


def _foldable(one: range, other: range, devices: Sequence[DeviceProbe], zones: Mapping[int, str]) -> bool:
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


def _types(devices: Sequence[DeviceProbe]) -> dict[str, list[DeviceProbe]]:
    """The devices of each type, by a name that says what they are."""
    found: dict[str, list[DeviceProbe]] = {}
    for device in devices:
        same = next((members for members in found.values() if members[0].alike(device)), None)
        if same is not None:
            same.append(device)
            continue
        plain = re.sub(r"[^a-z0-9]+", "_", device.name.lower()).strip("_")
        names = [plain, *(f"{plain}_{number}" for number in range(2, len(found) + 2))]
        found[next(name for name in names if name not in found)] = [device]
    return found


def _type_of(device: DeviceProbe, types: Mapping[str, list[DeviceProbe]]) -> str:
    return next(name for name, members in types.items() if members[0].alike(device))


def _device(members: Sequence[DeviceProbe]) -> dict[str, Any]:
    return {"tflops": {dtype: _number([member.tflops[dtype] for member in members]) for dtype in members[0].tflops},
            **{key: _number([getattr(member, key) for member in members]) for key in ("memory_gib", "memory_gb_s")}}


def _pairs(blocks: Sequence[range], devices: Sequence[DeviceProbe], links: Mapping[Ends, LinkProbe]) -> \
        dict[Ends, list[LinkProbe]]:
    """What was measured between two blocks, which are named by their first ranks: between their machines, or within
    the one that both are parts of."""
    found = {}
    for place, one in enumerate(blocks):
        for other in blocks[place + 1:]:
            machines = {devices[one[0]].machine, devices[other[0]].machine}
            found[one[0], other[0]] = [link for ends, link in links.items()
                                       if {devices[end].machine for end in ends} == machines]
    return found


def _apart(ends: Ends, devices: Sequence[DeviceProbe]) -> bool:
    return devices[ends[0]].machine != devices[ends[1]].machine


def _zones(blocks: Sequence[range], devices: Sequence[DeviceProbe], links: Mapping[Ends, LinkProbe]) -> dict[int, str]:
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


def _between(blocks: Sequence[range], devices: Sequence[DeviceProbe], links: Mapping[Ends, LinkProbe],
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


def _link(measured: Sequence[LinkProbe], together: bool = False) -> dict[str, float]:
    """The usual one, or (`together`) what those that were measured at the same time have in all."""
    speeds = [link.gb_s for link in measured]
    return {"gb_s": _number([sum(speeds)] if together else speeds),
            "latency_us": _number([link.latency_us for link in measured])}


def _number(values: Sequence[float]) -> float:
    """The median, to three digits."""
    return float(f"{median(values):.3g}")
