"""Transfer dock: samples between groups that do not step together (MindSpeed RL §"Distributed Transfer Dock Strategy").

    DockClient ── put, fetch ────► StorageShard     rows by (id, column); group g lives in shard g mod n
         │                           │      ▲
         │                 new columns      rows to remove
         │                           ▼      │
         └─── lease, commit ─────► ConsumerIndex    metadata of all rows; one index for each consumer

For each consumer on its own, a row is

    STORED       some of its columns have been put (a prompt's rows: their ids, by the trainer)
    READY        it has all columns that the consumer reads, and its group is whole
    LEASED       one holder works on it; READY again when the lease expires, the holder's connection ends, or the next
                 attempt of the holder's group has rolled back
    COMMITTED    consumed; READY again after a rollback, as long as the consumer retains its step
    RELEASED     consumed for good; a row that all consumers have released leaves its shard

So rows may be produced more than once, and are trained on exactly once.

    client       what groups call                          selection    consumers, layout, choice of a lease's rows
    index        leases and commits of a consumer, pure    storage      rows in the shard's memory
    slots        metadata of rows, in arrays               intervals    sets of numbers, as ranges
    shard_state  storage and indexes of one process, and its updates to the others
    shard        server of a shard_state                   process      the same as a child process
    timeouts     explanations of waits that time out       directory    addresses of the shards, in the store
    transfer_queue, keys   TransferQueue's key-value calls, on shards of their own

A shard whose process or machine is lost begins again with no rows; the trainers restart from their snapshot and enqueue
its prompts again, which are sampled to the same tokens.

The client loads torch; the process of a shard, which handles bytes alone, does not.
"""

from typing import TYPE_CHECKING, Any

from distflow.dock.errors import DockError, LeaseLost, TimedOut
from distflow.dock.index import Lease
from distflow.dock.selection import Consumer
from distflow.dock.shard import StorageShardServer

if TYPE_CHECKING:
    from distflow.dock.client import DockClient

__all__ = ["Consumer", "DockClient", "DockError", "Lease", "LeaseLost", "StorageShardServer", "TimedOut"]


def __getattr__(name: str) -> Any:
    if name != "DockClient":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from distflow.dock.client import DockClient

    return DockClient
