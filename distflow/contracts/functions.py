"""Contracts of the node functions that a DAG may name: shipped ones, those of its `imports`, and `MODULE:NAME`.

A module's source says them; one that registers functions as it runs is imported.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distflow.config.dag import Dag, Node
from distflow.config.yaml_source import YamlSource
from distflow.contracts import decorators
from distflow.contracts.definitions import shown_in, where_defined
from distflow.contracts.forms import Contract
from distflow.contracts.modules import check_imports, hidden_by, module_file, where_looked_for
from distflow.contracts.read import read_contract
from distflow.errors import Diagnostic, InvalidInput, Location, did_you_mean, shown

BUILT_IN = "workers.functions"


def built_in() -> dict[str, Contract]:
    """Return the contracts of all shipped functions, by name."""
    folder = module_file(BUILT_IN).parent  # type: ignore[union-attr]
    modules = [f"{BUILT_IN}.{path.stem}" for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]
    return {contract.name: contract for module in modules for contract in of_module(module)}


def of_module(module: str) -> tuple[Contract, ...]:
    """Return the contracts of the functions that a module's source marks with `@node`. Raises InvalidInput."""
    path = module_file(module)
    if path is None:
        raise InvalidInput(Diagnostic(f"module `{module}` cannot be found", None, where_looked_for(module)))
    return _of_file(module, path)


@functools.cache
def _of_file(module: str, _path: Path) -> tuple[Contract, ...]:
    return tuple(read_contract("node", each) for each in shown_in(module, "node"))


def load_function(key: str) -> Any:
    """Return the function that a contract's `key` names. Raises InvalidInput if its module cannot be imported."""
    module, _, name = key.partition(":")
    return getattr(decorators.load_module(module), name, None) or decorators.NODES[name]


def imported(module: str, name: str) -> Contract | None:
    """Return the contract of a function that the source does not show, by importing the module; None if it has none."""
    loaded = decorators.load_module(module, f"It is imported because its source shows no `{name}` with @node above it.")
    function = getattr(loaded, name, None) or decorators.NODES.get(name)
    if function is None or not hasattr(function, "__distflow_node__"):
        return None
    return dataclasses.replace(read_contract("node", function), name=name, module=module)


def contract_of(functions: dict[str, Contract], node: Node) -> Contract | None:
    """Return the contract of a node's function, that it names or that is its default; None if there is none."""
    if node.function:
        return functions.get(node.function)
    fitting = [contract for contract in functions.values()
               if contract.marks.type == node.type and node.role in contract.marks.default_for]
    return fitting[0] if len(fitting) == 1 else None


def named_settings(dag: Dag, functions: dict[str, Contract], annotation: str) -> Iterator[tuple[str, str, Any]]:
    """Yield (node, setting, its value in force) for settings whose annotation is, or may be, this word."""
    for node, item in dag.nodes.items():
        contract = contract_of(functions, item)
        for name, setting in contract.settings.items() if contract else ():
            if annotation in setting.annotation.split(" | "):
                yield node, name, item.settings.get(name, setting.value)


def find_functions(dag: Dag, source: YamlSource, run_file: str, mistakes: list[Diagnostic]) -> dict[str, Contract]:
    """Return the contracts of all functions that the DAG may name; add to `mistakes`, and to `sys.path`."""
    for folder in (str(Path(source.file).resolve().parent), str(Path(run_file).resolve().parent), str(Path.cwd())):
        if folder not in sys.path:
            sys.path.append(folder)
    finder = _Finder(dag, source, mistakes)
    for index, module in enumerate(dag.imports):
        finder.found |= finder.shown(module, source.location(("imports", index)))
    for node, item in dag.nodes.items():
        if item.function and item.function not in finder.found:
            finder.find(node, item.function)
    return finder.found


class _Finder:
    def __init__(self, dag: Dag, source: YamlSource, mistakes: list[Diagnostic]):
        self.dag, self.source, self.mistakes = dag, source, mistakes
        self.found = built_in()
        self.modules: dict[str, dict[str, Contract]] = {}  # what each shows
        self.broken: set[str] = set()  # modules that could not be read: functions are not reported as missing from them

    def find(self, node: str, function: str) -> None:
        """Find a function that no source read so far shows; add a mistake if there is none."""
        where = self.source.location(("nodes", node, "function"))
        module, separator, name = function.rpartition(":")
        modules = [module] if separator else self.dag.imports
        shown = self.shown(module, where) if separator else {}
        contract = shown.get(name) or self._import(modules, name, where)
        if contract:
            self.found[function] = contract
        elif not self.broken.intersection(modules):
            known = shown or self.found
            what = f"node `{node}`: module `{module}` has no function `{name}` with @node above it" if separator else \
                f"node `{node}`: there is no function `{function}`"
            hint = where_defined(function, "node", self.dag.imports, "Instead:  function: MODULE:NAME")
            hint = hint or did_you_mean(name, known, "Functions")
            if not separator and not self.dag.imports:
                hint += "\nYour own are found by  imports: [MODULE]  or  function: MODULE:NAME"
            self.mistakes.append(Diagnostic(what, where, hint))

    def shown(self, module: str, where: Location) -> dict[str, Contract]:
        """Return the contracts that a module's source shows, by name; {} with a mistake if it cannot be read."""
        if module not in self.modules:
            self.modules[module] = {}
            try:
                self._refuse_hidden(module)
                if (path := module_file(module)) and (missing := check_imports(module, path)):
                    raise InvalidInput(missing)
                self.modules[module] = {contract.name: contract for contract in of_module(module)}
            except InvalidInput as error:
                self._note(module, error, where)
        return self.modules[module]

    def _refuse_hidden(self, module: str) -> None:
        """Raise InvalidInput: a file beside the DAG or in this folder has the name of a module that is found first."""
        for folder in (Path(self.source.file).parent, Path()):
            file = folder / f"{module}.py"
            if file.is_file() and (hidden := hidden_by(module, file)):
                raise InvalidInput(Diagnostic(f"`{module}` is another module than {shown(file)}", None, hidden))

    def _import(self, modules: list[str], name: str, where: Location) -> Contract | None:
        """Return the contract of a function by importing modules: the last resort, since that runs the user's code."""
        for module in modules:
            try:
                contract = None if module in self.broken else imported(module, name)
            except InvalidInput as error:
                self._note(module, error, where)
                continue
            if contract:
                return contract
        return None

    def _note(self, module: str, error: InvalidInput, where: Location) -> None:
        self.broken.add(module)
        for mistake in error.mistakes:
            if mistake.where is None:
                self.mistakes.append(dataclasses.replace(mistake, where=where))
            else:
                hint = "\n".join(part for part in (mistake.hint, f"{where} names the module.") if part)
                self.mistakes.append(dataclasses.replace(mistake, hint=hint))
