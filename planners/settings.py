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
    """Unknown settings, missing ones, values of another type than the annotation's, and repeats below one."""
    mistakes, given = [], spec.dag.nodes[node].settings
    source = spec.dag_source
    for name, value in given.items():
        path = ("nodes", node, "with", name)
        if name not in contract.settings:
            what = f"node `{node}`: function `{contract.name}` has no setting `{name}`"
            hint = did_you_mean(name, contract.settings, "Settings") or "It has no settings at all."
            mistakes.append(Mistake(what, source.spot(path, key=True), hint))
            continue
        setting = contract.settings[name]
        if setting.annotation and not _fits(value, setting.annotation):
            expected = setting.annotation.replace("Literal[", "one of [").strip()
            what = f"node `{node}`: setting `{name}` of `{contract.name}` must be {expected}, not {value!r}"
            hint = "" if setting.default == REQUIRED else f"Its default is {setting.default}."
            mistakes.append(Mistake(what, source.spot(path), hint))
    for name, setting in contract.settings.items():
        if setting.default == REQUIRED and name not in given:
            what = f"node `{node}`: function `{contract.name}` needs the setting `{name}`"
            hint = f"Add it:  with: {{{name}: …}}" + (f"   ({setting.annotation})" if setting.annotation else "")
            mistakes.append(Mistake(what, source.spot(("nodes", node), key=True), hint))
    if contract.marks.repeats and not mistakes:
        mistakes += _check_repeats(spec, node, contract, contract.marks.repeats)
    return mistakes


def _check_repeats(spec: Spec, node: str, contract: Contract, name: str) -> list[Mistake]:
    value = setting_value(spec, node, contract, name)
    if type(value) is int and value > 0:
        return []
    shown = repr(value) if value is not None else contract.settings[name].default
    what = (f"node `{node}`: setting `{name}` says how many rows `{contract.name}` writes for each that it reads; it "
            f"must be a whole number above 0, not {shown}")
    return [Mistake(what, spec.dag_source.spot(("nodes", node, "with", name)), f"Instead:  with: {{{name}: 8}}")]


def setting_value(spec: Spec, node: str, contract: Contract, name: str) -> Any:
    """The value in force: given, or the function's default; None for a default that is no plain value."""
    given = spec.dag.nodes[node].settings
    if name in given:
        return given[name]
    default = contract.settings[name].default
    if default == REQUIRED:
        return None
    try:
        return ast.literal_eval(default)
    except ValueError:
        return None


def repeats_of(spec: Spec, node: str, contract: Contract) -> int:
    """How many rows a node writes for each that it reads."""
    value = setting_value(spec, node, contract, contract.marks.repeats) if contract.marks.repeats else 1
    return value if type(value) is int and value > 0 else 1


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
    if not isinstance(node, ast.Subscript):
        return Any
    name = ast.unparse(node.value).rpartition(".")[2]
    if name == "Literal":
        values = ast.literal_eval(node.slice)
        return Literal[values if isinstance(values, tuple) else (values,)]
    items = [_kind(item) for item in (node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice])]
    if name == "Optional":
        items.append(type(None))
    if name in ("Optional", "Union"):
        return Union[tuple(items)]  # noqa: UP007 - built at run time
    return _NAMES[name][tuple(items)] if name in ("list", "dict") else Any
