"""Settings of another project as they become a DAG and a run file: by keys joined by dots, each taken or left."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from distflow.config.yaml_syntax import BoundedLoader
from distflow.errors import Diagnostic, InvalidInput, Location


@dataclass
class Conversion:
    """What a configuration becomes. settings: of the run file, by keys joined by dots. arguments: of the DAG's nodes,
    as `update.clip`. taken: keys that are converted, or say nothing here."""

    file: Path
    given: Mapping[str, Any]
    algorithm: str = "grpo"
    settings: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)
    defaults: dict[str, Any] = field(default_factory=dict)  # of the other project, by its keys
    filled: dict[str, Any] = field(default_factory=dict)  # those that were needed
    reference: bool = True
    follow: dict[str, Any] | None = None  # how the reference follows the actor
    drops_truncated: bool = False
    entropies: bool = False  # whether the update reads them

    def get(self, key: str, default: Any = None) -> Any:
        self.taken.add(key)
        value = self._said(key)
        return default if value is None else value

    def _said(self, key: str) -> Any:
        """Return a setting as the other project would have it: of the file, else its default if that is not ours."""
        value = self.given.get(key)
        if value is None and key in self.defaults:
            value = self.filled[key] = self.defaults[key]
        return value

    def number(self, key: str, default: float) -> Any:
        """Return a setting to compute with. Raises InvalidInput: it is no number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidInput(Diagnostic(f"`{key}` must be a number, not {value!r}", self._location(key)))
        return value

    def _location(self, key: str) -> Location:
        """Return where the last part of a key stands first in the file."""
        word = re.compile(rf"(?<!\w){re.escape(key.rpartition('.')[2]).replace('_', '[_-]')}(?!\w)")
        lines = self.file.read_text(encoding="utf-8").splitlines()
        found = next(((number, line, match) for number, line in enumerate(lines, 1) if (match := word.search(line))),
                     None)
        if found is None:
            return Location(str(self.file))
        number, line, match = found
        return Location(str(self.file), number, match.start() + 1, len(match[0]), line)

    def translated(self, key: str, meanings: Mapping[Any, Any], default: Any = None) -> Any:
        """Return what a setting's value is here; None, and the setting stays listed, if there is no such value."""
        value = self._said(key)
        value = default if value is None else value
        if not isinstance(value, (str, bool)) or value not in meanings:
            return None
        self.taken.add(key)
        return meanings[value]

    def copy(self, keys: Mapping[str, str], prefix: str = "") -> None:
        for key, ours in keys.items():
            if (value := self.get(prefix + key)) is not None:
                target = self.arguments if ours.startswith("with:") else self.settings
                target[ours.removeprefix("with:")] = value

    def put(self, ours: str, value: Any) -> None:
        if value is not None:
            self.settings[ours] = value

    def left(self) -> list[str]:
        return [f"{key}: {value}" for key, value in self.given.items() if key not in self.taken and value is not None]


def _value(text: Any) -> Any:
    """Return a setting's value; 1e-6, which YAML 1.1 takes for text, is a number."""
    if not isinstance(text, str):
        return text
    try:
        return float(text) if re.fullmatch(r"[-+]?[\d.]+[eE][-+]?\d+", text) else yaml.load(text, BoundedLoader)
    except (yaml.YAMLError, ValueError):
        return text


def flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values by keys joined by dots; `${a.b}` is what `a.b` is, and other interpolations are left out."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = _value(value)
    if prefix:
        return found
    for _ in range(3):  # references to references
        found = {key: found.get(value[2:-1], value) if isinstance(value, str) and value.startswith("${") else value
                for key, value in found.items()}
    return {key: value for key, value in found.items() if not (isinstance(value, str) and value.startswith("${"))}


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by keys joined by dots as the mappings of a YAML file."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        *folders, last = key.split(".")
        inner = found
        for name in folders:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return found
