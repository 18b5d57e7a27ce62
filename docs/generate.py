"""Write docs/run_file.md, the reference of the run file's keys, from distflow/config/run.py, and dags/schema/, the JSON
schemas of what users write: `make docs`.

A key's kind, bounds and default are those of its pydantic model; what it means is the text below the field.
"""

from __future__ import annotations

import inspect
import json
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from distflow.cli.json_schema import KINDS, descriptions, schema  # noqa: E402 - needs the path above
from distflow.config.run import Run  # noqa: E402
from distflow.config.yaml_source import Document  # noqa: E402 - needs the path above

PAGE, SCHEMAS = ROOT / "docs/run_file.md", ROOT / "dags/schema"
HEAD = """# The run file

<!-- Made by `make docs` from distflow/config/run.py: change it there. -->

A run file says what is physical: models, data, steps, engines, and how ranks share the work. The DAG is the algorithm.
`distflow run DAG --run FILE` takes one (under torchrun `--run-file FILE`); `--set roles.actor.learning_rate=1e-6`
overrides one value, the keys joined by dots. Unknown keys and values of another kind are refused with the line and the
nearest right key. Relative paths are looked for in the current folder, beside the run file and among the shipped files.
`dags/runs/` has complete ones.

"""
_KINDS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}
_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below",
           "minLength": "length at least", "multipleOf": "a multiple of"}


def page() -> str:
    """Return the whole page."""
    return HEAD + "\n\n".join("\n".join(_section(place, kind)) for place, kind in documents(Run, "")) + "\n"


def documents(kind: type[Document], place: str) -> Iterator[tuple[str, type[Document]]]:
    """Yield a document and all that it holds, each with its keys as in `roles.NAME.generation`."""
    yield place, kind
    for name, field in kind.model_fields.items():
        for inner in _models(field.annotation):
            plural = {dict: ".NAME", list: "[]"}.get(typing.get_origin(field.annotation), "")
            yield from documents(inner, f"{place}.{name}{plural}".lstrip("."))


def _models(annotation: Any) -> list[type[Document]]:
    """Return the documents that an annotation speaks of."""
    if isinstance(annotation, type) and issubclass(annotation, Document):
        return [annotation]
    return [found for part in typing.get_args(annotation) for found in _models(part)]


def _section(place: str, kind: type[Document]) -> Iterator[str]:
    yield f"## `{place}:`" if place else "## The file itself"
    yield f"\n{_text(inspect.getdoc(kind))}\n"
    yield "| key | value | default | what it says |"
    yield "|---|---|---|---|"
    schema, texts = kind.model_json_schema(), descriptions(kind)
    for name in kind.model_fields:
        value = schema["properties"][name]
        default = "required" if name in schema.get("required", ()) else _default(value)
        cells = (f"`{name}`", _value(value), default, _text(texts.get(name, "")))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _value(schema: dict[str, Any]) -> str:
    """Return which values a key takes."""
    if choices := [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]:
        return " or ".join(map(_value, choices))
    if "enum" in schema:
        return " | ".join(f"`{each}`" for each in schema["enum"])
    if "$ref" in schema:
        return "mapping, below"
    if schema.get("type") == "array":
        return f"list of: {_value(schema['items'])}"
    if schema.get("type") == "object":
        return f"mapping of names to: {_value(schema['additionalProperties'])}"
    bounds = [f"{words} {schema[key]:g}" if schema[key] < 2**53 else f"{words} 2^{schema[key].bit_length() - 1}"
              for key, words in _BOUNDS.items() if key in schema]
    return ", ".join([_KINDS.get(schema.get("type", ""), "any"), *bounds])


def _default(schema: dict[str, Any]) -> str:
    value = schema.get("default")
    if value is None:
        return "none"
    nested = isinstance(value, dict) and value
    return "as below" if nested else f"`{json.dumps(value, ensure_ascii=False)}`"


def _text(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    PAGE.write_text(page())
    SCHEMAS.mkdir(exist_ok=True)
    for name in KINDS:
        (SCHEMAS / f"{name}.json").write_text(json.dumps(schema(name), indent=1, ensure_ascii=False) + "\n")
    print(PAGE, SCHEMAS)
