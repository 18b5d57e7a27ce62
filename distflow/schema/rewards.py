"""Are the rewards that a DAG and a run name there? Read from source, as the contracts of node functions are."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from distflow.schema import registry
from distflow.schema.contract import built_in, module_file
from distflow.schema.errors import Mistake, Spot, did_you_mean

if TYPE_CHECKING:
    from distflow.schema.spec import Spec

ANNOTATION = "Reward"
"""A setting with this annotation names a reward."""


def check_rewards(spec: Spec) -> list[Mistake]:
    """A mistake for each name that no module of the DAG registers with `@reward`."""
    named = list(_named(spec))
    known = {name for module in _modules(spec) for name in _rewards_of(module)}
    if any(name not in known for name, _ in named):
        known |= _registered(spec.dag.imports)
    return [Mistake(f"there is no reward `{name}`", where, did_you_mean(name, sorted(known), "Rewards"))
            for name, where in named if name not in known]


def _named(spec: Spec) -> Iterator[tuple[str, Spot]]:
    for node, item in spec.dag.nodes.items():
        contract = spec.functions.get(item.function or "")
        for name, value in item.settings.items():
            setting = contract.settings.get(name) if contract else None
            if setting and setting.annotation == ANNOTATION:
                yield str(value), spec.dag_source.spot(("nodes", node, "with", name))
    if spec.run.validation:
        yield spec.run.validation.reward, spec.run_source.spot(("validation", "reward"))


def _modules(spec: Spec) -> set[str]:
    shipped = {contract.module for contract in built_in().values()}
    return shipped | {contract.module for contract in spec.functions.values()} | set(spec.dag.imports)


def _rewards_of(module: str) -> list[str]:
    """The functions that a module's source marks with `@reward`; none if it cannot be read (reported elsewhere)."""
    path = module_file(module)
    return [] if path is None else _rewards_in(path)


def _rewards_in(path: Path) -> list[str]:
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except SyntaxError:
        return []
    return [item.name for item in body if isinstance(item, ast.FunctionDef)
            and any(ast.unparse(decorator) in ("reward", "distflow.reward") for decorator in item.decorator_list)]


def _registered(modules: list[str]) -> set[str]:
    """What importing the modules registers: the last resort, since it runs the user's code."""
    for module in modules:
        if module_file(module) is not None:
            registry.load_module(module)
    return set(registry.REWARDS)
