"""Order of sources, and entries of the directory."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from stores import CountingStore

from distflow.weights.directory import SEEN, Directory, HeldChunks, Holders, SourceEntry
from distflow.weights.manifest import ManifestDigest, PublishedVersion
from distflow.weights.sources import is_available, is_supplied, order_sources

KEY = "3.team"


def entry(who, have=10, rank=-1, **more):
    return SourceEntry(who, ("127.0.0.1", 1), rank, (HeldChunks(3, KEY, have, 10),), **more)


def entries(*given):
    return Holders({each.who: each for each in given})


def order(*given, mine=0):
    return [each.who for each in order_sources(entries(*given), KEY, "me", mine, [0])]


def test_relays_before_the_trainer_and_the_free_before_the_busy():
    assert order(entry("t", rank=0, serving="half"), entry("busy", serving="x"), entry("full"),
                 entry("half", have=5, source="t")) == ["full", "half", "t", "busy"]


def test_a_relay_is_worth_asking_if_it_is_ahead_and_something_flows_to_it():
    trainer = entry("t", rank=0, serving="half")
    assert order(trainer, entry("half", have=5, source="t"), mine=4) == ["half", "t"]
    assert order(trainer, entry("half", have=5, source="t"), mine=6) == ["t", "half"]
    assert order(trainer, entry("dry", have=5)) == ["t", "dry"]
    assert order(entry("other part", rank=1)) == []


def test_neither_we_nor_a_ring_count_as_supply():
    below = entry("below", have=2, source="me")
    ring = entries(entry("a", have=1, source="b"), entry("b", have=1, source="a"), below,
                   entry("c", have=1, source="below"), entry("d", have=1, source="t"), entry("t", rank=0))
    assert {who for who, each in ring.items() if is_supplied(each, KEY, "me", ring)} == {"d", "t"}


def test_one_whose_source_is_not_among_those_that_were_looked_at_counts_as_supplied():
    some = entries(entry("a", have=1, source="unseen"), entry("dry", have=1))
    some.whole = False
    assert {who for who, each in some.items() if is_supplied(each, KEY, "me", some)} == {"a"}
    assert order_sources(some, KEY, "me", 0, [0])[0].who == "a"


def test_whether_a_version_can_be_had():
    assert is_available(entries(entry("full")), KEY, [0, 1])
    assert is_available(entries(entry("t0", rank=0), entry("t1", rank=1)), KEY, [0, 1])
    assert not is_available(entries(entry("t0", rank=0), entry("half", have=5)), KEY, [0, 1])


@pytest.fixture
def pair(store):
    made = [Directory(store, entry(who), dead=0.3) for who in ("a", "b")]
    yield made
    for one in made:
        one.over.set()


def test_a_reader_of_many_holders_looks_at_some(store):
    """And at the trainer ranks that it asks for first."""
    for number in range(3 * SEEN):
        Directory(store, entry(f"relay {number}")).update()
        Directory(store, entry(f"trainer-{number}", rank=number)).update()
    counting = CountingStore(store.port)
    ours, seen = Directory(counting.below(store.prefix[:-1]) if store.prefix else counting, entry("me")), set()
    counting.operations.clear()
    for _ in range(20):
        found = ours.holders([150, *range(150)])
        assert (len(found), found.whole) == (2 * SEEN, False)
        assert {each.rank for each in found.values() if each.rank >= 0} == {150, *range(SEEN - 1)}
        seen |= {who for who, each in found.items() if each.rank < 0}
    assert len(counting.operations) == 40
    assert len(seen) > 2 * SEEN, "others each time"


def test_who_shows_no_sign_of_life_disappears(pair):
    ours, theirs = pair
    theirs.update()
    assert list(ours.holders()) == ["b"]
    end = time.monotonic() + 60
    while ours.holders():
        assert time.monotonic() < end
    assert ours.store.get(theirs.own_key) is None
    theirs.update(serving="a")
    assert ours.holders()["b"].serving == "a", "it was only slow"


def test_a_version_is_revealed_once(pair):
    ours, theirs = pair
    first, second = PublishedVersion(1, "x", (ManifestDigest("d", 5, 1),)), PublishedVersion(2, "x",
                                                                                             (ManifestDigest("e", 5,
                                                                                                             1),))
    assert (ours.newest(), ours.newest_versions()) == ("", [])
    ours.begin_attempt("x")
    assert ours.announce_version(first)
    assert theirs.announce_version(second)
    assert (ours.newest(), ours.newest_versions()) == (second.key, [second, first])


def test_a_team_of_an_earlier_attempt_reveals_nothing(pair):
    """Whatever it had read before the next one began."""
    ours, theirs = pair
    first, late = (PublishedVersion(version, "x", (ManifestDigest("d", 5, 1),)) for version in (1, 2))
    ours.begin_attempt("x")
    assert ours.announce_version(first)
    theirs.begin_attempt("y")
    assert not ours.announce_version(late)
    assert (theirs.newest(), theirs.newest_versions()) == (first.key, [first])
    assert theirs.store.list("head/") == {f"head/{first.key}": first.pack()}


def test_of_two_that_reveal_at_once_neither_is_lost(store):
    """Each changes what the other has read; the store remembers three versions."""
    teams = [Directory(store, entry(str(number))) for number in range(4)]
    teams[0].begin_attempt("x")
    versions = [PublishedVersion(number, "x", ()) for number in range(12)]
    with ThreadPoolExecutor(4) as threads:
        shown = [threads.submit(team.announce_version, version) for team, version in zip(teams * 3, versions)]
    assert all(job.result() for job in shown)
    assert len({head.version for head in teams[0].newest_versions()}) == 3
    assert len(teams[0].store.list("head/")) == 3
