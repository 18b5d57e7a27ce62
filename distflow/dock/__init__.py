"""Transfer dock: rows between groups that do not step together (MindSpeed RL §"Distributed Transfer Dock Strategy").

    client       put, lease, fetch, commit, rollback       process    a shard server as a child process
    shard        server of a shard and its indexes         shard_state   its state, updates to the other processes
    storage      rows by (id, column)                      index      leases and commits of one consumer, pure
    selection    consumers, the layout, the choice of the next rows       timeouts   explanations of waits that time out
    persistence  journal and snapshot, for a process that is restored; no run switches them on yet

A row is put, is ready for a consumer once it has the columns that the consumer reads, is leased, and is committed; an
expired lease makes it ready again, a rollback too. It leaves the dock when all consumers have committed it.
"""

from distflow.dock.client import DockClient
from distflow.dock.errors import DockError, Full, LeaseLost, TimedOut
from distflow.dock.index import Lease
from distflow.dock.selection import Consumer
from distflow.dock.shard import StorageShardServer

__all__ = ["Consumer", "DockClient", "DockError", "Full", "Lease", "LeaseLost", "StorageShardServer",
           "TimedOut"]
