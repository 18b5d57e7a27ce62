"""Deltas: what has changed since the version before, and nothing else, over real connections."""

from __future__ import annotations

import numpy as np
import pytest

from distflow.weights.delta import DeltaChoice, decode, encode


def words(made: np.random.Generator, count: int) -> np.ndarray:
    return made.integers(0, 1 << 16, count, dtype=np.uint16)


@pytest.mark.parametrize("seed", range(30))
def test_a_delta_makes_the_new_version_of_the_old_one(seed):
    made = np.random.default_rng(seed)
    old = words(made, int(made.integers(0, 5000)))
    new, changed = old.copy(), made.random(len(old)) < made.choice([0.0, 0.0003, 0.01, 0.1])
    new[changed] = words(made, int(changed.sum()))
    if seed % 3 == 0 and len(new):
        new[-1] += 1  # the last word, after a long stretch that stays
    before, after, into = old.view(np.uint8), new.view(np.uint8), np.empty(2 * len(new), np.uint8)
    delta = encode(before, after)
    if delta is None:
        assert 3 * (old != new).mean() > 2 / 4 - 0.1, "little has changed"
        return
    decode(before, len(delta[0]), np.frombuffer(b"".join(each.tobytes() for each in delta), np.uint8), into)
    assert (into == after).all()


def test_a_few_changed_weights_take_few_bytes():
    made = np.random.default_rng(0)
    for share in (0.01, 0.03):
        old = words(made, 1 << 20)
        new = np.where(made.random(len(old)) < share, old ^ 1, old)
        assert sum(each.nbytes for each in encode(old.view(np.uint8), new.view(np.uint8))) < 0.05 * new.nbytes


def test_what_has_changed_much_or_has_an_odd_length_is_sent_whole():
    made = np.random.default_rng(0)
    assert encode(words(made, 999).view(np.uint8), words(made, 999).view(np.uint8)) is None
    assert encode(np.zeros(9, np.uint8), np.zeros(9, np.uint8)) is None


@pytest.mark.parametrize(("codes", "delta"), [(1, [3, 0]), (1, [40, 0, 0]), (2, [255, 1, 0, 0]), (9, [0, 0, 0])])
def test_a_delta_that_fits_nothing_is_refused(codes, delta):
    with pytest.raises(ConnectionError, match="are no delta of chunks of 64"):
        decode(np.zeros(64, np.uint8), codes, np.array(delta, np.uint8), np.empty(64, np.uint8))


def test_the_faster_way_is_taken_and_the_other_one_tried_again():
    choice, rates = DeltaChoice(), {True: 5e9, False: 1e9}
    taken = []
    for run in range(200):
        if run == 100:
            rates = {True: 1e9, False: 5e9}  # a faster network
        taken.append(choice.choose())
        choice.record_rate(taken[-1], rates[taken[-1]])
    assert taken[:4].count(True) == 2
    assert sum(taken[4:100]) >= 90
    assert sum(taken[140:]) <= 6


def test_few_bytes_cross_a_connection_when_little_has_changed(mover, events):
    """And a relay has them for the next one."""
    trainer = mover("publisher", rank=0, ranks=1)
    rollouts = [mover("puller", who=name, transport="tcp") for name in "ab"]
    for version in (1, 2, 3):
        trainer.ask("publish", version=version, mib=8, every=100)
        for rollout in rollouts:
            rollout.send("pull", mib=8, every=100)
        assert [rollout.answer() for rollout in rollouts] == [{"version": version, "right": True}] * 2
    pulled = events("weights_pulled")
    assert [event["bytes"] + event["unchanged_bytes"] for event in pulled] == [8 << 20] * 6
    assert {event["bytes"] for event in pulled if event["version"] == 1} == {8 << 20}
    assert min(event["bytes"] for event in pulled) < 8 << 16
