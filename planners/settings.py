"""Checks the `with:` of a node against the keyword-only parameters of its function."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from distflow.config.spec import Spec
from distflow.contracts.forms import Contract
from distflow.contracts.settings import check_given
from distflow.errors import Diagnostic


def check_settings(spec: Spec, node: str, contract: Contract) -> list[Diagnostic]:
    wrong: dict[str, list[Diagnostic]] = {}
    given, source, repeats = spec.dag.nodes[node].settings, spec.dag_source, contract.marks.repeats
    for each in check_given(given, contract.settings, f"function `{contract.name}`", "with: {SETTING}"):
        where = source.location(("nodes", node) if each.missing else ("nodes", node, "with", *each.path),
                                each.key or each.missing)
        name = str(each.path[0])
        reasons, value = contract.marks.refuses.get(name, {}), given.get(name)
        hint = reasons.get(value, each.hint) if isinstance(value, Hashable) else each.hint
        wrong.setdefault(name, []).append(Diagnostic(f"node `{node}`: {each.what}", where, hint))
    if repeats and (repeats in given or repeats not in wrong):
        wrong[repeats] = _check_repeats(spec, node, contract, repeats)
    for name, (other, wanted) in contract.marks.belongs_to.items():
        if not wrong.get(name) and not wrong.get(other):
            wrong[f"{name} and {other}"] = _check_companion(spec, node, contract, (name, other), (wanted,), True)
    for name, (other, wanted) in contract.marks.only_with.items():
        if not wrong.get(name) and not wrong.get(other):
            wrong[f"{name} only with {other}"] = _check_companion(spec, node, contract, (name, other), wanted, False)
    return [mistake for mistakes in wrong.values() for mistake in mistakes]


def _check_companion(spec: Spec, node: str, contract: Contract, names: tuple[str, str], wanted: tuple[Any, ...],
                     needed: bool) -> list[Diagnostic]:
    """Check a setting that belongs to some values of another: it must not be given with others, and may be `needed`."""
    (name, other), path = names, ("nodes", node, "with")
    value, own = (setting_value(spec, node, contract, each) for each in (other, name))
    setting = contract.settings[name]
    if needed and value in wanted and own is None:
        kind = setting.bounds or setting.annotation
        what = f"node `{node}`: `{other}: {value}` needs the setting `{name}`"
        hint = f"Add it:  with: {{{other}: {value}, {name}: …}}" + (f"   ({kind})" if kind else "")
        return [Diagnostic(what, spec.dag_source.location((*path, other)), hint)]
    if value not in wanted and own is not None and own != setting.value:
        allowed = " or ".join(f"`{item}`" for item in wanted)
        what = f"node `{node}`: setting `{name}` says nothing with `{other}: {value}`, only with {allowed}"
        hint = f"Take `{name}` out, or instead:  with: {{{other}: {wanted[0]}, {name}: {own}}}"
        return [Diagnostic(what, spec.dag_source.location((*path, name), key=True), hint)]
    return []


def _check_repeats(spec: Spec, node: str, contract: Contract, name: str) -> list[Diagnostic]:
    value = setting_value(spec, node, contract, name)
    if type(value) is int and value > 0:
        return []
    shown = repr(value) if value is not None else contract.settings[name].default
    what = (f"node `{node}`: setting `{name}` says how many rows `{contract.name}` writes for each that it reads; it "
            f"must be a whole number above 0, not {shown}")
    return [Diagnostic(what, spec.dag_source.location(("nodes", node, "with", name)), f"Instead:  with: {{{name}: 8}}")]


def setting_value(spec: Spec, node: str, contract: Contract, name: str) -> Any:
    """Return the value in force: given, or the function's default; None for a default that is no literal."""
    given = spec.dag.nodes[node].settings
    if name in given:
        return given[name]
    return contract.settings[name].value


def repeats_of(spec: Spec, node: str, contract: Contract) -> int:
    """Return how many rows a node writes for each that it reads."""
    value = setting_value(spec, node, contract, contract.marks.repeats) if contract.marks.repeats else 1
    return value if type(value) is int and value > 0 else 1
