"""Ranks at one store: values are broadcast and agreed on, and errors name the ranks that differ or are missing."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from unittest import mock

import pytest
import torch.distributed as dist
from ranks import run_ranks
from stores import hosted

from distflow.errors import Disagreement
from distflow.recovery.store import RunStore


def join(port: int, wait_limit: float) -> RunStore:
    place = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size()), "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with mock.patch.dict(os.environ, place):
        return RunStore(wait_limit)


def error_of(action: Callable[[], object]) -> str:
    with pytest.raises(Disagreement) as error:
        action()
    return str(error.value)


def scenarios(port: int) -> dict[str, str]:
    store, rank = join(port, 60), dist.get_rank()
    store.agree("plan", "abc", "Why.")
    seen = {"folder": store.broadcast("folder", "runs/größe-1" if rank == 0 else "elsewhere")}
    seen["one differs"] = error_of(lambda: store.agree("version", "2" if rank == 1 else "1", "Update it."))
    seen["two differ"] = error_of(lambda: store.agree("files", f"file {rank}", "Copy them."))
    hasty = join(port, 3.0)
    if rank != 1:
        seen["one missing"] = error_of(lambda: hasty.agree("late", "same", "Why."))
    if rank != 0:
        seen["timeout"] = error_of(lambda: hasty.broadcast("never"))
    dist.barrier()
    return seen


def test_three_ranks():
    store = hosted()
    zero, one, two = run_ranks(3, scenarios, store.port)
    assert [seen["folder"] for seen in (zero, one, two)] == ["runs/größe-1"] * 3
    for seen in (zero, one, two):
        assert seen["one differs"] == "the ranks do not have the same version: rank 1 has 2, rank 0 has 1. Update it."
        assert seen["two differ"] == ("the ranks do not have the same files: rank 1 has file 1, rank 2 has file 2, "
                                      "rank 0 has file 0. Copy them.")
    for seen in (zero, two):
        assert seen["one missing"].startswith("waiting for the late: rank 1 did not come.")
    for seen in (one, two):
        assert seen["timeout"].startswith("waiting for the never: rank 0 did not come.")


def test_a_store_that_is_not_there():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: no server answers there
        place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        with mock.patch.dict(os.environ, place):
            error = error_of(lambda: RunStore(0.5))
    assert f"rank 1 does not reach the others at 127.0.0.1:{place['MASTER_PORT']}" in error


def test_alone_without_torchrun():
    with mock.patch.dict(os.environ):
        os.environ.pop("RANK", None)
        store = RunStore(10)
    store.agree("plan", "abc", "Why.")
    assert store.broadcast("folder", "runs/a") == "runs/a"
    assert (store.rank, store.ranks) == (0, 1)
