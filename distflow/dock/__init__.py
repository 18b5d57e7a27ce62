"""The transfer dock: rows between groups that do not step together (MindSpeed RL, its section of that name).

    service.py     a process of the dock: warehouse and controllers, served        child.py   one as a child process
    client.py      put, lease, fetch, commit, renew, saved, snapshot               reach.py   its connections
    warehouse.py, kept.py   rows by (id, column)                                       parcel.py  rows as buffers
    controller.py  leases and commits of one consumer, pure                        selection.py  which rows next
    recall.py      commits that are taken back
    desk.py, peers.py   what a process knows, and state updates between processes
    lease.py       what a holder knows
    line.py, door.py   proof of the token, messages; those before it                layout.py  who consumes what, where
    memory.py      payloads through shared memory, within a machine
    snapshot.py, journal.py  for a process that is restored; no run switches them on yet
    intervals.py, diagnosis.py, errors.py, volume.py
"""

from distflow.dock.client import DockClient
from distflow.dock.errors import DockError, Full, LeaseLost, Refused, TimedOut, Unreachable
from distflow.dock.index import Lease
from distflow.dock.selection import Consumer, LeaseRequest, RowState, deal, selection
from distflow.dock.shard import StorageShardServer

__all__ = ["Consumer", "DockClient", "DockError", "Full", "Lease", "LeaseLost", "LeaseRequest", "Refused", "RowState",
           "StorageShardServer", "TimedOut", "Unreachable", "deal", "selection"]
