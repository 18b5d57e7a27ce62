"""The trainer's source on a real dock, and what a trainer that died has left there."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch

from distflow.config.load import load
from distflow.data.batch import Batch, Ragged
from distflow.data.crossing import REPORT, report_column
from distflow.data.dataloader import Dataloader
from distflow.dock import Consumer, DockClient, DockError, LeaseLost, StorageShardServer, TimedOut
from distflow.dock.consumers import ORDER, VALIDATION
from distflow.errors import InvalidInput, RewardsFailed
from distflow.plan import ROLLOUT, TRAINER
from distflow.store.interface import StoreUnavailable
from distflow.telemetry.events import Events
from distflow.telemetry.metrics import Metrics
from planners import plan
from workers.colocated import ColocatedSource
from workers.functions.trajectory import Recorded, rows_of
from workers.fusion import Fusion
from workers.rollout import PartialRollouts, RolloutContext, TurnWriter
from workers.rollout_channel import VALIDATING, RolloutChannel, SampleTimeout
from workers.sources import AsyncSource, UnorderedSource, source_of

ROWS, PROMPTS, TOKEN = 4, 2, bytes(32)


class Loader:
    """Two prompts a step; `position` of those that were drawn."""

    batch = PROMPTS
    records = encode = seed = share = layout = files = None

    def __init__(self, steps: int):
        self.position = steps * PROMPTS

    @property
    def drawn_before(self) -> int:
        return self.position // PROMPTS

    def at(self, prompts: torch.Tensor) -> torch.Tensor:
        return prompts


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


def test_other_ranks_hear_of_the_first_one_while_it_waits_for_samples(channel):
    """Otherwise they would take it for lost just when it reports what is missing."""
    trainer = plan(load("grpo.yaml", None, ["mode=async"], None), 4).groups[0].plan
    fused = Fusion(trainer, 0, Loader(3), channel, 2.0, executor=None)
    with channel.dock("trainer 0") as dock:
        timeout = SampleTimeout(channel, dock, 2.0)
        until = timeout.since + 2.0
        look = partial(fused._seen, dock, draw=3, least=ROWS, timeout=timeout)
        assert look() == b""
        with pytest.raises(TimedOut, match="it wants at least 4; 24 are ready") as error:
            list(iter(look, None))
    assert "`wait_limit`" in error.value.__notes__[0]
    assert time.monotonic() >= until


@pytest.mark.parametrize("fused", [False, True])
def test_the_wait_for_samples_begins_when_nobody_validates_any_more(channel, fused):
    """A rollout that validates keeps its weights, so that the samples of newer ones come later."""
    limit, source = 0.4, trainer(channel, steps=3)
    groups = plan(load("grpo.yaml", None, ["mode=async"], None), 4).groups
    fusion, ended = Fusion(groups[0].plan, 0, Loader(3), channel, limit, executor=None), time.monotonic() + 3 * limit
    with source.dock as dock:
        dock.index_status = lambda: {"indexes": {VALIDATION: {"leases": time.monotonic() < ended}},
                                     "clients": [["rollout 1", VALIDATING, 0.0]]}
        timeout = SampleTimeout(channel, dock, limit)
        look = partial(fusion._seen, dock, 3, ROWS, timeout) if fused else partial(
            source._lease_batch, 3, timeout, PROMPTS)
        with pytest.raises(TimedOut):
            list(iter(look, None))
    assert time.monotonic() >= ended + limit / 2, "from the last look on it is a whole one"


def test_the_dock_is_asked_who_validates_a_few_times_in_a_wait(channel, monkeypatch):
    """However often somebody wants to know whether it is over, as after each step of training."""
    asked = []
    monkeypatch.setattr(RolloutChannel, "is_validating", lambda self, dock: asked.append(dock))
    timeout = SampleTimeout(channel, None, 600.0)
    assert not any(timeout.is_over() for _ in range(100))
    assert len(asked) == 1
    timeout.look_at = 0.0
    timeout.is_over()
    assert len(asked) == 2


def test_partial_rows_that_the_dock_refuses_are_reported_and_the_others_saved(channel, tmp_path, monkeypatch):
    events = Events()
    events.open(tmp_path / "events.jsonl", 0)
    monkeypatch.setattr("distflow.telemetry.events._current", events)
    twice, small = (Batch(torch.tensor(rows), {"partial/tokens": torch.zeros(len(rows), dtype=torch.uint8)})
                    for rows in ([99, 99], [5]))
    partials = {number: SimpleNamespace(partial=SimpleNamespace(partial_rows=lambda rows=rows: rows), turn=0)
                for number, rows in enumerate((twice, small))}
    rollout = SimpleNamespace(saves_partial=True, dedicated=False, failure=None, under_way=partials,
                              turns=TurnWriter())
    with channel.dock("trainer 0") as dock:
        RolloutContext._save_partial(rollout, dock)
        assert dock.fetch_saved(torch.tensor([5]))[0].ids.tolist() == [5]
    event, = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (event["event"], event["rows"]) == ("partial_rollouts_lost", 2)
    assert "a row twice" in event["reason"]


def test_turns_replace_those_before_whoever_has_put_these(channel):
    def rows(value, *ids):
        return Batch(torch.tensor(ids), {"partial/tokens": torch.full((len(ids),), value)})

    with channel.dock("any") as dock:
        first, second = TurnWriter(), TurnWriter()
        with first.writing(lambda: channel.dock("rollout 1")):
            for value in range(40):  # several of them go in one put
                first.save(rows(value, 5), turn=0)
                first.save(rows(value, 6, 7), turn=7)
        saved, turns = dock.fetch_saved(torch.tensor([5, 6, 7]))
        assert saved["partial/tokens"].tolist() == [39, 39, 39]
        assert min(turns.tolist()) >= 7
        with second.writing(lambda: channel.dock("rollout 2")):
            second.save(rows(50, 6), turn=int(turns.max()) + 1)
        assert dock.fetch_saved(torch.tensor([5, 6, 7]))[0]["partial/tokens"].tolist() == [39, 50, 39]


@pytest.mark.parametrize(("restart", "kept"), [(True, [3]), (False, [1, 2, 3])])
def test_with_restart_conversations_of_other_weights_begin_again(restart, kept):
    versions = [torch.tensor(each, dtype=torch.int32) for each in ([6, 6], [6, 7], [7, 7])]
    saved = rows_of([1, 2, 3], [Recorded(torch.ones(2, dtype=torch.int64), torch.ones(2), each, b"")
                                for each in versions])
    engine = SimpleNamespace(generation=None, end_tokens=None, version=7)
    assert PartialRollouts(engine, saved, restart).recorded().ids.tolist() == kept


@pytest.mark.parametrize(("dedicated", "stopped", "over", "fails"), [
    (True, True, False, False), (True, False, True, False), (True, False, False, True),
    (False, True, False, True)])  # a rank that goes on to train still needs what it sampled
def test_errors_count_unless_the_run_is_over(dedicated, stopped, over, fails):
    job = Future()
    rollout = SimpleNamespace(dedicated=dedicated, stopped=stopped, channel=SimpleNamespace(is_over=over), failure=None)
    job.set_exception(RewardsFailed("all of them"))
    RolloutContext._notice(rollout, job)
    assert (rollout.failure is not None) == fails


def test_a_store_that_does_not_answer_is_no_end_of_the_run():
    class Channel:
        @property
        def is_over(self):
            raise StoreUnavailable("there:1", 600.0)

    job = Future()
    rollout = SimpleNamespace(dedicated=True, stopped=False, channel=Channel(), failure=None, ended=False)
    job.set_exception(StoreUnavailable("there:1", 600.0))
    RolloutContext._notice(rollout, job)
    assert isinstance(rollout.failure, StoreUnavailable)
    assert not rollout.ended


def test_a_dock_that_fails_ends_sampling_at_once():
    """Not only when all prompts under way are complete."""
    def fail(dock):
        raise DockError("it has gone")

    rollout = SimpleNamespace(max_prompts=1, over=False, ended=False, _renew_leases=fail, who="rollout 0",
                              complete=SimpleQueue(), channel=SimpleNamespace(dock=contextlib.nullcontext),
                              turns=TurnWriter())
    with pytest.raises(DockError, match="it has gone"), RolloutContext.leasing(rollout) as dock:
        RolloutContext.lease(rollout, dock, lambda dock: False)
    assert rollout.ended
    assert rollout.complete.get_nowait() is None, "the thread that puts waits for more"


@pytest.mark.parametrize(("leases", "ready", "silent", "busy", "enough"), [
    (1, 3, 0.0, False, False),  # of the draw before, which is in this step too
    (2, 0, 0.0, True, True), (1, 4, 0.0, True, True), (1, 3, 11.0, False, True), (1, 3, 11.0, True, False)])
def test_when_a_trainer_rank_stops_sampling(leases, ready, silent, busy, enough):
    colocated = ColocatedSource({}, None, None, enough=4, limit=10.0)
    colocated.draws, colocated.ready, colocated.changed = 1, 3, time.monotonic() - silent
    colocated.engines = {"actor": SimpleNamespace(was_busy=busy)}
    status = {"indexes": {TRAINER: {"leases": leases, "committed": 8, "leased": 2},
                          ROLLOUT: {"committed": 10 + ready}}}
    assert colocated._have_enough(SimpleNamespace(index_status=lambda: status)) == enough
    assert not colocated._have_enough(SimpleNamespace(index_status=lambda: {"indexes": {}})), "it is not configured"


def test_a_source_in_order_refuses_to_leave_out_what_was_left_over(channel, unordered):
    made = trainer(channel, steps=1)
    state = unordered().state_dict()
    made.load_state_dict({**state, "open": []})
    with pytest.raises(InvalidInput, match=r"left 2 prompts over .* on_stale"):
        made.load_state_dict({**state, "open": [[4, 0], [6, 1]]})
    made.close()


@pytest.mark.parametrize(("mode", "on_stale", "refused"), [
    ("async", "drop", False), ("semi_sync", "keep", False), ("async", "wait", True), ("sync", "drop", True)])
def test_a_checkpoint_with_prompts_left_over_can_be_exported(monkeypatch, mode, on_stale, refused):
    """An export joins without a dock, and trains on nothing."""
    monkeypatch.setattr("workers.sources.dataloader", lambda *_, **__: Dataloader([{}] * 8, None, PROMPTS, 0))
    source = source_of(SimpleNamespace(
        channel=None, plan=SimpleNamespace(source=SimpleNamespace(share=lambda rank: None)), roles={"actor": None},
        prompted="actor", rank=0, balance=None,
        spec=SimpleNamespace(run=SimpleNamespace(mode=mode, on_stale=on_stale))))
    with pytest.raises(InvalidInput, match="left 1 prompts over") if refused else contextlib.nullcontext():
        source.load_state_dict({"position": 4, "open": [[1, 0]]})
        assert source.position == 4


def ready(dock: DockClient) -> int:
    return sum(each["indexes"][TRAINER]["ready"] for each in dock.status() if TRAINER in each["indexes"])


def trainer(channel: RolloutChannel, steps: int, attempt: int = 0) -> AsyncSource:
    plan = SimpleNamespace(tasks=(), source=None, ranks=1)
    source = AsyncSource(Loader(steps), channel, plan, 0, 0, 3, 1.0, attempt=attempt)
    source.position = steps * PROMPTS
    return source


def test_rows_of_a_snapshot_that_were_not_committed_leave_the_dock(channel):
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


def test_commits_after_the_state_are_rolled_back(channel):
    """The trainer has lost its newest state; the rows of the steps since are trained on again."""
    first = trainer(channel, steps=0)
    count = ROWS * PROMPTS
    for step in range(3):
        first.dock.commit(first.dock.lease(TRAINER, count, step=step))
    first.release_before({"position": PROMPTS})
    again = trainer(channel, steps=1, attempt=1)
    again.reconcile()
    assert ready(again.dock) == 2 * count
    with pytest.raises(LeaseLost, match="attempt 1 has begun"):
        first.dock.lease(TRAINER, count, step=1)
    first.dock.close()
    again.dock.close()


def test_a_dock_without_room_holds_back_rollouts_and_never_the_trainer():
    """Samples of one step are three times what the dock should store, and rollouts may be two steps ahead."""
    steps, width, most = 6, 1000, []
    service = StorageShardServer(TOKEN)
    channel = RolloutChannel(None, TOKEN, [service.start()], "127.0.0.1", ROWS, PROMPTS, 1)
    count, over = ROWS * PROMPTS, threading.Event()
    rollout = Consumer(ROLLOUT, (ORDER,), (REPORT, "samples"), ROWS, count, row_bytes=2 * width)

    def sample() -> list[int]:
        begun = []
        with channel.dock("rollout 0") as dock:
            while not over.is_set():
                if lease := dock.try_lease(ROLLOUT, ROWS, wait=0.05):
                    begun.append(int(lease.ids[0]) // count)
                    dock.put(Batch(lease.ids, {REPORT: report_column([Metrics().take()], ROWS),
                                               "samples": torch.zeros(ROWS, width, dtype=torch.uint8)}))
                    dock.commit(lease)
                    most.append(dock.status()[0]["bytes"])
        return begun

    with channel.dock("trainer 0") as dock, ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        stack.callback(over.set)
        dock.configure([rollout, Consumer(TRAINER, rollout.writes, (), ROWS, count, can_roll_back=True)],
                       count * width // 3)
        source = AsyncSource(Loader(0), channel, SimpleNamespace(tasks=(), source=None, ranks=1), 0, 2, steps, 30.0)
        source.at = lambda prompts: prompts
        sampling = pool.submit(sample)
        for step in range(steps):
            assert source.next().tolist() == list(range(step * PROMPTS, step * PROMPTS + PROMPTS))
            end = time.monotonic() + 30
            while step + 1 < steps and not service.state.indexes[ROLLOUT].lacks_room():
                assert time.monotonic() < end, "rollouts go on"
                time.sleep(0.001)
            source.finish()
            source.release_before({"position": source.position})
        over.set()
        assert sampling.result() == sorted(sampling.result())
        source.dock.close()
    assert max(most) <= (count + ROWS) * (width + 100), "the step that the trainer waits for, and not much of another"
    service.close()


def test_a_dock_that_never_had_those_steps_is_left_alone(channel):
    """As the dock of a resumed run."""
    made = trainer(channel, steps=40)
    made.reconcile()
    with channel.dock("somebody") as dock:
        assert ready(dock) == 3 * ROWS * PROMPTS
    made.dock.close()


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

    def make(drops: bool = True, state=None, attempt: int = 0) -> UnorderedSource:
        task = SimpleNamespace(node="rollout", role="actor", writes=("versions",), arrives=False, out_fan=())
        plan = SimpleNamespace(tasks=(task,), source=None, ranks=1)
        source = UnorderedSource(Loader(0), empty, plan, 0, 1, 4, 1.0, attempt=attempt, drops=drops,
                                 trained={"actor": SimpleNamespace(version=0)})
        source.at = lambda prompts: prompts
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


def step(source: UnorderedSource, number: int) -> list[int]:
    source.trained["actor"].version = 10 * number
    found = source.next().tolist()
    source.finish()
    return found



def test_prompts_that_are_done_first_come_first_and_old_ones_are_sampled_again(empty, unordered):
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
def test_a_run_that_is_resumed_with_another_batch_samples_on(empty, position, asked):
    """Two steps of three are done, by twice as many prompts, or by a number that ends in the middle of a draw."""
    source = AsyncSource(Loader(0), empty, SimpleNamespace(tasks=(), source=None, ranks=1), 0, 0, 3, 1.0)
    source.load_state_dict({"position": position})
    source.start_at(2)
    source._enqueue_prompts(source.drawn_before)
    with empty.dock("rollout 1") as dock:
        leases = iter(lambda: dock.try_lease(ROLLOUT, ROWS), None)
        assert {int(lease.ids[0]) // ROWS for lease in leases} == asked
    source.close()


def test_each_prompt_is_trained_on_once_also_by_a_trainer_that_begins_again(empty, unordered):
    """The first trainer dies behind its snapshot, ahead of the commit; the second in the step after."""
    source = unordered()
    source._enqueue_prompts(0)
    sample(empty, {0: 0, 2: 0})
    trained = source.next().tolist()
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


def test_a_state_of_another_mode_releases_what_was_trained_on(unordered):
    """As of an async run with `on_stale: wait`, or of a sync one, without checkpoints."""
    source = unordered(state={"position": 2 * PROMPTS})
    source.release_before({"position": 2 * PROMPTS})
    assert source.dock.status()[0]["rows"] == 0


def test_a_prompt_that_is_sampled_again_has_a_whole_wait_limit(empty, unordered, monkeypatch):
    source, renewed, old = unordered(), [], [[True] * ROWS + [False] * ROWS, [False] * ROWS]
    source._are_old = lambda rows: torch.tensor(old.pop(0))
    source._enqueue_prompts(0)
    sample(empty, {0: 0, 1: 0, 2: 0})
    renew = SampleTimeout.renew
    monkeypatch.setattr(SampleTimeout, "renew", lambda timeout: renew(timeout) or renewed.append(source.taken))
    assert step(source, 0) == [1, 2]
    assert renewed == [0, 0, 1], "at the beginning of the draw, and whenever a lease has come"


def test_a_full_dock_lets_trained_steps_go_but_the_newest_two(empty, unordered):
    """However many leases a step took; no checkpoint is written meanwhile."""
    source, held = unordered(), []
    source.draws, source.staleness, lease = None, 0, source._lease_batch
    source.dock.configure(source.dock.layout.consumers, 1)
    source._lease_batch = lambda taken, timeout, prompts: lease(taken, timeout, 1)
    for number in range(6):
        prompts = [*range(number * PROMPTS, (number + 1) * PROMPTS)]
        source._enqueue_prompts(number)
        sample(empty, dict.fromkeys(prompts, 10 * number))
        assert step(source, number) == prompts
        held.append(source.dock.status()[0]["rows"] // (PROMPTS * ROWS))
    assert (source.taken, held) == (6 * PROMPTS, [1, 2, 2, 2, 2, 2])
    assert source.dock.rollback(TRAINER, source.ends[0]) == 2 * PROMPTS * ROWS


def test_old_prompts_may_be_kept(empty, unordered):
    source = unordered(drops=False)
    source.enqueued = 4
    source.open = {0: 0, 1: 0, 2: 0, 3: 0}
    source.oldest = {"actor": [10, 20]}
    source._enqueue_prompts(0)
    sample(empty, {1: 0, 3: 0})
    assert step(source, 3) == [1, 3]
