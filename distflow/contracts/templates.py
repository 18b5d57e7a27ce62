"""Templates: texts with columns in braces, as `"{questions}\\nAn answer: {completions}"`; finds the columns."""

from __future__ import annotations

import string

from distflow.config.spec import Spec
from distflow.contracts.forms import Contract, Read
from distflow.contracts.functions import named_settings
from distflow.errors import Diagnostic

ANNOTATION = "Template"  # annotation of a setting that holds a template; its function gets the columns beside its own


def fields(template: str) -> list[str]:
    """Return the columns that a template names, each once. Raises ValueError if the text is no template."""
    names = [name for _, name, form, conversion in string.Formatter().parse(template) if name is not None
             and not _refuse_more(name, form, conversion)]
    if not names:
        raise ValueError("it names no column, so that all prompts would be the same")
    return list(dict.fromkeys(names))


def _refuse_more(name: str, form: str | None, conversion: str | None) -> None:
    if not name.isidentifier() or form or conversion:
        raise ValueError(f"{{{name}}} is not the name of a column")


def check_templates(spec: Spec) -> list[Diagnostic]:
    mistakes = []
    for node, name, value in _templates(spec):
        try:
            fields(value)
        except ValueError as error:
            hint = "Columns stand in braces:  {questions}   A brace of the text itself is written twice:  {{ }}"
            mistakes.append(Diagnostic(f"node `{node}`: `{name}` cannot be read: {error}",
                                       spec.dag_source.location(("nodes", node, "with", name)), hint))
    return mistakes


def with_template_columns(spec: Spec, node: str, contract: Contract) -> Contract:
    """Return the contract of a node's function with the columns that its templates name too."""
    return contract.reading(Read(name, "list[str]") for owner, _, value in _templates(spec) if owner == node
                            for name in readable_fields(value))


def readable_fields(template: str) -> list[str]:
    """Return the columns that a template names; [] if it cannot be read, which another check reports."""
    try:
        return fields(template)
    except ValueError:
        return []


def _templates(spec: Spec) -> list[tuple[str, str, str]]:
    return [each for each in named_settings(spec.dag, spec.functions, ANNOTATION) if isinstance(each[2], str)]
