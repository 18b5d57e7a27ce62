"""What is no mistake in a plan, and probably not what was meant."""

from __future__ import annotations

from collections.abc import Iterator

from distflow.schema.contract import Contract
from distflow.schema.engines import untested
from distflow.schema.lora import base_of
from distflow.schema.run import Run
from distflow.schema.spec import Spec
from planners.bind import model_roles
from planners.columns import Flow
from planners.learning import learning_notes
from planners.settings import setting_value

_APART = ("groups", "staleness", "on_new_weights", "transport", "switch_at", "fuse")
"""What the run file says of ranks that sample while others train."""


def notes_of(spec: Spec, bound: dict[str, Contract], flows: dict[str, Flow], generating: set[str]) -> tuple[str, ...]:
    """One line each. `generating`: the roles that sample."""
    notes = [*learning_notes(spec, bound, flows)]
    notes += [f"role `{role}` stands in the run file, and DAG `{spec.dag.name}` has none of that name: its settings "
              "change nothing" for role in spec.run.roles if role not in spec.dag.roles]
    notes += [f"node `{node}` reads `{column}`, which changes nothing: its setting `{setting}` is 0"
              for node, column, setting in _idle(spec, bound, flows)
              if all(other == node for other, flow in flows.items() for read in flow.reads if read.name == column)]
    notes += untested(spec)
    notes += [f"`{key}` changes nothing in mode sync, where all ranks sample and then train. Set  mode: async"
              for key in _APART if spec.run.mode == "sync" and getattr(spec.run, key) != Run.model_fields[key].default]
    notes += [f"role `{role}` computes with the model of `{base_of(spec, role)}`, without its adapters, and with that "
              f"role's settings: what the run file says of `{role}` changes nothing"
              for role in model_roles(spec) if role in spec.run.roles and role not in generating
              and base_of(spec, role)]
    for role in sorted(generating):
        model = spec.model_of(role)
        if model and model.architecture and role in spec.dag.roles and spec.dag.roles[role].trained:
            notes.append(f"role `{role}` starts from random weights, so its samples earn no reward to learn from. "
                         f"Start it from a trained model:  --set roles.{role}.model=FOLDER   (`make demo` shows it)")
        own, shape = spec.settings_of(role), spec.shape_of(role)
        longest = spec.run.data.max_prompt_tokens + (own.generation.max_new_tokens if own else 0)
        if shape and shape.positions and longest > shape.positions:
            notes.append(f"role `{role}` may generate up to {longest:,} tokens (data.max_prompt_tokens + "
                         f"generation.max_new_tokens), but its model was made for {shape.positions:,}")
    return tuple(notes)


def _idle(spec: Spec, bound: dict[str, Contract], flows: dict[str, Flow]) -> Iterator[tuple[str, str, str]]:
    """(node, column, setting) where a node reads a column only for a setting that is 0."""
    for node, contract in bound.items():
        for setting, parameter in contract.marks.requires.items():
            if not setting_value(spec, node, contract, setting):
                yield from ((node, read.name, setting) for read in flows[node].reads if read.parameter == parameter)
