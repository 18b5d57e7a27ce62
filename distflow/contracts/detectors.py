"""Checks `robust.detectors` of the run file against the functions under `@detector`, whose source is read."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import TYPE_CHECKING

from distflow.contracts.signature import module_file
from distflow.errors import Diagnostic, did_you_mean

if TYPE_CHECKING:
    from distflow.contracts.spec import CheckedSpec

SHIPPED = "distflow.recovery"


def check_detectors(spec: CheckedSpec) -> list[Diagnostic]:
    """Return a mistake for each unknown detector, unknown setting and value of a wrong type."""
    configured = spec.run.robust.detectors
    if not configured:
        return []
    own = [path for module in spec.dag.imports if (path := module_file(module))]
    shipped = sorted(module_file(SHIPPED).parent.glob("*.py"))  # type: ignore[union-attr]
    known = {name: settings for path in (*shipped, *own) for name, settings in _of_file(path).items()}
    mistakes = []
    for name, values in configured.items():
        path = ("robust", "detectors", name)
        if name not in known:
            what = f"there is no detector `{name}`"
            hint = (f"{did_you_mean(name, known, 'Detectors')}\nOne of your own stands in a module that the DAG "
                    "imports, under @detector.")
            mistakes.append(Diagnostic(what, spec.run_source.location(path, key=True), hint))
            continue
        for each, value in values.items():
            if each not in known[name]:
                hint = did_you_mean(each, known[name], "Settings") or "It has no settings at all."
                what = f"detector `{name}` has no setting `{each}`"
                mistakes.append(Diagnostic(what, spec.run_source.location((*path, each), key=True), hint))
            elif isinstance(value, bool) != known[name][each]:
                kind = "true or false" if known[name][each] else "a number"
                what = f"setting `{each}` of detector `{name}` is {kind}, not {str(value).lower()}"
                mistakes.append(Diagnostic(what, spec.run_source.location((*path, each))))
    return mistakes


@functools.cache
def _of_file(path: Path) -> dict[str, dict[str, bool]]:
    """Return the detectors of a file, with setting → whether it is a bool (else a number).

    Returns {} for a file that cannot be read (reported elsewhere).
    """
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except SyntaxError:
        return {}
    return {item.name: {argument.arg: ast.unparse(default or argument) in ("True", "False")
                        for argument, default in zip(item.args.kwonlyargs, item.args.kw_defaults)}
            for item in body if isinstance(item, ast.FunctionDef) and any(map(_is_detector, item.decorator_list))}


def _is_detector(decorator: ast.expr) -> bool:
    name = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(name) in ("detector", "distflow.detector")
