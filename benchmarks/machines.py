"""Machines made of network namespaces: each with one network device of its own, shaped to a rate, behind one switch.

Linux as root only. Shaping is by `tc … tbf` at both ends of each device, so a machine sends and receives at most at the
rate, as through a network card of that speed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

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
