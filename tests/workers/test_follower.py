"""Trainers of two roles on a real dock and a real store: columns, checkpoints and the end that they tell each other."""

from __future__ import annotations

import contextlib
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from stores import hosted

from distflow.config.load import load
from distflow.config.run import Checkpoint
from distflow.data.batch import Batch, Ragged
from distflow.data.crossing import POLICIES, REPORT, report_column
from distflow.data.row_filter import KeptRows
from distflow.dock import StorageShardServer
from distflow.dock.consumers import run_consumers
from distflow.errors import CheckpointError, ColumnError, RankMissing, SamplesChanged
from distflow.plan import ROLLOUT, Layout
from distflow.recovery.checkpoint_files import complete_checkpoints, step_of
from distflow.telemetry.metrics import Metrics
from planners import plan
from workers.follower import FollowerLink, LeaderLink, RunOver, TrainerBuffer
from workers.rollout_channel import RolloutChannel
from workers.sources import AsyncSource, FollowerSource, SyncSource
from workers.train_state import TrainState

ROWS, PROMPTS, STEPS, TOKEN = 8, 2, 3, bytes(32)
EACH = ROWS * PROMPTS


class Prompts:
    """What a dataloader has, of prompts that are their numbers."""

    batch, records, encode, seed, share, layout, balance = PROMPTS, range(1000), None, 0, 0, Layout(1), None
    files = None


class At:
    def at(self, prompts):
        return Batch(prompts, {"prompts": Ragged(prompts, torch.ones_like(prompts)), "group": prompts})


class Leading(At, AsyncSource):
    pass


class Following(At, FollowerSource):
    pass


class Sync(At, SyncSource):
    pass


pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def trainers(request):
    """The source and the buffer of the actor's trainer, and of the critic's, each with a link to the other."""
    mode = getattr(request, "param", "async")
    spec = load("ppo.yaml", None, [f"mode={mode}", "groups={rollout: 1, trainers: {critic: 1}}"], None)
    made = plan(spec, 3 if mode == "async" else 2)
    leading, *_, following = made.groups
    service, store = StorageShardServer(TOKEN), hosted(20.0)
    channel = RolloutChannel(store, TOKEN, [service.start()], "127.0.0.1", ROWS, PROMPTS, 3)
    with channel.dock("rollout") as dock:
        dock.configure(run_consumers(made, ROWS, PROMPTS, True))
    saved = []

    def save(step):
        links[1].begin_checkpoint(step)
        saved.append((step, sources[1].state_dict()["position"]))

    links = LeaderLink(store, ["critic"], 0, 20.0), FollowerLink(store, "critic", 0)
    kind = Leading if mode == "async" else Sync
    sources = (kind(Prompts, channel, leading.plan, 0, 0, STEPS, 20.0, group=leading),
               Following(Prompts, channel, following.plan, 0, 0, STEPS, 20.0, group=following, link=links[1],
                         save=lambda step: save(step)))
    buffers = [TrainerBuffer(group.plan, 0, Metrics()) for group in (leading, following)]
    for buffer, source in zip(buffers, sources):
        buffer.source = source
    yield SimpleNamespace(sources=sources, buffers=buffers, links=links, saved=saved, rollout=made.groups[1],
                          channel=channel, sync=kind is Sync)
    for source in sources:
        source.close()
    service.close()


def sample(trainers, step, dropped=()):
    """Put what rollouts write of a step's rows: row i answers i, and rows of `dropped` leave the step."""
    with trainers.channel.dock("rollout") as dock:
        lease = dock.lease(ROLLOUT, EACH, step=step, wait=20.0)
        ids = lease.ids
        _put(trainers, dock, ids, dropped)
        dock.commit(lease)


def _put(trainers, dock, ids, dropped):
    columns = sampled(ids, dropped)
    written = {f"{move.producer}/{name}": columns[name] for move in trainers.rollout.plan.dock for name in move.columns}
    policies = Ragged(torch.full((len(ids),), 0x80, dtype=torch.uint8), torch.ones_like(ids))  # {}: of no role
    dock.put(Batch(ids, {**written, REPORT: report_column([Metrics().take()] * PROMPTS, ROWS), POLICIES: policies}))


def sampled(ids, dropped):
    column = Ragged(ids.clone(), torch.ones_like(ids))
    return {"responses": column, "rollout_logprobs": column.with_values(ids.float()), "versions": column,
               "completions": column, "finished": ids >= 0, "rewards": ids.float(),
               "keep": ~torch.isin(ids, torch.tensor([*dropped])),
               "reward_parts": column, "reference_logprobs": column.with_values(ids.float())}


def begin(trainers, which):
    source, buffer = trainers.sources[which], trainers.buffers[which]
    prompts = source.next()
    buffer.start(prompts, source.drawn)
    buffer.receive((task, columns, ids) for task, columns, ids in source.take_results())
    return source, buffer, {task.node: task for task in buffer.lineage.tasks.values()}


def follow(trainers):
    """A step of the critic. Return the values that it has put, the returns that it has got, and the rows."""
    source, buffer, tasks = begin(trainers, 1)
    rows = buffer.take(tasks["values"])
    values = rows["responses"].with_values(rows["responses"].values.float() * 2)
    buffer.put(tasks["values"], {"values": values}, rows.ids)
    inputs = buffer.take(tasks["critic"])
    source.finish()
    return inputs


def lead(trainers):
    source, buffer, tasks = begin(trainers, 0)
    mine = buffer.step_columns["rollout", tasks["rollout"].layout]["responses"]
    ids = buffer.step_columns["rollout", tasks["rollout"].layout].ids
    buffer.step_columns["reference", tasks["reference"].layout] = Batch(
        ids, {"reference_logprobs": mine.with_values(mine.values.float())})
    inputs = buffer.take(tasks["advantage"])
    returns = inputs["values"].with_values(inputs["values"].values + 0.5)
    buffer.put(tasks["advantage"], {"advantages": returns, "returns": returns}, inputs.ids)
    source.finish()
    return inputs


def lead_alone(trainers, dropped):
    """A step of the actor in mode sync, which samples."""
    source, buffer, tasks = begin(trainers, 0)
    ids = source.rows.ids
    columns = sampled(ids, dropped)
    for node in ("rollout", "reward", "reference"):
        left = buffer.step_columns["rollout", tasks["rollout"].layout].ids if node == "reference" else ids
        part = Batch(ids, {name: columns[name] for name in tasks[node].writes}).select(left % EACH)
        buffer.put(tasks[node], part.columns, left)
    inputs = buffer.take(tasks["advantage"])
    returns = inputs["values"].with_values(inputs["values"].values + 0.5)
    buffer.put(tasks["advantage"], {"advantages": returns, "returns": returns}, inputs.ids)
    source.finish()
    return inputs


@pytest.mark.parametrize("trainers", ["async", "sync"], indirect=True)
@pytest.mark.parametrize("dropped", [(), (1, 9, 10), tuple(range(EACH, 2 * EACH))], ids=["none", "some", "a step"])
def test_both_have_the_same_rows_of_each_step(trainers, dropped):
    """Values go one way and returns the other, of the rows that are left, whoever samples them."""
    both = (follow, partial(lead_alone, dropped=dropped) if trainers.sync else lead)
    with ThreadPoolExecutor(2) as threads:
        for step in range(2):
            got = [threads.submit(each, trainers) for each in both]
            if not trainers.sync:
                sample(trainers, step, dropped)
            done, _ = wait(got, 20, FIRST_EXCEPTION)
            if failed := next((each for each in done if each.exception()), None):
                trainers.links[0].store.put("ended", "[0, false]")  # or the other one would wait for it
                failed.result()
            critic, actor = (each.result(20) for each in got)
            left = [row for row in range(step * EACH, (step + 1) * EACH) if row not in dropped]
            assert critic.ids.tolist() == actor.ids.tolist() == left
            if left:
                assert actor["values"].values.tolist() == [2.0 * row for row in left]
                assert critic["returns"].values.tolist() == [2 * row + 0.5 for row in left]
    with trainers.channel.dock("somebody") as dock:
        for source in trainers.sources:
            source.release_before({"position": 2 * PROMPTS})
        assert not dock.status()[0]["rows"], "rows are left that all have trained on"


def test_what_the_first_asks_for_is_done_before_the_next_step(trainers):
    """The state is that of the step before, whatever has been drawn; then the first one ends."""
    (leader, link), (_, critic) = trainers.links, trainers.sources
    with ThreadPoolExecutor(3) as threads:
        got = [threads.submit(each, trainers) for each in (follow, lead)]
        sample(trainers, 0)
        assert all(each.result(20) for each in got)
        leader.begin_checkpoint(1)
        got = threads.submit(follow, trainers)
        trainers.sources[0]._enqueue_prompts(1)
        sample(trainers, 1)
        assert not link.finished
        leader.store.put("ended", "[1, true]")
        with pytest.raises(RunOver):
            got.result(20)
    assert trainers.saved == [(1, PROMPTS)]
    assert critic.state_dict()["position"] == 2 * PROMPTS, "the draw under way counts"
    for step, refused in ((1, None), (2, "the disk is full"), (0, "have done later steps")):
        if step:
            with contextlib.suppress(CheckpointError), link.checkpoint_part(step):
                if refused:
                    raise CheckpointError(refused)
        else:
            leader.begin_checkpoint(0)
            assert link.poll(1) == [False, True]
        with pytest.raises(CheckpointError, match=refused) if refused else contextlib.nullcontext(), \
                leader.checkpoint_part(step):
            pass
    assert link.requested_checkpoint == -1, "it is written"
    with pytest.raises(RankMissing), link.checkpoint_part(4):
        raise RankMissing("a rank has ended while it wrote")
    assert not leader.store.has("parts/critic/4")
    assert link.finished


def test_metrics_of_others_come_once_and_again_after_a_restart(trainers):
    leader, link = trainers.links
    for done in (1, 2, 10):
        link.post(done, {"value/loss": float(done)})
    assert [*leader.metrics()] == [(done, {"value/loss": float(done)}) for done in (1, 2, 10)]
    assert not dict(leader.metrics())
    leader.forget(3)
    assert dict(LeaderLink(leader.store, ["critic"], 0, 1.0).metrics()).keys() == {10}


class Engine:
    version = 0

    def __init__(self, value):
        self.weight = torch.full((3,), value)

    def state_dict(self):
        return {"weight": self.weight}

    def load_state_dict(self, state):
        self.weight = state["weight"]


def state_of(folder, roles, link=None, value=0.0):
    """The state of a trainer of these roles, after one step if they have a value."""
    trained = {role: SimpleNamespace(engine=Engine(value), engine_swap=None, has_engine=True, version=0)
               for role in roles}
    source = SimpleNamespace(batch=1, state_dict=lambda: {"position": 0}, release_before=lambda state: None,
                             load_state_dict=lambda state: None)
    found = TrainState(folder, Checkpoint(every=1, keep=1), None, trained, source, 20.0, link)
    for step in (1,) if value else ():
        found.snapshot(step)
        found.before_update()
    return found


def test_a_checkpoint_is_there_when_all_its_parts_are(tmp_path, capsys):
    store = hosted(20.0)
    links = LeaderLink(store, ["critic"], 0, 20.0), FollowerLink(store, "critic", 0)
    first, other = (state_of(tmp_path, [role], link, value) for role, link, value in
                    (("actor", links[0], 1.0), ("critic", links[1], 2.0)))
    first.save(1)
    assert links[1].requested_checkpoint == 1
    assert not complete_checkpoints(tmp_path)
    other.save(1)
    other.finish()
    first.finish()
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == [1]
    first.save(2)
    assert links[1].poll(3) == [False, False]
    first.finish()
    assert "lacks the part of role `critic`: its ranks have done later steps" in capsys.readouterr().err
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == [1]
    again = state_of(tmp_path, ["critic"], links[1])
    assert again.restore(1) == 1
    assert again.roles["critic"].engine.weight.tolist() == [2.0] * 3
    together = state_of(tmp_path, ["actor", "critic"])
    assert together.restore() == 1, "they may go on in one trainer"
    assert [role.engine.weight[0] for role in together.roles.values()] == [1.0, 2.0]
    together.snapshot(2)
    together.save(2)
    together.finish()
    assert again.restore(2) == 2, "and apart again"
    again.roles["critic"].engine.weight = torch.zeros(3)
    again.save(2)
    again.finish()
    for alone in (False, True):
        again = state_of(tmp_path, ["critic"], links[1])
        assert again.restore(2, alone) == 2
        assert again.roles["critic"].engine.weight.tolist() == [2.0] * 3, "that of both is the newer one"
    first = state_of(tmp_path, ["actor"])
    first.snapshot(3)
    first.save(3)
    first.finish()
    with pytest.raises(CheckpointError, match="critic has no whole checkpoint of step 3, where the other trainers go"):
        again.restore(3)
    again.save(3)
    again.finish()
    assert state_of(tmp_path, ["critic"], links[1]).restore(2, again=True) == 3, "it has done a step since"
    weights = next((tmp_path / "critic/step-00000003").glob("*.distcp"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=r"its part .*critic/step-00000003: .*checksum differs"):
        state_of(tmp_path, ["actor"], links[0]).restore()


def test_a_trainer_starts_again_where_it_was_resumed_and_has_the_run_stopped():
    store = hosted(20.0)
    leader, link = LeaderLink(store, ["critic"], 0, 20.0), FollowerLink(store, "critic", 0)
    assert link.resumed_at is None
    FollowerLink(store, "critic", 1).note_resumed(9)
    link.note_resumed(4)
    assert FollowerLink(store, "critic", 1).resumed_at == 4
    assert not leader.stopped
    FollowerLink(store, "critic", 1).stop()
    assert leader.stopped


@pytest.mark.parametrize("trainers", ["sync"], indirect=True)
def test_a_repeated_step_must_have_the_same_samples(trainers):
    """The dock keeps what came first, on which the critic may have computed."""
    source, buffer, tasks = begin(trainers, 0)
    ids, task = source.rows.ids, tasks["rollout"]
    columns = {name: sampled(ids, ())[name] for name in task.writes}
    for _ in range(2):
        buffer.put(task, columns, ids)
    responses = columns["responses"]
    longer = Ragged(torch.cat([responses.values, responses.values[-1:]]), responses.lengths + (ids == ids[-1]))
    with pytest.raises(SamplesChanged, match=r"samples of step 1 came otherwise .*responses"):
        buffer.put(task, columns | {"responses": longer}, ids)


@pytest.mark.parametrize("trainers", ["sync"], indirect=True)
def test_rows_that_were_all_dropped_have_the_form_of_others(trainers, monkeypatch):
    source, buffer, tasks = begin(trainers, 0)
    monkeypatch.setattr("workers.follower.gather_values", lambda mine: [mine, {"returns": (1, "float32", ())}])
    nothing = Batch(torch.empty(0, dtype=torch.int64), {"returns": torch.empty(0)})
    with pytest.raises(ColumnError, match="node `advantage` has not written returns of the rows"):
        source.put_for_others(tasks["advantage"], buffer._in_form(nothing), buffer)
    buffer.kept = KeptRows(nothing.ids, tasks["advantage"].out_fan)
    source.put_for_others(tasks["advantage"], buffer._in_form(nothing), buffer)
    stored = source.dock.fetch(source.rows.ids, ["advantage/returns"])["advantage/returns"]
    assert isinstance(stored, Ragged)
    assert stored.lengths.tolist() == [0] * EACH
