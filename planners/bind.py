"""Which function each node runs: the one that it names, or the default of its (role, type)."""

from __future__ import annotations

from distflow.schema.contract import ENGINE_TYPES, Contract
from distflow.schema.dag import COMPUTE_ROLES
from distflow.schema.errors import Mistake, did_you_mean
from distflow.schema.spec import Spec


def bind(spec: Spec) -> tuple[dict[str, Contract], list[Mistake]]:
    """The contract of each node, and the roles and functions that do not exist."""
    bound: dict[str, Contract] = {}
    mistakes = _check_roles(spec)
    for name, node in spec.dag.nodes.items():
        if node.function is None:
            contract, mistake = _default(spec, name)
        else:
            contract, mistake = spec.functions.get(node.function), None
        if contract and contract.marks.type != node.type:
            where = spec.dag_source.spot(("nodes", name, "type"))
            what = f"node `{name}` has type {node.type}, but its function `{contract.name}` is {contract.marks.type}"
            mistake = Mistake(what, where, f"Instead:  type: {contract.marks.type}")
        if mistake:
            mistakes.append(mistake)
        if contract:
            bound[name] = contract
    return bound, mistakes


def _default(spec: Spec, name: str) -> tuple[Contract | None, Mistake | None]:
    node = spec.dag.nodes[name]
    fitting = [contract for contract in spec.functions.values()
               if contract.marks.type == node.type and node.role in contract.marks.default_for]
    if len(fitting) == 1:
        return fitting[0], None
    known = [contract.name for contract in spec.functions.values() if contract.marks.type == node.type]
    what = f"node `{name}` names no function, and {'none is' if not fitting else 'several are'} the default for " \
           f"role `{node.role}` and type {node.type}"
    listing = ", ".join(contract.name for contract in fitting) if fitting else ", ".join(known)
    return None, Mistake(what, spec.dag_source.spot(("nodes", name), key=True), f"Add `function:` with one of: {listing}.")


def _check_roles(spec: Spec) -> list[Mistake]:
    mistakes, dag, source = [], spec.dag, spec.dag_source
    for name, node in dag.nodes.items():
        if node.role in dag.roles or (node.type not in ENGINE_TYPES and node.role in COMPUTE_ROLES):
            continue
        known = [*dag.roles, *(COMPUTE_ROLES if node.type not in ENGINE_TYPES else ())]
        what = f"node `{name}`: there is no role `{node.role}`"
        hint = did_you_mean(node.role, dict.fromkeys(known)) or "Declare it under `roles:`."
        mistakes.append(Mistake(what, source.spot(("nodes", name, "role")), hint))
    for name, role in dag.roles.items():
        if role.copy_of is not None and role.copy_of not in dag.roles:
            what = f"role `{name}` is a copy of `{role.copy_of}`, which is not a role"
            hint = did_you_mean(role.copy_of, [other for other in dag.roles if other != name])
            mistakes.append(Mistake(what, source.spot(("roles", name, "copy_of")), hint))
    return mistakes + _check_training(spec) + _check_run_roles(spec)


def _check_training(spec: Spec) -> list[Mistake]:
    """A node that trains needs a role that is declared `trained`, and the other way round."""
    mistakes, dag, source = [], spec.dag, spec.dag_source
    training = {node.role: name for name, node in dag.nodes.items() if node.type == "MODEL_TRAIN"}
    for role, name in training.items():
        if role in dag.roles and not dag.roles[role].trained:
            what = f"node `{name}` trains role `{role}`, which is not declared as trained"
            mistakes.append(Mistake(what, source.spot(("roles", role), key=True), f"Instead:  {role}: {{trained: true}}"))
    for role, settings in dag.roles.items():
        if settings.trained and role not in training:
            what = f"role `{role}` is declared as trained, but no MODEL_TRAIN node trains it"
            mistakes.append(Mistake(what, source.spot(("roles", role), key=True)))
    return mistakes


def _check_run_roles(spec: Spec) -> list[Mistake]:
    """Roles of the run file that the DAG does not have are for other DAGs; a model that is missing is a mistake."""
    mistakes = []
    used = {node.role for node in spec.dag.nodes.values() if node.type in ENGINE_TYPES} & set(spec.dag.roles)
    for role in sorted(used):
        if spec.model_of(role) is None:
            what = f"role `{role}` has no model in {spec.run_source.file}"
            hint = f"Add it:  roles: {{{role}: {{model: path/to/model}}}}"
            mistakes.append(Mistake(what, spec.run_source.spot(("roles",), key=True), hint))
    for role in spec.run.roles:
        if role not in spec.dag.roles and role not in COMPUTE_ROLES:
            what = f"the run file has a role `{role}`, but DAG `{spec.dag.name}` does not"
            where = spec.run_source.spot(("roles", role), key=True)
            mistakes.append(Mistake(what, where, did_you_mean(role, spec.dag.roles)))
    return mistakes
