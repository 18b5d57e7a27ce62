"""State updates between processes of the dock: from warehouses to controllers, and back when rows are committed."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from distflow.data.dock.errors import DockError
from distflow.data.dock.layout import Address
from distflow.data.dock.line import Closed, Line, dial

_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
"""Seconds between two attempts to reach a peer, doubled each time."""
_BEAT = 1.0
"""Seconds after which a silent connection is tried: a peer that was replaced must be told everything again."""
_LIMIT = 10.0
_log = logging.getLogger("distflow.dock")

Update = dict[str, Any]


class Outbox(threading.Thread):
    """Updates for one peer, in order. Each new connection begins with `everything`, so none can be lost.

    `tell` and `everything` run under the lock of the service, which `changed` holds.
    """

    def __init__(self, address: Address, token: bytes, who: str, changed: threading.Condition,
                 everything: Callable[[], list[Update]]):
        super().__init__(name=f"dock updates for {address[0]}:{address[1]}", daemon=True)
        self.address, self.token, self.who = address, token, who
        self.changed, self.everything = changed, everything
        self.waiting: deque[Update] = deque()
        self.trouble = ""
        """Why the peer is out of reach; empty if it is not."""
        self.since, self.warned = 0.0, False
        self.news, self.over = threading.Event(), threading.Event()

    def tell(self, update: Update) -> None:
        if not self.trouble:  # a peer that comes back is told everything
            self.waiting.append(update)
            self.news.set()

    def stop(self) -> None:
        self.over.set()
        self.news.set()

    def run(self) -> None:
        pause = _PAUSE
        while not self.over.is_set():
            line = None
            try:
                line = dial(self.address, self.token, _LIMIT)
                self._ask(line, {"op": "hello", "who": self.who, "session": ""})
                pause = _PAUSE
                self._stream(line)
            except (OSError, Closed, DockError) as error:
                self._cut_off(str(error) or type(error).__name__)
            finally:
                if line is not None:
                    line.close()
            self.over.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _stream(self, line: Line) -> None:
        with self.changed:
            self.waiting.clear()
            self.trouble, self.warned = "", False
            updates = self.everything()
        while not self.over.is_set():
            self._ask(line, {"op": "updates", "updates": updates})
            self.news.wait(_BEAT)
            self.news.clear()
            updates = [self.waiting.popleft() for _ in range(len(self.waiting))]

    def _cut_off(self, trouble: str) -> None:
        with self.changed:
            now = time.monotonic()
            self.since = self.since if self.trouble else now
            if now - self.since > _LONGEST_PAUSE and not self.warned:
                self.warned = True
                _log.warning("%s cannot tell %s:%d of new rows: %s", self.who, *self.address, trouble)
            self.trouble = trouble
            self.waiting.clear()

    def _ask(self, line: Line, message: dict[str, Any]) -> None:
        line.send(message)
        reply, size = line.receive()
        line.skip(size)
        if "error" in reply:
            raise DockError(reply["message"])
