"""JSON schemas of DAG, run and cluster files, by which editors complete and check them while they are written.

They come from the models that validation uses. They are weaker: what depends on several keys, on a signature or on data
is checked by `distflow validate`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic import PydanticInvalidForJsonSchema, TypeAdapter

from distflow.config.cluster import Cluster
from distflow.config.dag import Dag
from distflow.config.run import Data, Generation, Lora, Model, Run
from distflow.config.yaml_source import Document
from distflow.contracts.decorators import LOSS
from distflow.contracts.forms import Contract
from distflow.contracts.functions import built_in
from distflow.contracts.settings import REQUIRED, Setting

KINDS: dict[str, type[Document]] = {"dag": Dag, "run": Run, "cluster": Cluster}
_SHORT = {Generation.__name__: "stop", Lora.__name__: "targets", Data.__name__: "train"}
"""Keys with several texts for which one may stand, by the document that has them."""
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]


def schema(name: str) -> Schema:
    kind = KINDS[name]
    found = kind.model_json_schema(by_alias=True)
    models = {model.__name__: model for model in _documents(kind)}
    for title, part in {**found.get("$defs", {}), kind.__name__: found}.items():
        _describe(part, models[title])
    if "Model" in found.get("$defs", {}):
        found["$defs"]["Model"] = {"anyOf": [{"type": "string", "description": Model.__doc__}, found["$defs"]["Model"]]}
    if listed := found.get("$defs", {}).get("LoggerSettings"):
        found["$defs"]["LoggerSettings"] = {"anyOf": [{"enum": [*listed["properties"]]}, listed]}
    if kind is Dag:
        _add_functions(found["$defs"]["Node"])
    return {"$schema": _DIALECT, **found, "title": f"distflow {name} file"}


def _documents(kind: type[Document]) -> Iterator[type[Document]]:
    """Yield a document and all kinds of documents; a schema has no others."""
    yield kind
    for child in Document.__subclasses__():
        yield child
        yield from child.__subclasses__()


def _describe(part: Schema, model: type[Document]) -> None:
    """Add what each key means, and let one text stand for a list of one."""
    texts = descriptions(model)
    for name, value in part["properties"].items():
        value.pop("title", None)
        if name in texts:
            value["description"] = " ".join(texts[name].split())
    if model.__name__ in _SHORT:
        listed = part["properties"][_SHORT[model.__name__]]
        kinds = {key: listed.pop(key) for key in ("type", "items", "additionalProperties", "minProperties")
                 if key in listed}
        listed["anyOf"] = [{"type": "string"}, kinds]
    if model is Data:
        named = part["properties"]["columns"]
        kinds = {key: named.pop(key) for key in ("type", "additionalProperties")}
        named["anyOf"] = [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, kinds]


def descriptions(kind: type[Document]) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # pyright: ignore[reportAttributeAccessIssue]
    return {field.target.id: str(text.value.value) for field, text in zip(body, body[1:])
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)}


def _add_functions(node: Schema) -> None:
    """Offer the built-in functions with their settings; a user's own may have any name and settings."""
    contracts = dict(sorted(built_in().items()))
    node["properties"]["function"] = {
        "description": "A built-in function, one of this DAG's imports, or MODULE:FUNCTION.",
        "anyOf": [{"enum": [*contracts]}, {"type": "string"}, {"type": "null"}]}
    node["allOf"] = [{"if": {"properties": {"function": {"const": name}}, "required": ["function"]},
                      "then": {"properties": {"with": _settings(contract)}}} for name, contract in contracts.items()]


def _settings(contract: Contract) -> Schema:
    required = [name for name, setting in contract.settings.items() if setting.default == REQUIRED]
    return {"type": "object", "properties": {name: _setting(each) for name, each in contract.settings.items()},
            "additionalProperties": False, **({"required": required} if required else {})}


def _setting(setting: Setting) -> Schema:
    try:
        found = TypeAdapter(setting.kind).json_schema()
    except PydanticInvalidForJsonSchema:  # checked by a function
        found = {}
    for form in found.get("anyOf", ()):  # a loss of a module that the DAG imports needs no MODULE
        if form.get("pattern") == LOSS:
            form.pop("pattern")
    if setting.description:
        found["description"] = setting.description
    if setting.value is not None:
        found["default"] = setting.value
    return found
