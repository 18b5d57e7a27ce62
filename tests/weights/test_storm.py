"""Fifty movements of weights, with a process killed at a random moment of each."""

import random
import threading

import pytest

MIB, CHUNK, RANKS, ROLLOUTS, MOVEMENTS = 4, 256 << 10, 2, 3, 50


class Crowd:
    """A trainer of two ranks and three rollouts; each that is killed is restarted."""

    def __init__(self, mover):
        self.mover = mover
        self.trainers = [self.trainer(rank) for rank in range(RANKS)]
        self.rollouts = [self.rollout(number) for number in range(ROLLOUTS)]

    def trainer(self, rank):
        return self.tired(self.mover("publisher", rank=rank, ranks=RANKS))

    def rollout(self, number):
        transport = "auto" if number else "tcp"
        return self.tired(self.mover("puller", who=f"rollout-{number}", deadline=0.5, transport=transport))

    def tired(self, mover):
        """Slow sources, so that most kills hit a transfer under way."""
        return mover.send("tire", seconds=0.003)

    def publish(self, version):
        for trainer in self.trainers:
            trainer.send("publish", version=version, mib=MIB)

    def kill_one(self, chance):
        """Return the processes to restart."""
        victims = [*enumerate(self.rollouts), *((-1, trainer) for trainer in self.trainers)]
        number, victim = chance.choice(victims)
        victim.kill()
        return number

    def restore(self, number):
        """A trainer restarts as a whole; a rollout alone."""
        if number >= 0:
            self.rollouts[number] = self.rollout(number)
            return
        for trainer in self.trainers:
            if trainer.process.is_alive():
                trainer.kill()
        self.trainers = [self.trainer(rank) for rank in range(RANKS)]


def heard(mover):
    try:
        while (said := mover.answer()) == {"tired": True}:
            pass
        return said
    except (EOFError, OSError):
        return None


@pytest.mark.run
def test_no_version_is_ever_torn(mover, events):
    chance, crowd = random.Random(20251121), Crowd(mover)
    for version in range(1, MOVEMENTS + 1):
        for rollout in crowd.rollouts:
            rollout.send("pull", least=version, mib=MIB, ranks=RANKS)
        crowd.publish(version)
        moment = threading.Event()
        moment.wait(chance.uniform(0.0, 0.15))
        killed = crowd.kill_one(chance)
        if killed < 0:
            crowd.restore(killed)
            crowd.publish(version)
        answers = [heard(one) for one in (*crowd.trainers, *crowd.rollouts)]
        assert [answer for number, answer in enumerate(answers) if number != RANKS + killed and answer and
                answer.get("right") is False] == []
        survivors = [answer for number, answer in enumerate(answers[RANKS:]) if number != killed]
        assert survivors == [{"version": version, "right": True}] * len(survivors), (version, killed)
        if killed >= 0:
            crowd.restore(killed)
    lost = len(events("weights_source_lost"))
    pulled = events("weights_pulled")
    assert all(event["bytes"] <= (RANKS * MIB << 20) + lost * CHUNK for event in pulled)
    assert len(pulled) >= MOVEMENTS * (ROLLOUTS - 1)
