"""TransferQueue's side of `transfer_dock.py`: clients that put, list and get, each in a partition of its own."""

from __future__ import annotations

import time
from typing import Any

import ray
import torch
import transfer_queue as queue
from omegaconf import OmegaConf
from tensordict import TensorDict

from benchmarks.contender import serve

_SETTINGS = {"backend": {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": 2}}}
_STORE = 256 << 20
"""Bytes of Ray's object store, which carries no rows here."""


def lengths_of(ids: torch.Tensor, mean: int) -> torch.Tensor:
    """Return the lengths of rows, as in `transfer_dock.py`."""
    return 1 + (ids * 2654435761 % (2 * mean - 1))


@ray.remote(num_cpus=1)
class Client:
    """A process that puts, lists and gets."""

    def __init__(self, number: int):
        torch.set_num_threads(1)
        self.partition = f"client {number}"
        queue.init()

    def make(self, first: int, cycles: int, rows: int, mean: int) -> None:
        self.mean, self.parts = mean, []
        for cycle in range(cycles):
            ids = torch.arange(first + cycle * rows, first + (cycle + 1) * rows)
            lengths = lengths_of(ids, mean)
            values = ids.repeat_interleave(lengths)
            fields = {"ids": ids, "rewards": ids.float(),
                      "tokens": torch.nested.nested_tensor_from_jagged(values, lengths=lengths),
                      "logprobs": torch.nested.nested_tensor_from_jagged(values.float(), lengths=lengths)}
            self.parts.append(([str(row) for row in ids.tolist()], ids, TensorDict(fields, batch_size=rows)))

    def cycles(self) -> float:
        for keys, ids, fields in self.parts:
            queue.kv_batch_put(keys=keys, partition_id=self.partition, fields=fields)
            there = queue.kv_list(self.partition)[self.partition]
            got = queue.kv_batch_get(keys=keys, partition_id=self.partition)
            lengths = got["tokens"].offsets().diff()
            if not (torch.equal(got["ids"], ids) and torch.equal(lengths, lengths_of(ids, self.mean))
                    and there.keys() >= set(keys)):
                raise ValueError("got other rows than were put")
        return time.perf_counter()

    def clear(self) -> None:
        for keys, _, _ in self.parts:
            queue.kv_clear(keys=keys, partition_id=self.partition)


class Driver:
    """Tells the clients when; no row comes here."""

    def __init__(self) -> None:
        ray.init(address="local", num_cpus=64, include_dashboard=False, log_to_driver=False, object_store_memory=_STORE)
        queue.init(OmegaConf.create(_SETTINGS))
        self.clients: list[Any] = []
        self.next = 0

    def round(self, clients: int, cycles: int, rows: int, mean: int) -> float:
        """Return the seconds for every client's `cycles`."""
        self.clients += [Client.remote(number) for number in range(len(self.clients), clients)]
        at_work = self.clients[:clients]
        ray.get([client.make.remote(self.next + place * cycles * rows, cycles, rows, mean)
                 for place, client in enumerate(at_work)])
        self.next += clients * cycles * rows
        begin = time.perf_counter()
        end = max(ray.get([client.cycles.remote() for client in at_work]))
        ray.get([client.clear.remote() for client in at_work])
        return end - begin


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(Driver())
    ray.shutdown()
