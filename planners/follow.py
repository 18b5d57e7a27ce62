"""Checks frozen roles that follow the trained role that they copy (`follow:` of a role).

Weights are mixed shard by shard, where they lie: the two roles are on the same ranks, in one layout, as whole models.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from distflow.config.models import adapted
from distflow.config.spec import Spec
from distflow.contracts.forms import ENGINE_TYPES, Contract
from distflow.errors import Diagnostic
from distflow.plan import Layout


def check_follow(spec: Spec, bound: Mapping[str, Contract]) -> list[Diagnostic]:
    """Return a mistake for each role that cannot follow the one that it copies."""
    return [mistake for name, role in spec.dag.roles.items() if role.follow
            for mistake in _check(spec, name, bound)]


def _check(spec: Spec, name: str, bound: Mapping[str, Contract]) -> Iterator[Diagnostic]:
    roles, source = spec.dag.roles, spec.dag_source
    role, where = roles[name], source.location(("roles", name, "follow"))
    copied = roles.get(role.copy_of or "")
    if role.copy_of is None:
        yield Diagnostic(f"role `{name}` follows no role: `follow` is for a copy", where,
                         f"Add  copy_of: ROLE  of a trained role, or take `follow` out of `{name}`.")
    elif copied is None:
        return  # another check says so
    elif role.trained:
        yield Diagnostic(f"role `{name}` is trained, and would follow `{role.copy_of}` too", where,
                         f"Take `trained` or `follow` out of `{name}`.")
    elif not copied.trained:
        yield Diagnostic(f"role `{name}` follows `{role.copy_of}`, which is not trained, so that nothing would change",
                         where, f"Take `follow` out, or name a trained role:  {name}: {{copy_of: ROLE, follow: …}}")
    elif role.head != copied.head:
        yield Diagnostic(f"role `{name}` (head: {role.head}) follows `{role.copy_of}`, which has another output layer "
                         f"(head: {copied.head})", where, f"Instead:  {name}: {{…, head: {copied.head}}}")
    elif adapted(spec, role.copy_of):
        yield Diagnostic(f"role `{name}` follows `{role.copy_of}`, of which adapters alone are trained: its own "
                         "weights, which the two share, never change",
                         spec.run_source.location(("roles", role.copy_of, "lora"), key=True),
                         f"Take `lora` out, or `follow` out of role `{name}`.",
                         (spec.run_source.location(("roles", role.copy_of, "lora"), key=True), where))
    elif spec.model_of(name) != spec.model_of(role.copy_of):
        yield Diagnostic(f"role `{name}` follows `{role.copy_of}`, and starts from another model",
                         spec.run_source.location(("roles", name, "model")),
                         f"Take `model` out of `{name}`, or `follow` out of the DAG.")
    elif spec.run.has_samplers and (sampling := _sampling(spec, name, bound)):
        yield Diagnostic(f"role `{name}` follows `{role.copy_of}` where that is trained, and node `{sampling}` samples "
                         f"with it on other ranks (mode {spec.run.mode})", where, "Instead:  mode: sync")


def _sampling(spec: Spec, role: str, bound: Mapping[str, Contract]) -> str:
    of_role = (node for node, contract in bound.items() if contract.samples and spec.dag.nodes[node].role == role)
    return next(of_role, "")


def follow_notes(spec: Spec) -> Iterator[str]:
    for name, role in spec.dag.roles.items():
        if role.follow and role.follow.every > spec.run.steps:
            yield (f"role `{name}` would follow `{role.copy_of}` every {role.follow.every} steps, and the run has "
                   f"{spec.run.steps}: it stays as it is")


def check_layouts(spec: Spec, layouts: Mapping[tuple[str, bool], Layout],
                  sampling: Collection[str]) -> list[Diagnostic]:
    """Return a mistake for each role that follows one whose model lies otherwise on the ranks. `layouts`: of the
    engines that train and infer, by role and False; `sampling`: the nodes that sample, whose layouts are others."""
    mistakes = []
    for name, role in spec.dag.roles.items():
        copied = role.copy_of or ""
        if not role.follow or (name, False) not in layouts or (copied, False) not in layouts:
            continue
        own, other = spec.settings_of(name), spec.settings_of(copied)
        what = f"role `{name}` follows `{copied}`, whose shards it must have"
        if layouts[name, False] != layouts[copied, False]:
            path = _size(spec, (name, copied), layouts[name, False], layouts[copied, False], sampling)
            mistakes.append(Diagnostic(f"{what}, and `layouts` splits the two otherwise",
                                       spec.run_source.location(path, key=True),
                                       f"Give the nodes of `{name}` and `{copied}` the same tp and cp."))
        elif own and other and own.replicas != other.replicas:
            mistakes.append(Diagnostic(f"{what}, and it has replicas: {own.replicas}, the other {other.replicas}",
                                       spec.run_source.location(("roles", name, "replicas")),
                                       f"Instead:  roles: {{{name}: {{…, replicas: {other.replicas}}}}}"))
    return mistakes


def _size(spec: Spec, roles: tuple[str, str], own: Layout, other: Layout, sampling: Collection[str]) -> tuple[str, ...]:
    """Return the path in the run file of a size that one role's nodes have and the other's have not."""
    differing = [key for key in ("tp", "pp", "cp", "ep", "order", "layers", "dp", "rows")
                 if getattr(own, key) != getattr(other, key)]
    named = [(role, node, key) for node, asked in spec.run.layouts.items() for key in differing
             if key in asked.model_fields_set and node not in sampling
             and (item := spec.dag.nodes[node]).type in ENGINE_TYPES and (role := item.role) in roles]
    found = min(named, key=lambda each: roles.index(each[0]), default=None)
    return ("layouts", *found[1:]) if found else ("layouts",)
