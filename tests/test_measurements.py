"""From measurements to a cluster description that can be planned for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from distflow.config.cluster import Cluster, check_cluster
from distflow.config.yaml_source import check, parse
from distflow.measurements import DeviceProbe, LinkProbe, cluster_of_probes
from planners.heterogeneous.hardware import hardware_of

BIG = DeviceProbe(0, "NVIDIA H200", {"bfloat16": 700.0, "float32": 50.0}, 139.0, 4000.0)
SMALL = replace(BIG, name="NVIDIA L4", tflops={"bfloat16": 90.0, "float32": 25.0}, memory_gib=22.0)
NVLINK, FAST, FAR = LinkProbe(400.0, 5.0), LinkProbe(20.0, 20.0), LinkProbe(1.0, 900.0)


def cluster(said: dict) -> Cluster:
    """As the file that is written is read."""
    source = parse(yaml.safe_dump(said, sort_keys=False), "probed")
    found, mistakes = check(Cluster, source)
    assert not mistakes + check_cluster(found, source)
    return found


def on(device: DeviceProbe, *machines: int) -> list[DeviceProbe]:
    return [replace(device, machine=machine) for machine in machines]


def test_alike_devices_have_one_type_with_their_medians():
    devices = [replace(BIG, memory_gb_s=4000.0 + 100 * rank) for rank in range(3)]
    found = cluster(cluster_of_probes(devices, {(0, 1): NVLINK, (1, 2): replace(NVLINK, gb_s=500.0)}))
    assert found.devices.keys() == {"nvidia_h200"}
    assert found.devices["nvidia_h200"].memory_gb_s == 4100
    assert found.machines["machine1"].devices == 3
    assert found.machines["machine1"].inside.gb_s == 450


def test_alike_machines_are_folded_and_ranks_keep_their_order():
    devices = on(BIG, 0, 0, 1, 1) + on(SMALL, 2) + on(BIG, 3, 3)
    links = {(0, 1): NVLINK, (2, 3): NVLINK, (5, 6): NVLINK}
    links |= {(0, 2): FAST, (1, 3): FAST, (0, 4): FAST, (2, 4): FAST, (0, 5): FAST, (1, 6): FAST, (2, 5): FAST,
              (3, 6): FAST, (4, 5): FAST}
    found = cluster(cluster_of_probes(devices, links))
    assert [(kind.device, kind.devices, kind.count) for kind in found.machines.values()] == [
        ("nvidia_h200", 2, 2), ("nvidia_l4", 1, 1), ("nvidia_h200", 2, 1)]
    assert found.size == 7
    assert found.links["zone"].gb_s == 30  # two devices send twice as much: 40, 20, 20, 40, 40, 20


def test_a_machine_of_unlike_devices_is_described_as_several():
    slow = replace(BIG, tflops={"bfloat16": 350.0, "float32": 25.0})
    found = cluster(cluster_of_probes([BIG, BIG, slow], {(0, 1): NVLINK, (1, 2): NVLINK}))
    assert [(kind.device, kind.devices) for kind in found.machines.values()] == [
        ("nvidia_h200", 2), ("nvidia_h200_2", 1)]
    assert found.between("machine1", "machine2").gb_s == 400


@pytest.mark.parametrize(("factor", "types"), [(1.2, 1), (1.3, 2)])
def test_the_tolerance(factor, types):
    devices = [BIG, replace(BIG, memory_gb_s=factor * BIG.memory_gb_s)]
    assert len(cluster_of_probes(devices, {(0, 1): NVLINK})["devices"]) == types


def test_machines_behind_slow_links_stand_in_other_zones():
    links = {(0, 1): FAST, (0, 2): FAR, (1, 2): FAR, (0, 3): FAR, (1, 3): FAR, (2, 3): FAST}
    found = cluster(cluster_of_probes(on(BIG, 0, 1, 2, 3), links))
    assert [(kind.zone, kind.count) for kind in found.machines.values()] == [("zone1", 2), ("zone2", 2)]
    assert found.between("machine1", "machine2").gb_s == 1
    assert found.links["zone"].gb_s == 20
    bandwidth = [[link.bandwidth for link in row] for row in hardware_of(found, fold=True).between]
    assert bandwidth == [[20e9, 1e9], [1e9, 20e9]], "what is measured counts as it is"


def test_one_device_needs_no_links():
    assert cluster(cluster_of_probes([BIG], {})).size == 1


def test_a_small_machine_beside_large_ones_is_in_their_zone():
    devices = on(BIG, *[0] * 4, *[1] * 4, 2)
    links = {(rank, rank + 1): NVLINK for rank in (0, 1, 2, 4, 5, 6)} | {(rank, rank + 4): FAST for rank in range(4)}
    found = cluster(cluster_of_probes(devices, links | {(0, 8): FAST, (4, 8): FAST}))
    assert {kind.zone for kind in found.machines.values()} == {"zone"}
