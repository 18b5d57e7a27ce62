"""The one reader of contracts: of functions and classes under any of distflow's decorators, imported or in source."""

from __future__ import annotations

import inspect
from typing import Any, get_args, get_origin

from distflow.contracts.annotations import EVALUATION_FAILS, text_of, type_of
from distflow.contracts.definitions import Definition, live
from distflow.contracts.forms import Contract, EnvironmentContract, Read, RewardContract, Signature
from distflow.contracts.settings import Setting, Unreadable, read_setting
from distflow.errors import Diagnostic, InvalidInput

FORMS: dict[str, type[Signature]] = {"node": Contract, "reward": RewardContract, "environment": EnvironmentContract,
                                     "loss": Signature, "detector": Signature}
"""Contract by decorator."""


def read_contract(kind: str, function: Any) -> Any:
    """Return the contract of a function or class under `@kind`, imported or a `Definition`: one of FORMS.

    Raises InvalidInput with every mistake in its signature and in the arguments of its decorator.
    """
    definition = function if isinstance(function, Definition) else live(function)
    signature, mistakes = _signature(definition)
    try:
        contract = FORMS[kind].of(signature, definition.thing)
    except InvalidInput as error:
        raise InvalidInput([*mistakes, *error.mistakes]) from None
    if mistakes:
        raise InvalidInput(mistakes)
    return contract


def _signature(definition: Definition) -> tuple[Signature, list[Diagnostic]]:
    """Return the signature, in which a setting that cannot be read takes any value, and what is wrong with those."""
    found = inspect.signature(definition.thing)
    reads, settings, mistakes = [], {}, []
    for parameter in found.parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            (form,) = _forms(parameter.annotation, definition) or ("",)
            reads.append(Read(parameter.name, form, parameter.default is not parameter.empty))
        elif parameter.kind is parameter.KEYWORD_ONLY:
            try:
                settings[parameter.name] = read_setting(parameter, definition.names)
            except Unreadable as error:
                settings[parameter.name] = Setting(parameter.name)
                mistakes.append(Diagnostic(f"setting `{parameter.name}` of `{definition.name}` {error}",
                                           definition.parameters.get(parameter.name, definition.where),
                                           "As in  share: Annotated[float, Field(gt=0, le=1)] = 0.5"))
    summary = (inspect.getdoc(definition.thing) or "").strip().partition("\n\n")[0].replace("\n", " ")
    return Signature(definition.name, definition.module, definition.where, tuple(reads), settings,
                     _forms(found.return_annotation, definition, parts=True), summary), mistakes


def _forms(annotation: Any, definition: Definition, parts: bool = False) -> tuple[str, ...]:
    """Return the form that an annotation says, or those of the `parts` of a tuple; () if it says none."""
    if annotation is inspect.Parameter.empty:
        return ()
    try:
        kind = type_of(annotation, definition.names)
    except EVALUATION_FAILS:
        return ()
    return tuple(map(text_of, get_args(kind))) if parts and get_origin(kind) is tuple else (text_of(kind),)
