"""Assigns ranks to the roles of a DAG: to the trainer's, and where there are samplers to groups beside it.

    group              nodes, in the order of the ranks
    trainer            all that no other group has; nodes in `layouts` that do not sample, and on rows that may have
                       been dropped, too
    rollout            those that sample (RobustRL §2.1), with their inputs; COMPUTE nodes that read only columns of
                       this group, such as rewards; `tokenizer_only` ones, such as `ask`, that make a sampling role's
                       prompts; frozen roles with  groups: {inference: {ROLE: rollout}}
    inference ROLE     a frozen role with ranks of its own, and others colocated with it (`planners.inference`)

Without samplers the trainer has all nodes and ranks. Within it `first` of `layouts`, and then `groups.inference` too,
give roles ranks to themselves (`RankGroup.begins`).

Between the groups, columns pass through the dock. A `row_wise` node of the trainer need not wait for the whole step: it
is fused, that is computed of each prompt as it comes from the rollout (Zhong et al. 2024, inter-stage fusion). Which
rows the rollout's filters drop is known by then: they are dropped before the node, as they are from the step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from distflow.config.spec import Spec
from distflow.contracts.forms import ENGINE_TYPES, Contract
from distflow.errors import Diagnostic
from distflow.plan import KEEP, REWARD_PARTS, ROLLOUT, SOURCE, TRAINER, Group, Layout, Plan, Task, Transfer
from planners.check import refusal
from planners.columns import SHOWN, NodeColumns
from planners.inference import check_colocated_roles, check_on_rollouts, inference_groups, ranks_in_chain, why_not
from planners.placement import RankGroup
from planners.resampling import draws_of
from planners.transfers import row_bytes

_READABLE = (*SHOWN, REWARD_PARTS)
"""Columns for samples.jsonl, whether or not the trainer reads them."""


@dataclass(frozen=True)
class GroupCut:
    """Groups of a run, the trainer first, and the columns that cross from each node to other groups."""

    chain: tuple[str, ...]
    groups: tuple[RankGroup, ...]
    crossing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fused: frozenset[str] = frozenset()
    """Trainer nodes that run on prompts as they arrive."""
    samplers: Mapping[str, Layout] = field(default_factory=dict)
    """Layouts of the models with which the trainer samples beside the rollouts, by role."""

    @property
    def trainer(self) -> RankGroup:
        return self.groups[0]

    def owner(self, node: str) -> str:
        """Return the name of the group that runs a node."""
        return next(group.name for group in self.groups if node in group.nodes)

    @property
    def ranks(self) -> dict[str, range]:
        """The ranks of each kind of group."""
        found: dict[str, range] = {}
        for group in self.groups:
            kind, end = group.name.partition(" ")[0], group.first + group.replicas * group.ranks
            found[kind] = range(found[kind].start if kind in found else group.first, end)
        return found


def assign_ranks(spec: Spec, bound: dict[str, Contract], chain: list[str], flows: dict[str, NodeColumns],
                 ranks: int) -> tuple[GroupCut, list[Diagnostic]]:
    """Return the groups of a run with their nodes and ranks, in every mode: first the trainer; where there are samplers
    these, and then frozen roles with ranks of their own. Without samplers such roles have some of the trainer's."""
    begins = {node: asked.first for node, asked in spec.run.layouts.items() if asked.first}
    if not spec.run.has_samplers:
        own, mistakes = ranks_in_chain(spec, bound, chain, flows, ranks)
        return GroupCut(tuple(chain), (RankGroup(TRAINER, frozenset(chain), 0, ranks, begins=begins | own),)), mistakes
    sampling = [node for node in chain if node in bound and bound[node].samples]
    nodes, mistakes = _of_rollout(spec, bound, chain, flows, sampling)
    training, model, found = _sizes(spec, sampling, ranks)
    found += check_on_rollouts(spec, bound, chain, flows, model.width)
    found += check_colocated_roles(spec, bound, chain)
    first = ranks - sum(spec.run.groups.inference_ranks.values())
    inference, unfit = inference_groups(spec, bound, chain, flows, nodes, first)
    replicas = max((first - training) // model.width, 0 if spec.run.trainer_samples_alone else 1)
    samplers = [RankGroup(ROLLOUT, frozenset(nodes), training, model.width, replicas), *inference]
    apart = frozenset[str]().union(*(group.nodes for group in samplers))
    trainer = RankGroup(TRAINER, frozenset(chain) - apart, 0, training, begins=begins)
    crossing = {node: names for group in samplers for node in chain if node in group.nodes
                and (names := _crossing(node, group.nodes, flows, (KEEP, *_READABLE)))}
    trains = any(contract.marks.type == "MODEL_TRAIN" for contract in bound.values())
    if not mistakes and not (sampling and trains):
        what = (f"mode {spec.run.mode} has ranks that {'train' if sampling else 'sample'} while others "
                f"{'sample' if sampling else 'train'}, but no node of DAG `{spec.dag.name}` does")
        mistakes.append(Diagnostic(what, spec.run_source.location(("mode",)), "Instead:  mode: sync"))
    mistakes += _check_fans(spec, crossing, flows) + _check_colocated(spec, sampling, nodes, chain)
    mistakes += _check_stale(spec, flows, nodes, crossing)
    fused = frozenset[str]()
    if spec.run.on_stale == "wait" and replicas and not _is_exact(spec, sampling):
        own = [node for node in chain if node in bound or node in apart]
        fused = _fused(spec, bound, own, flows, apart) - crossing.keys()
    roles = sorted({spec.dag.nodes[node].role for node in sampling}) if spec.run.trainer_samples else ()
    held = replace(model, dp=training // model.width)
    return GroupCut(tuple(chain), (trainer, *samplers), crossing, fused, dict.fromkeys(roles, held)), \
        [*mistakes, *found, *unfit]


def _is_exact(spec: Spec, sampling: list[str]) -> bool:
    """Return whether a row is sampled, and looked at, the same in any company."""
    settings = [spec.settings_of(spec.dag.nodes[node].role) for node in sampling]
    return any(each is not None and each.generation.batch_rows == 1 for each in settings)


def _of_rollout(spec: Spec, bound: dict[str, Contract], chain: list[str], flows: dict[str, NodeColumns],
                sampling: list[str]) -> tuple[set[str], list[Diagnostic]]:
    """Return the nodes of the rollout group."""
    nodes: set[str] = set()
    mistakes, sampled = [], {spec.dag.nodes[node].role for node in sampling}
    read = {column.producer for node in sampling for column in flows[node].reads}
    on_rollouts = [role for role in spec.run.groups.on_rollouts if role in spec.dag.roles
                   and not spec.dag.roles[role].trained]
    for node in (node for node in chain if node in bound):
        item, producers = spec.dag.nodes[node], {column.producer for column in flows[node].reads} - {SOURCE}
        ahead = {other for other in nodes if KEEP not in flows[other].writes}
        late = sorted(producers - ahead)
        if node in sampling and late:
            mistakes.append(_too_late(spec, node, late[0]))
        asks = bound[node].marks.tokenizer_only and node in read and item.role in sampled
        computes = ((asks or bound[node].marks.type == "COMPUTE") and draws_of(spec, node, bound[node]) == 1
                    and node not in spec.run.layouts)
        if node in sampling or (computes and not late and (producers or _before(node, sampling, flows))):
            nodes.add(node)
        elif item.role in on_rollouts and item.type in ENGINE_TYPES:
            if why := why_not(spec, bound, chain, flows, node, ahead):
                mistakes.append(refusal(spec, item.role, f"node `{node}` {why}", node))
            nodes.add(node)
    return nodes, mistakes


def joined(plans: list[Plan], cut: GroupCut, ranks: int) -> Plan:
    """Return the plan of a run from those of its groups."""
    groups = tuple(Group(group.name, group.first, group.replicas, plan) for group, plan in zip(cut.groups, plans))
    trainer = plans[0]
    own = {task.node: task for task in trainer.chain(0)}
    for group in groups[1:]:
        for task in group.plan.chain(0):
            first, dp = (group.first, group.replicas * task.layout.dp) if group.replicas else \
                (0, trainer.ranks // task.layout.width)  # the ranks that train do it
            own[task.node] = replace(task, layout=replace(task.layout, first=first, dp=dp))
    dock = {move.producer: move for move in trainer.dock}
    tasks = tuple(replace(task, transfers=tuple(_through(move, task, cut, dock) for move in task.transfers))
                  for node in cut.chain for task in [own[node]])
    memory = max((plan.memory for plan in plans), key=lambda items: sum(item.bytes for item in items))
    return replace(trainer, ranks=ranks, tasks=tasks, groups=groups, memory=memory)


def tasks_of(group: RankGroup, tasks: Iterable[Task], cut: GroupCut) -> tuple[Task, ...]:
    """Return the tasks of a group. Those of other groups only bring the columns that it reads, and in the trainer those
    that cross; fused ones bring their outputs."""
    if group.name == ROLLOUT:
        return tuple(task for task in tasks if task.node in group.nodes)
    if group is not cut.trainer:
        return of_arriving(tasks, cut, group.nodes, group.filters)
    own = {task.node: task.writes for task in tasks if task.node in group.nodes}
    bring = {**cut.crossing, **{node: own[node] for node in cut.fused}}
    return tuple(task if task.node in own and task.node not in cut.fused else _bringing(task, bring)
                 for task in tasks if task.node in own or task.node in cut.crossing or task.samples)


def of_arriving(tasks: Iterable[Task], cut: GroupCut, nodes: frozenset[str],
                filters: Collection[str]) -> tuple[Task, ...]:
    """Return the tasks of nodes that run on rows as they come; those of other groups bring what these read, and which
    rows the `filters` have dropped."""
    wanted = {task.node: {(move.producer, name) for move in task.transfers for name in move.columns}
              for task in tasks if task.node in nodes}
    read = set().union(*wanted.values())
    bring = {node: tuple(name for name in names if (node, name) in read or (name == KEEP and node in filters))
             for node, names in cut.crossing.items()}
    return tuple(task if task.node in nodes else _bringing(task, bring)
                 for task in tasks if task.node in wanted or task.node in cut.crossing
                 or (task.samples and cut.owner(task.node) == ROLLOUT))


def crossings(spec: Spec, cut: GroupCut, flows: dict[str, NodeColumns], bound: dict[str, Contract],
              group: RankGroup) -> tuple[Transfer, ...]:
    """Return the transfers through the dock, by producer: all of them for the trainer, or those of a group."""
    result = []
    for node, names in cut.crossing.items():
        if group is not cut.trainer and node not in group.nodes:
            continue
        rows, forms = spec.run.data.batch, dict(zip(flows[node].writes, bound[node].returns))
        for repeater in flows[node].out_fan:
            rows *= flows[repeater].repeats
        size = rows * sum(row_bytes(spec, name, forms.get(name, "Tensor")) for name in names)
        result.append(Transfer(node, names, "dock", size, size // cut.trainer.ranks))
    return tuple(result)


def _bringing(task: Task, columns: dict[str, tuple[str, ...]]) -> Task:
    return replace(task, writes=columns.get(task.node, ()), transfers=(), arrives=True)


def _fused(spec: Spec, bound: dict[str, Contract], chain: list[str], flows: dict[str, NodeColumns],
           nodes: Set[str]) -> frozenset[str]:
    """Return the trainer's nodes that need not wait for a step: behind none of its filters and no role's training.
    `chain`: its nodes, and those `nodes` with whose columns a step begins: these also say which rows stay."""
    fused: set[str] = set()
    trained: set[str] = set()
    for node in (node for node in chain if node in bound and node not in nodes):
        item = spec.dag.nodes[node]
        if draws_of(spec, node, bound[node]) > 1:
            break
        needs = {column.producer for column in flows[node].reads}.union(item.dependencies) - {SOURCE}
        alone = bound[node].marks.row_wise and KEEP not in flows[node].writes
        if alone and needs and needs <= nodes | fused and item.role not in trained:
            fused.add(node)
        if item.type == "MODEL_TRAIN":
            trained.add(item.role)
    return frozenset(fused)


def _crossing(node: str, nodes: Set[str], flows: dict[str, NodeColumns], more: Collection[str]) -> tuple[str, ...]:
    """Return the columns of a node of the group `nodes` that others read, and those of `more`."""
    wanted = {column.name for other, flow in flows.items() if other not in nodes for column in flow.reads
              if column.producer == node}
    return tuple(name for name in dict.fromkeys(flows[node].writes)
                 if name in wanted or name in more)


def _before(node: str, sampling: list[str], flows: dict[str, NodeColumns]) -> bool:
    needed = {column.producer for other in sampling for column in flows[other].reads}
    while more := {column.producer for other in needed - {SOURCE} for column in flows[other].reads} - needed:
        needed |= more
    return node in needed


def _through(move: Transfer, task: Task, cut: GroupCut, dock: dict[str, Transfer]) -> Transfer:
    if move.producer == SOURCE or cut.owner(move.producer) == cut.owner(task.node):
        return move
    crossed = dock[move.producer]
    share = len(move.columns) / len(crossed.columns)
    return replace(move, kind="dock", bytes_per_step=int(crossed.bytes_per_step * share),
                   bytes_of_busiest_rank=int(crossed.bytes_of_busiest_rank * share))


def _too_late(spec: Spec, node: str, late: str) -> Diagnostic:
    what = (f"mode {spec.run.mode}: node `{node}` samples, but needs node `{late}`, which runs in the trainer; both "
            "would wait for each other in every step")
    return Diagnostic(what, spec.dag_source.location(("nodes", node), key=True), "Instead:  mode: sync")


def _check_fans(spec: Spec, crossing: dict[str, tuple[str, ...]], flows: dict[str, NodeColumns]) -> list[Diagnostic]:
    """Check that all columns that cross belong to rows that stem from the same ones as the last repetition's."""
    finest = max(crossing, key=lambda node: len(flows[node].out_fan), default="")
    for node in crossing:
        fan = flows[node].out_fan
        if flows[finest].out_fan[: len(fan)] != fan:
            what = (f"mode {spec.run.mode}: the trainer needs columns of nodes `{finest}` and `{node}`, which repeat "
                    "the same rows independently, so that they cannot travel together")
            hint = "Instead:  mode: sync" + (", and no groups.inference" if spec.run.groups.inference else "")
            return [Diagnostic(what, spec.dag_source.location(("nodes", node), key=True), hint)]
    return []


def _check_colocated(spec: Spec, sampling: list[str], nodes: set[str], chain: list[str]) -> list[Diagnostic]:
    there = {spec.dag.nodes[node].role for node in chain
             if node not in nodes and spec.dag.nodes[node].type in ENGINE_TYPES}
    alone = [node for node in sampling if spec.dag.nodes[node].role not in there]
    if not (spec.run.trainer_samples and alone):
        return []
    what = (f"in mode semi_sync ranks that train sample too, but role `{spec.dag.nodes[alone[0]].role}` of node "
            f"`{alone[0]}` only samples, so that they do not have it")
    return [Diagnostic(what, spec.dag_source.location(("nodes", alone[0]), key=True), "Instead:  mode: async")]


def _check_stale(spec: Spec, flows: dict[str, NodeColumns], nodes: set[str],
                 crossing: dict[str, tuple[str, ...]]) -> list[Diagnostic]:
    """Check that the trainer sees how old samples are, where it drops them, and corrects for it, where it does not."""
    corrects = any({"importance", "response_mask"} & {*flow.writes} and "rollout_logprobs" in {
        column.name for column in flow.reads} for node, flow in flows.items() if node not in nodes)
    groups = spec.run.groups
    if spec.run.on_stale != "wait" and groups.inference_ranks:
        what, hint = (f"ranks that only infer take prompts step by step, and with on_stale: {spec.run.on_stale} there "
                      "is no order of steps"), "Instead:  on_stale: wait, or no  groups.inference"
    elif spec.run.on_stale == "keep" and not corrects:
        what, hint = (f"DAG `{spec.dag.name}` has no node that corrects for old weights, so on_stale: keep would train "
                      "on samples of another policy as if they were its own"), \
            "Add a node with  function: truncated_importance  (docs/algorithms.md), or  on_stale: drop"
    elif spec.run.on_stale == "drop" and not any("versions" in names for names in crossing.values()):
        what, hint = (f"no training node of DAG `{spec.dag.name}` reads `versions`, so that the trainer does not see "
                      "how old samples are"), "Instead:  on_stale: wait"
    else:
        return []
    return [Diagnostic(what, spec.run_source.location(("on_stale",)), hint)]


def _sizes(spec: Spec, sampling: list[str], ranks: int) -> tuple[int, Layout, list[Diagnostic]]:
    """Return how many ranks train, and the layout of a rollout's model; roles of their own have the last ranks."""
    wanted, apart = spec.run.groups.rollout, sum(spec.run.groups.inference_ranks.values())
    ranks -= apart
    split = next((node for node in sampling if node in spec.run.layouts), None)
    asked = spec.run.layouts[split] if split else None
    model = Layout(1, tp=asked.tp, cp=asked.cp, pp=asked.pp) if asked else Layout(1)
    width = model.width
    count = wanted if isinstance(wanted, int) else max(round(wanted * ranks / width), 1) * width
    colocated = spec.run.trainer_samples
    needed = 1 if colocated and not count else 2
    if ranks < needed:
        beside = f" beside the {apart} of groups.inference" if apart else ""
        least = "2 ranks" if needed > 1 else "1 rank"
        what = (f"mode {spec.run.mode} needs at least {least}{beside}"
                f"{', one that trains and one that samples' * (needed > 1)}; here {'is' if ranks == 1 else 'are'} "
                f"{max(ranks, 0)}")
        alone = ", or  groups: {rollout: 0}" if colocated and ranks == 1 else \
            ", or let one rank do both (partial rollouts):  mode: semi_sync  with  groups: {rollout: 0}  " \
            if ranks == 1 and not apart else ""
        remedy = f"Start {needed + apart} ranks (--ranks {needed + apart}){alone}, or  mode: sync"
        return 1, Layout(1), [Diagnostic(what, spec.run_source.location(("mode",)), remedy)]
    sizes = range(0 if colocated else width, ranks, width)
    fitting = [some for some in sizes if not colocated or not (ranks - some) % width]
    if count not in fitting:
        what = f"groups.rollout: {count} of {ranks} ranks sample, {_unfit(ranks, count, width, colocated)}"
        least = 2 * width if count else width
        more = f"a multiple of {width} ranks, {least} or more" if colocated else f"at least {width + 1} ranks"
        nearest = min(fitting, key=lambda some: (abs(some - count), not some), default=0)
        remedy = f"Instead:  groups: {{rollout: {nearest}}}" if fitting else f"Start {more}"
        return 1, Layout(1), [Diagnostic(what, spec.run_source.location(("groups", "rollout")), remedy)]
    return ranks - count, model, _check_role(spec, sampling, split) if split and width > 1 else []


def _unfit(ranks: int, count: int, width: int, colocated: bool) -> str:
    if count >= ranks:
        return "which leaves none to train"
    if not (count or colocated):
        return "and only in mode semi_sync do those that train, too"
    if count % width:
        return f"and `layouts` wants each model on {width} of them"
    return f"but the {ranks - count} that train do so too in mode semi_sync, and `layouts` wants each model on {width}"


def _check_role(spec: Spec, sampling: list[str], split: str) -> list[Diagnostic]:
    if len({spec.dag.nodes[node].role for node in sampling}) < 2:
        return []
    what = "several roles sample, and ranks that share a model, as `layouts` wants it, follow one of them"
    return [Diagnostic(what, spec.run_source.location(("layouts", split)),
                       f"Instead:  layouts: {{{split}: {{tp: 1}}}}")]
