"""One rank of each machine pulls a version; the others use its memory. Machines are names here, and share nothing."""

import hashlib
import math
import time

import pytest

from distflow.weights import directory
from distflow.weights.directory import Directory, HeldChunks, MachineRelays, SourceEntry

MIB = 48
WHOLE = MIB << 20
RUN = 16 << 20
"""Bytes of one request by TCP."""


@pytest.fixture
def trainer(mover):
    return mover("publisher", machine="trainer's", transport="tcp")


@pytest.fixture
def machine(mover):
    def start(name, ranks, first=0, **more):
        """No heartbeat is ever late, unless a test says so."""
        made = [mover("puller", who=f"{name}{rank}", machine=name, **more) for rank in range(first, first + ranks)]
        assert [rank.ask("newest") for rank in made] == [{"newest": -1}] * ranks, "all have joined"
        for rank in made:
            rank.ask("be_patient", seconds=3600.0)
        return made

    return start


def last_pulls(events):
    return {event["who"]: event for event in events("weights_pulled")}


def crossed(event):
    """Bytes of a pull by name of a source on another machine."""
    return {who: count for who, count in event["sources"].items() if who[0] != event["who"][0]}


def elected_of(store, machine):
    name = hashlib.blake2b(machine.encode(), digest_size=8).hexdigest()
    return MachineRelays.unpack(store.get(f"run/weights/machine/{name}")).elected


def begun(trainer):
    while not trainer.ask("sent")["sent"]:
        assert trainer.process.is_alive()


def test_one_rank_of_each_machine_pulls_and_the_others_use_its_memory(trainer, machine, events):
    machines = machine("a", 3), machine("b", 3)
    for version in (1, 2, 3):
        for rollout in sum(machines, []):
            rollout.send("pull", mib=MIB, least=version)
        trainer.ask("publish", version=version, mib=MIB)
        assert [rollout.answer() for rollout in sum(machines, [])] == [{"version": version, "right": True}] * 6
        pulls = last_pulls(events)
        assert sorted(who[0] for who, event in pulls.items() if crossed(event)) == ["a", "b"]
        assert all(sum(crossed(event).values()) in (0, WHOLE) for event in pulls.values())
        assert trainer.ask("sent")["sent"] == version * WHOLE, "the second machine has it from the first"
        for ranks in machines:
            assert len({tuple(rank.ask("files")["files"]) for rank in ranks}) == 1


@pytest.mark.parametrize("others", [1, 2])
def test_another_takes_over_when_the_elected_rank_is_killed(trainer, machine, events, store, others):
    """It keeps the chunks that it has verified in the memory of the dead one, and they are in one copy again."""
    elected, *rest = machine("a", 1 + others)
    trainer.ask("publish", version=1, mib=MIB)
    trainer.ask("tire", seconds=1.0)
    elected.ask("die_pulling", chunks=2 * RUN // (1 << 20) + 3)
    elected.send("pull", mib=MIB)
    begun(trainer)
    for rank in rest:
        rank.send("pull", mib=MIB)
    elected.process.join()
    assert [rank.answer() for rank in rest] == [{"version": 1, "right": True}] * others
    found = {who: crossed(event) for who, event in last_pulls(events).items() if crossed(event)}
    assert [*elected_of(store, "a").values()] == [(who, 2) for who in found], "the second election"
    assert [(event["who"], event["version"], event["term"]) for event in events("weights_elected")] == \
        [(who, 1, 2) for who in found], "the first is no event"
    assert 0 < sum(found.popitem()[1].values()) <= WHOLE - RUN
    assert len({tuple(rank.ask("files")["files"]) for rank in rest}) == 1


def test_the_lease_of_an_elected_rank_that_stands_still_runs_out(trainer, machine, events, store):
    """When it goes on, it does so with what the other one has pulled."""
    [first], [second] = machine("a", 1, deadline=60.0), machine("a", 1, first=1, deadline=1.0)
    trainer.ask("publish", version=1, mib=MIB)
    first.ask("stop_pulling", chunks=3, lease=1.5)
    second.ask("doubt", who="a0", seconds=1.5)
    first.send("pull", mib=MIB).wait_until_stopped()
    second.pulls(1, MIB)
    sent = trainer.ask("sent")["sent"]
    first.go_on()
    assert first.answer() == {"version": 1, "right": True}
    pulls = last_pulls(events)
    assert [who for who, _ in elected_of(store, "a").values()] == ["a1"]
    assert "a1" in pulls["a0"]["sources"]
    assert trainer.ask("sent")["sent"] <= sent + 2 * RUN, "what it had requested before"


KEY = "3.attempt"


@pytest.fixture
def make(store):
    def make(who):
        """No heartbeat is ever late, unless a test says so."""
        entry = SourceEntry(who, ("127.0.0.1", 1), machine="m", held=(HeldChunks(3, KEY, 0, 9),))
        one = Directory(store, entry, dead=math.inf)
        one.update()
        return one

    return make


@pytest.fixture
def ranks(make):
    return [make(who) for who in "abc"]


def elect(one, key=KEY):
    return one.elect(key, one.holders())


def test_one_of_several_is_elected_for_each_version(ranks):
    assert [elect(one) for one in ranks] == [True, False, False]
    assert [elect(one) for one in ranks] == [True, False, False]
    assert [elect(one, "4.attempt") for one in ranks[1:]] == [True, False]
    ranks[0].update(pulling="")
    assert [elect(one) for one in ranks] == [True, False, False], "it may be elected again"
    ranks[0].update(pulling="")
    assert elect(ranks[2])


def test_of_two_that_see_the_same_one_is_elected(ranks):
    """Also where one was elected before, and has done its work."""
    for first, second in ((0, 1), (1, 2)):
        seen = [ranks[number].holders() for number in (first, second)]
        assert ranks[first].elect(KEY, seen[0])
        assert not ranks[second].elect(KEY, seen[1]), "until it has looked again"
        assert elect(ranks[second]) is False
        ranks[first].update(pulling="")


def test_an_election_for_an_older_version_leaves_that_of_a_newer_one(ranks):
    """The rank that pulls the older one may not know the newer one yet."""
    assert elect(ranks[0], "4.attempt")
    assert elect(ranks[1], KEY)
    assert not elect(ranks[2], "4.attempt")


def test_a_rank_that_has_just_joined_can_be_the_elected_one(ranks, make, monkeypatch):
    """Also where those that read know of too many relays to look at all of them."""
    monkeypatch.setattr(directory, "SEEN", 0)
    assert "d" not in ranks[0].holders()
    assert elect(new := make("d"))
    assert new.mine.pulling == KEY
    assert not elect(ranks[0])


def test_a_rank_without_heartbeat_loses_the_lease_and_knows_it(ranks):
    first, second, _ = ranks
    assert elect(first)
    assert not elect(second)
    second.dead = 0.0
    assert "a" not in second.holders(), "no heartbeat between two looks"
    second.dead = math.inf
    assert elect(second)
    first.dead = 0.0
    first.update(source="another")
    assert first.mine.pulling == ""
    first.dead = math.inf
    assert second.holders()["a"].pulling == ""
    second.update(source="yet another")
    assert not elect(first)


def test_a_lease_that_is_lost_while_a_heartbeat_is_sent_is_lost(ranks, monkeypatch):
    first, second, _ = ranks
    assert elect(first)
    put = first.store.put

    def stand_still(key, value):
        put(key, value)
        begin, second.dead = time.monotonic(), 0.0
        second.holders()
        assert "a" not in second.holders()
        second.dead = math.inf
        assert elect(second)
        first.dead = time.monotonic() - begin

    with monkeypatch.context() as patched:
        patched.setattr(first.store, "put", stand_still)
        first.update(source="another")
    first.update(source="yet another")
    assert first.mine.pulling == ""


def test_a_rank_that_starts_again_is_not_the_elected_one(ranks, store):
    assert elect(ranks[0])
    again = Directory(store, SourceEntry("a", ("127.0.0.1", 2), machine="m"))
    again.update()
    assert MachineRelays.unpack(store.get("weights/machine/m")) == MachineRelays((1, 2, 3), {})
    assert elect(ranks[1])
    assert not elect(again)
