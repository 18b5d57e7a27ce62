"""Names the ranks that have not entered a collective in which others wait, by torch's flight recorder.

    entered            the newest collective of each group of ranks that this process has entered
    CollectiveMonitor  publishes it while this process makes no progress: who waits in a collective cannot answer
    absent             who has not entered what, by all that was published

The recorders are torch's own, of gloo, and one of NCCL where torch has it (not run yet). They keep the last
`TORCH_FR_BUFFER_SIZE` (2,000) collectives. Where NCCL times out, torch ends the process by SIGABRT: what its rank has
published is then read by its supervisor.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from distflow.telemetry import heartbeat

_INTERVAL = 5.0  # seconds without progress after which a rank publishes where it is
_SHOWN = 8


class Collective(NamedTuple):
    """A collective of a group. since: when this process entered it, in seconds since the epoch."""

    number: int
    name: str
    group: str
    ranks: list[int]
    since: float


def entered(first: int = 0) -> dict[str, Collective]:
    """Return the newest collective of each group that this process has entered. `first`: number of torch's rank 0. Of a
    process that makes its groups once: torch keeps records of groups that are gone, and their names come again."""
    import torch.distributed as dist
    from torch._C import _distributed_c10d as recorder

    dumps = [getattr(recorder, name) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")
             if hasattr(recorder, name)]
    groups = {group.group_name: sorted(ranks) for group, ranks in [*dist.distributed_c10d._world.pg_group_ranks.items()]
              if isinstance(group, dist.ProcessGroup) and len(ranks) > 1}
    found: dict[str, Collective] = {}
    for entry in (entry for dump in dumps for entry in json.loads(dump(True, False)).get("entries", ())):
        name, description = entry["process_group"]
        if name in groups and not entry["is_p2p"]:
            backend, _, operation = entry["profiling_name"].partition(":")  # each backend of a group counts for itself
            found[f"{first}/{backend}/{name}"] = Collective(
                entry["collective_seq_id"], operation, description or name,
                [first + rank for rank in groups[name]], entry["time_created_ns"] / 1e9)
    return found


def absent(published: Mapping[int, str]) -> str:
    """Return which ranks have not entered the newest collective of a group, the longest wait first; empty if none. By
    rank, what each `CollectiveMonitor` has published."""
    by_rank = {rank: {key: Collective(*each) for key, each in json.loads(text or "{}").items()}
               for rank, text in published.items()}
    waiting: dict[str, dict[int, Collective]] = {}
    for rank, groups in by_rank.items():
        for key, each in groups.items():
            waiting.setdefault(key, {})[rank] = each
    newest = {key: {rank: each for rank, each in ranks.items() if each.number == max(ranks.values()).number}
              for key, ranks in waiting.items()}
    longest_first = sorted(newest, key=lambda key: min(each.since for each in newest[key].values()))
    lines = [line for key in longest_first for line in _absent_from(newest[key], waiting[key])]
    return "; ".join(lines[:_SHOWN]) + (f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else "")


def _absent_from(inside: Mapping[int, Collective], known: Mapping[int, Collective]) -> Iterator[str]:
    one = next(iter(inside.values()))
    since = time.time() - min(each.since for each in inside.values())
    what = f"{one.name} {one.number} of group `{one.group}`, where rank {_listed(inside)} waits for {since:.0f} s"
    behind = [rank for rank in one.ranks if rank not in inside]
    for says, ranks in (("has not entered", [rank for rank in behind if rank in known]),
                        ("has not said that it entered", [rank for rank in behind if rank not in known])):
        if ranks:
            yield f"rank {_listed(ranks)} {says} {what}"
    names = {inside[rank].name: rank for rank in sorted(inside, reverse=True)}
    if len(names) > 1:
        yield f"collective {one.number} of group `{one.group}` is " + " and ".join(
            f"{name} on rank {rank}" for name, rank in sorted(names.items(), key=lambda item: item[1]))


def _listed(ranks: Mapping[int, Collective] | list[int]) -> str:
    return ", ".join(map(str, ranks))


class CollectiveMonitor:
    """Thread that publishes the collectives of this process while it makes no progress, and "" once it does again.

    Args:
        publish: takes what `absent` reads.
        first: number of torch's rank 0.
        limit: seconds after which collectives time out.
    """

    def __init__(self, publish: Callable[[str], None], first: int, limit: float):
        self.publish, self.first, self.interval = publish, first, min(_INTERVAL, limit / 4)
        self.ended = threading.Event()

    def __enter__(self) -> None:
        threading.Thread(target=self._run, name="collectives", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.ended.set()

    def _run(self) -> None:
        silence, published = heartbeat.Silence(), ""
        while not self.ended.wait(self.interval):
            silent = silence.of(heartbeat.current().page.progress) >= self.interval
            if (text := json.dumps(entered(self.first)) if silent else "") != published:
                self.publish(text)
                published = text
