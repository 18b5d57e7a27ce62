"""Real processes, killed for real: by their own process id, and by nothing else."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from docks import tokens, until

from distflow.data.batch import Batch
from distflow.dock import Consumer, DockClient, DockError, TimedOut
from distflow.rpc.errors import Unreachable
from distflow.telemetry.processes import stopped

ROOT = Path(__file__).resolve().parents[2]
ROWS = 60

CONSUMER = """
import sys, time
from pathlib import Path
from distflow.dock import DockClient, DockError
from distflow.rpc.errors import RpcError

address, token, journal = ("127.0.0.1", int(sys.argv[1])), bytes.fromhex(sys.argv[2]), sys.argv[3]
limit, pause = float(sys.argv[4]), float(sys.argv[5])
with DockClient([address], token, "trainer") as dock, open(journal, "a", buffering=1) as out:
    while True:
        try:
            lease = dock.lease("update", 4, least=1, wait=limit)
        except (DockError, RpcError):
            break
        batch = dock.fetch(lease)
        assert all(row.tolist() == [id] * (id % 5) for id, row in zip(batch.ids.tolist(), batch["tokens"].rows))
        print("trains", *lease.ids.tolist(), file=out)
        time.sleep(pause)
        if dock.commit(lease):
            print("trained", *lease.ids.tolist(), file=out)
"""


def consumer(address, token, journal, limit=3.0, pause=0.004):
    command = [sys.executable, "-c", CONSUMER, str(address[1]), token.hex(), str(journal), str(limit), str(pause)]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})


def test_killing_a_consumer_loses_nothing_and_trains_nothing_twice(children, token, tmp_path, forked):
    """One of two consumers is killed at a random moment; the other finishes."""
    random.seed(3)
    address = children().address
    journal = tmp_path / "journal"
    journal.touch()
    with DockClient([address], token, "test") as dock:
        dock.configure((Consumer("update", ("tokens",)),))
        dock.put(tokens(range(ROWS)))
        workers = [consumer(address, token, journal) for _ in range(2)]
        while len(journal.read_text().splitlines()) < 3:
            assert any(worker.poll() is None for worker in workers)
            time.sleep(0.002)
        time.sleep(random.random() * 0.01)
        workers[0].kill()
        workers[0].wait()
        assert workers[1].wait(timeout=60) == 0
        committed = dock.status()[0]["indexes"]["update"]["committed"]
        with pytest.raises(TimedOut):
            dock.lease("update", 1)
    lines = [line.split() for line in journal.read_text().splitlines()]
    trained = [int(row) for kind, *rows in lines if kind == "trained" for row in rows]
    assert committed == ROWS
    assert len(trained) == len(set(trained))
    taken = [int(row) for kind, *rows in lines if kind == "trains" for row in rows]
    assert set(taken) == set(range(ROWS))
    assert len(set(range(ROWS)) - set(trained)) <= 4, "killed between a commit and its line"


@pytest.mark.run
def test_a_stopped_consumer_loses_its_lease_by_silence(children, token, tmp_path, forked):
    """SIGSTOP closes no connection: only time tells."""
    address, journal = children().address, tmp_path / "journal"
    journal.touch()
    with DockClient([address], token, "test") as dock:
        dock.configure((Consumer("update", ("tokens",), seconds=0.3),))
        dock.put(tokens(range(4)))
        worker = consumer(address, token, journal, limit=0.1, pause=0.25)
        while "trains" not in journal.read_text():
            time.sleep(0.001)
        worker.send_signal(signal.SIGSTOP)
        try:
            mine = dock.commit(dock.lease("update", 4, wait=5))
        except TimedOut:  # on a crowded machine it may have committed before it was stopped
            mine = False
        worker.send_signal(signal.SIGCONT)
        worker.wait(timeout=30)
        assert dock.status()[0]["indexes"]["update"]["committed"] == 4
    assert journal.read_text().count("trained") == (not mine)


def test_a_stopped_shard_is_noticed_in_the_time_of_the_request_itself(children, token):
    """A large put asks for room first; the request before it may have waited longer."""
    child = children()
    rows = Batch(torch.arange(4), {"tokens": torch.zeros(4, 1 << 16)})
    with DockClient([child.address], token, "rollout", timeout=2.0) as dock:
        dock.configure((Consumer("update", ("tokens",)),))
        dock.put(rows)
        assert len(dock.lease("update", 4, wait=12)) == 4
        child.process.signal(signal.SIGSTOP)
        until(lambda: stopped(child.process.pid))
        began = time.monotonic()
        with pytest.raises(Unreachable, match="has not sent or taken a byte for 2 s"):
            dock.put(rows)
        assert 2 <= time.monotonic() - began < 4
        child.process.signal(signal.SIGCONT)
        assert dock.put(rows) == 0


ROLLOUT = """
import os, signal, sys
import torch
from distflow.data.batch import Batch
from distflow.dock import DockClient
from distflow.rpc.connection import Connection

sent, send = [], Connection.send

def send_and_die(connection, header, buffers=()):
    if header["op"] == "put":
        if sent:
            os.kill(os.getpid(), signal.SIGKILL)
        sent.append(header)
    send(connection, header, buffers)
    if header["op"] == "put":
        connection.receive()

Connection.send = send_and_die
with DockClient([("127.0.0.1", int(port)) for port in sys.argv[2:]], bytes.fromhex(sys.argv[1]), "rollout") as dock:
    dock.put(Batch(torch.arange(16), {"tokens": torch.ones(16, dtype=torch.int64)}))
"""


def test_a_rollout_that_is_killed_within_a_put_leaves_no_group_of_two_attempts(children, token, forked):
    addresses = [children().address for _ in range(2)]
    command = [sys.executable, "-c", ROLLOUT, token.hex(), *(str(port) for _, port in addresses)]
    with DockClient(addresses, token, "test") as dock:
        dock.configure((Consumer("rollout", ("order",), ("tokens",), 4), Consumer("update", ("tokens",), (), 4)))
        killed = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                                check=False)
        assert killed.returncode == -signal.SIGKILL
        first = dock.lease("update", 8, wait=10)
        assert first.ids.tolist() == [0, 1, 2, 3, 8, 9, 10, 11], "the groups that one shard has, whole"
        assert dock.put(Batch(torch.arange(16), {"tokens": torch.full((16,), 2)})) == 8
        rows = dock.fetch(torch.arange(16), ["tokens"])["tokens"].reshape(4, 4)
        assert rows.tolist() == [[1] * 4, [2] * 4, [1] * 4, [2] * 4]


ORDERED = Consumer("rollout", ("order",), ("tokens",), 2, home=0)
TRAINED = Consumer("trainer", ("tokens",), (), 2, step_rows=12, can_roll_back=True, home=1)


def test_an_index_whose_machine_is_lost_is_rebuilt_and_no_row_is_trained_twice(children, token):
    """The machine of the trainer's index is lost, with a third of the rows: these alone come again."""
    shards = [children() for _ in range(3)]
    with DockClient([shard.address for shard in shards], token, "trainer", timeout=60) as dock:
        dock.configure((ORDERED, TRAINED))
        sampled, trained = sample(dock, range(36)), []
        for step in range(2):
            lease = dock.lease("trainer", 12, step=step, wait=10)
            if step == 0:
                dock.commit(lease)
                trained += lease.ids.tolist()
        until(lambda: [dock.status()[shard]["marked"].get("trainer") for shard in (0, 2)] == [8, 8])
        shards[1].kill()
        children(port=shards[1].address[1], layout=dock.layout, number=1)
        lost = [row for row in range(36) if row // 2 % 3 == 1]
        assert dock.index_status()["indexes"]["trainer"]["committed"] in (0, 8)  # of rows that are there
        dock.commit(lease)  # of the index before; its rows were fetched, those of the lost shard too
        trained += lease.ids.tolist()
        dock.put(Batch(torch.tensor(lost), {"order": torch.zeros(len(lost))}))
        again = sample(dock, lost)
        assert again == {row: sampled[row] for row in lost}, "the same seeds give the same tokens"
        lease = dock.lease("trainer", 12, step=2, wait=10)
        assert dock.fetch(lease)["tokens"].tolist() == [sampled[row] for row in lease.ids.tolist()]
        dock.commit(lease)
        trained += lease.ids.tolist()
        assert sorted(trained) == list(range(36))
        with pytest.raises(DockError, match="step 1 of `trainer` is committed already"):
            dock.lease("trainer", 12, step=1)


def sample(dock, rows):
    """Put what follows from the ids of these rows; return it by id."""
    ids = torch.tensor(list(rows))
    dock.put(Batch(ids, {"order": torch.zeros(len(ids))}))
    lease = dock.lease("rollout", len(ids), wait=10)
    dock.put(Batch(lease.ids, {"tokens": lease.ids * 7 % 31}))
    dock.commit(lease)
    assert lease.ids.tolist() == ids.tolist(), "rows that others have kept are not sampled again"
    return dict(zip(ids.tolist(), (ids * 7 % 31).tolist()))


def test_it_ends_with_whoever_started_it_and_that_is_noticed(children, token):
    child = children()
    with DockClient([child.address], token, "test", timeout=2.0) as dock:
        dock.configure((Consumer("update", ("tokens",)),))
        child.process.stdin.close()
        assert child.process.poll(10) == 0
        with pytest.raises(Unreachable, match="It may have died, with what it held"):
            dock.put(tokens([1]))
    child.process.stdout.close()


def test_a_signal_to_all_processes_of_a_run_is_not_for_the_dock(children):
    """The step that then ends the run needs its samples; its input closes afterwards."""
    child = children()
    for number in (signal.SIGTERM, signal.SIGINT):
        child.process.signal(number)
    child.stop()
    assert child.process.status == 0


def test_it_handles_rows_without_torch(children, token):
    """Which would take a second to load, and 200 MB."""
    child = children()
    with DockClient([child.address], token, "test") as dock:
        dock.configure((Consumer("update", ("tokens",)),))
        dock.put(tokens(range(4)), turn=1)
        dock.put(tokens(range(4)), version=3)
        lease = dock.lease("update", 4)
        assert len(dock.fetch(lease)) == 4
        assert dock.commit(lease)
        assert "libtorch" not in Path(f"/proc/{child.process.pid}/maps").read_text()
