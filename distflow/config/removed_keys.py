"""Keys that there are no more, and what to write instead."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

ANY = ...
REMOVED_KEYS: dict[str, tuple[Any, str]] = {
    "data.enable_thinking": (None, "Instead:  data: {chat_template_kwargs: {enable_thinking: false}}"),
    "groups.trainers": ({}, "Instead, by a node of the role:  layouts: {critic: {first: N}}  , where N is the first of "
                            "its ranks among those that train"),
    "robust.neighbour": (True, "Instead:  robust: {snapshots: local}"),
    "robust.peer_replica": (True, "Instead:  robust: {snapshots: local}"),
    "robust.restart": ("role", "Instead:  robust: {restarts: 0}"),
    "timeline": (ANY, "Take it out: it is always written."),
    "training_api.max_body_mib": (ANY, "Take it out: there is no limit to set."),
}
"""By the path that a key had, `*` for any name: the value that said nothing, and what to write instead."""


def instead_of(path: tuple[Any, ...]) -> str | None:
    """Return what to write instead of a removed key; None of a key that never was."""
    removed = _removed(path)
    return removed[1] if removed else None


def drop_removed(data: Any, recorded: bool, path: tuple[Any, ...] = ()) -> None:
    """Take removed keys that change nothing out of a file: those whose value says nothing any more, and of one that an
    older version has `recorded` those with the value that said nothing then."""
    named = list(data.items()) if isinstance(data, dict) else list(enumerate(data)) if isinstance(data, list) else []
    for name, value in named:
        removed = _removed((*path, name))
        if removed and (removed[0] is ANY or (recorded and removed[0] == value)):
            del data[name]
        else:
            drop_removed(value, recorded, (*path, name))


def _removed(path: tuple[Any, ...]) -> tuple[Any, str] | None:
    name = ".".join(map(str, path))
    return next((said for pattern, said in REMOVED_KEYS.items() if fnmatchcase(name, pattern)), None)
