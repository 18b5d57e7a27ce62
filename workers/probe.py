"""Measures the speed of each rank's device and of its links, for `distflow probe`.

All ranks measure their devices at the same time, since in a run they compute at the same time: cores that share a
memory show what is left for each. Each figure is the median of repetitions.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from statistics import median

import torch
import torch.distributed as dist

from distflow.data.exchange import barrier, gather
from distflow.errors import InvalidInput
from distflow.measurements import DeviceProbe, Ends, LinkProbe

_LEAST, _BUDGET = 5, 0.3  # repetitions of a measurement, and seconds that it takes if more of them fit
_LONG = 0.005  # least seconds of a repetition: far longer than reading a clock or launching a kernel
_ROUNDS = 20
_LARGEST = 8192
_COPIED = 128 * 2**20  # bytes: more than caches hold
_MACHINES = 16


def probe(device: torch.device) -> tuple[list[DeviceProbe], dict[Ends, LinkProbe]]:
    """Measure the devices of all ranks, by rank, and their links. Collective, over gloo and for GPUs NCCL."""
    hosts = [part.decode() for part in gather(_host().encode())]
    order = list(dict.fromkeys(hosts))
    if len(order) > _MACHINES:
        raise InvalidInput(f"{len(order)} machines have too many links to measure each; {_MACHINES} is the most. Probe "
                           "some of each kind, and raise their `count` in the file.")
    barrier()
    probed = DeviceProbe(order.index(hosts[dist.get_rank()]), _name(device), _tflops(device), _memory(device, hosts),
                         _copies(device))
    links = {}
    for together in _rounds(hosts):
        barrier()
        links |= {ends: _between(ends, device) for ends in together if dist.get_rank() in ends}
    mine = json.dumps([asdict(probed), [[ends, asdict(link)] for ends, link in links.items() if link]])
    every = [json.loads(part) for part in gather(mine.encode())]
    return [DeviceProbe(**device) for device, _ in every], {
        tuple(ends): LinkProbe(**link) for _, found in every for ends, link in found}


def _rounds(hosts: list[str]) -> Iterator[list[Ends]]:
    """Yield the pairs of ranks that measure at the same time: in a machine one pair of neighbours; of two machines as
    many as the smaller one has ranks, since the bandwidth of machines is that of all their devices together."""
    ranks = {host: [rank for rank, at in enumerate(hosts) if at == host] for host in hosts}
    for mine in ranks.values():
        yield from ([ends] for ends in zip(mine, mine[1:]))
    for one, other in itertools.combinations(ranks.values(), 2):
        yield [(min(ends), max(ends)) for ends in zip(one, other)]


def _host() -> str:
    """Return a name of this machine; its host name alone may be that of several."""
    return f"{os.environ.get('GROUP_RANK', 0)} {socket.gethostname()}"


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _tflops(device: torch.device) -> dict[str, float]:
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        size = 256
        while True:
            one = torch.ones(size, size, dtype=dtype, device=device)
            seconds = _seconds(lambda one=one: one @ one, device, 0.0)
            if seconds >= _LONG or size == _LARGEST:
                break
            size *= 2
        seconds = _seconds(lambda one=one: one @ one, device, _BUDGET)
        found[str(dtype).removeprefix("torch.")] = 2 * size**3 / seconds / 1e12
    return found


def _memory(device: torch.device, hosts: list[str]) -> float:
    """Return the GiB of this device, or without GPUs this rank's part of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1] / 2**30
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30 / hosts.count(hosts[dist.get_rank()])


def _copies(device: torch.device) -> float:
    """Measure GB/s within the device's memory, bytes read plus bytes written."""
    source = torch.ones(_COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED / _seconds(lambda: target.copy_(source), device, _BUDGET) / 1e9


def _between(ends: Ends, device: torch.device) -> LinkProbe | None:
    """Measure the link to another rank: latency as half of a small message's round trip, and the rate of large ones.
    Both ranks call it; the first one gets the result."""
    first, other = dist.get_rank() == ends[0], ends[1] if dist.get_rank() == ends[0] else ends[0]
    small = torch.zeros(8, dtype=torch.uint8, device=device)

    def there_and_back(sent: torch.Tensor) -> None:
        (dist.send if first else dist.recv)(sent, other)
        (dist.recv if first else dist.send)(small, other)
        small.sum().item()  # waits until it has come

    def rounds(sent: torch.Tensor, count: int) -> float:
        there_and_back(sent)
        return median(_clock(lambda: there_and_back(sent)) for _ in range(count))

    latency, nbytes, seconds = rounds(small, _ROUNDS) / 2, 2**16, 0.0
    enough = torch.zeros(1, device=device)
    while not enough.item():
        nbytes *= 4
        large = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        seconds = rounds(large, _LEAST)
        enough.fill_(seconds > 4 * _LONG or nbytes >= _COPIED)
        (dist.send if first else dist.recv)(enough, other)  # one clock decides
    rate = nbytes / max(seconds - 2 * latency, seconds / 2) / 1e9
    return LinkProbe(rate, latency * 1e6) if first else None


def _seconds(act: Callable[[], object], device: torch.device, budget: float) -> float:
    """Return the median seconds of `act` on a device, after one call to warm up."""
    def whole() -> None:
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    whole()
    end, found = time.perf_counter() + budget, []
    while len(found) < _LEAST or time.perf_counter() < end:
        found.append(_clock(whole))
    return median(found)


def _clock(act: Callable[[], None]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start
