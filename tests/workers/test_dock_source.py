"""The trainer's source on a real dock, and what a trainer that died has left there."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from distflow.data.batch import Batch, Ragged
from distflow.data.crossing import REPORT, report_column
from distflow.data.dataloader import Dataloader
from distflow.dock import Consumer, DockClient, StorageShardServer, TimedOut
from distflow.dock.consumers import ORDER
from distflow.errors import InvalidInput
from distflow.plan import ROLLOUT, TRAINER
from distflow.telemetry.metrics import Metrics
from workers.dock_source import DockSource
from workers.rollout_channel import RolloutChannel

ROWS, PROMPTS, TOKEN = 4, 2, bytes(32)


class Records(list):
    """Records of no fields."""

    def get(self, indices):
        return [self[index] for index in indices]


def loader() -> Dataloader:
    return Dataloader(Records([{}] * 8), lambda records: {}, PROMPTS, 0)


@pytest.fixture
def channel():
    """A dock that has the samples of three steps."""
    service = StorageShardServer(TOKEN)
    address = service.start()
    channel = RolloutChannel(None, TOKEN, [address], "127.0.0.1", ROWS, PROMPTS, 2)
    with channel.dock("trainer 0") as dock:
        dock.configure([Consumer(TRAINER, (REPORT,), (), ROWS, ROWS * PROMPTS, seconds=3600.0, can_roll_back=True)])
        ids = channel.rows_of(torch.arange(3 * PROMPTS))
        dock.put(Batch(ids, {REPORT: torch.zeros(len(ids), dtype=torch.uint8)}))
    yield channel
    service.close()


@pytest.mark.parametrize(("on_stale", "refused"), [("drop", False), ("keep", False), ("wait", True), ("", True)])
def test_prompts_left_over_are_refused_where_training_is_in_order(empty, on_stale, refused):
    """Without `on_stale`: in mode sync. An export loads a state, and trains on nothing."""
    source = DockSource(loader(), plan(), empty, settings(on_stale=on_stale), TRAINED, 0) if on_stale else loader()
    source.load_state_dict({"position": 4, "open": [[1, 0]]})
    with pytest.raises(InvalidInput, match="left 1 prompts over") if refused else contextlib.nullcontext():
        source.start_at(2)
    source.close()


@pytest.mark.parametrize("on_stale", ["wait", "keep"])
def test_prompts_after_a_resume_with_other_data_are_those_of_rollouts(empty, on_stale):
    source = DockSource(loader(), plan(), empty, settings(on_stale=on_stale), TRAINED, 0)
    source.loader.files = {"new.jsonl": [8, "new"]}
    source.load_state_dict({"position": 4, "files": {"old.jsonl": [6, "old"]}})
    other = loader()
    other.records.load_state_dict(source.loader.records.state_dict())
    indices = [source.loader._index(place) for place in range(20)]
    assert indices == [other._index(place) for place in range(20)]
    assert len({*indices[4:12]}) == 8
    assert len({*indices[:4]}) > 1
    source.close()


def ready(dock: DockClient) -> int:
    return sum(each["indexes"][TRAINER]["ready"] for each in dock.status() if TRAINER in each["indexes"])


def settings(**more) -> SimpleNamespace:
    return SimpleNamespace(**{"steps": 3, "staleness": 0, "wait_limit": 1.0, "on_stale": "wait",
                              "trainer_samples_alone": False, **more})


def plan(*tasks) -> SimpleNamespace:
    return SimpleNamespace(tasks=tasks, source=None, ranks=1)


TRAINED = {"actor": SimpleNamespace(version=0)}


def trainer(channel: RolloutChannel, steps: int, attempt: int = 0) -> DockSource:
    source = DockSource(loader(), plan(), channel, settings(), TRAINED, 0, attempt)
    source.load_state_dict({"position": steps * PROMPTS})
    return source


def test_ordered_source_reconcile_commits_rows_of_the_snapshot(channel):
    """A trainer died between the two: only the rows of steps to come are left."""
    with channel.dock("somebody") as dock:
        first = dock.lease(TRAINER, ROWS * PROMPTS, step=0)
        dock.commit(first)
        assert ready(dock) == 2 * ROWS * PROMPTS
        again = trainer(channel, steps=2)
        again.reconcile()
        assert ready(dock) == ROWS * PROMPTS
        again.reconcile()
        assert ready(dock) == ROWS * PROMPTS
        again.dock.close()


@pytest.fixture
def empty():
    """A dock whose trainer takes what is done first."""
    service = StorageShardServer(TOKEN)
    channel = RolloutChannel(None, TOKEN, [service.start()], "127.0.0.1", ROWS, PROMPTS, 1)
    with channel.dock("trainer 0") as dock:
        samples = (REPORT, "rollout/versions")
        dock.configure([Consumer(ROLLOUT, (ORDER,), samples, ROWS),
                        Consumer(TRAINER, samples, (), ROWS, seconds=3600.0, can_roll_back=True)])
    yield channel
    service.close()


@pytest.fixture
def unordered(empty):
    """Make trainers that are at most one step ahead."""
    made = []

    def make(drops: bool = True, state=None, attempt: int = 0) -> DockSource:
        task = SimpleNamespace(node="rollout", role="actor", writes=("versions",), arrives=False, out_fan=(), draws=1)
        run = settings(steps=4, staleness=1, on_stale="drop" if drops else "keep")
        source = DockSource(loader(), plan(task), empty, run, {"actor": SimpleNamespace(version=0)}, 0, attempt)
        if state:
            source.load_state_dict(state)
        made.append(source)
        return source

    yield make
    for source in made:
        source.close()


def sample(channel, prompts: dict[int, int]) -> None:
    """Complete these prompts, each with weights of a version."""
    with channel.dock("rollout 1") as dock:
        leased = {}
        while lease := dock.try_lease(ROLLOUT, ROWS):
            leased[int(lease.ids[0]) // ROWS] = lease
        assert prompts.keys() <= leased.keys()
        for prompt, version in prompts.items():
            versions = Ragged.from_rows([torch.tensor([version, 99], dtype=torch.int32)] * ROWS)
            dock.put(Batch(leased[prompt].ids, {REPORT: report_column([Metrics().take()], ROWS),
                                                "rollout/versions": versions}))
            dock.commit(leased[prompt])


def step(source: DockSource, number: int) -> list[int]:
    source.trained["actor"].version = 10 * number
    found = source.next().ids.tolist()
    source.finish()
    return found


def test_unordered_source_takes_done_prompts_first_and_resamples_stale_ones(empty, unordered):
    source = unordered()
    source._enqueue_prompts(0)
    sample(empty, {0: 0, 2: 0})
    assert step(source, 0) == [0, 2]
    source._enqueue_prompts(1)
    sample(empty, {3: 0, 4: 10})
    assert step(source, 1) == [3, 4]
    source._enqueue_prompts(2)
    sample(empty, {1: 0, 5: 10})  # 1 has taken two steps
    with pytest.raises(TimedOut):
        step(source, 2)
    assert source.open == {1: 1, 6: 0, 7: 0}, "5 is taken already"


@pytest.mark.parametrize(("position", "asked"), [(4 * PROMPTS, {8, 9}), (2 * PROMPTS + 1, {6, 7})])
def test_ordered_source_resumes_with_another_batch_size(empty, position, asked):
    """Two steps of three are done, by twice as many prompts, or by a number that ends in the middle of a draw."""
    source = DockSource(loader(), plan(), empty, settings(), TRAINED, 0)
    source.load_state_dict({"position": position})
    source.start_at(2)
    source._enqueue_prompts(source.loader.drawn_before)
    with empty.dock("rollout 1") as dock:
        leases = iter(lambda: dock.try_lease(ROLLOUT, ROWS), None)
        assert {int(lease.ids[0]) // ROWS for lease in leases} == asked
    source.close()


def test_unordered_source_trains_each_prompt_once_across_restarts(empty, unordered):
    """The first trainer dies behind its snapshot, ahead of the commit; the second in the step after."""
    source = unordered()
    source._enqueue_prompts(0)
    sample(empty, {0: 0, 2: 0})
    trained = source.next().ids.tolist()
    again = unordered(state=source.state_dict(), attempt=1)
    again.reconcile()
    again.trained["actor"].version = 10
    again._enqueue_prompts(1)
    sample(empty, {3: 10, 5: 10})
    state = again.state_dict()
    assert step(again, 1) == [3, 5], "0 and 2 came again"
    last = unordered(state=state, attempt=2)
    last.reconcile()
    trained += step(last, 1)
    last._enqueue_prompts(2)
    sample(empty, {1: 20, 4: 10, 6: 20, 7: 20})
    trained += step(last, 2) + step(last, 3)
    assert sorted(trained) == [*range(8)]
    last.release_before(last.state_dict())
    end = unordered(state=last.state_dict(), attempt=3)
    end.reconcile()
    assert end.dock.status()[0]["rows"] == 0, "what was trained on has left"
    assert not end.open


def test_unordered_source_resumes_from_a_state_of_another_mode(unordered):
    """As of an async run with `on_stale: wait`, or of a sync one, without checkpoints."""
    source = unordered(state={"position": 2 * PROMPTS})
    source.release_before({"position": 2 * PROMPTS})
    assert source.dock.status()[0]["rows"] == 0


def test_unordered_source_may_keep_stale_prompts(empty, unordered):
    source = unordered(drops=False)
    source.enqueued = 4
    source.open = {0: 0, 1: 0, 2: 0, 3: 0}
    source.oldest = {"actor": [10, 20]}
    source._enqueue_prompts(0)
    sample(empty, {1: 0, 3: 0})
    assert step(source, 3) == [1, 3]
