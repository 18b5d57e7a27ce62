"""Real gloo ranks of which one does not enter a collective, and what the others then say."""

from __future__ import annotations

import contextlib
import datetime
import json
import time

import pytest
import torch
import torch.distributed as dist
from ranks import end_processes, run_ranks
from stores import client

from distflow.recovery.rank_status import COLLECTIVES, RankStatus, absent_ranks
from distflow.telemetry.collectives import Collective, CollectiveMonitor, absent


def stand(late: int, other: bool) -> tuple[str, str]:
    """Let all but rank `late` enter a collective of ranks 1 and 2 or, with `other`, of all; return what is said of it
    while they wait, and after their time-out."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    underlying = store
    while isinstance(underlying, dist.PrefixStore):
        underlying = underlying.underlying_store
    below = client(underlying.port).below("who stands")
    pair, whole = dist.new_group([1, 2], group_desc="pair"), dist.new_group(group_desc="whole")
    group = whole if other else pair
    for _ in range(3):
        dist.all_reduce(torch.ones(1), group=whole)
    if other or rank:
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=4), group)
    status = RankStatus(below, rank, 3)
    status.set("computing node `update`", "training")
    with CollectiveMonitor(lambda text: below.put(f"{COLLECTIVES}/{rank}", text), 0, limit=1.0):
        if rank == late or not (other or rank):
            assert below.wait([f"{COLLECTIVES}/{each}" for each in range(3)], 60.0)
            until = time.monotonic() + 120
            while not (text := absent_ranks(below, range(3))) and time.monotonic() < until:
                below.wait(["nothing"], 0.1)  # the others need the processor
            store.wait(["over"])
            return text, ""
        with contextlib.suppress(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)
            pytest.fail("nobody was missing")
        missing = status.missing()
        store.set("over", "")
        return "", missing


@pytest.mark.parametrize(("other", "group", "number", "inside"), [(True, "whole", 4, r"0, 1"), (False, "pair", 1, "1")])
def test_the_rank_that_has_not_come_is_named_while_others_wait_and_when_they_give_up(other, group, number, inside):
    end_processes()
    said = run_ranks(3, stand, 2, other)
    end_processes()  # gloo may still write to what these waited for
    for text in (said[2][0], said[1][1]):
        assert text.startswith("rank 2 has not "), text
        assert f"{number} of group `{group}`, where rank {inside} waits for " in text
        assert "all_reduce" in text
    assert "no rank says that it is elsewhere" not in said[1][1]


def published(number: int, name: str = "all_reduce", since: float = 0.0, group: str = "dp") -> str:
    return json.dumps({f"0/{group}": Collective(number, name, group, [0, 1, 2, 3], since)})


def test_those_who_know_of_an_earlier_one_are_told_from_those_who_say_nothing():
    text = absent({0: published(7), 1: published(6), 2: "", 3: published(7)})
    first, second = text.split("; ")
    assert first.startswith("rank 1 has not entered all_reduce 7 of group `dp`, where rank 0, 3 waits for ")
    assert second.startswith("rank 2 has not said that it entered all_reduce 7 of group `dp`")


def test_ranks_that_have_entered_different_collectives_are_named():
    text = absent({rank: published(7, "all_gather" if rank == 2 else "all_reduce") for rank in range(4)})
    assert text == "collective 7 of group `dp` is all_reduce on rank 0 and all_gather on rank 2"
