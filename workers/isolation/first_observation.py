"""Asks an environment for what it shows before the first turn of a conversation.

It is an environment whose only turn that is, so that its child process, its limits and the blame for its end are those
of environments (`workers.isolation.env_pool`).
"""

from __future__ import annotations

import inspect
from collections.abc import Coroutine
from typing import Any

from distflow.contracts.decorators import Turn, environment
from distflow.contracts.environments import load_environment


@environment(safe=True)
class FirstObservation:
    """Environment whose only turn is what another one shows at its start."""

    def __init__(self, *, named: str, its_settings: dict[str, Any], **columns: str):
        self.started = load_environment(named)(**columns, **its_settings)

    def step(self, text: str) -> Turn | Coroutine[Any, Any, Turn]:
        shown = self.started.start()
        return _later(shown) if inspect.isawaitable(shown) else _turn(shown)


async def _later(shown: Any) -> Turn:
    return _turn(await shown)


def _turn(shown: Any) -> Turn:
    if not isinstance(shown, str):
        raise TypeError(f"`start` returned {shown!r:.200}; it must return a text")
    return Turn(shown, done=True)
