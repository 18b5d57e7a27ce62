"""One version of weights, from a trainer to rollouts."""


def test_a_rollout_pulls_what_a_trainer_publishes(mover, events):
    trainer = mover("publisher", rank=0, ranks=1, transport="tcp")
    rollout = mover("puller", who="a")
    for version in (3, 4):
        trainer.ask("publish", version=version, mib=4)
        said = rollout.ask("pull", mib=4)
        assert (said["version"], said["right"]) == (version, True), said
    assert [event["transports"] for event in events("weights_pulled")] == [["tcp"], ["tcp"]]
    assert rollout.ask("newest") == {"newest": 4}
