"""distflow's side of `databuffer_vs_peers.py`, driven as `contender.py` says.

Every case gets fresh processes, one a rank, in one gloo group. A round is timed from a moment on at which all ranks
begin, to the latest end of any.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import time
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import rows
from benchmarks.contender import serve
from benchmarks.group import begin_together
from benchmarks.rows import Case, Columns
from distflow.data.batch import Batch, Ragged
from distflow.data.databuffer import Databuffer
from distflow.plan import SOURCE, Column, Layout, Plan, Task, Transfer
from distflow.telemetry.metrics import Metrics

_TIMEOUT = datetime.timedelta(seconds=120)
"""For a rank that does not come; the others then end, and so does the benchmark."""


class ByDatabuffer:
    """Moves rows: `start` with them, `take` in another layout."""

    def __init__(self, case: Case, rank: int):
        form = {rows.PADDED: "Tensor", rows.RAGGED: "Ragged"}[case.form]
        reads = tuple(Column(name, name, SOURCE, form if name in rows.PER_TOKEN else "Tensor") for name in rows.NAMES)
        self.task = Task("consumer", "actor", "COMPUTE", "consume", {}, reads, (), Layout(case.consumers, case.first),
                         (Transfer(SOURCE, rows.NAMES, "all_to_all"),))
        plan = Plan("databuffer_vs_peers", "sync", case.ranks, (self.task,), Layout(case.producers))
        self.case, self.metrics = case, Metrics()
        self.buffer = Databuffer(plan, rank, self.metrics)
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

    def through(self) -> int:
        """Sent bytes as the databuffer counts them; received ones are those of the rows that were not here before."""
        sent = self.metrics.collect(lambda part: [part]).get("data/bytes_sent", 0.0)
        ids, columns = self.result()
        new = ~torch.isin(ids, self.loaded.ids)
        return int(sent) + rows.nbytes(columns, new)


class Rank:
    """What one process does for `Host`."""

    def __init__(self, case: Case, rank: int):
        self.case, self.rank, self.columns = case, rank, {}
        self.way = ByDatabuffer(case, rank)

    def rehearse(self) -> None:
        """Move a few rows: what is loaded or set up at first use, or needed to make rows, is not their memory."""
        case = self.case
        self.case = self.way.case = replace(case, mib=0)
        self.make()
        self.round(0)
        self.check(0, contents=True)
        self.case = self.way.case = case

    def make(self) -> None:
        if self.rank < self.case.producers:
            self.columns = rows.make(self.case, self.rank, pad=self.case.form == rows.PADDED)

    def round(self, repeat: int) -> tuple[float, int]:
        ids, columns = torch.empty(0, dtype=torch.int64), {}
        if self.rank < self.case.producers:
            ids = self.case.ids(repeat, self.rank)
            columns = self.columns | {"rewards": rows.rewards(self.case, repeat, ids)}
        self.way.load(ids, columns)
        dist.barrier()
        moment = begin_together()
        self.way.move()
        return time.perf_counter() - moment, self.way.through()

    def check(self, repeat: int, contents: bool) -> tuple[list[int], str]:
        ids, columns = self.way.result()
        wrong = rows.wrong(self.case, repeat, ids, columns) if contents and len(ids) else ""
        return ids.tolist(), wrong


class Host:
    """Starts a case's ranks and speaks for them."""

    def __init__(self) -> None:
        self.lines, self.processes = [], []
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["benchmarks.gloo_ranks"])  # torch is imported once, not once a rank

    def prepare(self, case: dict[str, Any]) -> None:
        self.close()
        with tempfile.TemporaryDirectory(prefix="gloo-") as folder:
            for rank in range(Case(**case).ranks):
                ours, theirs = self.context.Pipe()
                process = self.context.Process(target=work, args=(case, rank, f"{folder}/store", theirs), daemon=True)
                process.start()
                theirs.close()
                self.processes.append(process)
                self.lines.append(ours)
            self._all()

    def make(self) -> None:
        self._all("make")

    def round(self, repeat: int) -> dict[str, Any]:
        seconds, through = zip(*self._all("round", repeat))
        return {"seconds": max(seconds), "through": max(through)}

    def check(self, repeat: int, contents: bool) -> dict[str, Any]:
        ids, wrong = zip(*self._all("check", repeat, contents))
        return {"ids": ids, "wrong": [words for words in wrong if words]}

    def close(self) -> None:
        for line in self.lines:
            line.close()
        for process in self.processes:
            process.join()
        self.lines, self.processes = [], []

    def _all(self, *order: Any) -> list[Any]:
        """Return every rank's answer, by rank; without an order, that it is there."""
        for line in self.lines:
            if order:
                line.send(order)
        return [line.recv() for line in self.lines]


def work(case: dict[str, Any], rank: int, store: str, line: Connection) -> None:
    """Run one rank until its line is closed."""
    torch.set_num_threads(1)
    made = Case(**case)
    if made.machines > 1:
        os.environ["DISTFLOW_MACHINE"] = str(rank * made.machines // made.ranks)
    dist.init_process_group("gloo", store=dist.FileStore(store, made.ranks), rank=rank, world_size=made.ranks,
                            timeout=_TIMEOUT)
    target = Rank(made, rank)
    target.rehearse()
    line.send(asdict(made))
    try:
        while True:
            do, *given = line.recv()
            line.send(getattr(target, do)(*given))
    except EOFError:
        dist.destroy_process_group()


if __name__ == "__main__":
    # By its module's name: the ranks import what they run from there.
    from benchmarks.gloo_ranks import Host as ImportedHost
    os.chdir(Path(__file__).resolve().parents[1])
    host = ImportedHost()
    serve(host)
    host.close()
