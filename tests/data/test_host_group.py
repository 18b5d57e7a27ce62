"""Messages between ranks of one machine, of several, and of machines that share no memory; and who is named when one
does not come."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from ranks import run_ranks

from distflow.data import host_group as host_group_module
from distflow.data.host_group import HostGroup
from distflow.errors import RankMissing
from distflow.rpc.shared_memory import MemoryAddress

ROOT = Path(__file__).resolve().parents[2]


def talk(machines: str) -> list[int]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.environ["DISTFLOW_MACHINE"] = machines[rank].strip("-")
    try:
        host_group = HostGroup(rank, 20.0)
    finally:
        del os.environ["DISTFLOW_MACHINE"]
    for size in (0, 3, 100_000, 1, 4096, 0, 2_000_000):
        for _ in range(3):  # more often than there are mailboxes
            announced = host_group.gather(bytes([rank]) * (size + rank))
            assert announced == [bytes([other]) * (size + other) for other in range(ranks)]
        host_group.barrier()
    return host_group.machines


@pytest.mark.parametrize(("machines", "expected"), [
    ("a", [0]), ("aaaa", [0, 0, 0, 0]), ("aabb", [0, 0, 2, 2]), ("abab", [0, 1, 0, 1]), ("abbb", [0, 1, 1, 1]),
    ("----", [0, 1, 2, 3]), ("a--a", [0, 1, 2, 0]),
])
def test_every_message_reaches_every_rank(machines, expected):
    assert run_ranks(len(machines), talk, machines) == [expected] * len(machines)


def deceived(way: str, *forged: MemoryAddress) -> list[int]:
    """Rank 1 names what is not its own: as its mailboxes, or in them as its doorbell."""
    gather = host_group_module.gather_values

    def lie(value: Any, *group: dist.ProcessGroup) -> list[Any]:
        if isinstance(value, list):
            for _, descriptor, *_ in value[1]:
                owner = host_group_module._OWNER.pack(1, forged[0].descriptor, forged[0].inode)
                os.pwrite(descriptor, owner, 0)
            value = [value[0], forged] if way == "mailbox" else value
        return gather(value, *group)

    with mock.patch.object(host_group_module, "gather_values", lie if dist.get_rank() == 1 else gather):
        host_group = HostGroup(dist.get_rank(), 20.0)
    assert host_group.gather(b"x") == [b"x", b"x"]
    return host_group.machines


@pytest.mark.parametrize("way", ["mailbox", "bell"])
def test_no_file_of_another_process_is_opened_for_messages(forged, way):
    """The two ranks share no memory then, and their messages take the network."""
    addresses = forged("distflow-mailbox-0123")
    for address in addresses[: 6 if way == "mailbox" else 2]:
        assert run_ranks(2, deceived, way, address, address) == [[0, 1], [0, 1]]


def one_after_another() -> None:
    rank, machines = dist.get_rank(), "abb"
    for _ in range(3):
        os.environ["DISTFLOW_MACHINE"] = machines[rank]
        host_group = HostGroup(rank, 20.0)
        del os.environ["DISTFLOW_MACHINE"]
        for number in range(3):
            announced = host_group.gather(bytes([rank, number]))
            assert announced == [bytes([other, number]) for other in range(len(machines))]


def test_leaders_find_each_other_whichever_groups_exist_already():
    run_ranks(3, one_after_another)


def late(machines: str, who: int) -> str:
    """Rank `who` does not come to the second round."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    os.environ["DISTFLOW_MACHINE"] = machines[rank]
    host_group = HostGroup(rank, 2.0)
    del os.environ["DISTFLOW_MACHINE"]
    host_group.gather(b"")
    if rank == who:
        store.wait([f"given up {other}" for other in range(len(machines)) if other != who])
        return ""
    with pytest.raises(RankMissing) as caught:
        host_group.gather(b"")
    store.set(f"given up {rank}", "")
    return str(caught.value)


@pytest.mark.parametrize(("machines", "late_rank", "said"), [
    ("aaa", 1, ["rank 1 did not come within the wait limit of 2 s", "",
                "rank 1 did not come within the wait limit of 2 s"]),
    ("aabb", 3, ["on another machine, a rank did not come within the wait limit"] * 2
     + ["rank 3 did not come within the wait limit of 2 s", ""])])
def test_host_group_names_a_late_rank(machines, late_rank, said):
    """Its peer names it; on other machines no rank that came is named."""
    for found, expected in zip(run_ranks(len(machines), late, machines, late_rank), said):
        assert found.startswith(expected)


DYING = """
import os, signal, sys
import torch.distributed as dist
from distflow.data.host_group import HostGroup
from distflow.errors import RankMissing

rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 3), rank=rank, world_size=3)
group = HostGroup(rank, 60.0)
group.barrier()
if rank == 2:
    print("here", flush=True)
    sys.stdin.readline()
try:
    group.gather(b"anyone?")
except RankMissing as error:
    print(error, flush=True)
os._exit(0)
"""


def test_a_rank_that_dies_is_named_at_once(tmp_path):
    """Real processes and a real SIGKILL; the limit is a minute, and no rank waits for it."""
    (tmp_path / "dying.py").write_text(DYING)
    started = [subprocess.Popen([sys.executable, "dying.py", str(rank), "store"], cwd=tmp_path, text=True,
                                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE) for rank in range(3)]
    assert started[2].stdout.readline() == "here\n"
    os.kill(started[2].pid, signal.SIGKILL)
    announced = [process.communicate(timeout=30)[0] for process in started]
    assert announced[:2] == ["rank 2 ended while others waited for it\n"] * 2
