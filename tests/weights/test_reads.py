"""Processes that read slices of a model pull these and no more, bit for bit. Machines are names here."""

import pytest
import torch

from distflow.weights.shard_slice import Reads

LAYERS = 3
MATRIX = 8 << 20
FINE = {"version": 1, "right": True}


def boxes_of(rank, ranks):
    rows, columns = 2048 // ranks, 1024
    return {f"{layer}.{name}.weight": [box] for layer in range(LAYERS) for name, box in {
        "up": ((rank * rows, 0), (rows, columns)), "down": ((0, rank * rows), (columns, rows))}.items()}


def reads_of(machine, ranks):
    """Reads of a machine, which has every second half of the ranks."""
    found = [(2 * rank // ranks, boxes_of(rank, ranks)) for rank in range(ranks)]
    return Reads.on_machine(machine, found, torch.float32)


@pytest.fixture
def trainer(mover):
    def start(version=1, ranks=2):
        trainer = mover("publisher", machine="trainer's", transport="tcp")
        trainer.ask("publish_split", version=version, layers=LAYERS, ranks=ranks)
        return trainer

    return start


@pytest.fixture
def rollout(mover):
    """A puller on machine a (0) or b (1) of a model that is split over both."""
    def start(who, ranks=2, machine="ab"):
        return mover("puller", who=who, machine=who[0], transport="auto",
                     reads=reads_of(machine.index(who[0]) % 2, ranks))

    return start


def pulls(events):
    return {event["who"]: event for event in events("weights_pulled")}


@pytest.mark.parametrize("ranks", [2, 4])
def test_machines_pull_their_slices_once(trainer, rollout, events, ranks):
    trainer = trainer(ranks=ranks)
    rollouts = [rollout(f"{machine}{rank}", ranks) for machine in "ab" for rank in range(ranks // 2)]
    for each in rollouts:
        each.send("pull_slices", layers=LAYERS)
    assert [each.answer() for each in rollouts] == [FINE] * ranks
    ideal = 2 * LAYERS * MATRIX
    assert ideal < trainer.ask("sent")["sent"] < 1.05 * ideal
    assert all(sum(event["sources"].values()) < 1.05 * ideal / 2 for event in pulls(events).values())


def test_a_relay_serves_those_that_read_the_same_and_outlives_the_trainer(trainer, rollout, mover, events):
    first, relay = trainer(), rollout("a0")
    assert relay.ask("pull_slices", layers=LAYERS) == FINE
    first.kill()
    alike = rollout("c0", machine="cd")
    other, all_of_it = rollout("b0"), mover("puller", who="w", machine="w")
    assert alike.ask("pull_slices", layers=LAYERS) == FINE
    assert {*pulls(events)["c0"]["sources"]} == {"a0"}
    for each in (other, all_of_it):
        assert each.ask("pull_slices", layers=LAYERS, seconds=0.5)["error"] == "WeightsLate"
    trainer(version=2, ranks=4)
    for each in (other, all_of_it, alike):
        assert each.ask("pull_slices", layers=LAYERS, least=2) == {"version": 2, "right": True}


def test_a_relay_that_dies_costs_a_chunk(trainer, rollout, events):
    trainer, relay = trainer(), rollout("a0")
    assert relay.ask("pull_slices", layers=LAYERS) == FINE
    sent = trainer.ask("sent")["sent"]
    relay.send("die_serving", chunks=20)
    assert rollout("c0", machine="cd").ask("pull_slices", layers=LAYERS) == FINE
    assert {event["source"] for event in events("weights_source_lost") if event["who"] == "c0"} == {"a0"}
    assert trainer.ask("sent")["sent"] < 2 * sent


def test_what_travels_in_another_dtype_is_pulled_whole(trainer, mover):
    trainer, reads = trainer(), Reads(reads_of(0, 2).boxes, torch.bfloat16)
    assert mover("puller", who="a0", machine="a", reads=reads).ask("pull_slices", layers=LAYERS) == FINE
    assert trainer.ask("sent")["sent"] > 2 * LAYERS * MATRIX
