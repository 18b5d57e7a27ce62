"""Machines as threads, each with its own connection to a real store; complete runs are in tests/test_machines.py."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from distflow.errors import DistflowError, InvalidInput
from distflow.recovery import membership
from distflow.recovery.membership import Membership, Rendezvous, _report_losses
from distflow.store.etcd import EtcdStore
from distflow.telemetry.heartbeat import Silence

LONG = 600.0


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as threads:
        yield threads


def machine(store, name: str, least: int = 2, most: int = 3, grows: bool = False, silence: float = LONG,
            losses: int = 20) -> Membership:
    """Of three blocks the first one trains, or all do."""
    return Membership(store, name, 1, least, most, most if grows else 1, grows, silence, losses)


def joined(pool: ThreadPoolExecutor, *machines: Membership) -> list[Rendezvous | None]:
    return [future.result(30) for future in [pool.submit(each.join) for each in machines]]


def waiting(future: Future) -> bool:
    return not future.done()


def test_a_round_begins_when_all_have_come(store, pool):
    machines = [machine(store, name) for name in "abc"]
    first = pool.submit(machines[0].join)
    assert waiting(first)
    rounds = [*joined(pool, *machines[1:]), first.result(30)]
    assert sorted(round.block for round in rounds) == [0, 1, 2]
    assert {(round.number, round.blocks, round.replaces, round.why) for round in rounds} == {(0, 3, False, "")}


def test_enough_begin_when_no_other_comes(store, pool):
    """The block of the one that is missing is free for whoever comes later."""
    rounds = joined(pool, *(machine(store, name, silence=0.3) for name in "ab"))
    assert sorted(round.block for round in rounds) == [0, 1]
    late, = joined(pool, machine(store, "c"))
    assert late == Rendezvous(0, 2, 3)


def test_machines_that_died_while_they_came_are_not_waited_for(store, pool):
    """One was killed between its two writes, another one before the round began."""
    store.add("0/came")
    store.add("0/came")
    store.put("0/waits/2", "7 dead")
    rounds = joined(pool, *(machine(store, name, silence=1.0) for name in "ab"))
    assert sorted(round.block for round in rounds) == [0, 1]
    assert sorted(json.loads(store.get("0/members"))) == ["a", "b"]


def test_those_that_are_left_begin_again_in_their_order(store, pool):
    """The one that sampled first trains then; a replacement samples."""
    machines = [machine(store, name) for name in "abc"]
    rounds = joined(pool, *machines)
    names = {round.block: each for round, each in zip(rounds, machines)}
    names[1].propose(0, "block 0 is lost", lost=0)
    names[2].propose(0, "so I say too", lost=0)
    assert names[1].is_superseded(0)
    assert joined(pool, names[1], names[2]) == [Rendezvous(1, 0, 3, False, "block 0 is lost", LONG),
                                                Rendezvous(1, 1, 3, False, "block 0 is lost", LONG)]
    assert joined(pool, machine(store, "d")) == [Rendezvous(1, 2, 3, False, "block 0 is lost", LONG)]


def test_one_that_samples_takes_the_place_of_one_that_trains(store, pool):
    """The other one goes on in the same round; a spare one takes the free block, and who was lost is a spare."""
    machines = [machine(store, f"run host-{name} 7 7", silence=1.0) for name in "abc"]
    rounds = joined(pool, *machines)
    first, second, third = (each for _, each in sorted(zip(rounds, machines), key=lambda pair: pair[0].block))
    silences: dict = {}
    until = time.monotonic() + 30
    for count in itertools.count():
        second.send_heartbeat(0, 1, count)
        third.send_heartbeat(0, 2, count)
        for each, block in ((third, 2), (second, 1)):
            _report_losses(each, Rendezvous(0, block, 3), silences.setdefault(
                block, {other: Silence(0.5) for other in range(3)}), set())
        if second.holders(0)[0] == second.name:
            break
        assert time.monotonic() < until
    assert not second.holds(0, 1)
    assert not first.holds(0, 0)
    spare = machine(store, "spare")
    assert spare._take(0, 1, "") is None, "workers there still put what they have sampled"
    second.vacate(0, 1)
    assert joined(pool, second) == [Rendezvous(0, 0, 3, True)]
    assert joined(pool, spare) == [Rendezvous(0, 1, 3, True)]
    assert not third.is_superseded(0)
    assert third.holders(0) == {0: second.name, 1: "spare", 2: third.name}


def test_the_next_one_takes_the_place_if_the_first_heir_is_silent_too(store, pool):
    """Neither of the two that are left can know which was lost first."""
    machines = [machine(store, f"run host-{name} 7 7", most=4, silence=1.0) for name in "abcd"]
    by_block = {round.block: each for round, each in zip(joined(pool, *machines), machines)}
    assert [*by_block[0].heirs(0)] == [1, 2, 3]
    silences = {block: {other: Silence(0.5) for other in range(4)} for block in (2, 3)}
    until = time.monotonic() + 30
    for count in itertools.count():
        for block in (3, 2):
            by_block[block].send_heartbeat(0, block, count)
        for block in (3, 2):
            _report_losses(by_block[block], Rendezvous(0, block, 4), silences[block], set())
        if by_block[2].holders(0)[0] == by_block[2].name:
            break
        assert time.monotonic() < until
    assert not by_block[3].is_superseded(0)
    by_block[2].vacate(0, 2)
    assert joined(pool, by_block[2]) == [Rendezvous(0, 0, 4, True)]


def test_the_last_one_that_samples_takes_no_place(store, pool):
    """Nobody would sample: the machines that are left begin the next round."""
    machines = [machine(store, f"run host-{name} 7 7", most=2, silence=0.5) for name in "ab"]
    rounds = joined(pool, *machines)
    left = next(each for round, each in zip(rounds, machines) if round.block == 1)
    silences = {block: Silence(0.5) for block in range(2)}
    until = time.monotonic() + 30
    while not left.is_superseded(0):
        _report_losses(left, Rendezvous(0, 1, 2), silences, set())
        assert time.monotonic() < until


def test_the_block_of_one_that_samples_is_taken_once(store, pool):
    machines = [machine(store, name, most=2, silence=2.0) for name in "ab"]
    rounds = joined(pool, *machines)
    lost = next(each for round, each in zip(rounds, machines) if round.block == 1)
    lost.send_heartbeat(0, 1, 7)
    spares = [machine(store, name, most=2, silence=2.0) for name in "cd"]
    found = [pool.submit(each.join) for each in spares]
    stop = threading.Event()
    pool.submit(_beats, spares, next(each for each in machines if each is not lost), stop)
    try:
        assert next(_until_one(found)).result() == Rendezvous(0, 1, 2, True)
        assert sum(map(waiting, found)) == 1
    finally:
        stop.set()
        machines[0].finish(0)
    assert {future.result(30) for future in found} == {Rendezvous(0, 1, 2, True),
                                                       None}, "the other one waits to the end"


def _beats(machines: list[Membership], trains: Membership, stop: threading.Event) -> None:
    """Whoever has taken the block goes on to live in it, as does the machine that trains."""
    count, store = 100, machines[0].store
    while not stop.wait(0.05):
        count += 1
        trains.send_heartbeat(0, 0, count)
        if holder := store.get("0/holder/1"):
            store.put("0/heartbeat/1", f"{holder} {count}")


def _until_one(futures: list[Future]) -> Iterator[Future]:
    stop = threading.Event()
    for _ in range(600):
        yield from (future for future in futures if future.done())
        stop.wait(0.05)


def test_where_all_train_one_more_begins_again_with_all(store, pool):
    one = machine(store, "a", least=1, most=2, grows=True, silence=1.0)
    assert joined(pool, one) == [Rendezvous(0, 0, 1)]
    two = pool.submit(machine(store, "run host-b 7 7", least=1, most=2, grows=True).join)
    assert pool.submit(_when_begun, one).result(30) == Rendezvous(1, 0, 2, False, "machine host-b has come")
    assert two.result(30) == Rendezvous(1, 1, 2, False, "machine host-b has come")


def _when_begun(one: Membership) -> Rendezvous | None:
    while not one.is_superseded(0):
        pass
    return one.join()


def test_all_were_lost_where_all_train(store, pool, capfd, monkeypatch):
    """As when a cluster restarts and its etcd does not: nobody is left who would miss them."""
    monkeypatch.setattr(membership, "_REPORT_AFTER", 0.1)
    joined(pool, *(machine(store, f"run host-{name} 7 7", most=2, grows=True) for name in "ab"))
    rounds = joined(pool, *(machine(store, f"run host-{name} 8 8", most=2, grows=True, silence=0.6) for name in "ab"))
    assert sorted((round.number, round.block, round.replaces) for round in rounds) == [(1, 0, False), (1, 1, False)]
    assert {round.why.partition(" (ranks")[0] for round in rounds} <= {"machine host-a", "machine host-b"}
    assert "other machines have all 2 blocks of ranks; this one waits" in capfd.readouterr().out


def test_one_that_was_replaced_is_a_spare(store, pool):
    """It sent no heartbeat for a while, and must not work on beside the machine that has its ranks."""
    machines = [machine(store, name, most=2, silence=0.3) for name in "ab"]
    rounds = joined(pool, *machines)
    still = next(each for round, each in zip(rounds, machines) if round.block == 1)
    other, = joined(pool, machine(store, "c", most=2, silence=0.3))
    assert other == Rendezvous(0, 1, 2, True)
    assert not still.holds(0, 1)
    long = machine(store, still.name, most=2)
    again = pool.submit(long.join)
    machines[0].finish(0)
    assert again.result(30) is None


def test_losses_are_not_without_end(store, pool):
    machines = [machine(store, name, most=2, losses=1) for name in "ab"]
    for round, (why, lost) in enumerate([("block 1 is lost", 1), ("one has come", None), ("block 0 is lost", 0)]):
        joined(pool, *machines)
        machines[0].propose(round, why, lost)
    with pytest.raises(DistflowError, match="block 0 is lost. That is machine 2 that is lost, and robust.restarts is"):
        machines[1].join()


def test_an_end_is_everybodys(store, pool):
    machines = [machine(store, name, most=2) for name in "ab"]
    joined(pool, *machines)
    machines[0].finish(0, "the disk of machine a is full")
    with pytest.raises(DistflowError, match="the disk of machine a is full"):
        machines[1].join()
    with pytest.raises(DistflowError, match="the disk of machine a is full"):
        machine(store, "late").join()


def test_a_store_of_another_run(etcd):
    kept = EtcdStore(etcd.address("one"), LONG)
    machine(kept, "a").agree("one run")
    with pytest.raises(InvalidInput, match="has digest one run, here it is another. "
                       f".*--store etcd://127.0.0.1:{etcd.clients[0]}/ANOTHER"):
        machine(kept, "b").agree("another")


def test_a_run_that_is_done_is_not_begun_again(store):
    """An etcd remembers it; a job that found nothing to do must not look as if it had done it."""
    machine(store, "a").agree("the run")
    machine(store, "a").finish(0)
    with pytest.raises(InvalidInput, match="is done, and nothing is left to do here; each run needs a name"):
        machine(store, "another job").agree("the run")
