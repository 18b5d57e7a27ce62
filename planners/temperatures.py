"""Is a response as likely to a role as its tokens are when they are sampled? The temperature decides."""

from __future__ import annotations

from distflow.schema.contract import Contract
from distflow.schema.errors import Mistake
from distflow.schema.lora import base_of
from distflow.schema.run import RoleRun
from distflow.schema.spec import Spec
from planners.columns import Flow
from planners.settings import setting_value

_JUDGED, _LOGPROBS, _SETTING = "responses", "_logprobs", "temperature"


def check_temperatures(spec: Spec, bound: dict[str, Contract], flows: dict[str, Flow]) -> list[Mistake]:
    """Nodes whose role judges what another one has given, at another temperature: their log-probabilities could not be
    compared, and a divergence between them would be wrong. A temperature of a node's own is compared with that of
    the nodes whose log-probabilities it reads, and of those that read what it writes."""
    mistakes: dict[str, Mistake] = {}
    own = {node: setting_value(spec, node, contract, _SETTING) for node, contract in bound.items()
           if _SETTING in contract.settings}
    for node, flow in flows.items():
        mistakes = _unlike(spec, node, bound, own, flow) | mistakes
        if own.get(node) is not None:
            continue
        role, marks = spec.dag.nodes[node].role, bound[node].marks
        for column in (each for each in flow.reads if each.parameter == _JUDGED):
            writer = bound.get(column.producer)
            if writer is None or "COMPUTE" in (writer.marks.type, marks.type) or marks.head != "lm":
                continue
            mistake = _compared(spec, node, role, spec.dag.nodes[column.producer].role)
            if mistake:
                mistakes.setdefault(role, mistake)
    return list(mistakes.values())


def _unlike(spec: Spec, node: str, bound: dict[str, Contract], own: dict[str, float | None],
            flow: Flow) -> dict[str, Mistake]:
    """Find the writers whose log-probabilities have another temperature than the node that reads them, where one of the
    two has a temperature of its own. A COMPUTE node has none: what it reads must be of one temperature."""
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
            found[writer] = Mistake(what, spec.dag_source.spot(("nodes", writer)),
                                    f"Instead:  {writer}: {{…, with: {{temperature: {wanted:g}}}}}")
    return found


def _at(spec: Spec, node: str, own: dict[str, float | None]) -> float | None:
    """Return a node's temperature: its own, else that of its role."""
    settings = _in_force(spec, spec.dag.nodes[node].role)
    return own.get(node) if own.get(node) is not None or settings is None else _temperature(settings)


def _compared(spec: Spec, node: str, role: str, giver: str) -> Mistake | None:
    own, other = _in_force(spec, role), _in_force(spec, giver)
    if own is None or other is None or _temperature(own) == _temperature(other):
        return None
    what = (f"node `{node}`: role `{role}` judges responses at temperature {_temperature(own):g}, but role `{giver}`, "
            f"which gives them, at {_temperature(other):g}")
    hint = f"Instead:  roles: {{{role}: {{…, generation: {{temperature: {_temperature(other):g}}}}}}}"
    if giver in spec.lineage(role):
        hint += f"\nIt copies `{giver}`, but has none of its settings, since the run file gives it some of its own."
    return Mistake(what, spec.run_source.spot(("roles", role, "generation", "temperature")), hint)


def _in_force(spec: Spec, role: str) -> RoleRun | None:
    """A frozen role that computes with the base of an adapted one has that one's settings."""
    return spec.settings_of(base_of(spec, role) or role) if role in spec.dag.roles else None


def _temperature(settings: RoleRun) -> float:
    return settings.generation.temperature or 1.0  # the likeliest tokens are judged at 1
