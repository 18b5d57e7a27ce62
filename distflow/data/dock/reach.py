"""A client's connections to the processes of a dock: made when needed, and made again when they break.

Every request of the dock may be repeated without harm, so one whose connection broke is sent again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from distflow.data.dock.errors import KINDS, DockError, Overdue, Unreachable
from distflow.data.dock.layout import Address
from distflow.data.dock.line import Closed, Line, dial
from distflow.schema.errors import CheckpointError, ColumnError

_PAUSE = 0.05
"""Seconds between attempts to reach a process that may be starting again."""
_OTHERS = {kind.__name__: kind for kind in (ColumnError, CheckpointError)}
_log = logging.getLogger("distflow.dock")
Header = dict[str, Any]
Request = tuple[Address, Header, Sequence[Any]]
Reply = tuple[Header, Tensor]


class Reach:
    """Connections by address. `again(address)` is called when a process was replaced by another since the last time."""

    def __init__(self, token: bytes, who: str, session: str, patience: float, again: Callable[[Address], None]):
        self.token, self.who, self.session, self.patience, self.again = token, who, session, patience, again
        self.lines: dict[Address, Line] = {}
        self.epochs: dict[Address, int] = {}
        self.doing = ""
        self.told: dict[Address, str] = {}

    def ask(self, address: Address, header: Header, buffers: Sequence[Any] = (), wait: float = 0.0) -> Reply:
        """One request and its answer."""
        return self.ask_all([(address, header, buffers)], wait)[0]

    def ask_all(self, requests: Iterable[Request], wait: float = 0.0) -> list[Reply]:
        """Requests to several processes at once; the answers in their order.

        Args:
            wait: seconds that the other side may wait by itself before it answers.

        Raises:
            DockError: what the first of them that failed answered.
            Unreachable: no answer within the patience.
        """
        requests = list(requests)
        replies: list[Reply | None] = [None] * len(requests)
        deadline = time.monotonic() + self.patience
        while any(reply is None for reply in replies):
            open_ones = [place for place, reply in enumerate(replies) if reply is None]
            sent = [place for place in open_ones if self._try(requests[place], wait, deadline)]
            for place in sent:
                replies[place] = self._answer(requests[place][0], deadline)
        for reply, _ in replies:
            if "error" in reply:
                raise _error(reply)
        return replies

    def close(self) -> None:
        for line in self.lines.values():
            line.close()
        self.lines.clear()

    def _try(self, request: Request, wait: float, deadline: float) -> bool:
        """Send; False if the connection broke and there is time for another attempt."""
        address, header, buffers = request
        try:
            line = self._line(address)
            line.sock.settimeout(self.patience + wait)
            if self.told.get(address) != self.doing:
                self.told[address] = self.doing
                header = header | {"doing": self.doing}
            line.send(header, buffers)
        except (OSError, Closed, Unreachable) as error:
            self._failed(address, error, deadline)
            return False
        return True

    def _answer(self, address: Address, deadline: float) -> Reply | None:
        try:
            line = self.lines[address]
            header, size = line.receive()
            return header, line.payload(size) if size else torch.empty(0, dtype=torch.uint8)
        except (OSError, Closed) as error:
            self._failed(address, error, deadline)
            return None

    def _failed(self, address: Address, error: Exception, deadline: float) -> None:
        line = self.lines.pop(address, None)
        if line is not None:
            line.close()
        self.told.pop(address, None)
        if isinstance(error, TimeoutError) or time.monotonic() > deadline:
            what = "has not sent or taken a byte" if isinstance(error, TimeoutError) else "cannot be reached"
            raise Unreachable(f"the dock's process at {address[0]}:{address[1]} {what} for {self.patience:g} s "
                              f"({error or type(error).__name__}). If it died, restore it from its snapshot at the "
                              "same address; if it is stopped, continue it") from None
        time.sleep(_PAUSE)

    def _line(self, address: Address) -> Line:
        if address not in self.lines:
            line = dial(address, self.token, self.patience)
            line.send({"op": "hello", "who": self.who, "session": self.session})
            epoch = line.receive()[0]["epoch"]
            self.lines[address] = line
            if self.epochs.setdefault(address, epoch) != epoch:
                self.epochs[address] = epoch
                _log.warning("%s: the dock's process at %s:%d was replaced", self.who, *address)
                self.again(address)
        return self.lines[address]


def _error(reply: Header) -> Exception:
    kind = reply["error"]
    if kind == "Overdue":
        return Overdue(reply["message"], reply["report"])
    return (KINDS | _OTHERS).get(kind, DockError)(reply["message"])
