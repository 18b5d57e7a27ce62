"""Finds plans that run and cannot learn: mistakes where that is certain, notes where it is likely."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from distflow.config.spec import Spec
from distflow.contracts.forms import Contract
from distflow.contracts.functions import BUILT_IN
from distflow.contracts.rewards import ANNOTATION, read_recipe
from distflow.errors import Diagnostic
from planners.columns import NodeColumns
from planners.settings import setting_value

_FAST = 0.02
"""Learning rate that is probably a slip, also for a tiny model."""
_TRIAL = 10
"""Steps of a run that only tries whether it starts."""
_COMPARE = ("group_advantage", "leave_one_out_advantage", "informative_groups", "best_and_worst")
"""Functions that compare the answers to a prompt: of answers that earn the same they make nothing to learn from."""


def check_learning(spec: Spec, bound: dict[str, Contract], flows: dict[str, NodeColumns]) -> list[Diagnostic]:
    """Return a mistake for each node that compares the answers to a prompt where these cannot differ, or waits for a
    critic that does not learn."""
    mistakes = [mistake for node in bound for mistake in _warmup(spec, node, bound)] + [*_too_fast(spec)]
    for node, flow in flows.items():
        if not _is(bound[node], *_COMPARE):
            continue
        what = f"node `{node}`: function `{bound[node].name}` compares the answers to a prompt"
        if flow.fan and all(_answers(spec, other, bound[other]) == 1 for other in flow.fan):
            last, setting = flow.fan[-1], bound[flow.fan[-1]].marks.repeats
            mistakes.append(Diagnostic(f"{what}, and node `{last}` gives one: nothing could be learnt",
                                       spec.dag_source.location(("nodes", last, "with", setting), key=True),
                                       f"Instead:  {last}: {{…, with: {{{setting}: 8}}}}"))
            continue
        for alike in (other for other in flow.fan if _is(bound[other], "generate") and _greedy(spec, other)):
            role, key = spec.dag.nodes[alike].role, _greedy(spec, alike)
            mistakes.append(Diagnostic(f"{what}, and with `{key}` all that node `{alike}` gives are the same: nothing "
                                       "could be learnt",
                                       spec.run_source.location(("roles", role, "generation", key.partition(":")[0])),
                                    f"Instead:  roles: {{{role}: {{…, generation: {{temperature: 1.0, top_k: 0}}}}}}"))
    return mistakes


def _too_fast(spec: Spec) -> Iterator[Diagnostic]:
    """Yield the trained roles of which one step would move each weight by more than weights are large."""
    for role, settings in spec.run.roles.items():
        rate = settings.learning_rate
        if rate >= 1 and role in spec.dag.roles and spec.dag.roles[role].trained:
            meant = f"{rate:g}e-6" if rate < 10 else "1e-6"
            yield Diagnostic(f"role `{role}`: with a learning rate of {rate:g} AdamW moves each weight by up to that "
                             "in a step, so that nothing of the model would be left",
                             spec.run_source.location(("roles", role, "learning_rate")),
                             f"Did you mean {meant}? Usual are 1e-6 for RL, 1e-5 for SFT, ten times as much for LoRA.")


def _warmup(spec: Spec, node: str, bound: dict[str, Contract]) -> Iterator[Diagnostic]:
    """Yield what is wrong with the steps in which a policy waits for its critic to learn."""
    steps = setting_value(spec, node, bound[node], "critic_warmup") if _is(bound[node], "policy_update") else 0
    if type(steps) is not int or steps <= 0:
        return
    where = spec.dag_source.location(("nodes", node, "with", "critic_warmup"))
    role = spec.dag.nodes[node].role
    if steps >= spec.run.steps:
        yield Diagnostic(f"node `{node}` waits {steps} steps for the critic, and the run has {spec.run.steps}: role "
                         f"`{role}` would never be trained", where, "Lower `critic_warmup`, or raise  steps")
    if not any(contract.marks.type == "MODEL_TRAIN" and spec.dag.nodes[other].role != role
               for other, contract in bound.items()):
        yield Diagnostic(f"node `{node}` waits {steps} steps for a critic, and DAG `{spec.dag.name}` trains no other "
                         "role: nothing would be learnt in them", where, "Take `critic_warmup` out.")


def learning_notes(spec: Spec, bound: dict[str, Contract], flows: dict[str, NodeColumns]) -> Iterator[str]:
    """Yield what is probably not meant to be learnt in this way."""
    for role, settings in spec.run.roles.items():
        if _FAST <= settings.learning_rate < 1 and role in spec.dag.roles and spec.dag.roles[role].trained:
            yield (f"role `{role}` has a learning rate of {settings.learning_rate:g}, at which AdamW seldom learns: "
                   "usual are 1e-6 for RL, 1e-5 for SFT, ten times as much for LoRA")
        if settings.warmup_steps >= spec.run.steps > _TRIAL and role in spec.dag.roles and \
                spec.dag.roles[role].trained:
            yield (f"role `{role}` warms up for {settings.warmup_steps} steps, and the run has {spec.run.steps}: its "
                   f"learning rate never reaches {settings.learning_rate:g}")
    for node, contract in bound.items():
        role = spec.dag.roles.get(spec.dag.nodes[node].role)
        if contract.samples and role and role.trained and contract.marks.repeats and (key := _greedy(spec, node)):
            yield (f"node `{node}` samples role `{spec.dag.nodes[node].role}`, which is trained, with `{key}`: it "
                   "always gives the likeliest answer, so that training finds no better one. Set  temperature: 1.0, "
                   "top_k: 0")
        if _is(contract, "policy_update"):
            yield from _off_policy(spec, node, contract)
        if _is(contract, "overlong_penalty"):
            yield from _never_overlong(spec, node, bound, flows)
    yield from _unread(spec, bound, flows)
    yield from _other_reward(spec, bound)
    if spec.run.validation and (conversing := next(iter(spec.environments), None)):
        yield (f"validation asks for one answer to each question, without the environment of node `{conversing}`: its "
               "curve does not show what conversations earn. See `environment/reward`, or set  validation: null")


def _answers(spec: Spec, node: str, contract: Contract) -> Any:
    recovered, repeats = ("nodes", node, "with") in spec.dag_source.recovered, contract.marks.repeats
    return None if recovered or not repeats else setting_value(spec, node, contract, repeats)


def _is(contract: Contract, *names: str) -> bool:
    return contract.name in names and contract.module.startswith(f"{BUILT_IN}.")


def _greedy(spec: Spec, node: str) -> str:
    """Return the setting by which a node's role always gives the likeliest token; "" if none does."""
    own = spec.settings_of(spec.dag.nodes[node].role)
    if own is None:
        return ""
    return "temperature: 0" if own.generation.temperature == 0 else "top_k: 1" if own.generation.top_k == 1 else ""


def _off_policy(spec: Spec, node: str, contract: Contract) -> Iterator[str]:
    """Yield a note on several updates with the loss `reinforce`, which has no ratio to the policy that sampled."""
    loss, parts, epochs = (setting_value(spec, node, contract, name) for name in ("loss", "mini_batches", "epochs"))
    if loss == "reinforce" and (parts > 1 or epochs > 1):
        name, count = ("mini_batches", parts) if parts > 1 else ("epochs", epochs)
        yield (f"node `{node}` makes several updates of a step ({name}: {count}) with `loss: reinforce`, which takes "
               f"each sample as if the newest weights had given it. Set  {name}: 1   or  loss: ppo")


def _never_overlong(spec: Spec, node: str, bound: dict[str, Contract], flows: dict[str, NodeColumns]) -> Iterator[str]:
    longest, margin = (setting_value(spec, node, bound[node], name) for name in ("max_length", "margin"))
    sampling = next((other for other in reversed(flows[node].fan) if _is(bound[other], "generate")), None)
    own = spec.settings_of(spec.dag.nodes[sampling].role) if sampling else None
    if sampling is None or own is None or type(longest) not in (int, float) or type(margin) not in (int, float):
        return
    most = setting_value(spec, sampling, bound[sampling], "max_new_tokens") or own.generation.max_new_tokens
    if most <= longest * (1 - margin):
        yield (f"node `{node}` changes nothing: it punishes answers of more than {longest * (1 - margin):,.0f} tokens "
               f"(max_length {longest:,}, margin {margin:g}), and node `{sampling}` gives at most {most:,}. Set  "
               f"max_length: {most}")


def _unread(spec: Spec, bound: dict[str, Contract], flows: dict[str, NodeColumns]) -> Iterator[str]:
    """Yield a note on each column of log-probabilities that no node reads, with the `reads:` for an update; none where
    nothing is trained."""
    if not any(node.type == "MODEL_TRAIN" for node in spec.dag.nodes.values()):
        return
    for node, flow in flows.items():
        for column in flow.writes:
            if column.endswith("_logprobs") and not any(column == read.name for other in flows.values()
                                                        for read in other.reads):
                yield f"node `{node}` writes `{column}`, which no node reads{_reader(spec, bound, flows, node, column)}"


def _reader(spec: Spec, bound: dict[str, Contract], flows: dict[str, NodeColumns], node: str, column: str) -> str:
    role = spec.dag.nodes[node].role
    for other, flow in flows.items():
        own = spec.dag.nodes[other].role == role  # then it is the old policy, recomputed
        parameter, meaning = ("actor_logprobs", "the old policy") if own else ("reference_logprobs", "the reference")
        offered = {read.name for read in bound[other].reads}
        if parameter in offered and parameter not in {read.parameter for read in flow.reads} \
                and spec.dag.nodes[other].type == "MODEL_TRAIN":
            return f". To have `{other}` take it as {meaning}:  {other}: {{…, reads: {{{parameter}: {column}}}}}"
    return ""


def _other_reward(spec: Spec, bound: dict[str, Contract]) -> Iterator[str]:
    named = {node: setting_value(spec, node, contract, name) for node, contract in bound.items()
             for name, setting in contract.settings.items() if setting.annotation == ANNOTATION}
    if spec.run.validation is None or not named:
        return
    wanted = read_recipe(spec.run.validation.reward)[0]
    if all({term.name for term in read_recipe(value)[0].terms} != {term.name for term in wanted.terms}
           for value in named.values()):
        node, value = next(iter(named.items()))
        yield (f"validation pays `{spec.run.validation.reward}`, and training (node `{node}`) `{value}`: the curve of "
               f"the one says little of the other. Unless that is meant, set  validation: {{…, reward: {value}}}")
