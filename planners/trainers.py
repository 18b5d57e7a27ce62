"""Cuts a trained role out of the trainer, onto ranks of its own that train beside it (`groups.trainers`).

All trainers take the same rows in the same steps, and each runs its own nodes in the order of the whole chain. A node
waits for what another trainer writes when it is about to run, and what it writes is put as soon as it is there. So
whoever waits in a step waits for a node that stands earlier in the chain of that step, for samples, or for its own step
before; rollouts wait for steps before alone. By induction over steps and nodes there is no circle of waits. Nor is room
waited for in one: only rollouts wait for it, and not for the step that the first trainer is in (`Consumer.row_bytes`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from distflow.config.models import base_of
from distflow.config.spec import Spec
from distflow.contracts.forms import ENGINE_TYPES, Contract
from distflow.errors import Diagnostic
from distflow.plan import KEEP, TRAINER
from planners.check import prompted_role, refused_role, role_location, unknown_role
from planners.columns import NodeColumns
from planners.resampling import draws_of

_refusal = functools.partial(refused_role, key="trainers")
_where = functools.partial(role_location, key="trainers")


@dataclass(frozen=True)
class TrainerCut:
    """Nodes that compute with the model of a trained role, and of frozen ones colocated with it, and its `ranks`, from
    `first` on."""

    role: str
    nodes: frozenset[str]
    first: int
    ranks: int

    @property
    def group(self) -> str:
        return f"{TRAINER} {self.role}"


def cut_trainers(spec: Spec, bound: Mapping[str, Contract], chain: list[str], flows: Mapping[str, NodeColumns],
                 elsewhere: set[str], first: int) -> tuple[tuple[TrainerCut, ...], list[Diagnostic]]:
    """Return the groups of `groups.trainers`, with ranks from `first` on. `elsewhere`: nodes of ranks that sample or
    only infer, with whose columns the steps of all trainers begin."""
    cuts, mistakes = [], []
    groups = spec.run.groups
    of = {role: [node for node in chain if node in bound and spec.dag.nodes[node].type in ENGINE_TYPES
                 and spec.dag.nodes[node].role in groups.roles_on_ranks_of(role)] for role in groups.trainers}
    of_first = [node for node in chain if node in bound and node not in elsewhere.union(*of.values())]
    for role, ranks in groups.trainers.items():
        before = chain[: min((chain.index(node) for node in of[role]), default=0)]
        mistakes += _check(spec, role, of[role], of_first, bound, flows)
        if spec.run.mode == "sync":  # there a step begins with what comes before
            elsewhere = elsewhere.union(before) if not cuts else elsewhere.intersection(before)
        cuts.append(TrainerCut(role, frozenset(of[role]), first, ranks))
        first += ranks
    waited = {*of_first}  # by the first trainer, itself or through another one
    for _ in of:
        waited.update(*(nodes for nodes in of.values() if any(
            column.producer in nodes for node in waited for column in flows[node].reads)))
    for role in () if mistakes else [role for role, nodes in of.items() if waited.isdisjoint(nodes)]:
        mistakes.append(_refusal(spec, role, f"no other trainer reads what its nodes write ({', '.join(of[role])}), so "
                                 "that the first one would not wait for it, and could be any number of steps ahead",
                                 of[role][-1]))
    if cuts and not mistakes and (droppers := [node for node in chain if node in bound and (
            draws_of(spec, node, bound[node]) > 1 or (KEEP in flows[node].writes and node not in elsewhere))]):
        mistakes.append(_refusal(spec, cuts[0].role, f"node `{droppers[0]}` drops rows of a step, which it would still "
                                 "train on", droppers[0]))
    return tuple(cuts), mistakes


def _check(spec: Spec, role: str, nodes: list[str], of_first: list[str], bound: Mapping[str, Contract],
           flows: Mapping[str, NodeColumns]) -> Iterator[Diagnostic]:
    if role not in spec.dag.roles:
        yield unknown_role(spec, role, key="trainers")
        return
    shares = next((other for other in spec.dag.roles if base_of(spec, other) == role), "")
    follows = next((name for name, other in spec.dag.roles.items() if other.follow and other.copy_of == role), "")
    trains = [node for node in nodes if bound[node].marks.type == "MODEL_TRAIN"]
    if not trains:
        yield Diagnostic(f"role `{role}` cannot train on ranks of its own: no node trains it", _where(spec, role),
                         f"Instead:  groups: {{inference: {{{role}: {spec.run.groups.trainers[role]}}}}}")
    elif sampling := [node for node in nodes if bound[node].samples]:
        yield _refusal(spec, role, f"node `{sampling[0]}` samples with it, whose weights the first trainer publishes",
                       sampling[0])
    elif not any(bound[node].marks.type == "MODEL_TRAIN" for node in of_first):
        yield _refusal(spec, role, "no other role would be left to train on the first ranks")
    elif shares:
        yield _refusal(spec, role, f"role `{shares}` computes with the model under its adapters")
    elif follows:
        yield _refusal(spec, role, f"role `{follows}`, which these have, follows it (`follow`)")
    elif spec.run.data.images and spec.model_of(role) != spec.model_of(prompted_role(spec, spec.dag.nodes.values())):
        yield _refusal(spec, role, "prompts have images, and its model is another than the one that reads them first")
    elif not any(column.producer in of_first for node in nodes[: nodes.index(trains[0]) + 1]
                 for column in flows[node].reads) or (spec.run.mode == "sync" and not _begins(nodes, of_first, flows)):
        yield _refusal(spec, role, f"node `{trains[0]}` trains on nothing that the first trainer writes, so that "
                       "nothing would keep the two in step", trains[0])


def _begins(nodes: list[str], of_first: list[str], flows: Mapping[str, NodeColumns]) -> bool:
    """Return whether the first of a group's nodes reads what the first trainer writes."""
    return any(column.producer in of_first for column in flows[nodes[0]].reads)
