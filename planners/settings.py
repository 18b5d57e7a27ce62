"""Hold the `with:` of a node against the keyword-only parameters of its function."""

from __future__ import annotations

import ast
from typing import Any, Literal, Union

from pydantic import ConfigDict, TypeAdapter, ValidationError

from distflow.schema.contract import REQUIRED, Contract
from distflow.schema.errors import Mistake, did_you_mean
from distflow.schema.spec import Spec

_NAMES: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict,
                          "None": type(None)}


def check_settings(spec: Spec, node: str, contract: Contract) -> list[Mistake]:
    """Unknown settings, missing ones, and values of another type than the annotation's."""
    mistakes, given = [], spec.dag.nodes[node].settings
    source = spec.dag_source
    for name, value in given.items():
        path = ("nodes", node, "with", name)
        if name not in contract.settings:
            what = f"node `{node}`: function `{contract.name}` has no setting `{name}`"
            mistakes.append(Mistake(what, source.spot(path, key=True), did_you_mean(name, contract.settings)))
            continue
        annotation = contract.settings[name].annotation
        if annotation and not _fits(value, annotation):
            what = f"node `{node}`: setting `{name}` of `{contract.name}` must be {annotation}, not {value!r}"
            mistakes.append(Mistake(what, source.spot(path)))
    for name, setting in contract.settings.items():
        if setting.default == REQUIRED and name not in given:
            what = f"node `{node}`: function `{contract.name}` needs the setting `{name}`"
            hint = f"Add it: with: {{{name}: …}}" + (f"  ({setting.annotation})" if setting.annotation else "")
            mistakes.append(Mistake(what, source.spot(("nodes", node), key=True), hint))
    return mistakes


def setting_value(spec: Spec, node: str, contract: Contract, name: str) -> Any:
    """The value in force: given, or the function's default."""
    given = spec.dag.nodes[node].settings
    if name in given:
        return given[name]
    default = contract.settings[name].default if name in contract.settings else REQUIRED
    return None if default == REQUIRED else ast.literal_eval(default)


def _fits(value: Any, annotation: str) -> bool:
    kind = _kind(ast.parse(annotation, mode="eval").body)
    if kind is Any:
        return True
    try:
        TypeAdapter(kind, config=ConfigDict(strict=True)).validate_python(value)
    except ValidationError:
        return False
    return True


def _kind(node: ast.expr) -> Any:
    """The type that an annotation means; Any for what these rules do not cover."""
    if isinstance(node, ast.Name):
        return _NAMES.get(node.id, Any)
    if isinstance(node, ast.Constant) and node.value is None:
        return type(None)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return Union[_kind(node.left), _kind(node.right)]  # noqa: UP007 - built at run time
    if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Literal"):
        values = ast.literal_eval(node.slice)
        return Literal[values if isinstance(values, tuple) else (values,)]
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in ("list", "dict"):
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return _NAMES[node.value.id][tuple(_kind(item) for item in items)]
    return Any
