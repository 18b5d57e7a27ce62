"""The token by which the connections of a run authenticate each other, and the shards of its dock."""

from __future__ import annotations

import os
from unittest import mock

import msgpack
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from distflow.config.load import load
from distflow.data.batch import Batch, Ragged
from distflow.data.crossing import POLICIES, ReceivedColumns, rows_for_others
from distflow.data.databuffer import Databuffer
from distflow.data.row_filter import KeptRows
from distflow.errors import ColumnError, Disagreement, EngineError
from distflow.plan import ROLLOUT, TRAINER
from distflow.recovery.store import RunStore
from distflow.rpc.run_token import TOKEN, run_token
from distflow.telemetry.metrics import Metrics
from planners import plan
from workers.rollout_channel import RolloutChannel, open_channel


def tokens(port: int, exported: list[str]) -> str:
    """This rank's token in hex, or the error."""
    rank = dist.get_rank()
    place = {"RANK": str(rank), "WORLD_SIZE": str(len(exported)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
             "TORCHELASTIC_USE_AGENT_STORE": "True", TOKEN: exported[rank]}
    with mock.patch.dict(os.environ, place):
        try:
            return RunStore(60).agreed_token().hex()
        except Disagreement as error:
            return str(error)


def test_run_token_without_a_secret_comes_from_the_store(store, monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    zero, one = run_ranks(2, tokens, store.port, ["", ""])
    assert zero == one == run_token(store.get("0/token")).hex()


def test_run_token_with_a_secret_cannot_be_made_from_the_store(store, monkeypatch):
    zero, one = run_ranks(2, tokens, store.port, ["the token of the run"] * 2)
    assert zero == one
    assert len(bytes.fromhex(zero)) == 32
    monkeypatch.delenv(TOKEN, raising=False)
    kept = store.list("").values()
    assert not [value for value in kept if zero in (value, run_token(value).hex()) or "the token of the run" in value]


def test_rows_for_others_lack_columns_of_dropped_rows_alone():
    made = plan(load("grpo.yaml", None, ["mode=async", "groups.inference={reference: 1}"], None), 3).groups[2].plan
    task, ids = made.task("reference"), torch.arange(8)
    buffer = Databuffer(made, 0, Metrics())
    buffer.start(Batch(torch.zeros(1, dtype=torch.int64)))
    logprobs, = task.writes
    for kept in (ids[:5], ids[:0]):
        buffer.step_columns["reference", task.layout] = Batch(kept, {logprobs: kept.float()})
        with pytest.raises(ColumnError, match=f"node `reference` has not written {logprobs} of the rows .*no node has"):
            rows_for_others(made, buffer, 8, ids)
        buffer.kept = KeptRows(kept, task.out_fan)
        put = rows_for_others(made, buffer, 8, ids)[f"reference/{logprobs}"]
        assert put[: len(kept)].tolist() == kept.tolist()
        assert len(put) == len(ids)
        buffer.start(Batch(torch.zeros(1, dtype=torch.int64)))


def test_received_columns_keep_shared_values_of_prompts_that_lost_rows():
    """ReMax: an answer for each prompt beside its samples, of which some were dropped before these were fetched."""
    four = "nodes.rollout.with.group_size=4"
    trainer = plan(load("remax.yaml", None, ["mode=async", four], None), 4).groups[0].plan
    ids = torch.tensor([1, 4, 5, 6, 7, 11])
    received = ReceivedColumns(trainer, 4)
    rows = Batch(ids, dict.fromkeys(received.columns, 10 * ids))
    found = {task.node: (columns, owners.tolist()) for task, columns, owners in received.of(rows)}
    columns, prompts = found["baseline"]
    assert prompts == [0, 1, 2]
    assert columns["baselines"].tolist() == [10, 40, 110]
    assert found["reward"][1] == ids.tolist()


def test_run_token_differs_between_runs(monkeypatch):
    monkeypatch.setenv(TOKEN, "the token of the run")
    assert run_token("one") != run_token("another")


@pytest.mark.parametrize("exported", [("the token of the run", "another run's token"), ("the token of the run", ""),
                                      ("", "the token of the run")])
def test_run_token_of_unlike_machines_is_refused(store, exported):
    for error in run_ranks(2, tokens, store.port, [*exported]):
        assert error.startswith(f"the ranks do not have the same {TOKEN}: rank 1 has ")
        assert error.endswith(f"Export the same {TOKEN} on all machines.")


def shards(port: int, silence: float) -> tuple[int | None, list[tuple[str, int]], bool]:
    """The number of this machine's shard, the addresses of all, and whether they may move. Two of three machines train.
    """
    rank = dist.get_rank()
    place = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
             "TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", TOKEN: ""}
    made = plan(load("grpo.yaml", None, ["mode=async", "groups.rollout=1"], None), 3)
    with mock.patch.dict(os.environ, place):
        channel = open_channel(made, 2, RunStore(60), 1 << 20, silence=silence)
    with channel.dock("any") as dock:
        status = dock.status()
        assert [shard["rows"] for shard in status] == [0, 0] if silence else [0, 0, 0]
        assert TRAINER in status[0]["indexes"]
        assert ROLLOUT in status[0 if silence else 2]["indexes"], "beside the first rank that samples"
    number = channel.shard_process and channel.shard_process.number
    dist.barrier()
    channel.close()
    return number, channel.addresses, channel.directory is not None


@pytest.mark.parametrize("silence", [0.0, 30.0])
def test_open_channel_starts_a_shard_on_each_machine_that_stays(store, silence):
    numbers, addresses, moves = zip(*run_ranks(3, shards, store.port, silence))
    assert numbers == (0, 1, None if silence else 2)
    assert addresses[0] == addresses[1] == addresses[2]
    assert len({*addresses[0]}) == (2 if silence else 3)
    assert {*moves} == {bool(silence)}
    assert bool(store.get("0/shard/0")) == bool(silence)


@pytest.mark.parametrize(("policy", "refused"), [
    ([[0, 0]], False),
    ([[3, 77]], False),
    ([[3, 77], [4, 5]], False),
    ([[3, 78]], True),
    ([[4, 77]], True),
    ([[3, 77], [9, 5]], True),
], ids=["built with", "published", "sampled by two", "other weights", "of another version", "never published"])
def test_channel_refuses_rows_of_a_policy_that_was_not_published(store, recorded, policy, refused):
    channel = RolloutChannel(store, bytes(32), [], "127.0.0.1", 4, 2, 1)
    channel.add_fingerprint("actor", 3, 76)
    channel.add_fingerprint("actor", 3, 77)  # by the trainer's next attempt
    channel.add_fingerprint("actor", 4, 5)
    channel.add_version_set({"actor": 4})
    packed = torch.frombuffer(bytearray(msgpack.packb({"actor": policy}) or b""), dtype=torch.uint8)
    rows = Batch(torch.tensor([8]), {POLICIES: Ragged.from_rows([packed])})
    if not refused:
        channel.require_published(rows)
        return
    with pytest.raises(EngineError, match="not published as version .* are not trained on"):
        channel.require_published(rows)
    event, = recorded("policy_refused")
    assert (event["role"], event["version"]) == ("actor", policy[-1][0])


def test_channel_accepts_rows_where_no_weights_are_published(store):
    """Ranks that train have sampled all of them."""
    channel = RolloutChannel(store, bytes(32), [], "127.0.0.1", 4, 2, 1)
    packed = torch.frombuffer(bytearray(msgpack.packb({"actor": [[3, 77]]}) or b""), dtype=torch.uint8)
    channel.require_published(Batch(torch.tensor([8]), {POLICIES: Ragged.from_rows([packed])}))
