"""Checks the `with:` of a node against the keyword-only parameters of its function."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from distflow.config.load import Spec
from distflow.contracts.signature import REQUIRED, Contract, Setting, fits, in_words, nearest_within, within
from distflow.errors import Diagnostic, did_you_mean


def check_settings(spec: Spec, node: str, contract: Contract) -> list[Diagnostic]:
    """Return mistakes for unknown and missing settings, values of the wrong type or outside their bounds."""
    wrong: dict[str, list[Diagnostic]] = {}
    given, source = spec.dag.nodes[node].settings, spec.dag_source
    for name, value in given.items():
        wrong[name] = _check_value(spec, node, contract, name, value)
    for name, setting in contract.settings.items():
        if name not in given and setting.default == REQUIRED:
            what = f"node `{node}`: function `{contract.name}` needs the setting `{name}`"
            hint = f"Add it:  with: {{{name}: …}}" + (f"   ({setting.annotation})" if setting.annotation else "")
            wrong[name] = [Diagnostic(what, source.location(("nodes", node), key=True), hint)]
        elif name not in given and name == contract.marks.repeats:
            wrong[name] = _check_repeats(spec, node, contract, name)
    for name, (other, wanted) in contract.marks.belongs_to.items():
        if not wrong.get(name) and not wrong.get(other):
            wrong[f"{name} and {other}"] = _check_companion(spec, node, contract, (name, other), (wanted,), True)
    for name, (other, wanted) in contract.marks.only_with.items():
        if not wrong.get(name) and not wrong.get(other):
            wrong[f"{name} only with {other}"] = _check_companion(spec, node, contract, (name, other), wanted, False)
    return [mistake for mistakes in wrong.values() for mistake in mistakes]


def _check_value(spec: Spec, node: str, contract: Contract, name: str, value: Any) -> list[Diagnostic]:
    path, source, setting = ("nodes", node, "with", name), spec.dag_source, contract.settings.get(name)
    if setting is None:
        what = f"node `{node}`: function `{contract.name}` has no setting `{name}`"
        hint = did_you_mean(name, contract.settings, "Settings") or "It has no settings at all."
        return [Diagnostic(what, source.location(path, key=True), hint)]
    what = f"node `{node}`: setting `{name}` of `{contract.name}` must be"
    if setting.annotation and not fits(value, setting.annotation):
        expected = setting.annotation.replace("Literal[", "one of [").replace("| Loss", "or MODULE:FUNCTION").strip()
        hint = "" if setting.default == REQUIRED else f"Its default is {setting.default}."
        hint = contract.marks.refuses.get(name, {}).get(value if isinstance(value, Hashable) else None, hint)
        return [Diagnostic(f"{what} {expected}, not {value!r}", source.location(path), hint)]
    repeated = _check_repeats(spec, node, contract, name) if name == contract.marks.repeats else []
    if repeated or not setting.bounds or value is None or within(value, setting.bounds):
        return repeated
    return [Diagnostic(f"{what} {in_words(setting.bounds)}, not {value!r}", source.location(path),
                       _within_instead(setting))]


def _within_instead(setting: Setting) -> str:
    if setting.default == "None":
        return f"Take `{setting.name}` out, or give a number {in_words(setting.bounds)}."
    value = nearest_within(setting.bounds) if setting.value is None else setting.value
    return f"Instead:  with: {{{setting.name}: {value}}}"


def _check_companion(spec: Spec, node: str, contract: Contract, names: tuple[str, str], wanted: tuple[Any, ...],
                     needed: bool) -> list[Diagnostic]:
    """Check a setting that belongs to some values of another: it must not be given with others, and may be `needed`."""
    (name, other), path = names, ("nodes", node, "with")
    value, own = (setting_value(spec, node, contract, each) for each in (other, name))
    setting = contract.settings[name]
    if needed and value in wanted and own is None:
        kind = in_words(setting.bounds) or setting.annotation
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
