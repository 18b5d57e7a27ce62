"""A client's connections to the processes of a dock: made when needed, and made again when they break.

Every request of the dock may be repeated without harm, so one whose connection broke is sent again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from distflow.dock.errors import KINDS, DockError, TimedOut, Unreachable
from distflow.dock.selection import Address
from distflow.errors import CheckpointError, ColumnError
from distflow.rpc.connection import Connection, ConnectionEnded, connect
from distflow.rpc.shared_payloads import Segments

_PAUSE = 0.05
"""Seconds between attempts to reach a process that may be starting again."""
_OTHERS = {kind.__name__: kind for kind in (ColumnError, CheckpointError)}
_log = logging.getLogger("distflow.dock")
Header = dict[str, Any]
Request = tuple[Address, Header, Sequence[Any]]
Reply = tuple[Header, Tensor]


class RequestAttempt:
    """What goes wrong during a request: a broken connection is worth another attempt, as long as patience lasts."""

    def __init__(self, patience: float):
        self.patience = patience
        self.since: float | None = None

    def meet(self, address: Address, error: Exception) -> None:
        """Pause before the next attempt.

        Raises:
            Unreachable: there is none, for silence was waited out already, or attempts failed for long enough.
        """
        now = time.monotonic()
        self.since = now if self.since is None else self.since
        if isinstance(error, TimeoutError) or now - self.since >= self.patience:
            what = "has not sent or taken a byte" if isinstance(error, TimeoutError) else "cannot be reached"
            raise Unreachable(f"the dock's process at {address[0]}:{address[1]} {what} for {self.patience:g} s "
                              f"({error or type(error).__name__}). If it died, restore it from its snapshot at the "
                              "same address; if it is stopped, continue it") from None
        time.sleep(_PAUSE)


class ConnectionPool:
    """Connections by address. `again(address)` is called when a process was replaced by another since the last time,
    unless that begins anew."""

    def __init__(self, token: bytes, who: str, session: str, patience: float, again: Callable[[Address], None]):
        self.token, self.who, self.session, self.patience, self.again = token, who, session, patience, again
        self.lines: dict[Address, Connection] = {}
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
        replies: dict[int, Reply] = {}
        trouble = RequestAttempt(self.patience)
        while len(replies) < len(requests):
            open_ones = [place for place in range(len(requests)) if place not in replies]
            awaited: list[int] = []
            try:
                for place in open_ones:
                    awaited.append(place)
                    if not self._sent(requests[place], wait, trouble):
                        awaited.pop()
                while awaited:
                    reply = self._answer(requests[awaited[0]][0], trouble)
                    if reply is not None:
                        replies[awaited[0]] = reply
                    awaited.pop(0)
            finally:
                for place in awaited:  # what they still answer must not be taken for the answer to something else
                    self._drop(requests[place][0])
        for place in range(len(requests)):
            if "error" in replies[place][0]:
                raise _error(replies[place][0])
        return [replies[place] for place in range(len(requests))]

    def close(self) -> None:
        for line in self.lines.values():
            line.close()
        self.lines.clear()

    def _sent(self, request: Request, wait: float, trouble: RequestAttempt) -> bool:
        """Send; False if the connection broke and there is time for another attempt."""
        address, header, buffers = request
        try:
            line = self._line(address)
            line.sock.settimeout(self.patience + wait)
            if self.told.get(address) != self.doing:
                self.told[address] = self.doing
                header = header | {"doing": self.doing}
            line.send(header, buffers)
        except (OSError, ConnectionEnded, Unreachable) as error:
            self._drop(address)
            trouble.meet(address, error)
            return False
        return True

    def _answer(self, address: Address, trouble: RequestAttempt) -> Reply | None:
        try:
            header, size = self.lines[address].receive()
            return header, self.lines[address].payload(size)
        except (OSError, ConnectionEnded) as error:
            self._drop(address)
            trouble.meet(address, error)
            return None

    def _drop(self, address: Address) -> None:
        line = self.lines.pop(address, None)
        self.told.pop(address, None)
        if line is not None:
            line.close()

    def _line(self, address: Address) -> Connection:
        if address not in self.lines:
            line = connect(address, self.token, self.patience)
            memory = Segments()
            line.send({"op": "hello", "who": self.who, "session": self.session, "memory": memory.claim(self.token)})
            answer = line.receive()[0]
            line.memory = memory if answer["memory"] else None
            epoch = answer["epoch"]
            self.lines[address] = line
            if self.epochs.setdefault(address, epoch) != epoch:
                self.epochs[address] = epoch
                _log.warning("%s: the dock's process at %s:%d was replaced", self.who, *address)
                if not answer.get("forgets"):
                    self.again(address)
        return self.lines[address]


def _error(reply: Header) -> Exception:
    kind = reply["error"]
    if kind == "TimedOut":
        return TimedOut(reply["message"], reply["report"])
    return (KINDS | _OTHERS).get(kind, DockError)(reply["message"])
