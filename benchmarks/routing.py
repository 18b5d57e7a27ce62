"""CPU seconds and memory of one rank that learns where the rows of all go.  python -m benchmarks.routing RANKS"""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np
import torch

from benchmarks.contender import kilobytes
from benchmarks.rows import PER_TOKEN
from distflow.data.assignment import RowCounts
from distflow.data.batch import Batch, Ragged
from distflow.data.redistribute import PoolNotice, Route, RowNotices, ShareReceivers, agree_on_forms, announce
from distflow.plan import SOURCE, Column, Layout, RowLineage, Task

PER_MACHINE = 8


def route(ranks: int, rows: int, repeat: int) -> float:
    """Return what one rank computes to know where the rows of all go: each rank has `rows`, from all over the step as
    after a first redistribution; they are balanced by tokens, and stay on their machine as far as that allows."""
    made, notices = np.random.default_rng(repeat), []
    layout, machines = Layout(ranks), (np.arange(ranks) // PER_MACHINE * PER_MACHINE).tolist()
    reads = tuple(Column(name, name, SOURCE, "Ragged") for name in PER_TOKEN)
    lineage = RowLineage([Task("reads", "actor", "COMPUTE", "reads", {}, reads, (), layout)], Layout(1))
    for ids in np.sort(made.permutation(ranks * rows).reshape(ranks, rows)):
        lengths = [torch.from_numpy(made.integers(1, 2000, rows)) for _ in range(2)]  # a prompt's and its response's
        columns = {name: Ragged(torch.empty(int(lengths[name != "prompts"].sum()), dtype=torch.bool),
                                lengths[name != "prompts"]) for name in PER_TOKEN}
        batch, counts = Batch(torch.from_numpy(ids), columns), RowCounts(lineage, layout)
        counts.add(SOURCE, batch, None, origin=True)
        notices.append(announce(batch, PoolNotice(), counts.to_bytes())[0])
    receivers = ShareReceivers.of(layout, machines)
    begin = time.process_time()
    found = RowNotices(notices)
    assignment, _ = RowCounts(lineage, layout).assign(found.payloads(), machines)
    route = Route(found, agree_on_forms(found), assignment.destinations(lineage, SOURCE, layout), ranks)
    route.sent(0)
    route.received(0, ranks)
    route.crosses_machines(np.array(machines), receivers)
    return time.process_time() - begin


def main(ranks: int) -> None:
    route(8, 16, 0)
    before = kilobytes("self", "VmHWM")
    seconds = [route(ranks, 16, repeat) for repeat in range(6)][1:]
    print(statistics.median(seconds), min(seconds), max(seconds), kilobytes("self", "VmHWM") - before)


if __name__ == "__main__":
    main(int(sys.argv[1]))
