"""Processes die, hang or are cut off while weights move; every living rollout ends with a complete version."""

import random

import pytest
from weights.proxy import Proxy

MIB, CHUNK = 8, 256 << 10
WHOLE = MIB << 20


def moved(events, who):
    return next(event["bytes"] for event in reversed(events("weights_pulled")) if event["who"] == who)


@pytest.mark.parametrize("seed", range(2))
def test_the_source_dies(mover, events, seed):
    """A relay: the rest comes from the trainer."""
    after = random.Random(seed).randrange(WHOLE // CHUNK)
    trainer, relay, rollout = (mover("publisher"), mover("puller", who="relay"),
                               mover("puller", who="a", transport="tcp"))
    trainer.ask("publish", version=1, mib=MIB)
    relay.ask("pull", mib=MIB)
    relay.ask("die_serving", chunks=after)
    rollout.pulls(1, MIB)
    assert moved(events, "a") == WHOLE + CHUNK // 2, "of one chunk, a half came twice"
    assert {event["source"] for event in events("weights_source_lost")} == {"relay"}
    assert trainer.ask("sent")["sent"] == 2 * WHOLE - after * CHUNK


@pytest.mark.parametrize("seed", range(2))
def test_the_trainer_dies_and_no_process_has_everything(mover, events, seed):
    """Rollouts wait for the next attempt of the trainer, whose ranks are others."""
    after = random.Random(seed).randrange(WHOLE // CHUNK)
    trainer = mover("publisher", transport="tcp")
    rollouts = [mover("puller", who=f"rollout-{number}") for number in range(2)]
    trainer.ask("publish", version=4, mib=MIB)
    trainer.ask("die_serving", chunks=after)
    assert rollouts[0].ask("pull", mib=MIB, seconds=8)["error"] == "WeightsLate"
    assert {event["version"] for event in events("weights_lost")} == {4}
    for rollout in rollouts:
        rollout.send("pull", mib=MIB, ranks=2)
    started = [mover("publisher", rank=rank, ranks=2) for rank in range(2)]
    for one in started:
        one.send("publish", version=4, mib=MIB)
    assert [one.answer() for one in started] == [{}, {}]
    assert [rollout.answer() for rollout in rollouts] == [{"version": 4, "right": True}] * 2


@pytest.mark.parametrize("at", ["_copy_shards", "_publish_part", "announce_version"])
def test_a_trainer_that_dies_publishing_leaves_the_version_before(mover, at):
    trainers = [mover("publisher", rank=rank, ranks=2) for rank in range(2)]
    for trainer in trainers:
        trainer.send("publish", version=1, mib=1)
    assert [trainer.answer() for trainer in trainers] == [{}, {}]
    trainers[0].ask("publish", version=2, mib=1)
    trainers[1].send("die_publishing", version=2, mib=1, at=at).process.join()
    rollout = mover("puller", who="a")
    assert rollout.ask("newest") == {"newest": 1}
    relay_less = rollout.ask("pull", mib=1, ranks=2, seconds=1.5)
    assert relay_less["error"] == "WeightsLate", "half of it died with its rank"
    trainers[0].kill()
    started = [mover("publisher", rank=rank, ranks=2) for rank in range(2)]
    for version in (1, 2):
        for trainer in started:
            trainer.send("publish", version=version, mib=1)
        assert [trainer.answer() for trainer in started] == [{}, {}]
    rollout.pulls(2, 1, ranks=2)


def test_the_puller_dies(mover):
    """Its lease of the source is free at once."""
    trainer = mover("publisher")
    trainer.ask("publish", version=1, mib=MIB)
    victim = mover("puller", who="victim")
    victim.ask("die_pulling", chunks=7)
    victim.send("pull", mib=MIB).process.join()
    mover("puller", who="a").pulls(1, MIB)
    mover("puller", who="victim").pulls(1, MIB)


def test_a_link_is_cut_and_comes_back(mover, events):
    trainer = mover("publisher", transport="tcp")
    with Proxy(trainer.ask("publish", version=1, mib=MIB) or trainer.ask("port")["port"]) as proxy:
        trainer.ask("by_way_of", port=proxy.port)
        proxy.cut_after(WHOLE // 3)
        rollout = mover("puller", who="a").send("pull", mib=MIB)
        proxy.cut.wait(20)
        while not events("weights_source_lost"):
            assert rollout.process.is_alive()
        proxy.heal()
        assert rollout.answer() == {"version": 1, "right": True}
    assert WHOLE <= moved(events, "a") <= WHOLE + CHUNK


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_corrupt_chunk_is_pulled_elsewhere_and_reported(mover, events, transport):
    """The good ones of the relay's are used where they lie until then, in its memory."""
    trainer, relay, rollout = (mover("publisher", transport="tcp"),
                               *(mover("puller", who=who, transport=transport) for who in ("relay", "a")))
    trainer.ask("publish", version=1, mib=MIB)
    relay.ask("pull", mib=MIB)
    relay.ask("spoil", part=0, chunk=3)
    rollout.pulls(1, MIB)
    found = [(event["source"], event["chunk"]) for event in events("weights_corrupt")]
    assert found == [("relay", 3)]
    assert trainer.ask("sent")["sent"] == WHOLE + CHUNK


def test_chunks_that_stay_corrupt_are_an_error(mover, events):
    trainer = mover("publisher")
    trainer.ask("publish", version=1, mib=1)
    trainer.ask("spoil", part=0, chunk=1)
    said = mover("puller", who="a").ask("pull", mib=1)
    assert (said["error"], "may be defective" in said["message"]) == ("WeightsError", True)
    assert len(events("weights_corrupt")) == 5
