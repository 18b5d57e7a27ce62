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

from distflow.data.dock.client import Dock
from distflow.data.dock.errors import DockError, Full, LeaseLost, Overdue, Refused, Unreachable
from distflow.data.dock.layout import Consumer
from distflow.data.dock.lease import Lease
from distflow.data.dock.selection import Ask, Row, deal, selection
from distflow.data.dock.service import Service

__all__ = ["Ask", "Consumer", "Dock", "DockError", "Full", "Lease", "LeaseLost", "Overdue", "Refused", "Row", "Service",
           "Unreachable", "deal", "selection"]
