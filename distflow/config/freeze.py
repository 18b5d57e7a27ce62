"""Parameters that `roles.ROLE.freeze` keeps as they are, by the names that they have in the loaded model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from fnmatch import fnmatchcase

from distflow.config.spec import Spec
from distflow.errors import Diagnostic, InvalidInput, Location, listing, nearest

Sizes = dict[str, int]  # number of elements, by a parameter's name
_HEADS = ("lm_head.weight", "score.weight")
_HINTS = 5  # patterns that are shown beside one that names nothing


def frozen_names(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the parameters that a pattern names: `*` is any text, and a name may begin at any of its parts."""
    return [name for name in names if any(_names(pattern, name) for pattern in patterns)]


def _names(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _idle(patterns: Sequence[str], names: Sequence[str]) -> int | None:
    """Return the index of the first pattern that names no parameter; None if all do."""
    return next((index for index, pattern in enumerate(patterns)
                 if not any(_names(pattern, name) for name in names)), None)


def _likely(pattern: str, names: Iterable[str]) -> str:
    """Return what was probably meant by a pattern that names no parameter."""
    written = re.sub(r"\.\d+(?=\.)", ".*", pattern)

    def likeness(other: str) -> float:
        return max(SequenceMatcher(None, written, ending).ratio() for ending in _endings(other))

    near = sorted(_patterns_of(names), key=likeness, reverse=True)[:_HINTS]
    proposed = f"Did you mean `{near[0]}`? " if nearest(written, _endings(near[0])) else ""
    return proposed + listing(near, "Nearest")


def _endings(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[begin:]) for begin in range(len(parts))]


def _patterns_of(names: Iterable[str]) -> list[str]:
    """Return what one may write for some parameters, the numbers of layers left open: `model.layers.*.mlp.*`."""
    found: dict[str, None] = {}
    for name in names:
        *inner, last = re.sub(r"\.\d+(?=\.)", ".*", name).split(".")
        for end in range(2, len(inner) + 1):
            if inner[end - 1] != "*":
                found[".".join([*inner[:end], "*"])] = None
        found[".".join([*inner, last])] = None
    return sorted(found, key=lambda each: each.count("."))


def check_freeze(spec: Spec) -> list[Diagnostic]:
    """Return the mistakes in `freeze` of each role; put the numbers of frozen parameters into `spec.frozen`."""
    found: dict[Location | None, Diagnostic] = {}  # one for each line: a copy repeats the mistakes of what it copies
    for role in sorted(spec.dag.roles, key=lambda role: len(spec.lineage(role))):
        for mistake in _check(spec, role):
            found.setdefault(mistake.where, mistake)
    return list(found.values())


def _check(spec: Spec, role: str) -> Iterator[Diagnostic]:
    """Check a role with its settings, which may be those of the role that it copies."""
    settings, item = spec.settings_of(role), spec.dag.roles[role]
    if settings is None or not settings.freeze:
        return
    owner = next(name for name in spec.lineage(role) if name in spec.run.roles)
    where = spec.run_source.location(("roles", owner, "freeze"), key=True)
    if not item.trained:
        if owner == role:
            yield Diagnostic(f"role `{role}` has `freeze`, but DAG `{spec.dag.name}` does not train it", where,
                             "Take `freeze` out.")
        return
    if settings.lora:
        yield Diagnostic(f"role `{role}` has `freeze` and `lora`, which freezes all of the model but its adapters",
                         where, "Take one of the two out; `lora.targets` says which layers get adapters.")
        return
    sizes = parameter_sizes(spec, role)
    if sizes:
        yield from _misnamed(spec, role, list(sizes))
    spec.frozen[role] = sum(sizes[name] for name in frozen_names(settings.freeze, sizes))


def check_loaded(spec: Spec, role: str, names: Sequence[str]) -> None:
    """Check the patterns of a trained role against the names of its loaded model, which its files need not have said.
    Raises InvalidInput, with the line."""
    if mistakes := list(_misnamed(spec, role, names)):
        raise InvalidInput(mistakes)


def _misnamed(spec: Spec, role: str, names: Sequence[str]) -> Iterator[Diagnostic]:
    """Return the mistake in the patterns of a trained role whose parameters have these names, if there is one."""
    settings = spec.settings_of(role)
    patterns = settings.freeze if settings else []
    owner = next(name for name in spec.lineage(role) if name in spec.run.roles)
    who, hint = f"role `{role}`", ""
    if owner != role:
        who = f"role `{role}`, which has the settings of `{owner}` since it copies it"
        hint = f"Give it settings of its own:  roles: {{{role}: {{…, freeze: []}}}}"
    if (index := _idle(patterns, names)) is not None:
        what = f"{who}: `freeze` names `{patterns[index]}`, and its model has no such parameter"
        yield Diagnostic(what, spec.run_source.location(("roles", owner, "freeze", index)),
                         hint or _likely(patterns[index], names))
    elif patterns and len(frozen_names(patterns, names)) == len(names):
        what = f"{who}: `freeze` names all {len(names)} parameters, so that nothing is left to be trained"
        where = spec.run_source.location(("roles", owner, "freeze"), key=True)
        yield Diagnostic(what, where, hint or "Leave some out.")


def parameter_sizes(spec: Spec, role: str) -> Sizes:
    """Return the sizes of the role's parameters, named as in the loaded model; {} if they are known only then."""
    shape, valued = spec.parts_of(role), spec.dag.roles[role].head == "value"
    if shape is None or valued and shape.token_pixels:  # whose classifier is another class, of other names
        return {}
    if not valued:
        return shape.weights
    return {name: size for name, size in shape.weights.items() if name not in _HEADS} | {"score.weight": shape.hidden}
