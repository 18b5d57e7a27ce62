"""Fields of a record in the run file: columns that are made of them, and expressions over them, which have comparisons,
arithmetic and a few functions."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

OWN_FILTER = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""Filter that names a function, in place of an expression."""
_FUNCTIONS: dict[str, Callable[..., Any]] = {"abs": abs, "float": float, "int": int, "len": len, "lower": str.lower,
                                             "max": max, "min": min, "str": str}
_ALLOWED = (ast.Expression, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp, ast.Add, ast.Sub,
            ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Compare, ast.cmpop, ast.Name, ast.Load, ast.Constant,
            ast.List, ast.Tuple, ast.Subscript, ast.Call)


def fields_by_column(value: Any) -> Any:
    """Return a list of fields by the names of their columns, each the last part of a dotted name; anything else as it
    is. Raises ValueError: two would have the same name."""
    fields = [value] if isinstance(value, str) else value
    if not isinstance(fields, list):
        return value
    columns: dict[str, str] = {}
    for field in fields:
        name = str(field).rpartition(".")[2]
        if columns.setdefault(name, field) != field:
            named = ", ".join(f"{each.replace('.', '_')}: {each}" for each in (columns[name], field))
            raise ValueError(f"two fields would both be column `{name}`. Name them:  columns: {{{named}}}")
    return columns


def expression(text: str) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function that computes the expression of a record. Raises ValueError: it is none, or it has more than
    comparisons, arithmetic, `in`, `is`, `and`, `or`, `not`, `field[key]`, and calls of known functions."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"`{text}` is no expression over the fields of a record, as  len(question) < 400 and level "
                         f">= 3: {error.args[0]}") from None
    for item in ast.walk(tree):
        known = isinstance(item, _ALLOWED) and (not isinstance(item, ast.Call) or (
            isinstance(item.func, ast.Name) and item.func.id in _FUNCTIONS and not item.keywords))
        if not known:
            raise ValueError(f"`{text}` has `{ast.unparse(item)}`, which an expression over a record cannot have. "
                             f"Functions: {', '.join(_FUNCTIONS)}; for more write  MODULE:FUNCTION")
    code = compile(tree, "<expression>", "eval")
    return lambda record: eval(code, {"__builtins__": {}, **_FUNCTIONS}, dict(record))
