"""Keys of the key-value interface (`transfer_queue.py`): which row of the dock holds a field of which key.

    KeyServer      all keys of a queue, with their tags; clients record what they have put, and ask where it is
    KVBatchMeta    some keys as a client knows them
"""

from __future__ import annotations

import copy
import itertools
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import getLogger
from typing import Any

from distflow.dock.process import ShardProcess
from distflow.rpc.connection import Connection, ConnectionEnded
from distflow.rpc.server import Server

Tags = list[dict[str, Any]]


@dataclass
class KVBatchMeta:
    """Keys of one partition with their tags, and the fields that all of them have."""

    keys: list[str] = field(default_factory=list)
    tags: Tags = field(default_factory=list)
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] | None = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not len(self.tags) == len(self.keys) == len({*self.keys}):
            raise ValueError(f"{len(self.keys)} keys, each once, have {len(self.tags)} tags")
        self.tags, self.extra_info = copy.deepcopy(self.tags), copy.deepcopy(self.extra_info)

    def __len__(self) -> int:
        return len(self.keys)

    size = property(__len__)

    def _part(self, places: Sequence[int]) -> KVBatchMeta:
        return replace(self, keys=[self.keys[at] for at in places], tags=[self.tags[at] for at in places])

    def select_keys(self, keys_to_select: Sequence[str]) -> KVBatchMeta:
        if unknown := {*keys_to_select} - {*self.keys}:
            raise RuntimeError(f"keys {sorted(unknown)} are not in this batch")
        places = dict(zip(self.keys, range(len(self))))
        return self._part([places[key] for key in keys_to_select])

    def reorder(self, indexes: Sequence[int]) -> None:
        if sorted(indexes) != [*range(len(self))]:
            raise ValueError(f"{[*indexes]} is no order of {len(self)} keys")
        part = self._part(indexes)
        self.keys, self.tags = part.keys, part.tags

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """Return so many parts; where that does not divide, the first ones are longer by one."""
        ends = [-(-len(self) // chunks) * number - max(0, number - (len(self) % chunks or chunks))
                for number in range(chunks + 1)]
        return [self._part(range(*pair)) for pair in itertools.pairwise(ends)]

    @classmethod
    def concat(cls, data: Sequence[KVBatchMeta]) -> KVBatchMeta:
        parts, extra = [part for part in data if len(part)] or [cls()], dict[str, Any]()
        if len({(part.partition_id, frozenset(part.fields or ())) for part in parts}) > 1:
            raise ValueError("batches of several partitions, or with other fields, are not one batch")
        for name, value in (pair for part in parts for pair in (part.extra_info or {}).items()):
            if extra.setdefault(name, value) != value:
                raise ValueError(f"`extra_info` has two values of `{name}`")
        return replace(parts[0], keys=[key for part in parts for key in part.keys],
                       tags=[tag for part in parts for tag in part.tags], extra_info=extra)


class KeyServer:
    """Server of the keys of all partitions. cells: by partition and key its tag, and by field the column and the row.
    """

    def __init__(self, token: bytes, host: str, shards: Sequence[ShardProcess]):
        self.process, self.lock, self.clients, self.shards = os.getpid(), threading.Lock(), itertools.count(), shards
        self.cells: dict[str, dict[str, tuple[dict[str, Any], dict[str, tuple[str, int]]]]] = {}
        self.server = Server(token, host, 0, self._serve, getLogger("distflow.dock"))

    def _serve(self, connection: Connection, hello: dict[str, Any]) -> None:
        actions = {"put": self.put, "get": self.get, "list": self.list, "clear": self.clear}
        try:
            connection.send({"client": next(self.clients), "shards": [shard.address for shard in self.shards]})
            while True:
                header, _ = connection.receive(most=0)
                try:
                    with self.lock:
                        reply = actions[header.pop("op")](**header)
                except ValueError as error:
                    reply = {"error": str(error)}
                connection.send(reply)
        except (OSError, ConnectionEnded):
            return

    def put(self, partition: str, keys: list[str], columns: dict[str, str], row: int, tags: Tags) -> dict[str, Any]:
        """Note which columns of `row` and the rows behind it hold fields of the keys. Return the rows that are left
        with none, the tags, and the fields that all keys have."""
        there, left = self.cells.setdefault(partition, {}), set[int]()
        for number, (key, tag) in enumerate(zip(keys, tags)):
            held, fields = there.setdefault(key, ({}, {}))
            held.update(tag)
            before = {row for _, row in fields.values()}
            fields.update({name: (column, row + number) for name, column in columns.items()})
            left |= before - {row for _, row in fields.values()}
        return {"left": sorted(left), "tags": [there[key][0] for key in keys], "fields": _common(there, keys)}

    def get(self, partition: str, keys: list[str], select: list[str] | None) -> dict[str, Any]:
        there = self.cells.get(partition, {})
        if missing := [key for key in keys if key not in there]:
            raise ValueError(f"keys {missing[:5]} were not found in partition `{partition}`")
        names = _common(there, keys)
        if missing := {*(select or ())} - {*names}:
            raise ValueError(f"not all of these keys have the fields {sorted(missing)}; all of them have {names}")
        if not (select or names):
            raise ValueError("there are no fields to get: the keys have none in common, or none are given")
        found = {name: list(zip(*(there[key][1][name] for key in keys))) for name in select or names}
        if mixed := [name for name, (columns, _) in found.items() if len({*columns}) > 1]:
            raise ValueError(f"field `{mixed[0]}` is a tensor in some of these keys, and none in others")
        return {"fields": {name: (columns[0], rows) for name, (columns, rows) in found.items()}}

    def list(self, partition: str | None) -> dict[str, Any]:
        return {"partitions": {name: {key: tag for key, (tag, _) in keys.items()}
                               for name, keys in self.cells.items() if partition in (None, name)}}

    def clear(self, partition: str, keys: list[str]) -> dict[str, Any]:
        there = self.cells.get(partition, {})
        gone = [there.pop(key)[1] for key in keys if key in there]
        return {"left": sorted({row for fields in gone for _, row in fields.values()})}


def _common(there: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    first, *others = [there[key][1] for key in keys] or [{}]
    return [name for name in first if all(name in fields for fields in others)]
