"""Machines made of network namespaces: each with one network device of its own, shaped to a rate, behind one switch.

Linux as root only. Shaping is by `tc … tbf` at both ends of each device, so a machine sends and receives at most at the
rate, as through a network card of that speed. `far_machines` are two, joined by a link that delays each packet instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import queue
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_NEW_NETWORK = 0x40000000
_DEVICE = "port"


class NoMachines(Exception):
    """This system cannot make network namespaces, or shape their devices."""


@contextmanager
def machines(count: int, megabit: float) -> Iterator[list[str]]:
    """Yield the names of `count` machines with addresses 10.77.0.1 and on, each linked at `megabit` Mbit/s; gone at the
    end.

    Raises:
        NoMachines: says which command failed, and why.
    """
    tag = f"distflow{os.getpid()}"
    switch, names, made = f"{tag}s", [f"{tag}m{number}" for number in range(count)], []
    try:
        _run("ip", "netns", "add", switch)
        made.append(switch)
        _within(switch, "ip", "link", "add", "bridge", "type", "bridge")
        _within(switch, "ip", "link", "set", "bridge", "up")
        for number, name in enumerate(names):
            _run("ip", "netns", "add", name)
            made.append(name)
            _plug(switch, name, number, megabit)
        yield names
    finally:
        for name in reversed(made):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextmanager
def far_machines(delay: float) -> Iterator[list[str]]:
    """Yield the names of two machines with addresses 10.77.0.1 and 10.77.0.2, whose packets take `delay` seconds each
    way; gone at the end. The link has no rate of its own: its packets, of up to 64 KiB, pass through a process.

    Raises:
        NoMachines: says which command failed, and why.
    """
    names, made = [f"distflow{os.getpid()}f{number}" for number in range(2)], []
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            made.append(name)
        ready = multiprocessing.get_context("fork").Event()
        link = multiprocessing.get_context("fork").Process(target=_forward, args=(names, delay, ready), daemon=True)
        link.start()
        try:
            if not ready.wait(10.0):
                raise NoMachines("/dev/net/tun gives no devices")
            for number, name in enumerate(names):
                _within(name, "ip", "addr", "add", f"{address(number)}/24", "dev", _DEVICE)
                _within(name, "ip", "link", "set", _DEVICE, "up", "txqueuelen", "10000")
                _within(name, "ip", "link", "set", "lo", "up")
            yield names
        finally:
            link.terminate()
            link.join()
    finally:
        for name in reversed(made):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TUN, _NO_HEADER, _OFFLOADED = 0x0001, 0x1000, 0x4000  # IFF_TUN, IFF_NO_PI, IFF_VNET_HDR
_CHECKSUMS_AND_SEGMENTS = 0x01 | 0x02 | 0x04  # TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6: the kernel passes on 64 KiB at once
_PACKET = 70_000


def _forward(names: list[str], delay: float, ready: Any) -> None:
    """Carry packets between the devices of two machines, until terminated."""
    ends = []
    for name in names:
        enter(name)
        ends.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
        flags = _TUN | _NO_HEADER | _OFFLOADED
        fcntl.ioctl(ends[-1], _TUNSETIFF, struct.pack("16sH22x", _DEVICE.encode(), flags))
        fcntl.ioctl(ends[-1], _TUNSETOFFLOAD, _CHECKSUMS_AND_SEGMENTS)
    ready.set()
    threading.Thread(target=_carry, args=(ends[1], ends[0], delay), daemon=True).start()
    _carry(*ends, delay)


def _carry(source: int, target: int, delay: float) -> None:
    under_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def arrive() -> None:
        while True:
            due, packet = under_way.get()
            time.sleep(max(0.0, due - time.monotonic()))
            with contextlib.suppress(OSError):  # a device that is full or down loses packets, as any
                os.write(target, packet)

    threading.Thread(target=arrive, daemon=True).start()
    while True:
        select.select([source], [], [])
        with contextlib.suppress(BlockingIOError, OSError):
            while True:
                under_way.put((time.monotonic() + delay, os.read(source, _PACKET)))


def enter(name: str) -> None:
    """Move this process into a machine; collectives will use its device.

    Raises:
        OSError: the machine does not exist, or this process may not enter it.
    """
    with open(f"/run/netns/{name}", "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {name}")
    os.environ |= _seen(name)


def within(name: str, *command: str) -> list[str]:
    """Return the same command, started in a machine. All but its network, control groups too, is that of this
    process."""
    settings = [f"{key}={value}" for key, value in _seen(name).items()]
    return ["nsenter", f"--net=/run/netns/{name}", "env", *settings, *command]


def address(number: int) -> str:
    """Return the address of the machine with this number, from 0 on."""
    return f"10.77.0.{number + 1}"


def _seen(name: str) -> dict[str, str]:
    """Return what tells a process of distflow which machine it is on, and which device collectives use."""
    return {"GLOO_SOCKET_IFNAME": _DEVICE, "DISTFLOW_MACHINE": name}


def _plug(switch: str, name: str, number: int, megabit: float) -> None:
    """Link a machine to the switch by a pair of devices."""
    _within(switch, "ip", "link", "add", f"port{number}", "type", "veth", "peer", "name", _DEVICE, "netns", name)
    _within(switch, "ip", "link", "set", f"port{number}", "master", "bridge", "up")
    _within(name, "ip", "addr", "add", f"{address(number)}/24", "dev", _DEVICE)
    _within(name, "ip", "link", "set", _DEVICE, "up")
    _within(name, "ip", "link", "set", "lo", "up")
    shape = ("root", "tbf", "rate", f"{megabit}mbit", "burst", "128kb", "latency", "100ms")
    _within(switch, "tc", "qdisc", "add", "dev", f"port{number}", *shape)
    _within(name, "tc", "qdisc", "add", "dev", _DEVICE, *shape)


def _within(name: str, *command: str) -> None:
    _run("ip", "netns", "exec", name, *command)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise NoMachines(f"there is no `{command[0]}` here (Debian: apt install iproute2)") from None
    except subprocess.CalledProcessError as error:
        raise NoMachines(f"`{' '.join(command)}`: {error.stderr.strip()}") from None
