"""Templates: texts with columns in braces, as `"{questions}\\nAn answer: {completions}"`; finds the columns."""

from __future__ import annotations

import dataclasses
import string
from typing import TYPE_CHECKING

from distflow.contracts.signature import Contract, Read
from distflow.errors import Diagnostic

if TYPE_CHECKING:
    from distflow.contracts.spec import CheckedSpec

ANNOTATION = "Template"
"""Annotation of a setting that holds a template; its function gets the columns beside its own."""


def fields(template: str) -> list[str]:
    """Return the columns that a template names, each once.

    Raises:
        ValueError: the text is no template.
    """
    names = [name for _, name, form, conversion in string.Formatter().parse(template) if name is not None
             and not _refuse_more(name, form, conversion)]
    if not names:
        raise ValueError("it names no column, so that all prompts would be the same")
    return list(dict.fromkeys(names))


def _refuse_more(name: str, form: str | None, conversion: str | None) -> None:
    if not name.isidentifier() or form or conversion:
        raise ValueError(f"{{{name}}} is not the name of a column")


def check_templates(spec: CheckedSpec) -> list[Diagnostic]:
    """Return a mistake for each setting that should be a template and is none."""
    mistakes = []
    for node in spec.dag.nodes:
        for name, value in _templates(spec, node):
            try:
                fields(value)
            except ValueError as error:
                what = f"node `{node}`: `{name}` cannot be read: {error}"
                hint = "Columns stand in braces:  {questions}   A brace of the text itself is written twice:  {{ }}"
                where = spec.dag_source.location(("nodes", node, "with", name))
                mistakes.append(Diagnostic(what, where, hint))
    return mistakes


def with_template_columns(spec: CheckedSpec, node: str, contract: Contract) -> Contract:
    """Return the contract of a node's function with the columns that its templates name too."""
    known = {read.name: read for read in contract.reads}
    for _, value in _templates(spec, node):
        for name in _readable(value):
            known.setdefault(name, Read(name, "list[str]"))
    return dataclasses.replace(contract, reads=tuple(known.values()))


def _readable(template: str) -> list[str]:
    """Return the columns of a template; [] if it cannot be read, which `check_templates` reports."""
    try:
        return fields(template)
    except ValueError:
        return []


def _templates(spec: CheckedSpec, node: str) -> list[tuple[str, str]]:
    item = spec.dag.nodes[node]
    contract = spec.functions.get(item.function or "")
    return [(name, value) for name, value in item.settings.items() if contract and isinstance(value, str)
            and name in contract.settings and contract.settings[name].annotation == ANNOTATION]
