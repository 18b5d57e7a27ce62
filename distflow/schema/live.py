"""The contract of a function that its module's source does not show: one that is registered when it is imported."""

from __future__ import annotations

import ast
import inspect
from typing import Any

from distflow.schema import registry
from distflow.schema.contract import Contract, build, expression
from distflow.schema.errors import Spot


def imported(module: str, name: str) -> Contract | None:
    """The contract of a function that the source does not show, found by importing the module.

    Raises:
        InvalidInput: the import fails.
    """
    loaded = registry.load_module(module, f"It is imported because its source shows no `{name}` with @node above it.")
    function = getattr(loaded, name, None) or registry.NODES.get(name)
    if function is None or not hasattr(function, "__distflow_node__"):
        return None
    return live_contract(name, module, function, function.__distflow_node__)


def live_contract(name: str, module: str, function: Any, marks: registry.Marks) -> Contract:
    """The contract of a function that was imported."""
    line = inspect.getsourcelines(function)[1] if inspect.isfunction(function) else 0
    where = Spot(inspect.getsourcefile(function) or module, line) if line else Spot(module)
    signature = inspect.signature(function)
    returns = _parsed(signature.return_annotation)
    return build(name, module, where, marks, _arguments(signature), returns, inspect.getdoc(function))


def _arguments(signature: inspect.Signature) -> ast.arguments:
    """A live signature as the source would show it; a default that is no plain value becomes `...`."""
    result = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    for parameter in signature.parameters.values():
        argument = ast.arg(parameter.name, _parsed(parameter.annotation))
        missing = parameter.default is inspect.Parameter.empty
        default = None if missing else _parsed(repr(parameter.default)) or ast.Constant(...)
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            result.kwonlyargs.append(argument)
            result.kw_defaults.append(default)
        elif parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            result.args.append(argument)
            result.defaults += [default] if default else []
    return result


def _parsed(value: Any) -> ast.expr | None:
    if value is inspect.Parameter.empty:
        return None
    return expression(value if isinstance(value, str) else inspect.formatannotation(value))
