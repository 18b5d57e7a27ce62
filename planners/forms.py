"""What an annotation says of a column's form."""

from __future__ import annotations

import ast

KNOWN = {"Tensor", "Ragged", "list[str]"}


def plain_form(annotation: str) -> str:
    """`torch.Tensor` as `Tensor`, `Optional[Ragged]` as `Ragged`, `Sequence[str]` as `list[str]`."""
    return " | ".join(part for part in accepted(annotation) if part != "None")


def accepted(annotation: str) -> tuple[str, ...]:
    """The forms that an annotation allows, `None` among them; empty if there is no annotation."""
    return tuple(dict.fromkeys(_parts(ast.parse(annotation, mode="eval").body))) if annotation else ()


def fits(given: str, wanted: str) -> bool:
    """Whether a column of the form `given` can be passed as `wanted`. What these rules do not know fits."""
    forms = set(accepted(wanted)) - {"None"}
    return not given or given not in KNOWN or not forms <= KNOWN or not forms or given in forms


def _parts(node: ast.expr) -> list[str]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_parts(node.left), *_parts(node.right)]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _parts(ast.parse(node.value, mode="eval").body)
    if isinstance(node, ast.Subscript):
        name, inner = _last(node.value), node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name in ("Optional", "Union"):
            return [part for item in inner for part in _parts(item)] + ["None"] * (name == "Optional")
        if name in ("list", "List", "Sequence") and len(inner) == 1:
            return [f"list[{' | '.join(_parts(inner[0]))}]"]
    return [_last(node)]


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else ast.unparse(node)
