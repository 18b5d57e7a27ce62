"""Rows on their way through the dock by a group that only infers, between rollouts and the trainer."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

from distflow.data.batch import Batch
from distflow.data.crossing import POLICIES, report_column, report_of
from distflow.dock.consumers import consumers_of
from distflow.dock.shard import StorageShardServer
from distflow.plan import ROLLOUT, TRAINER
from distflow.telemetry.metrics import Metrics
from workers.inference import InferenceContext
from workers.overlap import ColocatedSampling
from workers.rollout_channel import RolloutChannel

ROWS, PROMPTS, TOKEN, READS = 2, 2, bytes(32), "inference reference"
COUNT = ROWS * PROMPTS


@pytest.fixture
def channel():
    """A dock that should store next to nothing, with prompts of two steps."""
    with closing(StorageShardServer(TOKEN)) as service:
        channel = RolloutChannel(None, TOKEN, [service.start()], "127.0.0.1", ROWS, PROMPTS, 3)
        with channel.dock("trainer 0") as dock:
            apart = {READS: (["rollout/responses"], ["reference/logprobs"])}
            dock.configure(consumers_of(["rollout/responses"], ROWS, COUNT, 8, apart), 1)
            channel.enqueue_prompts(dock, torch.arange(2 * PROMPTS))
        yield channel


def put(dock, lease, column, group):
    report = report_column([Metrics().take()] * (len(lease) // ROWS), ROWS)
    policies = {POLICIES: torch.zeros(len(lease))} if group == ROLLOUT else {}
    dock.put(Batch(lease.ids, {column: torch.ones(len(lease)), report_of(group): report, **policies}))
    dock.commit(lease)


def sampled(dock):
    lease = dock.lease(ROLLOUT, ROWS)
    put(dock, lease, "rollout/responses", ROLLOUT)
    return lease.ids.tolist()


@pytest.mark.parametrize("sampled_again", [False, True])
def test_columns_of_tokens_that_a_shard_has_lost_never_meet_other_tokens(sampled_again, monkeypatch):
    """A replica has fetched rows when their shard ends; it puts what it made of them into the one that replaces it."""
    computed, reasons = {"reference/logprobs": torch.zeros(ROWS)}, []
    monkeypatch.setattr("workers.inference.rows_for_others", lambda *_: Batch(lease.ids, computed))
    monkeypatch.setattr("workers.inference.gather", lambda payload: [payload])
    monkeypatch.setattr("workers.inference.events.record", lambda event, **more: reasons.append(more["reason"]))
    consumers = consumers_of(["rollout/responses"], ROWS, COUNT, 8, {READS: (["rollout/responses"], [*computed])})
    service = StorageShardServer(TOKEN)
    channel = RolloutChannel(None, TOKEN, [service.start()], "127.0.0.1", ROWS, PROMPTS, 3)
    context = replica(channel)
    with closing(context.dock), channel.dock("trainer 0") as dock:
        dock.configure(consumers)
        channel.enqueue_prompts(dock, torch.arange(1))
        sampled(dock)
        lease = context.dock.lease(READS, ROWS)
        with context.computing(lease) as buffer:
            service.close()
            with closing(StorageShardServer(TOKEN, port=service.address[1])) as again:
                again.start()
                dock.configure(consumers)
                if sampled_again:
                    channel.enqueue_prompts(dock, torch.arange(1))
                    sampled(dock)
                context.put(lease, buffer)
                assert "may have been sampled again" in reasons[0]
                assert dock.status()[0]["rows"] == (ROWS if sampled_again else 0)
                if sampled_again:
                    put(dock, dock.lease(READS, ROWS), "reference/logprobs", READS)
                    assert dock.fetch(dock.lease(TRAINER, ROWS, step=0))["reference/logprobs"].tolist() == [1.0] * ROWS


def replica(channel) -> InferenceContext:
    """Return what `infer` needs on the one rank of a replica, without a model."""
    context = InferenceContext.__new__(InferenceContext)
    context.channel, context.dock, context.who = channel, channel.dock("inference reference 0"), "inference reference 0"
    context.rank, context.role, context.waited, context.plan = 0, "reference", 0.0, None
    context.group, context.executor = SimpleNamespace(name=READS), SimpleNamespace(step=0)
    context.chain = [SimpleNamespace(layout=SimpleNamespace(dp=1, leads=lambda rank: True))]
    context.arrived = SimpleNamespace(buffer=None, fill=lambda dock, ids, _: dock.fetch(ids, ["rollout/responses"]))
    return context


def test_trainer_ranks_stop_sampling_once_enough_is_sampled_whoever_reads_it_still(channel):
    colocated = ColocatedSampling({}, None, None, enough=COUNT, limit=1000.0)
    colocated.draws = colocated.ready = colocated.changed = 0
    with channel.dock("any") as dock:
        sampled(dock)
        assert not colocated._have_enough(dock)
        sampled(dock)
        assert colocated._have_enough(dock), "though the reference has read none of it"
        put(dock, dock.lease(READS, COUNT), "reference/logprobs", READS)
        colocated.draws = 1
        lease = dock.lease(TRAINER, COUNT, step=0)
        assert not colocated._have_enough(dock), "the trainer has it already"
        dock.commit(lease)
        assert not colocated._have_enough(dock)
