"""Is a response as likely to a role as its tokens are when they are sampled? The temperature decides."""

from __future__ import annotations

from distflow.schema.contract import Contract
from distflow.schema.errors import Mistake
from distflow.schema.lora import base_of
from distflow.schema.run import RoleRun
from distflow.schema.spec import Spec
from planners.columns import Flow

_JUDGED = "responses"


def check_temperatures(spec: Spec, bound: dict[str, Contract], flows: dict[str, Flow]) -> list[Mistake]:
    """Nodes whose role judges what another one has given, at another temperature: their log-probabilities could not be
    compared, and a divergence between them would be wrong."""
    mistakes: dict[str, Mistake] = {}
    for node, flow in flows.items():
        role, marks = spec.dag.nodes[node].role, bound[node].marks
        for column in (each for each in flow.reads if each.parameter == _JUDGED):
            writer = bound.get(column.producer)
            if writer is None or "COMPUTE" in (writer.marks.type, marks.type) or marks.head != "lm":
                continue
            mistake = _compared(spec, node, role, spec.dag.nodes[column.producer].role)
            if mistake:
                mistakes.setdefault(role, mistake)
    return list(mistakes.values())


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
