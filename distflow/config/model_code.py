"""Code in a model's folder, which is never run: it would run with the user's rights, on every machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from distflow.config.families import known_types

_FILES = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
_REMEDY = ("Take a model whose architecture transformers has itself, without `auto_map`, or a newer transformers that "
           "has this one.")


def code_of(folder: Path) -> list[str]:
    """Return the classes and functions of its own that a model's folder names, as `modeling_own.OwnForCausalLM`."""
    found: set[str] = set()
    for mapped in (settings_in(folder / name).get("auto_map") for name in _FILES):
        values = mapped.values() if isinstance(mapped, dict) else ()
        found |= {name for value in values for name in (value if isinstance(value, list) else [value]) if name}
    return sorted(map(str, found))


def refusal(folder: Path, name: str) -> tuple[str, str]:
    """Return why a model that needs code in its folder is refused, and the remedy."""
    named = ", ".join(code_of(folder)[:4])
    return f"{name} asks for code of its own (`auto_map`: {named}), and code in a model's folder is never run", _REMEDY


def needs_code(folder: Path) -> bool:
    """Return whether a model is of no kind that transformers has. Does not import transformers."""
    kind = settings_in(folder / "config.json").get("model_type")
    return bool(code_of(folder)) and (not kind or f'"{kind}"' not in known_types())


def read_json(file: Path) -> Any:
    """Return what a JSON file of a model's folder holds. Raises OSError and ValueError: it cannot be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def settings_in(file: Path) -> dict[str, Any]:
    """Return the settings of a JSON file of a model's folder; none where it cannot be read, or holds something else."""
    try:
        content = read_json(file)
    except (OSError, ValueError):  # which another check reports
        return {}
    return content if isinstance(content, dict) else {}
