"""Environments that a DAG names: finds them, reads their contracts from source, and checks their settings."""

from __future__ import annotations

import functools
import importlib.util

from distflow.config.extras import pip_line
from distflow.config.spec import Spec
from distflow.contracts import decorators
from distflow.contracts.definitions import definitions
from distflow.contracts.forms import Contract, EnvironmentContract, Read, Signature
from distflow.contracts.functions import built_in, named_settings
from distflow.contracts.modules import module_file
from distflow.contracts.read import read_contract
from distflow.contracts.settings import check_given
from distflow.errors import Diagnostic, InvalidInput, did_you_mean

ANNOTATION = "Environment"
"""Annotation of a setting that names an environment, whose own settings are in `environment_settings` beside it."""
SETTINGS = "environment_settings"
SHIPPED = "workers.isolation.environments"
_PACKAGES = {"Gymnasium": ("gymnasium", "gymnasium"), "MCPSession": ("mcp", "mcp"), "MCPTools": ("mcp", "mcp"),
             "OpenEnv": ("websockets", "openenv"), "Verifiers": ("verifiers", "verifiers")}
"""Shipped environment → the package that it imports, and the extra of setup.cfg that has it."""


def check_environments(spec: Spec) -> list[Diagnostic]:
    """Return the mistakes in environments and their settings; put those that exist into `spec.environments`."""
    mistakes: list[Diagnostic] = []
    for node, name, value in named_settings(spec.dag, spec.functions, ANNOTATION):
        try:
            mistakes += _check_named(spec, node, name, value) if isinstance(value, str) else []
        except InvalidInput as error:
            mistakes += error.mistakes
    return mistakes


def _check_named(spec: Spec, node: str, setting: str, value: str) -> list[Diagnostic]:
    path = ("nodes", node, "with")
    where = spec.dag_source.location((*path, setting))
    modules = {*spec.dag.imports, *(contract.module for contract in spec.functions.values())}
    kind, known = find_environment(value, [*modules - {contract.module for contract in built_in().values()}])
    if kind is None:
        return [Diagnostic(f"node `{node}`: there is no environment `{value}`", where,
                           did_you_mean(value.rpartition(":")[2], sorted(known), "Environments"))]
    spec.environments[node] = kind
    package, extra = _PACKAGES.get(kind.name, ("", "")) if kind.module.startswith(f"{SHIPPED}.") else ("", "")
    if package and importlib.util.find_spec(package) is None:
        return [Diagnostic(f"environment `{kind.name}` needs the package `{package}`, which is not installed", where,
                           pip_line(extra))]
    hint = f"Add to it:  def step(self, text: str) -> Turn: …   ({where} names it)"
    silent = [] if kind.steps else [Diagnostic(f"environment `{kind.name}` has no method `step`", kind.where, hint)]
    return silent + wrong_settings(spec, (*path, SETTINGS), f"environment `{kind.name}`", kind, (*path, setting))


def with_environment_columns(spec: Spec, node: str, contract: Contract) -> Contract:
    """Return the contract of a node's function with the columns that the node's environment reads too; where it begins
    the conversation, the function writes the prompts."""
    kind = spec.environments.get(node)
    if kind is None:
        return contract
    contract = contract.reading(Read(kind.columns[read.name], "list[str]", read.optional) for read in kind.reads)
    return contract.writing("prompts", "Ragged") if kind.starts else contract


def load_environment(name: str) -> type:
    """Return the class of an environment: `module:Name`, or the name of one that is shipped or registered."""
    module, separator, own = name.rpartition(":")
    if not separator and own not in decorators.ENVIRONMENTS:
        module = next((each for each in shipped_modules() if own in {kind.name for kind in environments_in(each)}), "")
    found = getattr(decorators.load_module(module), own, None) if module else decorators.ENVIRONMENTS.get(own)
    if found is None or not hasattr(found, "__distflow_safe__"):
        where = f"module `{module}` has" if separator else "there is"
        raise InvalidInput(f"{where} no environment `{own}`. {did_you_mean(own, decorators.ENVIRONMENTS)}")
    return found


def live_environment(name: str) -> tuple[type, EnvironmentContract]:
    """Return the class of an environment and its contract; it is read once."""
    return _live_environment(name, decorators.ENVIRONMENTS.get(name))


@functools.cache
def _live_environment(name: str, registered: type | None) -> tuple[type, EnvironmentContract]:
    found = load_environment(name)
    return found, read_contract("environment", found)


def find_environment(name: str, modules: list[str]) -> tuple[EnvironmentContract | None, set[str]]:
    """Return the environment of that name (or `module:Name`), else None and all known names."""
    module, separator, own = name.rpartition(":")
    modules = [module] if separator else [*shipped_modules(), *modules]
    found = {kind.name: kind for each in modules for kind in environments_in(each)}
    if own in found:
        return found[own], set()
    for each in modules if separator else modules[len(shipped_modules()) :]:
        if module_file(each) is not None:
            decorators.load_module(each)
    live = decorators.ENVIRONMENTS.get(own)
    return (read_contract("environment", live) if live else None), {*found, *decorators.ENVIRONMENTS}


def shipped_modules() -> list[str]:
    folder = module_file(SHIPPED).parent  # type: ignore[union-attr]
    return [f"{SHIPPED}.{path.stem}" for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]


def environments_in(module: str) -> list[EnvironmentContract]:
    """Return the classes that a module's source marks with `@environment`; [] if it cannot be read."""
    return [read_contract("environment", each) for each in definitions(module, "environment")]


def wrong_settings(spec: Spec, path: tuple[str, ...], whose: str, signature: Signature,
                   named_at: tuple[str, ...]) -> list[Diagnostic]:
    """Return what is wrong with the settings at `path`. `whose`: as "environment `Lookup`", which `named_at` names."""
    given = spec.dag.nodes[path[1]].settings.get(path[-1])
    wrong = check_given(given if isinstance(given, dict) else {}, signature.settings, whose,
                        f"with: {{…, {path[-1]}: {{SETTING}}}}")
    return [Diagnostic(f"node `{path[1]}`: {each.what}",
                       spec.dag_source.location(named_at if each.missing else (*path, *each.path), each.key), each.hint)
            for each in wrong]
