"""Environments that a DAG names: finds them, reads their contracts from source, and checks their settings."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from distflow.contracts import decorators
from distflow.contracts.signature import REQUIRED, Contract, Read, Setting, built_in, fits, module_file
from distflow.errors import Diagnostic, InvalidInput, Location, did_you_mean, shown

if TYPE_CHECKING:
    from distflow.contracts.spec import CheckedSpec

ANNOTATION = "Environment"
"""Annotation of a setting that names an environment, whose own settings are in `environment_settings` beside it."""
SETTINGS = "environment_settings"
SHIPPED = "workers.isolation.environments"
_OF_DATA = {"question": "questions", "answer": "answers"}
"""Parameter of one row → the column of the dataset that it is from."""


@dataclass(frozen=True)
class EnvironmentContract:
    """Contract of an environment's class: the column of each positional parameter, and its settings.

    `steps`: it has a method `step`; `coroutine`: that is one.
    """

    name: str
    module: str
    where: Location
    columns: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Setting] = field(default_factory=dict)
    steps: bool = True
    safe: bool = False
    coroutine: bool = False

    @property
    def key(self) -> str:
        """Name by which a process loads it: `module:Name`."""
        return f"{self.module}:{self.name}"


def check_environments(spec: CheckedSpec) -> list[Diagnostic]:
    """Return a mistake for each name that is no environment, and for settings that do not fit the environment.

    Puts the environments that exist into `spec.environments`, by node.
    """
    mistakes: list[Diagnostic] = []
    for node, item in spec.dag.nodes.items():
        contract = spec.functions.get(item.function or "")
        for name, value in item.settings.items():
            setting = contract.settings.get(name) if contract else None
            if setting and setting.annotation == ANNOTATION and isinstance(value, str):
                where = spec.dag_source.location(("nodes", node, "with", name))
                kind, known = find_environment(value, [*_modules(spec)])
                if kind is None:
                    what = f"node `{node}`: there is no environment `{value}`"
                    mistakes.append(Diagnostic(what, where, did_you_mean(value.rpartition(":")[2], sorted(known),
                                                                         "Environments")))
                else:
                    spec.environments[node] = kind
                    mistakes += _check_environment(spec, node, kind, where)
    return mistakes


def with_environment_columns(spec: CheckedSpec, node: str, contract: Contract) -> Contract:
    """Return the contract of a node's function with the columns that the node's environment reads too."""
    kind = spec.environments.get(node)
    known = {read.name for read in contract.reads}
    extra = tuple(Read(column, "list[str]") for column in kind.columns.values() if column not in known) if kind else ()
    return dataclasses.replace(contract, reads=contract.reads + extra) if extra else contract


def load_environment(name: str) -> type:
    """Return the class of an environment: `module:Name`, or the name of one that is shipped or registered.

    Raises:
        InvalidInput: there is none, or its module fails when it is imported.
    """
    module, separator, own = name.rpartition(":")
    if not separator and own not in decorators.ENVIRONMENTS:
        module = next((each for each in shipped_modules() if own in {kind.name for kind in environments_in(each)}), "")
    found = getattr(decorators.load_module(module), own, None) if module else decorators.ENVIRONMENTS.get(own)
    if found is None or not hasattr(found, "__distflow_safe__"):
        where = f"module `{module}` has" if separator else "there is"
        raise InvalidInput(f"{where} no environment `{own}`. {did_you_mean(own, decorators.ENVIRONMENTS)}")
    return found


def environment_contract(environment: type) -> EnvironmentContract:
    """Return the contract of an imported class."""
    columns, settings = {}, {}
    for name, parameter in inspect.signature(environment).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            default = REQUIRED if parameter.default is inspect.Parameter.empty else repr(parameter.default)
            settings[name] = Setting(name, "", default)
        elif parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            columns[name] = _OF_DATA.get(name, name)
    step = getattr(environment, "step", None)
    return EnvironmentContract(environment.__name__, environment.__module__, Location(environment.__module__),
                               columns, settings,
                step is not None, getattr(environment, "__distflow_safe__", False), inspect.iscoroutinefunction(step))


def find_environment(name: str, modules: list[str]) -> tuple[EnvironmentContract | None, set[str]]:
    """Return the environment of that name (or `module:Name`); if there is none, None and the names of all known ones.

    A module is imported only if no source shows the name.
    """
    module, separator, own = name.rpartition(":")
    modules = [module] if separator else [*shipped_modules(), *modules]
    found = {kind.name: kind for each in modules for kind in environments_in(each)}
    if own in found:
        return found[own], set()
    for each in modules if separator else modules[len(shipped_modules()) :]:
        if module_file(each) is not None:
            decorators.load_module(each)
    live = decorators.ENVIRONMENTS.get(own)
    return (environment_contract(live) if live else None), {*found, *decorators.ENVIRONMENTS}


def shipped_modules() -> list[str]:
    folder = module_file(SHIPPED).parent  # type: ignore[union-attr]
    return [f"{SHIPPED}.{path.stem}" for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]


def _modules(spec: CheckedSpec) -> set[str]:
    built = {contract.module for contract in built_in().values()}
    return ({contract.module for contract in spec.functions.values()} | set(spec.dag.imports)) - built


def environments_in(module: str) -> list[EnvironmentContract]:
    """Return the classes that a module's source marks with `@environment`; [] if it cannot be read (reported
    elsewhere)."""
    path = module_file(module)
    if path is None:
        return []
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except SyntaxError:
        return []
    found = (_of_source(module, path, item) for item in body if isinstance(item, ast.ClassDef))
    return [kind for kind in found if kind]


def _of_source(module: str, path: Path, item: ast.ClassDef) -> EnvironmentContract | None:
    for decorator in item.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if ast.unparse(called) not in ("environment", "distflow.environment"):
            continue
        methods = {each.name: each for each in item.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
        if item.bases and "__init__" not in methods:
            return None  # what it inherits is known when it is imported
        where = Location(shown(path), item.lineno, text=f"class {item.name}")
        words = decorator.keywords if isinstance(decorator, ast.Call) else []
        safe = any(word.arg == "safe" and ast.unparse(word.value) == "True" for word in words)
        columns, settings = _parameters(methods["__init__"].args) if "__init__" in methods else ({}, {})
        return EnvironmentContract(item.name, module, where, columns, settings, bool(item.bases) or "step" in methods,
                                   safe,
                                   isinstance(methods.get("step"), ast.AsyncFunctionDef))
    return None


def _parameters(arguments: ast.arguments) -> tuple[dict[str, str], dict[str, Setting]]:
    names = [item.arg for item in [*arguments.posonlyargs, *arguments.args]][1:]
    settings = {item.arg: Setting(item.arg, ast.unparse(item.annotation) if item.annotation else "",
                                  ast.unparse(default) if default else REQUIRED)
                for item, default in zip(arguments.kwonlyargs, arguments.kw_defaults)}
    return {name: _OF_DATA.get(name, name) for name in names}, settings


def _check_environment(spec: CheckedSpec, node: str, kind: EnvironmentContract, where: Location) -> list[Diagnostic]:
    mistakes = []
    if not kind.steps:
        hint = f"Add to it:  def step(self, text: str) -> Turn: …   ({where} names it)"
        mistakes.append(Diagnostic(f"environment `{kind.name}` has no method `step`", kind.where, hint))
    path = ("nodes", node, "with", SETTINGS)
    return mistakes + wrong_settings(spec, path, f"environment `{kind.name}`", kind.settings, where)


def wrong_settings(spec: CheckedSpec, path: tuple[str, ...], whose: str, known: dict[str, Setting],
                   where: Location) -> list[Diagnostic]:
    """Return what is wrong with the settings at `path` of the DAG, which go to something that a node names.

    Args:
        whose: as "environment `Lookup`".
        known: the settings that it has.
        where: the location that names it.
    """
    mistakes, head, given = [], f"node `{path[1]}`:", spec.dag.nodes[path[1]].settings.get(path[-1])
    given = given if isinstance(given, dict) else {}
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known, "Settings") or "It has no settings at all."
            key = spec.dag_source.location((*path, name), key=True)
            mistakes.append(Diagnostic(f"{head} {whose} has no setting `{name}`", key, hint))
        elif (wanted := known[name].annotation) and not fits(given[name], wanted):
            what = f"{head} setting `{name}` of {whose} must be {wanted}, not {given[name]!r}"
            mistakes.append(Diagnostic(what, spec.dag_source.location((*path, name))))
    missing = [name for name, setting in known.items() if setting.default == REQUIRED and name not in given]
    if missing:
        hint = f"Add them:  with: {{…, {path[-1]}: {{{', '.join(f'{name}: …' for name in missing)}}}}}"
        mistakes.append(Diagnostic(f"{head} {whose} needs {', '.join(f'`{name}`' for name in missing)}", where, hint))
    return mistakes
