"""Weights from a trainer to rollouts, when nothing goes wrong, and what they leave behind."""

import pytest


def test_a_rollout_pulls_what_a_trainer_publishes(mover, events):
    trainer = mover("publisher")
    rollout = mover("puller", who="a", transport="tcp")
    for version in (3, 4, 7):
        trainer.ask("publish", version=version, mib=4)
        rollout.pulls(version, 4)
    assert rollout.ask("newest") == {"newest": 7}
    rollout.pulls(7, 4)
    told = [(event["version"], event["transports"], event["bytes"]) for event in events("weights_pulled")]
    assert told == [(version, ["tcp"], 4 << 20) for version in (3, 4, 7)]


def test_each_rank_of_a_trainer_sends_its_part(mover):
    trainers = [mover("publisher", rank=rank, ranks=3) for rank in range(3)]
    rollout = mover("puller", who="a")
    for trainer in trainers:
        trainer.send("publish", version=1, mib=2)
    assert all(trainer.answer() == {} for trainer in trainers)
    rollout.pulls(1, 2, ranks=3)
    assert [trainer.ask("sent")["sent"] for trainer in trainers] == [2 << 20] * 3


@pytest.mark.parametrize(("transport", "second"), [("tcp", (1 << 20, 7 << 20)), ("memory", (8 << 20, 0))])
def test_what_did_not_change_does_not_move(mover, events, transport, second):
    """In the memory of the source nothing has to move: all is verified, and the version before is of no use."""
    trainer, rollout = mover("publisher"), mover("puller", who="a", transport=transport)
    for version in (1, 2):
        trainer.ask("publish", version=version, mib=8, same=14)
        rollout.pulls(version, 8, same=14)
    assert [(event["bytes"], event["unchanged_bytes"]) for event in events("weights_pulled")] == [(8 << 20, 0), second]


def test_a_trainer_sends_once_however_many_pull(mover):
    """Rollouts that pull together form a chain; one that comes later is served by them."""
    trainer = mover("publisher")
    rollouts = [mover("puller", who=f"rollout-{number}", transport="tcp") for number in range(4)]
    trainer.ask("tire", seconds=0.02)
    trainer.ask("publish", version=1, mib=8)
    for rollout in rollouts:
        rollout.send("pull", mib=8)
    assert [rollout.answer() for rollout in rollouts] == [{"version": 1, "right": True}] * 4
    late = mover("puller", who="late", transport="tcp")
    late.pulls(1, 8)
    assert trainer.ask("sent") == {"sent": 8 << 20}
    assert sum(rollout.ask("sent")["sent"] for rollout in rollouts) == 4 * (8 << 20)


def test_another_token_gets_nothing(mover):
    trainer, stranger = mover("publisher"), mover("puller", who="a", token=b"x" * 32)
    trainer.ask("publish", version=1, mib=1)
    said = stranger.ask("pull", mib=1)
    assert said["error"] == "WeightsError"
    assert "its token is not that of the run" in said["message"]
    assert trainer.ask("sent") == {"sent": 0}


def test_runs_do_not_mix(mover):
    """Two of them on one store, even with the same token and the same names."""
    for run, version in (("one", 5), ("two", 6)):
        mover("publisher", run=run).ask("publish", version=version, mib=1)
    for run, version in (("one", 5), ("two", 6)):
        mover("puller", who="a", run=run).pulls(version, 1)


def test_versions_count_upwards(mover):
    trainer, rollout = mover("publisher"), mover("puller", who="a")
    for version in (1, 2, 3):
        trainer.ask("publish", version=version, mib=1)
    said = trainer.ask("publish", version=3, mib=1)
    assert (said["error"], "count upwards" in said["message"]) == ("WeightsError", True)
    rollout.pulls(3, 1)


def test_nothing_to_pull_is_an_error_after_the_limit(mover):
    said = mover("puller", who="a").ask("pull", mib=1, seconds=0.3)
    assert (said["error"], "newest published is -1" in said["message"]) == ("WeightsLate", True)
