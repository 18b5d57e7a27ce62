"""Checks a DAG against its run, and binds each node to its function: the one that it names, or the default of its
(role, type).

Checked are roles and their models, heads (a vocabulary, or one number for each token), temperatures, and ordered faults
that could never happen. Notes name what is no mistake, but probably not meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from distflow.config.dag import COMPUTE_ROLES, Node
from distflow.config.groups import Groups
from distflow.config.models import base_of, untested
from distflow.config.robust import Fault
from distflow.config.run import RoleRun, Run
from distflow.config.shipped import START_MODEL
from distflow.config.spec import Spec
from distflow.contracts.forms import ENGINE_TYPES, Contract
from distflow.contracts.nodes import whole_contract
from distflow.errors import Diagnostic, Location, did_you_mean, listing, nearest
from distflow.plan import INFERENCE, TRAINER, Task
from planners.columns import NodeColumns
from planners.follow import check_follow, follow_notes
from planners.learning import learning_notes
from planners.lengths import length_notes
from planners.settings import setting_value

_SAYS = {"lm": "a vocabulary (head: lm)", "value": "one number for each token (head: value)"}


def check_heads(spec: Spec, bound: dict[str, Contract], roles: list[str]) -> list[Diagnostic]:
    found = [_of_node(spec, node, contract) for node, contract in bound.items()]
    found += [_of_folder(spec, role) for role in roles]
    return [mistake for mistake in found if mistake]


def _of_node(spec: Spec, node: str, contract: Contract) -> Diagnostic | None:
    name, marks = spec.dag.nodes[node].role, contract.marks
    role = spec.dag.roles.get(name)
    recovered = any(path[:2] == ("roles", name) for path in spec.dag_source.recovered)
    if role is None or recovered or marks.type not in ENGINE_TYPES or marks.head in (None, role.head):
        return None
    what = (f"node `{node}`: function `{contract.name}` needs a model that gives {_SAYS[marks.head]}, and that of role "
            f"`{name}` gives {_SAYS[role.head]}")
    fitting = [f"`{other}`" for other, item in spec.dag.roles.items() if item.head == marks.head]
    hint = f"Give the node another role ({', '.join(fitting)}), or instead:" if fitting else "Instead:"
    hint += f"  {name}: {{…, head: {marks.head}}}"
    return Diagnostic(what, spec.dag_source.location(("nodes", node, "role")), hint)


def _of_folder(spec: Spec, name: str) -> Diagnostic | None:
    """Check that a frozen head comes with the model; one that is trained, or follows one, may be initialised."""
    role, shape = spec.dag.roles[name], spec.shape_of(name)
    if shape is None:
        return None
    where, hint = spec.dag_source.location(("roles", name), key=True), ""
    if role.head == "lm" and shape.labels is not None:
        what = f"role `{name}` needs a model with a vocabulary, and its folder holds a classifier"
        hint = f"Give it a language model, or instead:  {name}: {{…, head: value}}"
    elif role.head == "value" and shape.labels not in (None, 1):
        what = f"role `{name}` gives one number for each token, and the classifier in its folder {shape.labels}"
        hint = "Give it a reward model, which has a single label, or a language model."
    elif role.head == "value" and shape.labels is None and not role.trained and not role.follow:
        what = f"role `{name}` is not trained, and its model has no value head: it would give 0 for everything"
        hint = ("Give it the folder of a trained one (`reward_model.yaml` trains one):  "
                f"--set roles.{name}.model=FOLDER")
    else:
        return None
    return Diagnostic(what, where, hint)


def bind(spec: Spec) -> tuple[dict[str, Contract], set[str], list[Diagnostic]]:
    """Return the contract of each node, the nodes whose role or function does not exist, and the mistakes found."""
    bound: dict[str, Contract] = {}
    nameless, mistakes = _check_node_roles(spec)
    for name, node in spec.dag.nodes.items():
        if contract := whole_contract(spec, name):
            bound[name] = contract
            if contract.marks.type != node.type and not _is_recovered(spec, name, "type"):
                where = spec.dag_source.location(("nodes", name, "type"))
                what = f"node `{name}` has type {node.type}, but its function `{contract.name}` is " \
                       f"{contract.marks.type}"
                mistakes.append(Diagnostic(what, where, f"Instead:  type: {contract.marks.type}"))
        elif node.function is None and name not in nameless:  # with its right role it may have a default
            mistakes.append(_no_default(spec, name))
    mistakes += [*_check_copies(spec), *check_follow(spec, bound), *_check_training(spec, bound, nameless),
                 *_check_run_roles(spec), *check_heads(spec, bound, model_roles(spec)),
                 *_check_use(spec, bool(nameless))]
    return bound, nameless | (set(spec.dag.nodes) - set(bound)), mistakes


def _no_default(spec: Spec, name: str) -> Diagnostic:
    node = spec.dag.nodes[name]
    of_type = [contract for contract in spec.functions.values() if contract.marks.type == node.type]
    fitting = [contract for contract in of_type if node.role in contract.marks.default_for]
    what = (f"node `{name}` names no function, and {'several are' if fitting else 'none is'} the default for "
            f"role `{node.role}` and type {node.type}")
    hint = f"Add  function: NAME.  {listing([contract.name for contract in fitting or of_type], 'It may be one of')}"
    return Diagnostic(what, spec.dag_source.location(("nodes", name), key=True), hint)


def _is_recovered(spec: Spec, node: str, key: str) -> bool:
    """Return whether loading has already reported it."""
    return ("nodes", node, key) in spec.dag_source.recovered


def _check_node_roles(spec: Spec) -> tuple[set[str], list[Diagnostic]]:
    nameless, mistakes, dag = set(), [], spec.dag
    for name, node in dag.nodes.items():
        function = spec.functions.get(node.function or "")
        kind = function.marks.type if function else node.type
        known = dict.fromkeys([*dag.roles, *(COMPUTE_ROLES if kind not in ENGINE_TYPES else ())])
        if node.role in known:
            continue
        nameless.add(name)
        if _is_recovered(spec, name, "role"):
            continue
        what = f"node `{name}`: there is no role `{node.role}`"
        hint = did_you_mean(node.role, known, "Roles") or "Declare it under `roles:`."
        if not nearest(node.role, known) and known:
            hint += f" Or declare it:  roles: {{{node.role}: {{}}}}"
        mistakes.append(Diagnostic(what, spec.dag_source.location(("nodes", name, "role")), hint))
    return nameless, mistakes


def _check_copies(spec: Spec) -> list[Diagnostic]:
    mistakes, dag, source = [], spec.dag, spec.dag_source
    for name, role in dag.roles.items():
        where = source.location(("roles", name, "copy_of"))
        if role.copy_of is not None and role.copy_of not in dag.roles:
            what = f"role `{name}` is a copy of `{role.copy_of}`, which is not a role"
            hint = did_you_mean(role.copy_of, [other for other in dag.roles if other != name], "Roles")
            mistakes.append(Diagnostic(what, where, hint))
        elif role.copy_of == name:
            mistakes.append(Diagnostic(f"role `{name}` is a copy of itself", where))
        elif role.copy_of is not None and name in spec.lineage(role.copy_of) and name == min(spec.lineage(name)):
            chain = " → ".join([*spec.lineage(name), name])
            mistakes.append(Diagnostic(f"roles are copies of each other in a circle: {chain}", where,
                                       "One of them needs a model of its own and no `copy_of`."))
    return mistakes


def _check_training(spec: Spec, bound: dict[str, Contract], nameless: set[str]) -> list[Diagnostic]:
    mistakes, dag, source = [], spec.dag, spec.dag_source
    training = {}
    for name, node in dag.nodes.items():
        if "MODEL_TRAIN" in (node.type, bound[name].marks.type if name in bound else ""):
            training[node.role] = name
    for role, name in training.items():
        if role in dag.roles and not dag.roles[role].trained:
            what = f"node `{name}` trains role `{role}`, which is not declared as trained"
            hint = f"Instead:  {role}: {{trained: true}}"
            mistakes.append(Diagnostic(what, source.location(("roles", role), key=True), hint))
    unknown = bool(nameless.intersection(training.values())) or any(path[:1] == ("nodes",) for path in source.recovered)
    for role, settings in dag.roles.items():
        if settings.trained and role not in training and not unknown:
            what = f"role `{role}` is declared as trained, but no MODEL_TRAIN node trains it"
            hint = f"Add a node  {{role: {role}, type: MODEL_TRAIN, …}}  or take `trained` away."
            mistakes.append(Diagnostic(what, source.location(("roles", role), key=True), hint))
    return mistakes


def _check_use(spec: Spec, unknown: bool) -> list[Diagnostic]:
    types = {node.type for node in spec.dag.nodes.values()}
    if unknown or spec.dag_source.recovered:
        return []
    if not types.intersection(ENGINE_TYPES):
        hint = f"Add a node of type {' or '.join(ENGINE_TYPES)}."
        return [Diagnostic("no node runs a model", spec.dag_source.location(("nodes",), key=True), hint)]
    answering = [role for role in spec.dag.roles.values() if role.trained and role.head == "lm"]
    if spec.run.validation and not answering:
        what = f"`validation` asks how well a trained role answers, but DAG `{spec.dag.name}` trains none"
        if "MODEL_TRAIN" in types:
            what += " that has a vocabulary to answer with"
        return [Diagnostic(what, spec.run_source.location(("validation",), key=True), "Take `validation` out.")]
    if spec.run.training_api and spec.run.samples == "all":
        return [Diagnostic("`samples: all` has no effect with `training_api`, whose client gets the samples",
                           spec.run_source.location(("samples",), key=True), "Take `samples` out.")]
    if spec.run.training_api and spec.run.roles:
        for name, settings in spec.run.roles.items():
            if settings.generation.routing_replay:
                what = "`generation.routing_replay` has no effect with `training_api`, whose rows have no experts"
                at = ("roles", name, "generation", "routing_replay")
                return [Diagnostic(what, spec.run_source.location(at, key=True), "Take `routing_replay` out.")]
    if spec.run.training_api and (spec.run.has_samplers or not answering):
        what = "needs a DAG that trains a role with a vocabulary, as grpo or sft"
        if answering:
            what = "needs  mode: sync"
        return [Diagnostic(f"`training_api` {what}", spec.run_source.location(("training_api",), key=True))]
    return []


def _check_run_roles(spec: Spec) -> list[Diagnostic]:
    mistakes, source = [], spec.run_source
    # A run file may serve several DAGs; the command line is meant for this one.
    ordered = {path[1]: spot for path, spot in source.keys.items() if len(path) > 1 and path[0] == "roles"
               and spot.file.startswith("--set ")}
    foreign = [role for role in spec.run.roles if role not in spec.dag.roles
               and (role not in COMPUTE_ROLES or role in ordered)]
    for role in foreign:
        what = f"the run file has a role `{role}`, but DAG `{spec.dag.name}` does not"
        where = ordered.get(role) or source.location(("roles", role), key=True)
        if role in ordered:
            what = f"DAG `{spec.dag.name}` has no role `{role}`, so that this would change nothing"
        mistakes.append(Diagnostic(what, where, did_you_mean(role, spec.dag.roles, "Roles")))
    missing = {}
    for role in model_roles(spec):
        *_, origin = spec.lineage(role)
        if origin in spec.dag.roles and spec.model_of(role) is None:
            missing[origin] = role
    for role in missing:
        if any(nearest(other, spec.dag.roles) == role for other in foreign):
            continue  # it stands there, misspelt
        if any(path[:2] == ("roles", role) for path in source.recovered):
            continue  # it stands there, and loading has said what is wrong with it
        what = f"role `{role}` has no model in {source.file}"
        hint = f"Add it:  roles: {{{role}: {{model: path/to/model}}}}"
        mistakes.append(Diagnostic(what, source.location(("roles", role), key=True), hint))
    return mistakes


def model_roles(spec: Spec) -> list[str]:
    """Return the roles that need a model, sorted."""
    return sorted({node.role for node in spec.dag.nodes.values() if node.type in ENGINE_TYPES} & set(spec.dag.roles))


def prompted_role(spec: Spec, chain: Iterable[Task | Node]) -> str:
    """Return the role that encodes prompts and is validated: the first trained with a vocabulary, else the first."""
    tasks = [task for task in chain if task.type in ENGINE_TYPES]
    trained = (task.role for task in tasks if task.type == "MODEL_TRAIN" and spec.dag.roles[task.role].head == "lm")
    return next(trained, tasks[0].role)


_SCORED, _LOGPROBS, _SETTING = "responses", "_logprobs", "temperature"


def check_temperatures(spec: Spec, bound: dict[str, Contract], flows: dict[str, NodeColumns]) -> list[Diagnostic]:
    """Return mistakes for nodes that compare log-probabilities of different temperatures: divergences are wrong."""
    mistakes: dict[str, Diagnostic] = {}
    own = {node: setting_value(spec, node, contract, _SETTING) for node, contract in bound.items()
           if _SETTING in contract.settings}
    for node, flow in flows.items():
        mistakes = _unlike(spec, node, bound, own, flow) | mistakes
        if own.get(node) is not None:
            continue
        role, marks = spec.dag.nodes[node].role, bound[node].marks
        for column in (each for each in flow.reads if each.parameter == _SCORED):
            writer = bound.get(column.producer)
            if writer is None or "COMPUTE" in (writer.marks.type, marks.type) or marks.head != "lm":
                continue
            mistake = _compared(spec, node, role, spec.dag.nodes[column.producer].role)
            if mistake:
                mistakes.setdefault(role, mistake)
    return list(mistakes.values())


def _unlike(spec: Spec, node: str, bound: dict[str, Contract], own: dict[str, float | None],
            flow: NodeColumns) -> dict[str, Diagnostic]:
    """Find writers of log-probabilities at another temperature than their reader's, if one of the two has its own."""
    given = {column.producer: _at(spec, column.producer, own) for column in flow.reads
             if column.parameter.endswith(_LOGPROBS) and column.producer in bound}
    if own.get(node) is None and bound[node].marks.type == "COMPUTE":
        wanted = next((given[writer] for writer in given if own.get(writer) is None), next(iter(given.values()), None))
    else:
        wanted = _at(spec, node, own)
    found = {}
    for writer in sorted(given) if wanted is not None else ():
        either = own.get(node) is not None or own.get(writer) is not None
        if writer in own and either and given[writer] not in (None, wanted):
            what = (f"node `{writer}` writes log-probabilities at temperature {given[writer]:g}, but node `{node}`, "
                    f"which reads them, has {wanted:g}")
            found[writer] = Diagnostic(what, spec.dag_source.location(("nodes", writer)),
                                       f"Instead:  {writer}: {{…, with: {{temperature: {wanted:g}}}}}")
    return found


def _at(spec: Spec, node: str, own: dict[str, float | None]) -> float | None:
    settings = _in_force(spec, spec.dag.nodes[node].role)
    return own.get(node) if own.get(node) is not None or settings is None else _temperature(settings)


def _compared(spec: Spec, node: str, role: str, giver: str) -> Diagnostic | None:
    own, other = _in_force(spec, role), _in_force(spec, giver)
    if own is None or other is None or _temperature(own) == _temperature(other):
        return None
    what = (f"node `{node}`: role `{role}` judges responses at temperature {_temperature(own):g}, but role `{giver}`, "
            f"which gives them, at {_temperature(other):g}")
    hint = f"Instead:  roles: {{{role}: {{…, generation: {{temperature: {_temperature(other):g}}}}}}}"
    if giver in spec.lineage(role):
        hint += f"\nIt copies `{giver}`, but has none of its settings, since the run file gives it some of its own."
    return Diagnostic(what, spec.run_source.location(("roles", role, "generation", "temperature")), hint)


def _in_force(spec: Spec, role: str) -> RoleRun | None:
    """Return the settings of a role; a frozen one that computes with the base of an adapted one has that one's."""
    return spec.settings_of(base_of(spec, role) or role) if role in spec.dag.roles else None


def _temperature(settings: RoleRun) -> float:
    return settings.generation.temperature or 1.0  # the likeliest tokens are judged at 1


def check_profile(spec: Spec) -> Iterator[Diagnostic]:
    """Yield a mistake if the profiler would record no step of the run, or not all that it was asked to."""
    steps, last = spec.run.profile, spec.run.steps
    if steps and max(steps) > last:
        first = min(*steps, last)
        hint = f"Give steps up to {last}:  --profile {first}:{last}   or more steps:  --set steps={max(steps)}"
        yield Diagnostic(f"`profile` asks for step {max(steps)}, and the run has {last}",
                         spec.run_source.location(("profile",)), hint)


def check_faults(spec: Spec, groups: Mapping[str, range]) -> list[Diagnostic]:
    """Return the mistakes of each fault, located in the run file. `groups`: the ranks of each."""
    return [Diagnostic(f"faults[{number}]: {what}", spec.run_source.location(("faults", number, key)), hint)
            for number, fault in enumerate(spec.run.faults)
            for key, what, hint in _wrong(spec, fault, groups)]


def _wrong(spec: Spec, fault: Fault, groups: Mapping[str, range]) -> Iterator[tuple[str, str, str]]:
    """Yield the key that is wrong, what is wrong with it, and what to write instead."""
    if fault.group == INFERENCE and INFERENCE not in groups and spec.run.has_samplers:
        yield "group", "no role has ranks of its own that only infer: the run has no `groups.inference`", \
            "Take the fault out, or name a role that is only read, as  groups: {inference: {reference: 1}}"
        return
    if fault.group not in groups:
        yield "group", f"mode {spec.run.mode} has no group `{fault.group}`: all ranks are the trainer's", \
            "Take `group` out, or write  mode: async"
        return
    ranks = groups[fault.group]
    if not ranks:
        yield "group", f"group `{fault.group}` has no rank: with  groups: {{rollout: 0}}  those that train sample", \
            "Write  group: trainer , with  phase: generating  for the time in which they sample"
        return
    if fault.rank is not None and fault.rank not in ranks:
        yield "rank", f"rank {fault.rank} is not one of the {fault.group}'s", \
            f"It has {ranks.start} to {ranks.stop - 1}; without `rank` the seed draws one of them."
    if fault.phase == "starting":
        yield "phase", "a worker that starts has no step yet", "Name another phase."
    if fault.kind == "corrupt" and (fault.group != TRAINER or not spec.run.robust.snapshots):
        yield "kind", "only a trainer's copies in memory can be changed, where `robust.snapshots` is on", ""
    if fault.step > spec.run.steps:
        yield "step", f"there is no step {fault.step} in a run of {spec.run.steps}", ""


_OF_SAMPLERS = ("staleness", "on_stale", "transport")
"""Keys of the run file for ranks that sample while others train, beside `groups.rollout`."""


def notes_of(spec: Spec, bound: dict[str, Contract], flows: dict[str, NodeColumns],
             generating: set[str]) -> tuple[str, ...]:
    """Return a line for each thing that is probably not meant. `generating`: the roles that sample."""
    notes = [*learning_notes(spec, bound, flows), *follow_notes(spec)]
    notes += [f"role `{role}` stands in the run file, and DAG `{spec.dag.name}` has none of that name: its settings "
              "change nothing" for role in spec.run.roles if role not in spec.dag.roles]
    notes += [f"node `{node}` reads `{column}`, which changes nothing: its setting `{setting}` is 0"
              for node, column, setting in _idle(spec, bound, flows)
              if all(other == node for other, flow in flows.items() for read in flow.reads if read.name == column)]
    notes += untested(spec)
    idle = {"groups.rollout": spec.run.groups.rollout != Groups().rollout} | {
        f"groups.inference.{role}": True for role in spec.run.groups.on_rollouts} | {
        key: getattr(spec.run, key) != Run.model_fields[key].default for key in _OF_SAMPLERS}
    notes += [f"`{key}` changes nothing in mode sync, where all ranks sample and then train. Set  mode: async"
              for key, given in idle.items() if given and not spec.run.has_samplers]
    if spec.run.trainer_samples_alone and spec.run.transport != "auto":
        notes.append("`transport` changes nothing with  groups: {rollout: 0} : no weights are published")
    notes += [f"role `{role}` computes with the model of `{base_of(spec, role)}`, without its adapters, and with that "
              f"role's settings: what the run file says of `{role}` changes nothing"
              for role in model_roles(spec) if role in spec.run.roles and role not in generating
              and base_of(spec, role)]
    for role in sorted(generating):
        model = spec.model_of(role)
        if model and model.architecture and role in spec.dag.roles and spec.dag.roles[role].trained:
            notes.append(f"role `{role}` starts from random weights, so its samples earn no reward to learn from. "
                         f"Start it from a trained model:  --set roles.{role}.model=FOLDER   "
                         f"(`{START_MODEL}` is shipped)")
    return (*notes, *length_notes(spec, bound, generating), *model_notes(spec))


def model_notes(spec: Spec) -> Iterator[str]:
    """Yield what is not known of models, and which ones engines compute the plain way."""
    for role in model_roles(spec):
        model, shape = spec.model_of(role), spec.shape_of(role)
        if model and model.path and shape is None:
            yield (f"role `{role}`: the sizes of its model `{model.path}` are not known, so that neither its memory "
                   "nor its FLOPs are counted")
        elif shape and shape.plain and role in spec.run.roles:
            yield f"role `{role}`: the engine takes the plain way, slower and as right: its model {shape.plain}"


def _idle(spec: Spec, bound: dict[str, Contract], flows: dict[str, NodeColumns]) -> Iterator[tuple[str, str, str]]:
    """Yield (node, column, setting) where a node reads a column only for a setting that is 0."""
    for node, contract in bound.items():
        for setting, parameter in contract.marks.requires.items():
            if not setting_value(spec, node, contract, setting):
                yield from ((node, read.name, setting) for read in flows[node].reads if read.parameter == parameter)


def role_location(spec: Spec, role: str) -> Location | None:
    """Return where `groups.inference` gives a role ranks of its own."""
    return spec.run_source.location(("groups", "inference", role), key=True)


def refusal(spec: Spec, role: str, why: str, node: str | None = None) -> Diagnostic:
    """Return that a role cannot be on other ranks than those that train. `node`: whose line shows why."""
    where = role_location(spec, role)
    lines = (where, spec.dag_source.location(("nodes", node), key=True)) if node else (where,)
    return Diagnostic(f"role `{role}` cannot be on other ranks than those that train: {why}", where,
                      f"Take `{role}` out of  groups.inference  : these ranks have it then",
                      tuple(filter(None, lines)))
