"""Users' losses: finds functions under `@loss`, named by `loss: MODULE:FUNCTION`, and checks them from source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from distflow.config.spec import Spec
from distflow.contracts import decorators
from distflow.contracts.definitions import definitions, where_defined
from distflow.contracts.environments import wrong_settings
from distflow.contracts.forms import Signature
from distflow.contracts.functions import named_settings
from distflow.contracts.modules import check_module
from distflow.contracts.read import read_contract
from distflow.errors import Diagnostic, InvalidInput, did_you_mean

ANNOTATION = "Loss"
"""Part of the annotation of a setting that may name a loss, whose own settings are in `loss_settings` beside it."""
SETTINGS = "loss_settings"
PARAMETERS = ("logprobs", "old_logprobs", "advantages", "lengths")
"""Names that the positional parameters of a loss may have."""


def check_losses(spec: Spec) -> list[Diagnostic]:
    return [mistake for node, name, value in named_settings(spec.dag, spec.functions, ANNOTATION)
            for mistake in _check_named(spec, node, value, name)]


def qualify_losses(spec: Spec) -> None:
    """Write losses that a module of the DAG's `imports` defines as MODULE:FUNCTION, the name by which ranks load them.
    A shipped loss comes before one of the same name."""
    for node, name, value in named_settings(spec.dag, spec.functions, ANNOTATION):
        contract = spec.functions[spec.dag.nodes[node].function or ""]
        if isinstance(value, str) and value.isidentifier() and f"'{value}'" not in contract.settings[name].annotation:
            modules = [module for module in spec.dag.imports
                       if any(each.name == value for each in definitions(module, "loss"))]
            if modules:
                spec.dag.nodes[node].settings[name] = f"{modules[0]}:{value}"


def load_loss(key: str) -> Callable[..., Any]:
    """Return the function that `MODULE:FUNCTION` names, with `@loss` above it; raise InvalidInput if there is none."""
    module, _, name = key.partition(":")
    function = getattr(decorators.load_module(module), name, None)
    if function is None or not hasattr(function, "__distflow_loss__"):
        raise InvalidInput(f"module `{module}` has no function `{name}` with @loss above it")
    return function


def _check_named(spec: Spec, node: str, value: Any, name: str) -> Iterator[Diagnostic]:
    source, path = spec.dag_source, ("nodes", node, "with")
    given = spec.dag.nodes[node].settings.get(SETTINGS) or {}
    if not isinstance(value, str) or ":" not in value:
        own = isinstance(value, str) and where_defined(value, "loss", spec.dag.imports, "Instead:  loss: MODULE:NAME",
                                                       plain=False)
        if own:
            yield Diagnostic(f"node `{node}`: a loss of your own is named with its module, and `{value}` without",
                             source.location((*path, name)), own)
        elif given:
            yield Diagnostic(f"node `{node}`: `{SETTINGS}` are for a loss of your own, and `{name}` is `{value}`",
                             source.location((*path, SETTINGS), key=True), f"Take `{SETTINGS}` out.")
        return
    module, _, function = value.partition(":")
    where = source.location((*path, name))
    if mistakes := check_module(module, f"node `{node}`: ", where):
        yield from mistakes
        return
    known = {each.name: each for each in definitions(module, "loss")}
    if function not in known:
        hint = where_defined(value, "loss", (), "") or did_you_mean(function, known, "Losses in it") or \
            f"Write  @loss  above  def {function}(…)"
        yield Diagnostic(f"node `{node}`: module `{module}` has no function `{function}` with @loss above it",
                         where, hint)
        return
    try:
        signature = read_contract("loss", known[function])
    except InvalidInput as error:
        yield from error.mistakes
        return
    yield from _check_parameters(signature)
    yield from wrong_settings(spec, (*path, SETTINGS), f"loss `{function}`", signature, (*path, name))


def _check_parameters(contract: Signature) -> Iterator[Diagnostic]:
    names = [read.name for read in contract.reads]
    for read in contract.reads:
        if read.name not in PARAMETERS:
            hint = (f"{did_you_mean(read.name, PARAMETERS, 'It may have')}\n"
                    f"A setting stands behind a star:  def {contract.name}({PARAMETERS[0]}, …, *, {read.name}=…)")
            yield Diagnostic(f"loss `{contract.name}` has a parameter `{read.name}`, which a loss does not get",
                             contract.where, hint)
    for name in (name for name in contract.settings if name in PARAMETERS):
        yield Diagnostic(f"loss `{contract.name}` has a setting `{name}`, which is what a loss gets as a parameter",
                      contract.where, f"Put it before the star:  def {contract.name}({PARAMETERS[0]}, …, {name}, *, …)")
    if PARAMETERS[0] not in names:
        yield Diagnostic(f"loss `{contract.name}` has no parameter `{PARAMETERS[0]}`, so no gradient reaches the model",
                         contract.where, f"Instead:  def {contract.name}({', '.join(PARAMETERS[:3])}): …")
