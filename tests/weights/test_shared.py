"""Weights that several processes of a machine share: one copy, and never changed while it is used."""

import os
from pathlib import Path

import pytest
from weights.movers import tensors_of

from distflow.rpc.shared_memory import SharedMemoryPool, memory_name
from distflow.weights.chunk_store import ChunkStore, IncomingChunks
from distflow.weights.directory import SourceEntry
from distflow.weights.manifest import RankManifest
from distflow.weights.publisher import Publisher
from distflow.weights.sources import SourceClient, SourceGone
from distflow.weights.transport import transports

MIB, CHUNK = 8, 256 << 10
WHOLE = MIB << 20


def files(mover) -> list[int]:
    return mover.ask("files")["files"]


def own_files(mover) -> int:
    """Return the number of files with weights that the process has, each counted once."""
    found = set()
    for path in Path(f"/proc/{mover.process.pid}/fd").iterdir():
        if "memfd:distflow-weights" in os.readlink(path):
            found.add(path.stat().st_ino)
    return len(found)


def resident(*movers) -> int:
    """Bytes of weights that the processes have together; shared pages count once."""
    total, counts = 0, False
    for mover in movers:
        for line in Path(f"/proc/{mover.process.pid}/smaps").read_text().splitlines():
            name, _, rest = line.partition(":")
            counts = "memfd:distflow-weights" in line if "-" in name.split(" ")[0] else counts
            total += int(rest.split()[0]) << 10 if counts and name == "Pss" else 0
    return total


def publish(trainer, *versions):
    for version in versions:
        trainer.ask("publish", version=version, mib=MIB)


def test_rollouts_of_a_machine_have_one_copy(mover, events):
    trainer, rollouts = mover("publisher"), [mover("puller", who=f"r{i}") for i in range(3)]
    publish(trainer, 1)
    for rollout in rollouts:
        assert rollout.ask("pull", mib=MIB)["right"]
        assert files(rollout) == files(trainer)
    assert WHOLE <= resident(trainer, *rollouts) <= 1.1 * WHOLE
    assert {tuple(event["transports"]) for event in events("weights_pulled")} == {("memory",)}


def test_what_a_rollout_has_stays_and_its_buffer_is_used_again_afterwards(mover):
    """The rollout hangs meanwhile, which delays no other process."""
    trainer, rollout = mover("publisher"), mover("puller", who="a")
    publish(trainer, 1)
    rollout.ask("keep", mib=MIB)
    first = files(trainer)
    rollout.stop()
    publish(trainer, 2, 3, 4, 5, 6)
    rollout.go_on()
    assert rollout.ask("kept_right")["right"]
    rollout.pulls(6, MIB)
    assert rollout.ask("kept_right")["right"]
    publish(trainer, 7)
    assert rollout.ask("kept_right")["right"]
    count = own_files(trainer)
    rollout.ask("drop")
    used = []
    for version in range(8, 20):
        publish(trainer, version)
        used += files(trainer)
        rollout.pulls(version, MIB)
    assert first[0] in used
    assert own_files(trainer) <= count
    assert len(set(used)) <= 3, "of two versions, and of one that a rollout has still"


def test_the_lock_of_a_rollout_that_was_killed_is_gone(mover):
    trainer, rollouts = mover("publisher"), [mover("puller", who=f"r{i}") for i in range(2)]
    publish(trainer, 1)
    for rollout in rollouts:
        rollout.ask("pull", mib=MIB)
    first = files(trainer)
    rollouts[0].kill()
    publish(trainer, 2, 3)
    assert files(trainer) != first, "the other one has it"
    rollouts[1].kill()
    publish(trainer, 4)
    assert files(trainer) == first


def test_relays_pass_memory_on_when_its_owner_is_dead(mover, events):
    trainer = mover("publisher")
    publish(trainer, 1)
    owner, where = trainer, files(trainer)
    for who in ("a", "b", "c"):
        rollout = mover("puller", who=who, transport="memory")
        rollout.pulls(1, MIB)
        assert files(rollout) == where
        owner.kill()
        owner = rollout
    assert [list(event["sources"]) for event in events("weights_pulled")] == [["trainer-0"], ["a"], ["b"]]


@pytest.fixture
def supplied(store, token):
    """A trainer, and a puller's connection that has its lease of version 1."""
    publisher = Publisher(store, token, rank=0, ranks=1, timeout=0.0)
    publisher.publish(1, tensors_of(1, MIB))
    available = transports("memory", SharedMemoryPool(memory_name("weights", token)))
    client = SourceClient(SourceEntry("trainer-0", publisher.source.address, 0),
                          publisher.directory.newest_versions()[0],
                          "a", token, available, "memory", 3.0)
    assert client.lease() == ""
    yield publisher, client
    client.close()
    publisher.close()


def whole(publisher):
    chunks = publisher.held[0]
    return chunks, (0, 0, len(chunks.parts[0]))


def test_memory_that_was_used_again_before_it_was_locked_is_not_taken(supplied):
    """The announced address is outdated: the lock comes too late, and the source reports it."""
    publisher, client = supplied
    run = whole(publisher)[1]
    for version in (2, 3):
        publisher.publish(version, tensors_of(version, MIB))
    stale = client.map(0)
    assert (stale == publisher.held[-1].memory[0]).all(), "it is version 3"
    client.ask(run)
    with pytest.raises(SourceGone):
        client.take(0, slice(0, WHOLE), stale, lambda _: None)


def test_memory_that_was_locked_in_time_stays(supplied):
    publisher, client = supplied
    chunks, run = whole(publisher)
    memory = client.map(0)
    client.ask(run)
    client.take(0, slice(0, WHOLE), memory, lambda _: None)
    for version in (2, 3, 4, 5):
        publisher.publish(version, tensors_of(version, MIB))
    mine = ChunkStore(1, chunks.key)
    mine.add(0, RankManifest.unpack(chunks.packed[0]), chunks.packed[0], memory)
    bad = []
    IncomingChunks(mine, run, bad.append).advance(WHOLE)
    assert bad == []


def test_a_source_that_has_put_it_elsewhere_is_left(supplied):
    publisher, client = supplied
    chunks, run = whole(publisher)
    client.map(0)
    chunks.memory[0] = publisher.buffers.take(WHOLE)
    client.ask(run)
    with pytest.raises(ConnectionError, match="elsewhere now"):
        client.take(0, slice(0, WHOLE), client.map(0), lambda _: None)
