"""Which function each node runs: the one that it names, or the default of its (role, type)."""

from __future__ import annotations

from distflow.schema.contract import ENGINE_TYPES, Contract
from distflow.schema.dag import COMPUTE_ROLES
from distflow.schema.environments import reading
from distflow.schema.errors import Mistake, did_you_mean, listing, nearest
from distflow.schema.rewards import with_columns
from distflow.schema.spec import Spec
from distflow.schema.templates import with_fields
from planners.heads import check_heads


def bind(spec: Spec) -> tuple[dict[str, Contract], set[str], list[Mistake]]:
    """The contract of each node, the nodes whose role or function does not exist, and all mistakes about both."""
    bound: dict[str, Contract] = {}
    nameless, mistakes = _check_node_roles(spec)
    for name, node in spec.dag.nodes.items():
        contract, mistake = spec.functions.get(node.function or ""), None
        if node.function is None:
            contract, mistake = _default(spec, name, name in nameless)
        elif contract and contract.marks.type != node.type and not _doubtful(spec, name, "type"):
            where = spec.dag_source.spot(("nodes", name, "type"))
            what = f"node `{name}` has type {node.type}, but its function `{contract.name}` is {contract.marks.type}"
            mistake = Mistake(what, where, f"Instead:  type: {contract.marks.type}")
        if mistake:
            mistakes.append(mistake)
        if contract:
            for with_more in (with_columns, reading, with_fields):
                contract = with_more(spec, name, contract)
            bound[name] = contract
    mistakes += [*_check_copies(spec), *_check_training(spec, bound, nameless), *_check_run_roles(spec),
                 *check_heads(spec, bound, model_roles(spec)), *_check_use(spec, bool(nameless))]
    return bound, nameless | (set(spec.dag.nodes) - set(bound)), mistakes


def _default(spec: Spec, name: str, nameless: bool) -> tuple[Contract | None, Mistake | None]:
    node = spec.dag.nodes[name]
    of_type = [contract for contract in spec.functions.values() if contract.marks.type == node.type]
    fitting = [contract for contract in of_type if node.role in contract.marks.default_for]
    if len(fitting) == 1:
        return fitting[0], None
    if nameless:  # with its right role it may have a default
        return None, None
    what = (f"node `{name}` names no function, and {'several are' if fitting else 'none is'} the default for "
            f"role `{node.role}` and type {node.type}")
    hint = f"Add  function: NAME.  {listing([contract.name for contract in fitting or of_type], 'It may be one of')}"
    return None, Mistake(what, spec.dag_source.spot(("nodes", name), key=True), hint)


def _doubtful(spec: Spec, node: str, key: str) -> bool:
    """Whether loading has already complained about it."""
    return ("nodes", node, key) in spec.dag_source.doubtful


def _check_node_roles(spec: Spec) -> tuple[set[str], list[Mistake]]:
    """The nodes whose role does not exist."""
    nameless, mistakes, dag = set(), [], spec.dag
    for name, node in dag.nodes.items():
        function = spec.functions.get(node.function or "")
        kind = function.marks.type if function else node.type
        known = dict.fromkeys([*dag.roles, *(COMPUTE_ROLES if kind not in ENGINE_TYPES else ())])
        if node.role in known:
            continue
        nameless.add(name)
        if _doubtful(spec, name, "role"):
            continue
        what = f"node `{name}`: there is no role `{node.role}`"
        hint = did_you_mean(node.role, known, "Roles") or "Declare it under `roles:`."
        if not nearest(node.role, known) and known:
            hint += f" Or declare it:  roles: {{{node.role}: {{}}}}"
        mistakes.append(Mistake(what, spec.dag_source.spot(("nodes", name, "role")), hint))
    return nameless, mistakes


def _check_copies(spec: Spec) -> list[Mistake]:
    mistakes, dag, source = [], spec.dag, spec.dag_source
    for name, role in dag.roles.items():
        where = source.spot(("roles", name, "copy_of"))
        if role.copy_of is not None and role.copy_of not in dag.roles:
            what = f"role `{name}` is a copy of `{role.copy_of}`, which is not a role"
            hint = did_you_mean(role.copy_of, [other for other in dag.roles if other != name], "Roles")
            mistakes.append(Mistake(what, where, hint))
        elif role.copy_of == name:
            mistakes.append(Mistake(f"role `{name}` is a copy of itself", where))
        elif role.copy_of is not None and name in spec.lineage(role.copy_of) and name == min(spec.lineage(name)):
            chain = " → ".join([*spec.lineage(name), name])
            mistakes.append(Mistake(f"roles are copies of each other in a circle: {chain}", where,
                                    "One of them needs a model of its own and no `copy_of`."))
    return mistakes


def _check_training(spec: Spec, bound: dict[str, Contract], nameless: set[str]) -> list[Mistake]:
    """A node that trains needs a role that is declared `trained`, and the other way round."""
    mistakes, dag, source = [], spec.dag, spec.dag_source
    training = {}
    for name, node in dag.nodes.items():
        if "MODEL_TRAIN" in (node.type, bound[name].marks.type if name in bound else ""):
            training[node.role] = name
    for role, name in training.items():
        if role in dag.roles and not dag.roles[role].trained:
            what = f"node `{name}` trains role `{role}`, which is not declared as trained"
            hint = f"Instead:  {role}: {{trained: true}}"
            mistakes.append(Mistake(what, source.spot(("roles", role), key=True), hint))
    unknown = bool(nameless.intersection(training.values())) or any(path[:1] == ("nodes",) for path in source.doubtful)
    for role, settings in dag.roles.items():
        if settings.trained and role not in training and not unknown:
            what = f"role `{role}` is declared as trained, but no MODEL_TRAIN node trains it"
            hint = f"Add a node  {{role: {role}, type: MODEL_TRAIN, …}}  or take `trained` away."
            mistakes.append(Mistake(what, source.spot(("roles", role), key=True), hint))
    return mistakes


def _check_use(spec: Spec, unknown: bool) -> list[Mistake]:
    """A DAG must use a model, and validation have one that is trained and answers; not asked while roles are
    `unknown`."""
    types = {node.type for node in spec.dag.nodes.values()}
    if unknown or spec.dag_source.doubtful:
        return []
    if not types.intersection(ENGINE_TYPES):
        hint = f"Add a node of type {' or '.join(ENGINE_TYPES)}."
        return [Mistake("no node runs a model", spec.dag_source.spot(("nodes",), key=True), hint)]
    answering = [role for role in spec.dag.roles.values() if role.trained and role.head == "lm"]
    if spec.run.validation and not answering:
        what = f"`validation` asks how well a trained role answers, but DAG `{spec.dag.name}` trains none"
        if "MODEL_TRAIN" in types:
            what += " that has a vocabulary to answer with"
        return [Mistake(what, spec.run_source.spot(("validation",), key=True), "Take `validation` out.")]
    return []


def _check_run_roles(spec: Spec) -> list[Mistake]:
    """A model must be there for each role that computes; a role that no DAG knows is probably misspelt."""
    mistakes, source = [], spec.run_source
    # A run file may serve several DAGs; what stands on the command line is meant for this one.
    ordered = {path[1]: spot for path, spot in source.keys.items() if len(path) > 1 and path[0] == "roles"
               and spot.file.startswith("--set ")}
    foreign = [role for role in spec.run.roles if role not in spec.dag.roles
               and (role not in COMPUTE_ROLES or role in ordered)]
    for role in foreign:
        what = f"the run file has a role `{role}`, but DAG `{spec.dag.name}` does not"
        where = ordered.get(role) or source.spot(("roles", role), key=True)
        if role in ordered:
            what = f"DAG `{spec.dag.name}` has no role `{role}`, so that this would change nothing"
        mistakes.append(Mistake(what, where, did_you_mean(role, spec.dag.roles, "Roles")))
    missing = {}
    for role in model_roles(spec):
        *_, origin = spec.lineage(role)
        if origin in spec.dag.roles and spec.model_of(role) is None:
            missing[origin] = role
    for role in missing:
        if any(nearest(other, spec.dag.roles) == role for other in foreign):
            continue  # it stands there, misspelt
        if any(path[:2] == ("roles", role) for path in source.doubtful):
            continue  # it stands there, and loading has said what is wrong with it
        what = f"role `{role}` has no model in {source.file}"
        hint = f"Add it:  roles: {{{role}: {{model: path/to/model}}}}"
        mistakes.append(Mistake(what, source.spot(("roles", role), key=True), hint))
    return mistakes


def model_roles(spec: Spec) -> list[str]:
    """The roles that need a model, by name."""
    return sorted({node.role for node in spec.dag.nodes.values() if node.type in ENGINE_TYPES} & set(spec.dag.roles))
