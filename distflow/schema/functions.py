"""Finding the functions that a DAG names: shipped, imported, or as `module:function`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from distflow.schema.contract import Contract, built_in, of_module
from distflow.schema.dag import Dag
from distflow.schema.errors import InvalidInput, Mistake, Spot, did_you_mean
from distflow.schema.live import imported
from distflow.schema.modules import check_imports, module_file
from distflow.schema.source import Source


def find_functions(dag: Dag, source: Source, mistakes: list[Mistake]) -> dict[str, Contract]:
    """The contracts of all functions that the DAG may name; user modules are found beside the DAG file too."""
    for place in (str(Path(source.file).resolve().parent), str(Path.cwd())):
        if place not in sys.path:
            sys.path.append(place)
    finder = _Finder(dag, source, mistakes)
    finder.read_imports()
    for node, item in dag.nodes.items():
        if item.function and item.function not in finder.found:
            finder.find(node, item.function)
    return finder.found


class _Finder:
    def __init__(self, dag: Dag, source: Source, mistakes: list[Mistake]):
        self.dag, self.source, self.mistakes = dag, source, mistakes
        self.found = built_in()
        self.broken: set[str] = set()
        """Modules that could not be read. What they would have held is not reported as missing."""
        self.read: set[str] = set()

    def read_imports(self) -> None:
        for index, module in enumerate(self.dag.imports):
            shown = self._read(module, self.source.spot(("imports", index)))
            self.found.update({contract.name: contract for contract in shown})

    def find(self, node: str, function: str) -> None:
        """Look for a function that no source read so far shows; note a mistake if it is nowhere."""
        where = self.source.spot(("nodes", node, "function"))
        module, separator, name = function.rpartition(":")
        modules = [module] if separator else self.dag.imports
        shown = {contract.name: contract for contract in (self._read(module, where) if separator else ())}
        contract = shown.get(name) or self._import(modules, name, where)
        if contract:
            self.found[function] = contract
        elif not self.broken.intersection(modules):
            known = shown or self.found
            what = f"node `{node}`: module `{module}` has no function `{name}` with @node above it" if separator else \
                f"node `{node}`: there is no function `{function}`"
            hint = did_you_mean(name, known, "Functions")
            if not separator and not self.dag.imports:
                hint += "\nYour own are found by  imports: [MODULE]  or  function: MODULE:NAME"
            self.mistakes.append(Mistake(what, where, hint))

    def _read(self, module: str, where: Spot) -> tuple[Contract, ...]:
        try:
            if module in self.broken:
                return ()
            if module not in self.read and (path := module_file(module)):
                self.read.add(module)
                if missing := check_imports(module, path):
                    raise InvalidInput(missing)
            return of_module(module)
        except InvalidInput as error:
            self._note(module, error, where)
            return ()

    def _import(self, modules: list[str], name: str, where: Spot) -> Contract | None:
        """The function as a module registers it when it is imported: the last resort, since it runs the user's code."""
        for module in modules:
            try:
                contract = None if module in self.broken else imported(module, name)
            except InvalidInput as error:
                self._note(module, error, where)
                continue
            if contract:
                return contract
        return None

    def _note(self, module: str, error: InvalidInput, where: Spot) -> None:
        self.broken.add(module)
        for mistake in error.mistakes:
            if mistake.where is None:
                self.mistakes.append(dataclasses.replace(mistake, where=where))
            else:
                hint = "\n".join(part for part in (mistake.hint, f"{where} names the module.") if part)
                self.mistakes.append(dataclasses.replace(mistake, hint=hint))
