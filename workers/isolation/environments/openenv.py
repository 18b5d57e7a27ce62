"""Environments behind an OpenEnv server."""

from __future__ import annotations

import contextlib
import json
import re
import zlib
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from distflow.contracts.decorators import Turn, environment
from workers.isolation.rewards import behind_thoughts

_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_WRONG = ("VALIDATION_ERROR", "INVALID_JSON")  # codes of errors that a turn of the model has caused
_LARGEST = 16 << 20  # bytes of a message


@environment
class OpenEnv:
    """Plays in an environment of an OpenEnv server; each row has a session of its own there.

    The action of a turn is its last `<action>…</action>`, else all of it. The environment is reset with the column
    `seed`, or without one with the question's, so that equal questions are equal games where it heeds the seed.
    """

    def __init__(self, question: str, seed: str = "", *, server: str, action: str | None = "message",
                 show: str | None = None, reset: dict | None = None, wrong_action: float = 0.0):
        """`server` is its address, as `http://localhost:8000`; `action` the field of its action that gets the text, or
        null: the text is the action, as JSON. `show` is the field of its observations that is shown, else all of them
        as JSON; `reset` what a reset gets besides the seed. `wrong_action` is the reward for a turn whose action it
        does not take."""
        self.action, self.show, self.wrong_action = action, show, wrong_action
        self.session = connect(f"ws{server.removeprefix('http').rstrip('/')}/ws", max_size=_LARGEST, proxy=None,
                               close_timeout=1)
        own = int(seed) if seed.isdigit() else zlib.crc32((seed or question).encode())
        with contextlib.ExitStack() as refused:
            refused.callback(self.close)
            self.shown = self._shown(self._ask("reset", {"seed": own % 2**31, **(reset or {})}))
            refused.pop_all()

    def start(self) -> str:
        return self.shown

    def step(self, text: str) -> Turn:
        spoken = behind_thoughts(text) or ""
        said = (_ACTION.findall(spoken) or [spoken])[-1].strip()
        try:
            done = self._ask("step", _object(said) if self.action is None else {self.action: said})
        except ValueError as error:
            return Turn(f"This is no action: {error}"[:1000], reward=self.wrong_action)
        return Turn(self._shown(done), bool(done.get("done")), float(done.get("reward") or 0.0))

    def close(self) -> None:
        """End the session, of which the server has only so many."""
        with contextlib.suppress(ConnectionClosed):
            self.session.send(json.dumps({"type": "close"}))
        self.session.close()

    def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send a message and return the data of its answer. Raises ValueError: the action is wrong; OSError: any other
        error of the server."""
        with contextlib.suppress(ConnectionClosed):  # a server that is full has said so before it closes
            self.session.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self.session.recv())
        found = answer.get("data") or {}
        if answer.get("type") != "error":
            return found
        what = f"{found.get('code')}: {found.get('message')}"
        if kind == "step" and found.get("code") in _WRONG:
            details = [str(each.get("msg")) for each in found.get("errors") or ()]
            raise ValueError("; ".join([str(found.get("message")), *details]))
        raise OSError(f"the server refuses a {kind}: {what[:500]}")

    def _shown(self, answer: dict[str, Any]) -> str:
        observed = answer.get("observation") or {}
        if self.show is not None and self.show not in observed:
            raise ValueError(f"its observation has no field {self.show!r}; it has {', '.join(observed) or 'none'}")
        found = observed if self.show is None else observed[self.show]
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def _object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("it must be a JSON object")
    return found
