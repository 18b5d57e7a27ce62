"""Cluster files: device types, machines, zones, regions, and the links between them, checked for consistency.

Bandwidths are in GB/s (10⁹ bytes a second), latencies in microseconds, peak rates in TFLOP/s, memory in GiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement, permutations
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from distflow.config.yaml_source import Document, YamlSource
from distflow.errors import Diagnostic, did_you_mean

ZONE, REGION = "zone", "region"  # zone and region of machines whose file names none
DISTANCES = (ZONE, REGION, "world")  # names of links by distance
_MOST_GIB = 4096  # no device has more memory; who writes more has probably counted MiB


class Link(Document):
    """Link between two devices, machines or zones; `gb_s` in each direction."""

    gb_s: PositiveFloat
    latency_us: NonNegativeFloat = 0.0


class Device(Document):
    """Type of accelerator: peak rates by dtype without sparsity, memory and its bandwidth."""

    tflops: dict[Literal["bfloat16", "float32"], PositiveFloat] = Field(min_length=1)
    memory_gib: PositiveFloat
    memory_gb_s: PositiveFloat


class MachineGroup(Document):
    """`count` machines that are alike, each with `devices` of one type, in one zone."""

    device: str
    devices: PositiveInt = 8
    count: PositiveInt = 1
    zone: str = ZONE
    inside: Link | None = None  # between two devices of a machine
    network_gb_s: PositiveFloat | None = None
    """Limit of a machine's traffic over all its devices; default: the link's."""


class Cluster(Document):
    """Machines that a run is planned for.

    Alike ranks need nothing but `memory_gib`, that of each; without it a plan estimates memory but refuses nothing.
    Mixed hardware is described by `devices`, `machines` and their `links`.
    """

    memory_gib: PositiveFloat | None = None
    devices: dict[str, Device] = {}
    machines: dict[str, MachineGroup] = {}
    zones: dict[str, str] = {}  # region of each zone; zones that are not named here share one region
    links: dict[str, Link] = {}
    """Links between machines: of a pair, over all their devices. By distance (`zone`, `region`, `world`), or between
    two zones or regions, such as `east-west`, in its place; zones take precedence."""
    measured: bool = False
    """Whether the rates are measured, as `distflow probe` writes them, and not those of data sheets, of which large
    tasks reach a part."""

    @property
    def size(self) -> int | None:
        return sum(kind.count * kind.devices for kind in self.machines.values()) or None

    def region(self, zone: str) -> str:
        return self.zones.get(zone, REGION)

    def between(self, one: str, other: str) -> Link | None:
        """Return the link between two machines of these groups; None if the file has none."""
        zones = {self.machines[one].zone, self.machines[other].zone}
        if len(zones) == 1:
            return self.links.get(ZONE)
        regions = {self.region(zone) for zone in zones}
        names = [f"{one}-{other}" for ends in (zones, regions) for one, other in permutations(sorted(ends), 2)]
        return next((self.links[name] for name in [*names, DISTANCES[len(regions)]] if name in self.links), None)


def check_cluster(cluster: Cluster, source: YamlSource) -> list[Diagnostic]:
    """Return the mistakes beyond the form of keys: unknown names, contradictions and missing links."""
    mistakes = [*_names(cluster, source), *_memory(cluster, source), *_places(cluster, source)]
    return mistakes or [*_exclusive(cluster, source), *_links(cluster, source)]


def _names(cluster: Cluster, source: YamlSource) -> Iterator[Diagnostic]:
    zones = {kind.zone for kind in cluster.machines.values()}
    for name, kind in cluster.machines.items():
        if kind.device not in cluster.devices:
            yield Diagnostic(f"machines `{name}`: there is no device `{kind.device}`",
                             source.location(("machines", name, "device")),
                             did_you_mean(kind.device, cluster.devices, "Devices") or "Describe it:  devices: {…}")
    for zone in cluster.zones:
        if zone not in zones:
            yield Diagnostic(f"no machine stands in zone `{zone}`", source.location(("zones", zone), key=True),
                             did_you_mean(zone, sorted(zones), "Zones of machines"))
        if any(zone == region for region in cluster.zones.values()):
            yield Diagnostic(f"zone `{zone}` is named like a region, and a path between `{zone}` and another could be "
                             "of either", source.location(("zones", zone), key=True),
                             "Name it otherwise, here and at its machines:  "
                             f"zones: {{{zone}-1: {cluster.zones[zone]}}}")
    used = {kind.device for kind in cluster.machines.values()}
    for name in cluster.devices if used and used <= set(cluster.devices) else ():
        if name not in used:
            yield Diagnostic(f"no machine has a device `{name}`", source.location(("devices", name), key=True),
                             f"Take `{name}` out, or add  machines: {{NAME: {{device: {name}}}}}")


def _memory(cluster: Cluster, source: YamlSource) -> Iterator[Diagnostic]:
    limits = {("memory_gib",): cluster.memory_gib,
              **{("devices", name, "memory_gib"): device.memory_gib for name, device in cluster.devices.items()}}
    for path, limit in limits.items():
        if limit is not None and limit > _MOST_GIB:
            yield Diagnostic(f"`memory_gib: {limit:g}` is {limit / 1024:,.0f} TiB for one device; it was probably "
                             "counted in MiB", source.location(path), f"Write  memory_gib: {limit / 1024:g}")


def _places(cluster: Cluster, source: YamlSource) -> Iterator[Diagnostic]:
    """Yield a mistake for each link that is of no distance, and not between two places, or between several pairs."""
    zones = {kind.zone for kind in cluster.machines.values()}
    known = sorted(zones | {cluster.region(zone) for zone in zones})
    pairs = [(one, other) for one in known for other in known]
    ends = {f"{one}-{other}": frozenset((one, other)) for one, other in pairs}
    first: dict[frozenset[str], str] = {}
    for name in (name for name in cluster.links if name not in DISTANCES):
        where = source.location(("links", name), key=True)
        before = first.setdefault(ends.get(name, frozenset((name,))), name)
        named = [pair for pair in pairs if "-".join(pair) == name]
        if len(named) > 1:
            meant = " or ".join(f"`{one}` and `{other}`" for one, other in named)
            yield Diagnostic(f"link `{name}` may be between {meant}", where,
                             "Name these places otherwise, without `-`, here and at their machines.")
        elif name not in ends:
            right = [*DISTANCES, *(each for each, pair in ends.items() if len(pair) > 1)]
            yield Diagnostic(f"link `{name}` is of no distance, and not between two zones or regions", where,
                             did_you_mean(name, right))
        elif len(ends[name]) == 1:
            yield Diagnostic(f"link `{name}` leads from a place to itself", where,
                             "Links inside a zone:  links: {zone: {gb_s: …}}")
        elif before != name:
            yield Diagnostic(f"links `{before}` and `{name}` are between the same places", where,
                             f"Keep one:  {name}: {{gb_s: {cluster.links[name].gb_s:g}}}  or  {before}: "
                             f"{{gb_s: {cluster.links[before].gb_s:g}}}")


def _exclusive(cluster: Cluster, source: YamlSource) -> Iterator[Diagnostic]:
    if cluster.machines and cluster.memory_gib:
        yield Diagnostic("`memory_gib` is for alike ranks, and `devices` say it too",
                         source.location(("memory_gib",), key=True), "Take `memory_gib` out.")
    if cluster.devices and not cluster.machines:
        yield Diagnostic("devices are described, but no machine has them", source.location(("devices",), key=True),
                         "Add  machines: {NAME: {device: …, devices: 8, count: 1}}")


def _links(cluster: Cluster, source: YamlSource) -> Iterator[Diagnostic]:
    """Yield a mistake for each kind of link that a pair of machines needs and the file lacks."""
    for name, kind in cluster.machines.items():
        if kind.devices > 1 and kind.inside is None:
            yield Diagnostic(f"the devices of a machine `{name}` are not linked",
                             source.location(("machines", name), key=True),
                             f"Add  machines: {{{name}: {{…, inside: {{gb_s: …, latency_us: …}}}}}}")
    for one, other in combinations_with_replacement(cluster.machines, 2):
        if (one == other and cluster.machines[one].count == 1) or cluster.between(one, other) is not None:
            continue
        zones = [cluster.machines[name].zone for name in (one, other)]
        key = "zone" if zones[0] == zones[1] else "region" if len(set(map(cluster.region, zones))) == 1 else "world"
        missing = (f"machines `{one}` are not linked with each other" if one == other
               else f"machines `{one}` and `{other}` are not linked")
        path = f"  , or  links: {{{zones[0]}-{zones[1]}: {{gb_s: …}}}}" if zones[0] != zones[1] else "."
        yield Diagnostic(missing, source.location(("machines", other), key=True),
                         f"Add  links: {{{key}: {{gb_s: …}}}}{path}")
