"""verl's side of `databuffer_vs_peers.py`: two RayWorkerGroups, a DataProto, and the driver between them.

As in verl's trainer: the driver calls a method of the group that has the rows, which returns them as one DataProto,
and hands that to a method of the group that wants them. Both methods have the dispatch that verl's own workers have
(`make_nd_compute_dataproto_dispatch_fn`). `verl_dataproto.py MIB`: of memory for Ray's object store.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import ray
import torch
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from benchmarks import rows
from benchmarks.contender import serve
from benchmarks.rows import Case

_MESH = "rows"


class Holder(Worker):
    """A data-parallel rank that has rows, or gets them."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self._register_dispatch_collect_info(_MESH, dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def prepare(self, case: dict[str, Any]) -> None:
        self.case, self.columns, self.data = Case(**case), {}, None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def make(self) -> None:
        self.columns = rows.make(self.case, self.rank, pad=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load(self, repeat: int) -> None:
        ids = self.case.ids(repeat, self.rank)
        rewards = rows.rewards(self.case, repeat, ids)
        self.data = DataProto.from_dict(tensors=self.columns | {"ids": ids, "rewards": rewards})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=_MESH))
    def give(self, request: DataProto) -> DataProto:
        return self.data

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=_MESH))
    def get(self, data: DataProto) -> DataProto:
        self.data = data
        return DataProto(meta_info={})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def check(self, repeat: int, contents: bool) -> tuple[list[int], str]:
        columns = dict(self.data.batch.items())
        ids, self.data = columns.pop("ids"), None
        return ids.tolist(), rows.wrong(self.case, repeat, ids, columns) if contents else ""


class Driver:
    """The single controller."""

    def __init__(self, store_mib: int):
        ray.init(address="local", num_cpus=64, include_dashboard=False, log_to_driver=False,
                 object_store_memory=store_mib * 2**20)
        self.producers = self.consumers = None

    def prepare(self, case: dict[str, Any]) -> None:
        """Groups of the right sizes, without rows; those that fit are used again."""
        self.case = Case(**case)
        self.producers = _group(self.producers, self.case.producers)
        self.consumers = _group(self.consumers, self.case.consumers)
        self.producers.prepare(case)
        self.consumers.prepare(case)

    def make(self) -> None:
        self.producers.make()

    def round(self, repeat: int) -> float:
        self.producers.load(repeat)
        request = DataProto.from_dict(tensors={"share": torch.arange(self.case.producers)})
        begin = time.perf_counter()
        self.consumers.get(self.producers.give(request))
        return time.perf_counter() - begin

    def check(self, repeat: int, contents: bool) -> dict[str, Any]:
        ids, wrong = zip(*self.consumers.check(repeat, contents))
        return {"ids": ids, "wrong": [words for words in wrong if words]}


def _group(old: RayWorkerGroup | None, ranks: int) -> RayWorkerGroup:
    if old and old.world_size == ranks:
        return old
    for worker in old.workers if old else []:
        ray.kill(worker)
    pool = RayResourcePool(process_on_nodes=[ranks], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Holder)), device_name="cpu",
                          master_addr="127.0.0.1", master_port="0")  # unused; a process would be started to find one


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(Driver(int(sys.argv[1])))
    ray.shutdown()
