"""Nothing that a run on one machine listens to can be reached from another."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import environment

from distflow import launch
from distflow.telemetry.processes import descendants, parent
from workers.loopback import create

LOOPBACK = "0100007F"
"""127.0.0.1, as the kernel writes it."""


def listening(processes: set[int]) -> Iterator[tuple[int, str]]:
    """(process, address in hex) of what they listen to."""
    owners = {}
    for process in processes:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for file in Path(f"/proc/{process}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    owners[os.readlink(file)] = process
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, place, _, state, *more = line.split()
            if state == "0A" and (name := f"socket:[{more[5]}]") in owners:
                yield owners[name], place.partition(":")[0]


def test_a_run_listens_on_loopback_alone(workspace, ready):
    """Its store, gloo, the dock's process and the sources of weights."""
    line = ["run", "grpo.yaml", "--run", "tiny.yaml", "--name", "here", "--set", "mode=async", "--set", "steps=6",
            "--set", "groups.rollout=1", "--ranks", "3"]
    run = ready.command("-m", "distflow.cli", *line, folder=workspace, environment=environment())
    try:
        said = []
        for each in run.stdout:
            said.append(each)
            if "step 1/" in each:
                break
        family = {process: parent(process) for process in descendants(run.pid)}
        found = list(listening(set(family)))
    finally:
        for process in descendants(run.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        run.kill()
        run.stdout.close()
    assert {address for _, address in found} == {LOOPBACK}, "".join(said)
    agent = next(process for process, parent in family.items() if parent == run.pid)
    seats = {process for process, parent in family.items() if parent == agent}
    listen = {process for process, _ in found} - {agent}
    assert agent in {process for process, _ in found}, "torchrun's store"
    assert {family[process] for process in listen} == seats, "each rank's worker with its weights"
    assert len(listen) > len(seats), "the dock's process"


def test_what_is_not_on_loopback_would_be_seen():
    with socket.create_server(("0.0.0.0", 0)):
        assert (os.getpid(), "00000000") in list(listening({os.getpid()}))


@pytest.mark.parametrize(("machines", "chosen", "expected"), [
    ("1", None, "lo"), (None, None, "lo"), ("1", "eth7", "eth7"), ("2", None, None)])
def test_gloo_stays_on_a_machine_that_is_alone(monkeypatch, machines, chosen, expected):
    for name, value in (("GROUP_WORLD_SIZE", machines), ("GLOO_SOCKET_IFNAME", chosen)):
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    launch.stay_on_loopback()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == expected


def test_several_machines_are_refused():
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    with pytest.raises(ValueError, match="2 machines cannot meet on loopback"):
        create(RendezvousParameters("loopback", "", "run", 1, 2))
