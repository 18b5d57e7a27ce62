"""Texts with columns in braces, as `"{questions}\\nAn answer: {completions}"`: which columns they read."""

from __future__ import annotations

import dataclasses
import string
from typing import TYPE_CHECKING

from distflow.contracts.signature import Contract, Read
from distflow.errors import Diagnostic

if TYPE_CHECKING:
    from distflow.config.load import Spec

ANNOTATION = "Template"
"""A setting with this annotation is such a text; its function gets the columns beside its own."""


def fields(template: str) -> list[str]:
    """The columns that a template names, each once.

    Raises:
        ValueError: it is no template.
    """
    names = [name for _, name, form, conversion in string.Formatter().parse(template) if name is not None
             and not _refuse_more(name, form, conversion)]
    if not names:
        raise ValueError("it names no column, so that all prompts would be the same")
    return list(dict.fromkeys(names))


def _refuse_more(name: str, form: str | None, conversion: str | None) -> None:
    if not name.isidentifier() or form or conversion:
        raise ValueError(f"{{{name}}} is not the name of a column")


def check_templates(spec: Spec) -> list[Diagnostic]:
    """A mistake for each setting that should be a template and is none."""
    mistakes = []
    for node in spec.dag.nodes:
        for name, value in _templates(spec, node):
            try:
                fields(value)
            except ValueError as error:
                what = f"node `{node}`: `{name}` cannot be read: {error}"
                hint = "Columns stand in braces:  {questions}   A brace of the text itself is written twice:  {{ }}"
                where = spec.dag_source.spot(("nodes", node, "with", name))
                mistakes.append(Diagnostic(what, where, hint))
    return mistakes


def with_fields(spec: Spec, node: str, contract: Contract) -> Contract:
    """The contract of a node's function, which also reads the columns that its templates name."""
    known = {read.name: read for read in contract.reads}
    for _, value in _templates(spec, node):
        for name in _readable(value):
            known.setdefault(name, Read(name, "list[str]"))
    return dataclasses.replace(contract, reads=tuple(known.values()))


def _readable(template: str) -> list[str]:
    """None of one that cannot be read, which has been reported."""
    try:
        return fields(template)
    except ValueError:
        return []


def _templates(spec: Spec, node: str) -> list[tuple[str, str]]:
    item = spec.dag.nodes[node]
    contract = spec.functions.get(item.function or "")
    return [(name, value) for name, value in item.settings.items() if contract and isinstance(value, str)
            and name in contract.settings and contract.settings[name].annotation == ANNOTATION]
