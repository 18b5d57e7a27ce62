"""Rewards that a DAG and a run name: reads recipes, checks them against contracts, finds the columns that they read.

A recipe says which rewards make up a sample's reward; contracts are read from source, as those of node functions.

reward: math                                        one; my_rewards:near is `near` of the module my_rewards
reward: [math, format]                              their sum
reward: {math: 1.0, length: 0.2}                    a weighted sum
reward: {format: {weight: 0.5, tags: [answer]}}     with settings of the reward, or its `timeout`, `retries`
reward: {by: source, rewards: {gsm8k: math, mbpp: code}}    by the value of a column; each as above
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from distflow.config.spec import Spec
from distflow.config.yaml_source import YamlSource
from distflow.contracts import decorators
from distflow.contracts.definitions import Definition, definitions, where_defined
from distflow.contracts.forms import PER_SAMPLE, Contract, Read, RewardContract, plain_form
from distflow.contracts.functions import built_in, contract_of
from distflow.contracts.modules import check_module, module_file
from distflow.contracts.read import read_contract
from distflow.contracts.settings import Invalid, check_given
from distflow.errors import Diagnostic, InvalidInput, Location, did_you_mean, shown
from distflow.plan import CUT_THOUGHTS, FINISHED

KeyPath = tuple[str | int, ...]
_FORMS = "Write a name, a list of names, or weights:  reward: {math: 1.0, length: 0.2}"
_BY = "As in  reward: {by: source, rewards: {gsm8k: math, mbpp: code}}"


@dataclass(frozen=True)
class Term:
    """One reward of a sum. `path` is its path below the setting; `module` has it, "" where the name stands alone."""

    name: str
    weight: float = 1.0
    timeout: float | None = None
    retries: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    path: KeyPath = ()
    named_by_key: bool = False
    module: str = ""

    @property
    def spelling(self) -> str:
        return f"{self.module}:{self.name}" if self.module else self.name


@dataclass(frozen=True)
class Recipe:
    """Terms of each branch. `by` is the column whose value chooses a branch; "" if there is one for all, called ""."""

    by: str
    branches: dict[str, tuple[Term, ...]]

    @property
    def terms(self) -> list[Term]:
        return [term for terms in self.branches.values() for term in terms]

    def of(self, source: str) -> tuple[Term, ...] | None:
        """Return the terms for a row with this value of the column `by`; None if no branch is for it."""
        return self.branches.get(source if self.by else "")


def read_recipe(value: Any) -> tuple[Recipe, list[Invalid]]:
    """Return a recipe as far as it can be read, and all that is wrong with it."""
    invalid: list[Invalid] = []
    if isinstance(value, dict) and ("by" in value or isinstance(value.get("rewards"), dict)):
        return _read_branches(value, invalid), invalid
    return Recipe("", {"": _read_terms(value, (), invalid)}), invalid


def _read_branches(value: dict[str, Any], invalid: list[Invalid]) -> Recipe:
    for key in value:
        if key not in ("by", "rewards"):
            invalid.append(Invalid((key,), f"unknown key `{key}` beside `by` and `rewards`",
                                 did_you_mean(key, ("by", "rewards")), key=True))
    column, rewards = value.get("by"), value.get("rewards")
    if not isinstance(column, str) or not column:
        invalid.append(Invalid(("by",) if "by" in value else (), "`by` must name a column of text", _BY))
    if not isinstance(rewards, dict) or not rewards:
        invalid.append(Invalid(("rewards",) if "rewards" in value else (),
                             "`rewards` must say the reward for each value of "
                             f"`{column}`", _BY))
        rewards = {}
    branches = {name: _read_terms(item, ("rewards", name), invalid) for name, item in rewards.items()}
    return Recipe(column if isinstance(column, str) else "", branches)


def _read_terms(value: Any, path: KeyPath, invalid: list[Invalid]) -> tuple[Term, ...]:
    if isinstance(value, str):
        return (_parse_term(value, path=path),)
    if isinstance(value, dict) and "by" in value:
        invalid.append(Invalid(path, "`by` cannot stand inside another `by`", _BY))
    elif isinstance(value, dict) and value:
        return _once([_read_term(name, item, (*path, name), invalid) for name, item in value.items()], invalid)
    elif isinstance(value, list) and value:
        return _once(_read_listed(value, path, invalid), invalid)
    else:
        invalid.append(Invalid(path, f"a reward cannot be {value!r}", _FORMS))
    return ()


def _read_listed(names: list[Any], path: KeyPath, invalid: list[Invalid]) -> Iterator[Term]:
    for index, name in enumerate(names):
        own_path = (*path, index)
        if not isinstance(name, str):
            invalid.append(Invalid(own_path, f"a list of rewards holds names, not {name!r}", _FORMS))
        else:
            yield _parse_term(name, path=own_path)


def _once(terms: Iterable[Term], invalid: list[Invalid]) -> tuple[Term, ...]:
    """Return terms without those that stand there twice. A NAME is MODULE:NAME, since names are unique in a run."""
    kept: list[Term] = []
    for term in terms:
        alike = (each for each in kept if each.name == term.name and
                 (each.module == term.module or not each.module or not term.module))
        if other := next(alike, None):
            also = "" if other.spelling == term.spelling else f", as `{other.spelling}` too"
            invalid.append(Invalid(term.path, f"reward `{term.spelling}` stands twice{also}", "Leave one out. To count "
                                   f"it more:  reward: {{{other.spelling}: 2.0}}", term.named_by_key))
        else:
            kept.append(term)
    return tuple(kept)


def _read_term(name: str, value: Any, path: KeyPath, invalid: list[Invalid]) -> Term:
    given = dict(value) if isinstance(value, dict) else {"weight": value}
    own = {key: given.pop(key) for key in ("weight", "timeout", "retries") if key in given}
    right = {"weight": _is_number, "timeout": lambda it: _is_number(it) and it > 0,
             "retries": lambda it: type(it) is int and it >= 0}
    must = {"weight": "a number", "timeout": "a number of seconds above 0", "retries": "a whole number of at least 0"}
    for key in [key for key, item in own.items() if not right[key](item)]:
        own_path = (*path, key) if isinstance(value, dict) else path
        hint = "" if isinstance(value, dict) else f"Or a mapping of its settings:  {name}: {{weight: 1.0, …}}"
        invalid.append(Invalid(own_path, f"the {key} of reward `{name}` must be {must[key]}, not {own.pop(key)!r}",
                               hint))
    return _parse_term(name, **own, settings=given, path=path, named_by_key=True)


def _parse_term(name: str, **facts: Any) -> Term:
    """Return the term of `NAME` or `MODULE:NAME`."""
    module, _, own = name.rpartition(":")
    return Term(own, module=module, **facts)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


TEXTS = "Fields of the data are texts:  FIELD: str   What is in them is read by  int(FIELD)  or  json.loads(FIELD)"
ANNOTATION = "Reward"  # annotation of a setting that holds a recipe
SHIPPED = ("workers.isolation.rewards.texts", "workers.isolation.rewards.programs", "workers.isolation.rewards.judge")
"""Modules of the shipped rewards."""
@dataclass(frozen=True)
class RewardSetting:
    source: YamlSource
    path: tuple[str, ...]
    value: Any
    label: str

    def location(self, path: KeyPath, key: bool = False) -> Location:
        return self.source.location((*self.path, *path), key)


def check_rewards(spec: Spec) -> list[Diagnostic]:
    """Return what is wrong with the rewards that are named; put the contracts of all known ones into `spec.rewards`."""
    named = [(setting, *read_recipe(setting.value)) for setting in reward_settings(spec)]
    terms = [(setting, term) for setting, recipe, _ in named for term in recipe.terms]
    mistakes = [mistake for setting, term in terms if term.module for mistake in check_module(
        term.module, f"{setting.label}: ", setting.location(term.path, term.named_by_key))]
    if mistakes:
        return [*dict.fromkeys(mistakes)]
    spec.rewards.update(_find(spec, [term for _, term in terms], mistakes))
    if mistakes:
        return mistakes
    for setting, recipe, invalid in named:
        mistakes += [Diagnostic(f"{setting.label}: {each.what}", setting.location(each.path, each.key), each.hint)
                     for each in (*invalid, *_check_terms(spec, recipe))]
        mistakes += _unset_keys(setting, recipe)
    if spec.run.validation:
        mistakes += _check_columns(spec, named[-1][0], named[-1][1])
    return mistakes


def with_reward_columns(spec: Spec, node: str, contract: Contract) -> Contract:
    """Return the contract of a node's function with the columns that its rewards read too."""
    recipes = (read_recipe(spec.dag.nodes[node].settings.get(setting.name, setting.value))[0]
               for setting in contract.settings.values() if setting.annotation == ANNOTATION)
    return contract.reading(read for recipe in recipes for read in _columns_of(recipe, spec.rewards))


def shipped_rewards() -> dict[str, RewardContract]:
    return {each.name: read_contract("reward", each) for module in SHIPPED for each in definitions(module, "reward")}


def branches(spec: Spec, validation: bool) -> dict[str, list[str]]:
    """Return field of the data → values for which a reward is given, in validation or else in training."""
    values: dict[str, list[str]] = {}
    for setting in reward_settings(spec):
        recipe, _ = read_recipe(setting.value)
        if (setting.source is spec.run_source) == validation and recipe.by in spec.run.data.columns:
            known = values.get(recipe.by, list(recipe.branches))
            values[recipe.by] = [value for value in known if value in recipe.branches]
    return values


def validation_fields(spec: Spec) -> list[str]:
    """Return the `data.columns` that validation's reward reads; those that only training reads may be missing."""
    read = {each.name for each in validation_reads(spec)}
    return [name for name in spec.run.data.columns if name in read]


def validation_reads(spec: Spec) -> list[Read]:
    """Return the columns that validation's reward reads."""
    recipe = read_recipe(spec.run.validation.reward)[0] if spec.run.validation else None
    return [*_columns_of(recipe, spec.rewards)] if recipe else []


def reward_settings(spec: Spec) -> Iterator[RewardSetting]:
    for node, item in spec.dag.nodes.items():
        contract = contract_of(spec.functions, item)
        for name, value in item.settings.items():
            setting = contract.settings.get(name) if contract else None
            if setting and setting.annotation == ANNOTATION:
                yield RewardSetting(spec.dag_source, ("nodes", node, "with", name), value, f"node `{node}`")
    if spec.run.validation:
        yield RewardSetting(spec.run_source, ("validation", "reward"), spec.run.validation.reward, "`validation`")


def _columns_of(recipe: Recipe, contracts: dict[str, RewardContract]) -> Iterator[Read]:
    if recipe.by:
        yield Read(recipe.by, "list[str]", reader="`by`")
    for term in recipe.terms:
        if term.name in contracts:
            yield from contracts[term.name].columns.values()


def _check_terms(spec: Spec, recipe: Recipe) -> Iterator[Invalid]:
    for term in recipe.terms:
        contract = spec.rewards.get(term.name)
        if term.module and (contract is None or contract.module != term.module and not _imports(term.module, contract)):
            hint = _other_module(spec, term, contract)
            yield Invalid(term.path, f"module `{term.module}` has no reward `{term.name}`", hint, term.named_by_key)
        elif contract is None:
            named = ", ".join(dict.fromkeys([*filter(module_file, spec.dag.imports), "MODULE"]))
            hint = where_defined(term.name, "reward", spec.dag.imports, "Name its module:  reward: MODULE:NAME  , or "
                                 f"let the DAG import it:  imports: [{named}]")
            yield Invalid(term.path, f"there is no reward `{term.name}`", hint or did_you_mean(
                term.name, sorted(spec.rewards), "Rewards"), term.named_by_key)
        else:
            invalid = [*_check_settings(term, contract)]
            yield from invalid or _run_own_check(term, contract)


def _imports(module: str, contract: RewardContract) -> bool:
    """Return whether a module has a reward that another one defines; it is imported to see that."""
    reward = getattr(decorators.load_module(module), contract.name, None)
    return reward is not None and reward is decorators.REWARDS.get(contract.name)


def _other_module(spec: Spec, term: Term, contract: RewardContract | None) -> str:
    """Return a hint for `MODULE:NAME` whose module does not define the name; `contract`: of that name in the run."""
    if hint := where_defined(term.spelling, "reward", (), ""):
        return hint
    known = [name for name, each in spec.rewards.items() if each.module == term.module]
    if known:
        return did_you_mean(term.name, known, "Rewards in it")
    if contract:
        right = term.name if contract.module in SHIPPED else f"{contract.module}:{term.name}"
        return f"{shown(contract.where.file)}:{contract.where.line} defines it. Write  reward: {right}"
    return f"Write  @reward  above  def {term.name}(…)"


def _check_settings(term: Term, contract: RewardContract) -> Iterator[Invalid]:
    wrong = check_given(term.settings, contract.settings, f"reward `{term.name}`",
                        f"reward: {{{term.name}: {{SETTING}}}}", ("weight", "timeout", "retries"))
    for each in wrong:
        yield replace(each, path=term.path, key=term.named_by_key) if each.missing else \
            replace(each, path=(*term.path, *each.path))


def _run_own_check(term: Term, contract: RewardContract) -> Iterator[Invalid]:
    if contract.checked:
        decorators.load_module(contract.module)
        if wrong := decorators.REWARDS[contract.name].__distflow_reward__.check(**term.settings):
            what, _, hint = wrong.partition("\n")
            yield Invalid(term.path, f"reward `{contract.name}` {what}", hint, term.named_by_key)


def _unset_keys(setting: RewardSetting, recipe: Recipe) -> list[Diagnostic]:
    named = [(term, term.settings.get("key_variable")) for term in recipe.terms]
    return [Diagnostic(f"{setting.label}: reward `{term.name}` takes its key from the environment variable {key}, "
                       "which is not set", setting.location((*term.path, "key_variable")),
                       f"export {key}=…   or, where no key is needed, take `key_variable` out", of_machine=True)
            for term, key in named if isinstance(key, str) and not os.environ.get(key)]


def _check_columns(spec: Spec, setting: RewardSetting, recipe: Recipe) -> Iterator[Diagnostic]:
    fields = [*spec.run.data.columns]
    known, where = [*PER_SAMPLE.values(), FINISHED, CUT_THOUGHTS, *fields], setting.location(())
    for read in _columns_of(recipe, spec.rewards):
        what = f"{setting.label}: {read.reader} reads column `{read.name}`"
        if read.name not in known and not read.optional:
            hint = f"{did_you_mean(read.name, read.called(known), 'Columns')}\nIf it is a field of the data:  " \
                   f"data: {{columns: [{', '.join([*fields, read.name])}]}}"
            yield Diagnostic(f"{what}, which the data does not give", where, hint)
        elif read.name in fields and plain_form(read.form) == "Ragged":
            yield Diagnostic(f"{what} as tokens, and the dataset gives its text", where, TEXTS)


def _find(spec: Spec, wanted: Iterable[Term], mistakes: list[Diagnostic]) -> dict[str, RewardContract]:
    """Return the contracts of all rewards that can be named; modules are imported only if one wanted is missing."""
    modules = {contract.module for contract in spec.functions.values()} - {each.module for each in built_in().values()}
    users = dict.fromkeys([*spec.dag.imports, *(term.module for term in wanted if term.module)])
    named, unread, found = {term.name for term in wanted}, set[str](), dict[str, RewardContract]()
    for module in dict.fromkeys([*SHIPPED, *sorted(modules), *users]):
        for definition in definitions(module, "reward"):
            if other := found.get(definition.name):
                mistakes.append(_same_name(definition, other))
            try:
                found[definition.name] = read_contract("reward", definition)
            except InvalidInput as error:  # which is none of this run's where it names others of the module
                unread.add(definition.name)
                mistakes += error.mistakes * (definition.name in named)
    if not mistakes and not named <= set(found):
        for module in users:
            if module_file(module) is not None:
                decorators.load_module(module)
        for name, function in decorators.REWARDS.items():
            try:
                found |= {} if name in found or name in unread else {name: read_contract("reward", function)}
            except InvalidInput as error:
                mistakes += error.mistakes * (name in named)
    return found


def _same_name(definition: Definition, other: RewardContract) -> Diagnostic:
    name = definition.name
    return Diagnostic(f"reward `{name}` has the name of another one ({other.where}): two rewards of one run cannot "
                      "have one name, also where each is named with its module", definition.where,
                      f"Rename one of them:  def {name}_2(…)  , named  reward: {definition.module}:{name}_2")
