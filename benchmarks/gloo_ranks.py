"""distflow's side of `databuffer_vs_peers.py`, driven as `contender.py` says.

Every case gets fresh processes, one a rank, in one gloo group. A round is timed from a moment on at which all ranks
begin, to the latest end of any.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import rows
from benchmarks.contender import serve
from benchmarks.group import Rank, Served, begin_together
from benchmarks.rows import Case, Columns
from distflow.data.batch import Batch, Ragged
from distflow.data.databuffer import Databuffer
from distflow.plan import SOURCE, Column, Layout, Plan, Task, Transfer
from distflow.telemetry.metrics import Metrics


class ByDatabuffer:
    """Moves rows: `start` with them, `take` in another layout."""

    def __init__(self, case: Case, rank: int):
        form = {rows.PADDED: "Tensor", rows.RAGGED: "Ragged"}[case.form]
        reads = tuple(Column(name, name, SOURCE, form if name in rows.PER_TOKEN else "Tensor") for name in rows.NAMES)
        self.task = Task("consumer", "actor", "COMPUTE", "consume", {}, reads, (), Layout(case.consumers, case.first),
                         (Transfer(SOURCE, rows.NAMES, "all_to_all"),))
        plan = Plan("databuffer_vs_peers", "sync", case.ranks, (self.task,), Layout(case.producers))
        self.buffer = Databuffer(plan, rank, Metrics())
        self.taken = Batch(torch.empty(0, dtype=torch.int64))

    def load(self, ids: Tensor, columns: Columns) -> None:
        """Take this rank's rows of the next round; not timed."""
        self.loaded = Batch(ids, {name: Ragged(*column) if isinstance(column, tuple) else column
                                  for name, column in columns.items()})
        del self.taken

    def move(self) -> None:
        """Move all rows to where they should be; timed."""
        self.buffer.start(self.loaded)
        self.taken = self.buffer.take(self.task)

    def result(self) -> tuple[Tensor, Columns]:
        return self.taken.ids, {name: (column.values, column.lengths) if isinstance(column, Ragged) else column
                                for name, column in self.taken.columns.items()}


class CaseRank(Rank):
    """What one process does for `Host`."""

    def __init__(self, given: dict[str, Any], rank: int, store: str):
        self.case, self.columns = Case(**given), {}
        if self.case.machines > 1:
            os.environ["DISTFLOW_MACHINE"] = str(rank * self.case.machines // self.case.ranks)
        super().__init__(rank, self.case.ranks, store)
        self.way = ByDatabuffer(self.case, rank)
        self.rehearse()

    def rehearse(self) -> None:
        """Move a few rows: what is loaded or set up at first use, or needed to make rows, is not their memory."""
        case = self.case
        self.case = replace(case, mib=0)
        self.make()
        self.round(0)
        self.check(0, contents=True)
        self.case = case

    def make(self) -> None:
        if self.rank < self.case.producers:
            self.columns = rows.make(self.case, self.rank, pad=self.case.form == rows.PADDED)

    def round(self, repeat: int) -> float:
        ids, columns = torch.empty(0, dtype=torch.int64), {}
        if self.rank < self.case.producers:
            ids = self.case.ids(repeat, self.rank)
            columns = self.columns | {"rewards": rows.rewards(self.case, repeat, ids)}
        self.way.load(ids, columns)
        dist.barrier()
        moment = begin_together()
        self.way.move()
        return time.perf_counter() - moment

    def check(self, repeat: int, contents: bool) -> tuple[list[int], str]:
        ids, columns = self.way.result()
        wrong = rows.wrong(self.case, repeat, ids, columns) if contents and len(ids) else ""
        return ids.tolist(), wrong


class Host:
    """Starts a case's ranks and speaks for them."""

    def __init__(self) -> None:
        self.ranks = Served(CaseRank)

    def prepare(self, case: dict[str, Any]) -> None:
        self.ranks.close()
        with tempfile.TemporaryDirectory(prefix="gloo-") as folder:
            self.ranks = Served(CaseRank, [(case, rank, f"{folder}/store") for rank in range(Case(**case).ranks)])

    def make(self) -> None:
        self.ranks.ask_all("make")

    def round(self, repeat: int) -> float:
        return max(self.ranks.ask_all("round", repeat))

    def check(self, repeat: int, contents: bool) -> dict[str, Any]:
        ids, wrong = zip(*self.ranks.ask_all("check", repeat, contents))
        return {"ids": ids, "wrong": [words for words in wrong if words]}


if __name__ == "__main__":
    # By its module's name: the ranks import what they run from there.
    from benchmarks.gloo_ranks import Host as ImportedHost
    os.chdir(Path(__file__).resolve().parents[1])
    host = ImportedHost()
    serve(host)
    host.ranks.close()
