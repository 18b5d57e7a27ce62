"""Values of YAML against the annotations of the parameters that get them."""

from __future__ import annotations

import ast
from typing import Annotated, Any, Literal, Union

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

_NAMES: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict,
                          "None": type(None), "Loss": Annotated[str, Field(pattern=r"^\w+(\.\w+)*:\w+$")]}


def fits(value: Any, annotation: str) -> bool:
    """Whether a value of YAML is of the kind that an annotation means. What these rules do not know fits."""
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
