"""The environments that a DAG names: found and read from source, as node functions and rewards are."""

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
    from distflow.config.load import Spec

ANNOTATION = "Environment"
"""A setting with this annotation names an environment; `environment_settings` beside it are that one's own."""
SETTINGS = "environment_settings"
SHIPPED = "workers.isolation.environments"
_OF_DATA = {"question": "questions", "answer": "answers"}
"""Parameters that stand for one row of a column that every dataset gives."""


@dataclass(frozen=True)
class EnvironmentContract:
    """An environment as its class shows it: the column of each positional parameter, and its own settings."""

    name: str
    module: str
    where: Location
    columns: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Setting] = field(default_factory=dict)
    steps: bool = True
    safe: bool = False
    coroutine: bool = False
    """`step` is one."""

    @property
    def key(self) -> str:
        """`module:Name`, from which a process loads it."""
        return f"{self.module}:{self.name}"


def check_environments(spec: Spec) -> list[Diagnostic]:
    """A mistake for each name that is no environment, and for settings that do not fit the one that is named.

    Those that are there are kept in `spec.environments`, by node.
    """
    mistakes: list[Diagnostic] = []
    for node, item in spec.dag.nodes.items():
        contract = spec.functions.get(item.function or "")
        for name, value in item.settings.items():
            setting = contract.settings.get(name) if contract else None
            if setting and setting.annotation == ANNOTATION and isinstance(value, str):
                where = spec.dag_source.spot(("nodes", node, "with", name))
                kind, known = find_kind(value, [*_modules(spec)])
                if kind is None:
                    what = f"node `{node}`: there is no environment `{value}`"
                    mistakes.append(Diagnostic(what, where, did_you_mean(value.rpartition(":")[2], sorted(known),
                                                                         "Environments")))
                else:
                    spec.environments[node] = kind
                    mistakes += _check_kind(spec, node, kind, where)
    return mistakes


def reading(spec: Spec, node: str, contract: Contract) -> Contract:
    """The contract of a node's function, which also reads the columns that the node's environment wants."""
    kind = spec.environments.get(node)
    known = {read.name for read in contract.reads}
    extra = tuple(Read(column, "list[str]") for column in kind.columns.values() if column not in known) if kind else ()
    return dataclasses.replace(contract, reads=contract.reads + extra) if extra else contract


def load_environment(name: str) -> type:
    """The class of an environment: `module:Name`, or the name of one that is shipped or that an imported module has.

    Raises:
        InvalidInput: there is none; or its module fails when it is imported.
    """
    module, separator, own = name.rpartition(":")
    if not separator and own not in decorators.ENVIRONMENTS:
        module = next((each for each in shipped_modules() if own in {kind.name for kind in kinds_of(each)}), "")
    found = getattr(decorators.load_module(module), own, None) if module else decorators.ENVIRONMENTS.get(own)
    if found is None or not hasattr(found, "__distflow_safe__"):
        where = f"module `{module}` has" if separator else "there is"
        raise InvalidInput(f"{where} no environment `{own}`. {did_you_mean(own, decorators.ENVIRONMENTS)}")
    return found


def kind_of(environment: type) -> EnvironmentContract:
    """What an imported class shows."""
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


def find_kind(name: str, modules: list[str]) -> tuple[EnvironmentContract | None, set[str]]:
    """The environment of that name (or `module:Name`), and the names of all in the modules if there is none.

    A module is imported only if no source shows the name.
    """
    module, separator, own = name.rpartition(":")
    modules = [module] if separator else [*shipped_modules(), *modules]
    found = {kind.name: kind for each in modules for kind in kinds_of(each)}
    if own in found:
        return found[own], set()
    for each in modules if separator else modules[len(shipped_modules()) :]:
        if module_file(each) is not None:
            decorators.load_module(each)
    live = decorators.ENVIRONMENTS.get(own)
    return (kind_of(live) if live else None), {*found, *decorators.ENVIRONMENTS}


def shipped_modules() -> list[str]:
    folder = module_file(SHIPPED).parent  # type: ignore[union-attr]
    return [f"{SHIPPED}.{path.stem}" for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]


def _modules(spec: Spec) -> set[str]:
    built = {contract.module for contract in built_in().values()}
    return ({contract.module for contract in spec.functions.values()} | set(spec.dag.imports)) - built


def kinds_of(module: str) -> list[EnvironmentContract]:
    """The classes that a module's source marks with `@environment`; none if it cannot be read (reported elsewhere)."""
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


def _check_kind(spec: Spec, node: str, kind: EnvironmentContract, where: Location) -> list[Diagnostic]:
    mistakes = []
    if not kind.steps:
        hint = f"Add to it:  def step(self, text: str) -> Turn: …   ({where} names it)"
        mistakes.append(Diagnostic(f"environment `{kind.name}` has no method `step`", kind.where, hint))
    path = ("nodes", node, "with", SETTINGS)
    return mistakes + wrong_settings(spec, path, f"environment `{kind.name}`", kind.settings, where)


def wrong_settings(spec: Spec, path: tuple[str, ...], whose: str, known: dict[str, Setting],
                   where: Location) -> list[Diagnostic]:
    """Return what is wrong with the settings at `path` of the DAG, which go to something that a node names.

    Args:
        whose: as "environment `Lookup`".
        known: the settings that it has.
        where: the place that names it.
    """
    mistakes, head, given = [], f"node `{path[1]}`:", spec.dag.nodes[path[1]].settings.get(path[-1])
    given = given if isinstance(given, dict) else {}
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known, "Settings") or "It has no settings at all."
            spot = spec.dag_source.spot((*path, name), key=True)
            mistakes.append(Diagnostic(f"{head} {whose} has no setting `{name}`", spot, hint))
        elif (wanted := known[name].annotation) and not fits(given[name], wanted):
            what = f"{head} setting `{name}` of {whose} must be {wanted}, not {given[name]!r}"
            mistakes.append(Diagnostic(what, spec.dag_source.spot((*path, name))))
    missing = [name for name, setting in known.items() if setting.default == REQUIRED and name not in given]
    if missing:
        hint = f"Add them:  with: {{…, {path[-1]}: {{{', '.join(f'{name}: …' for name in missing)}}}}}"
        mistakes.append(Diagnostic(f"{head} {whose} needs {', '.join(f'`{name}`' for name in missing)}", where, hint))
    return mistakes
