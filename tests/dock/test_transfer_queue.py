"""TransferQueue's calls on the dock: what its package documents of them, between processes."""

from __future__ import annotations

import asyncio
import os
import pickle
from multiprocessing import Pipe

import pytest
import torch
from fork_server import fork_process

import distflow.dock.transfer_queue as tq
from distflow.errors import DistflowError

TensorDict = pytest.importorskip("tensordict").TensorDict


@pytest.fixture(scope="module")
def address():
    yield tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 3}}})
    tq.close()
    assert tq.ADDRESS not in os.environ


@pytest.fixture
def partition(address, request):
    yield request.node.name
    tq.kv_clear([*tq.kv_list(request.node.name).get(request.node.name, {})], request.node.name)
    assert held() == 0, "rows have stayed in the shards"


def held() -> int:
    return sum(shard["rows"] for shard in tq.get_client().dock.status())


def rows_of(column) -> list:
    return [row.tolist() for row in column.unbind()]


def test_fields_come_back_jagged_dense_or_as_plain_values(partition):
    tokens = [torch.arange(length) for length in (3, 0, 5)]
    images = torch.nested.nested_tensor([torch.ones(length, 2) for length in (2, 1, 4)])
    plain = [{"turn": [1, "a"], 7: None}, {}, {"text": "ü"}]
    fields = TensorDict({"tokens": torch.nested.as_nested_tensor(tokens, layout=torch.jagged), "images": images,
                         "scores": torch.tensor([0.5, 1.0, 2.0]), "square": torch.eye(3),
                         "half": torch.ones(3, 2, dtype=torch.bfloat16)}, batch_size=3)
    for name, values in {"extra": plain, "uid": ["a", "b", "c"]}.items():
        fields.set(name, stack_of(values))
    meta = tq.kv_batch_put(["x", "y", "z"], partition, fields)
    assert [*meta.fields] == [*fields.keys()]
    got = tq.kv_batch_get(["z", "x", "y"], partition)
    order = [2, 0, 1]
    assert rows_of(got["tokens"]) == [tokens[at].tolist() for at in order]
    assert [row.shape for row in got["images"].unbind()] == [(4, 2), (2, 2), (1, 2)]
    assert got["scores"].tolist() == [2.0, 0.5, 1.0]
    assert got["square"].is_nested
    assert torch.equal(got["square"].to_padded_tensor(0.0), torch.eye(3)[order])
    assert got["half"].dtype == torch.bfloat16
    assert got.get("extra").tolist() == [plain[at] for at in order]
    assert got.get("uid").tolist() == ["c", "a", "b"]
    assert got.batch_size == (3,)


def test_parts_of_longer_rows_come_back_alone(partition):
    """A jagged tensor may look at a part of each row of its values."""
    start, length = torch.tensor([1, 2]), torch.tensor([3, 2])
    parts = torch.nested.narrow(torch.arange(12).reshape(2, 6), 1, start, length, layout=torch.jagged)
    tq.kv_batch_put(["a", "b"], partition, {"parts": parts, "heads": torch.nested.nested_tensor_from_jagged(
        torch.arange(10), torch.tensor([0, 4, 10]), lengths=length)})
    got = tq.kv_batch_get(["a", "b"], partition)
    assert rows_of(got["parts"]) == [[1, 2, 3], [8, 9]]
    assert rows_of(got["heads"]) == [[0, 1, 2], [4, 5]]


def stack_of(values):
    from tensordict import NonTensorStack

    return NonTensorStack(*values)


def test_a_key_gets_more_fields_and_others_than_before(partition):
    first = tq.kv_put("k", partition, {"a": torch.tensor([1, 2])}, {"status": "running", "step": 0})
    assert (first.fields, first.tags) == (["a"], [{"status": "running", "step": 0}])
    second = tq.kv_put("k", partition, {"b": torch.tensor([3])}, {"status": "done"})
    assert (second.fields, second.tags) == (["a", "b"], [{"status": "done", "step": 0}])
    tq.kv_put("k", partition, {"a": torch.tensor([9, 9, 9]), "b": torch.tensor([4])})
    got = tq.kv_batch_get("k", partition)
    assert (rows_of(got["a"]), rows_of(got["b"])) == ([[9, 9, 9]], [[4]])
    assert held() == 1, "rows that hold no field any more have left"
    tq.kv_put("k", partition, tag={"status": "used"})
    assert tq.kv_list(partition) == {partition: {"k": {"status": "used", "step": 0}}}


def test_keys_that_were_put_apart_are_fetched_together(partition):
    for length in (1, 2, 3):
        tq.kv_put(f"k{length}", partition, {"a": torch.arange(length), f"only{length}": torch.tensor(length)})
    got = tq.kv_batch_get(["k3", "k1"], partition)
    assert [*got.keys()] == ["a"], "the fields that all have"
    assert rows_of(got["a"]) == [[0, 1, 2], [0]]
    assert tq.kv_batch_get("k2", partition, "only2")["only2"].tolist() == [2]


def test_keys_with_tensors_of_several_types_are_joined_as_by_torch(partition):
    tq.kv_put("whole", partition, {"mask": torch.ones(2, dtype=torch.int64)})
    tq.kv_put("half", partition, {"mask": torch.tensor([0.5])})
    got = tq.kv_batch_get(["half", "whole"], partition)["mask"]
    assert (got.dtype, rows_of(got)) == (torch.float32, [[0.5], [1.0, 1.0]])
    tq.kv_put("flat", partition, {"mask": torch.ones(2, 2)})
    with pytest.raises(DistflowError, match="`mask` do not fit together"):
        tq.kv_batch_get(["half", "flat"], partition)


@pytest.mark.parametrize("cleared", [False, True])
def test_a_field_that_is_replaced_while_it_is_fetched_is_fetched_again(address, partition, cleared):
    tq.kv_put("k", partition, {"n": torch.tensor(1)})
    reader, values = tq.QueueClient(address), iter([2])
    fetch = reader.dock.fetch

    def fetch_late(*given):
        for value in values:
            tq.kv_clear("k", partition) if cleared else tq.kv_put("k", partition, {"n": torch.tensor(value)})
        return fetch(*given)

    reader.dock.fetch = fetch_late
    if cleared:
        with pytest.raises(ValueError, match="not found"):
            reader.kv_batch_get("k", partition)
    else:
        assert reader.kv_batch_get("k", partition)["n"].tolist() == [2]
    reader.dock.close()
    reader.connection.close()


def test_partitions_hold_keys_of_the_same_name_apart(partition):
    other = f"{partition} too"
    for name, number in ((partition, 1), (other, 2)):
        tq.kv_batch_put(["a", "b"], name, TensorDict({"n": torch.full((2,), number)}, batch_size=2),
                        [{"n": number}, {}])
    tq.kv_clear(["a", "none"], partition)
    assert tq.kv_list(partition) == {partition: {"b": {}}}
    assert tq.kv_list()[other] == {"a": {"n": 2}, "b": {}}
    assert tq.kv_batch_get(["a", "b"], other)["n"].tolist() == [2, 2]
    tq.kv_clear(["a", "b"], other)
    tq.kv_clear("a", "nowhere")
    assert tq.kv_list("nowhere") == {}


def test_metadata_selects_what_is_fetched(partition):
    keys, numbers = [f"k{number}" for number in range(5)], torch.arange(5)
    meta = tq.kv_batch_put(keys, partition, TensorDict({"n": numbers, "m": -numbers}, batch_size=5),
                           [{"at": number} for number in range(5)])
    parts = meta.chunk(3)
    assert [len(part) for part in parts] == [2, 2, 1]
    assert [part.size for part in meta.chunk(6)] == [1, 1, 1, 1, 1, 0]
    back = tq.KVBatchMeta.concat([parts[2], parts[0], tq.KVBatchMeta()])
    assert back.tags == [{"at": 4}, {"at": 0}, {"at": 1}]
    back.reorder([2, 0, 1])
    assert tq.kv_batch_get_by_meta(back)["n"].tolist() == [1, 4, 0]
    assert [*tq.kv_batch_get_by_meta(meta.select_keys(["k3"]), "m").keys()] == ["m"]
    with pytest.raises(ValueError, match="select_fields.*not found"):
        tq.kv_batch_get_by_meta(meta, ["n", "none"])


def test_async_calls_are_the_same(partition):
    async def talk():
        puts = [tq.async_kv_put(f"k{number}", partition, {"n": torch.tensor(number)}) for number in range(8)]
        await asyncio.gather(*puts)
        return await tq.async_kv_batch_get([f"k{number}" for number in range(8)], partition)

    assert asyncio.run(talk())["n"].tolist() == [*range(8)]


def work(line, address, partition):
    """In another process: read what is there, and add a field."""
    os.environ[tq.ADDRESS] = address
    tq.init()
    got = tq.kv_batch_get(["a", "b"], partition, "n")["n"]
    tq.kv_batch_put(["a", "b"], partition, {"doubled": 2 * got}, [{"by": "other"}, {}])
    line.send(tq.kv_list(partition))
    line.recv()


def test_processes_share_keys_and_rows(address, partition):
    tq.kv_batch_put(["a", "b"], partition, {"n": torch.tensor([4, 5])})
    ours, theirs = Pipe()
    process = fork_process(work, theirs, address, partition, daemon=True)
    assert ours.recv() == {partition: {"a": {"by": "other"}, "b": {}}}
    assert tq.kv_batch_get(["b", "a"], partition)["doubled"].tolist() == [10, 8]
    ours.send(None)
    process.join()


def fields_of(rows: int) -> dict:
    return {"n": torch.arange(rows)}


class Unwelcome:
    def __reduce__(self):
        return os._exit, (1,)


def test_what_cannot_be_kept_is_refused(partition):
    fields, before = fields_of(2), held()
    tq.kv_batch_put(["a"], partition, {"n": torch.tensor([1])})
    for keys, given, tags, match in (
            (["a", "b", "c"], fields, None, "3 keys have 2 rows"), (["a", "b"], fields, [{}], "2 keys have 1 rows"),
            (["a", "a"], fields, None, "each once"), (["a"], None, None, "neither"),
            (["a"], {"x": [Unwelcome()]}, None, "nothing is pickled"), (["a"], {"x": [(1, 2)]}, None, "nothing is"),
            (["a"], fields_of(1), [{"x": torch.ones(1)}], "a tag has.*nothing is"),
            (["a"], None, [{"x": (1,)}], "a tag has"),
            (["a"], {"x": [pickle.dumps(1), 2]}, None, "1 keys have 2 rows")):
        with pytest.raises(ValueError, match=match):
            tq.kv_batch_put(keys, partition, given, tags)
    for keys, select, match in ((["a", "b"], None, r"\['b'\] were not found"), (["a"], "none", r"\['none'\]"),
                                ([], None, "no fields to get")):
        with pytest.raises(ValueError, match=match):
            tq.kv_batch_get(keys, partition, select)
    assert held() == before + 1, "rows of a refused call have stayed"
    tq.kv_put("b", partition, {"n": "text"})
    with pytest.raises(ValueError, match="a tensor in some of these keys"):
        tq.kv_batch_get(["a", "b"], partition)
    assert tq.kv_batch_get("b", partition).get("n").tolist() == ["text"]


def test_without_the_secret_nobody_is_served(address):
    with pytest.raises(DistflowError, match="token"):
        tq.QueueClient(address.partition("/")[0] + "/" + "0" * 32)
