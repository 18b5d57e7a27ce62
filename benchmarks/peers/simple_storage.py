"""TransferQueue's side of `databuffer_vs_peers.py`: SimpleStorage with two units, by its key-value interface.

As in its own throughput test and in verl's use of it: `kv_batch_put` of a TensorDict by every producer, then
`kv_batch_get` by every consumer of an even, contiguous share of the keys. Ragged columns are jagged nested tensors.
`simple_storage.py MIB`: of memory for Ray's object store, which carries no rows here.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import ray
import torch
import transfer_queue as queue
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor

from benchmarks import rows
from benchmarks.contender import serve
from benchmarks.rows import PADDED, Case

_PARTITION = "train"
_SETTINGS = {"backend": {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": 2}}}


@ray.remote(num_cpus=1)
class Client:
    """A rank that puts rows, gets them, or both."""

    def __init__(self, rank: int):
        torch.set_num_threads(1)
        self.rank = rank
        queue.init()

    def prepare(self, case: dict[str, Any]) -> None:
        self.case, self.columns, self.got = Case(**case), {}, None

    def make(self) -> None:
        if self.rank < self.case.producers:
            self.columns = {name: _nested(column) for name, column
                            in rows.make(self.case, self.rank, pad=self.case.form == PADDED).items()}

    def load(self, repeat: int) -> None:
        """Take what to put, and the keys of what to get."""
        if self.rank < self.case.producers:
            ids = self.case.ids(repeat, self.rank)
            self.keys = _keys(ids)
            self.fields = TensorDict(self.columns | {"ids": ids, "rewards": rows.rewards(self.case, repeat, ids)},
                                     batch_size=len(ids))
        share = self.rank - self.case.first
        if 0 <= share < self.case.consumers:
            size = self.case.rows // self.case.consumers
            self.wanted = _keys(self.case.first_id(repeat) + share * size + torch.arange(size))

    def put(self) -> None:
        queue.kv_batch_put(keys=self.keys, partition_id=_PARTITION, fields=self.fields)

    def get(self) -> float:
        self.got = queue.kv_batch_get(keys=self.wanted, partition_id=_PARTITION)
        return time.perf_counter()

    def check(self, repeat: int, contents: bool) -> tuple[list[int], str]:
        columns = {name: (value.values(), value.offsets().diff()) if value.is_nested else value
                   for name, value in self.got.items()}
        ids, self.got = columns.pop("ids"), None
        return ids.tolist(), rows.wrong(self.case, repeat, ids, columns) if contents else ""

    def clear(self) -> None:
        queue.kv_clear(keys=self.keys, partition_id=_PARTITION)


class Driver:
    """Tells the clients when; no row comes here."""

    def __init__(self, store_mib: int):
        ray.init(address="local", num_cpus=64, include_dashboard=False, log_to_driver=False,
                 object_store_memory=store_mib * 2**20)
        queue.init(OmegaConf.create(_SETTINGS))
        self.clients: list[Any] = []

    def prepare(self, case: dict[str, Any]) -> None:
        self.case = Case(**case)
        self.clients += [Client.remote(rank) for rank in range(len(self.clients), self.case.ranks)]
        self.producers = self.clients[: self.case.producers]
        self.consumers = self.clients[self.case.first :][: self.case.consumers]
        ray.get([client.prepare.remote(case) for client in self.clients])

    def make(self) -> None:
        ray.get([client.make.remote() for client in self.producers])

    def round(self, repeat: int) -> dict[str, Any]:
        ray.get([client.load.remote(repeat) for client in self.clients])
        begin = time.perf_counter()
        ray.get([client.put.remote() for client in self.producers])
        end = max(ray.get([client.get.remote() for client in self.consumers]))
        return {"seconds": end - begin, "through": self.case.nbytes}  # half of all rows into a unit, and out of it

    def check(self, repeat: int, contents: bool) -> dict[str, Any]:
        found = ray.get([client.check.remote(repeat, contents) for client in self.consumers])
        ray.get([client.clear.remote() for client in self.producers])
        ids, wrong = zip(*found)
        return {"ids": ids, "wrong": [words for words in wrong if words]}


def _nested(column: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    if not isinstance(column, tuple):
        return column
    values, lengths = column
    return torch.nested.nested_tensor_from_jagged(values, lengths=lengths)


def _keys(ids: Tensor) -> list[str]:
    return [str(number) for number in ids.tolist()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(Driver(int(sys.argv[1])))
    ray.shutdown()
