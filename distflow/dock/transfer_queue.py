"""Key-value interface of TransferQueue 0.1.11 on the dock, for programs that use that package.

    import distflow.dock.transfer_queue as tq

`init` starts a server of keys (`keys.py`) in its process, and shards; in other processes it connects to them.

`async_kv_…` are the same calls in a thread. Values are tensors, or what msgpack holds: nothing is pickled. Samplers,
streaming loaders, checkpoints and `data_parser` are not offered.
"""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import msgpack
import torch
from torch import Tensor

from distflow.data.batch import Batch, ColumnData, Ragged, jagged
from distflow.dock.client import DockClient
from distflow.dock.errors import DockError
from distflow.dock.keys import KeyServer, KVBatchMeta, Tags
from distflow.dock.process import start
from distflow.errors import ColumnError
from distflow.rpc.connection import connect
from distflow.rpc.run_token import run_token

if TYPE_CHECKING:
    from tensordict import TensorDict

ADDRESS = "DISTFLOW_TRANSFER_QUEUE"
"""Environment variable with the queue's address, HOST:PORT/ID, that other processes must be given."""
_PACKED = "packed "
"""Begins the names of columns with values that are no tensors."""
_CLIENT_ROWS, _TIMEOUT = 1 << 40, 60.0
Names = list[str] | str


class QueueClient:
    """This process's connections to the key server and to the dock."""

    def __init__(self, address: str):
        self.process, self.lock, (place, _, name) = os.getpid(), threading.Lock(), address.partition("/")
        host, _, port = place.rpartition(":")
        self.connection = connect((host, int(port)), token := run_token(name), _TIMEOUT)
        reply = self.connection.ask({"op": "hello"})
        self.next_row = reply["client"] * _CLIENT_ROWS
        self.dock = DockClient([tuple(shard) for shard in reply["shards"]], token, "transfer queue", _TIMEOUT)

    def kv_put(self, key: str, partition_id: str, fields: TensorDict | dict[str, Any] | None = None,
               tag: dict[str, Any] | None = None) -> KVBatchMeta:
        """Put fields of a key: a TensorDict of one row, or a dict of values without the dimension of rows."""
        if isinstance(fields, dict):
            fields = {name: value[None] if isinstance(value, Tensor) else [value] for name, value in fields.items()}
        return self.kv_batch_put([key], partition_id, fields, None if tag is None else [tag])

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: TensorDict | dict[str, Any] | None = None,
                     tags: Tags | None = None) -> KVBatchMeta:
        """Put or replace fields of keys, a row each, and update their tags."""
        if fields is None and tags is None:
            raise ValueError("neither `fields` nor `tags` were given")
        columns = dict(_column_of(name, value) for name, value in (fields.items() if fields is not None else ()))
        meta, tags = KVBatchMeta([*keys], [{}] * len(keys), partition_id), [{}] * len(keys) if tags is None else tags
        _packed("a tag", tags)
        if wrong := {len(tags), *map(len, columns.values())} - {len(keys)}:
            raise ValueError(f"{len(keys)} keys have {wrong.pop()} rows or tags: give each key one")
        with self.lock:
            row, self.next_row = self.next_row, self.next_row + len(keys)
            if columns and keys:
                self.dock.put(Batch(torch.arange(row, self.next_row), columns))
            reply = self._ask(op="put", partition=partition_id, keys=meta.keys, row=row, tags=tags,
                              columns={name.removeprefix(_PACKED): name for name in columns})
        return replace(meta, tags=reply["tags"], fields=reply["fields"])

    def kv_batch_get(self, keys: Names, partition_id: str, select_fields: Names | None = None) -> TensorDict:
        """Return the fields that are selected, or those that all keys have. Tensors with dimensions are jagged."""
        from tensordict import NonTensorStack, TensorDict

        keys = _listed(keys)
        with self.lock:
            fields, found = self._fields(partition=partition_id, keys=keys,
                                         select=None if select_fields is None else _listed(select_fields))
        result = TensorDict({}, batch_size=[len(keys)])
        for name, (column, _) in fields.items():
            values = found[column]
            result.set(name, jagged(name, values) if column == name else NonTensorStack(
                *(msgpack.unpackb(row.numpy(), strict_map_key=False) for row in values.rows)))
        return result

    def kv_batch_get_by_meta(self, meta: KVBatchMeta, select_fields: Names | None = None) -> TensorDict:
        select = meta.fields if select_fields is None else _listed(select_fields)
        if unknown := {*(select or ())} - {*(meta.fields or ())}:
            raise ValueError(f"`select_fields` has {sorted(unknown)}, which were not found in the metadata")
        return self.kv_batch_get(meta.keys, meta.partition_id or "", select)

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        """Return the tags by partition and key, of one partition or of all."""
        with self.lock:
            return self._ask(op="list", partition=partition_id)["partitions"]

    def kv_clear(self, keys: Names, partition_id: str) -> None:
        """Remove keys, if they are there."""
        with self.lock:
            self._ask(op="clear", partition=partition_id, keys=_listed(keys))

    def _fields(self, **request: Any) -> tuple[dict[str, tuple[str, list[int]]], dict[str, Any]]:
        """Return where fields of keys are, and the columns; where they are by then, if some have been replaced."""
        fields = self._ask(op="get", **request)["fields"]
        while True:
            together: dict[tuple[int, ...], list[str]] = {}  # fields that were put at once
            for column, rows in fields.values():
                together.setdefault(tuple(rows), []).append(column)
            try:
                return fields, {name: column for rows, names in together.items()
                                for name, column in self._fetch(torch.tensor(rows), names).columns.items()}
            except ColumnError:
                before, fields = fields, self._ask(op="get", **request)["fields"]
                if fields == before:
                    raise

    def _fetch(self, rows: Tensor, names: list[str]) -> Batch:
        try:
            return self.dock.fetch(rows, names)
        except ColumnError:  # they may be of several types, which are joined as by torch
            return Batch.concat([self.dock.fetch(row, names) for row in rows.split(1)])

    def _ask(self, **request: Any) -> dict[str, Any]:
        reply = self.connection.ask(request)
        if "error" in reply:
            raise ValueError(reply["error"])
        if reply.get("left"):
            self.dock.remove(torch.tensor(reply["left"]))
        return reply


def _listed(names: Names) -> list[str]:
    return [names] if isinstance(names, str) else [*names]


def _column_of(name: str, value: Any) -> tuple[str, ColumnData]:
    """Return a column for a field, and its name."""
    if isinstance(value, Tensor) and value.is_nested and value.layout == torch.jagged and value.is_contiguous():
        return name, Ragged(value.values().cpu(), cast(Any, value).offsets().diff().cpu())
    if isinstance(value, Tensor):
        return name, value.cpu() if value.ndim < 2 else Ragged.from_rows([*value.cpu().unbind()], value.dtype)
    rows = [_packed(f"field `{name}`", each) for each in (value if isinstance(value, list) else value.tolist())]
    data = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)
    return _PACKED + name, Ragged(data, torch.tensor([*map(len, rows)]))


def _packed(what: str, value: Any) -> bytes:
    """Return plain values as bytes. Raises ValueError: only a pickle could hold them as they are."""
    try:
        return msgpack.packb(value, strict_types=True) or b""
    except TypeError as error:
        raise ValueError(f"{what} has what is neither a tensor nor plain values, and nothing is pickled: {error}. "
                         "Put tensors as fields of their own, and lists in place of tuples") from None


_here: dict[str, Any] = {}
"""This process's client, and the key server if it was started here."""


def init(conf: Mapping[str, Any] | None = None, host: str = "127.0.0.1") -> str:
    """Connect to the queue that the environment names; else start one, and name it there. Return its address. `conf`,
    TransferQueue's, may say how many storage units there are; `host`: of this machine, for clients on others."""
    if ADDRESS not in os.environ:
        units = (conf or {}).get("backend", {}).get("SimpleStorage", {}).get("num_data_storage_units", 2)
        token = run_token(name := secrets.token_hex(16))
        shards = [start(token, host=host, number=number) for number in range(units)]
        with DockClient([shard.address for shard in shards], token, "transfer queue") as dock:
            dock.configure(())
        _here["server"] = KeyServer(token, host, shards)
        os.environ[ADDRESS] = "{}:{}/{}".format(*_here["server"].server.start(), name)
    get_client()
    return os.environ[ADDRESS]


def close() -> None:
    """Close this process's connections, and end the queue if it was started here."""
    if client := _here.pop("client", None):
        client.dock.close()
        client.connection.close()
    server = _here.pop("server", None)
    if server and server.process == os.getpid():
        del os.environ[ADDRESS]
        server.server.close()
        for shard in server.shards:
            shard.stop()


def get_client() -> QueueClient:
    """Return this process's client."""
    if "client" not in _here or _here["client"].process != os.getpid():
        if ADDRESS not in os.environ:
            raise DockError(f"there is no queue: call  init()  first, and give other processes {ADDRESS}")
        _here["client"] = QueueClient(os.environ[ADDRESS])
    return _here["client"]


def _of_client(name: str) -> tuple[Callable[..., Any], Callable[..., Coroutine[Any, Any, Any]]]:
    @functools.wraps(getattr(QueueClient, name))
    def call(*given: Any, **more: Any) -> Any:
        return getattr(get_client(), name)(*given, **more)

    return call, functools.partial(asyncio.to_thread, call)


kv_put, async_kv_put = _of_client("kv_put")
kv_batch_put, async_kv_batch_put = _of_client("kv_batch_put")
kv_batch_get, async_kv_batch_get = _of_client("kv_batch_get")
kv_batch_get_by_meta, async_kv_batch_get_by_meta = _of_client("kv_batch_get_by_meta")
kv_list, async_kv_list = _of_client("kv_list")
kv_clear, async_kv_clear = _of_client("kv_clear")
