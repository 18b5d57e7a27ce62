"""`distflow nodes` and `distflow engines`: list the functions, rewards, environments and engines that a DAG can use."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from distflow.cli.common import Verb
from distflow.config.load import load_for_planning
from distflow.config.models import ROLLOUTS, TRAINERS, TRANSPORTS, Engine, installed
from distflow.contracts.environments import environments_in, shipped_modules
from distflow.contracts.forms import Contract, EnvironmentContract, RewardContract
from distflow.contracts.functions import built_in
from distflow.contracts.rewards import shipped_rewards
from distflow.contracts.settings import REQUIRED, Setting
from distflow.errors import InvalidInput, did_you_mean

SIZES = ("tp", "pp", "cp", "ep")
_RUN_FILE_WORDS = {"images": "data.images", "value": "head: value"}
"""Features of an engine that the run file or the DAG has another word for."""


def _add_nodes_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="show only this function")
    parser.add_argument("--dag", metavar="FILE", help="list the functions of this DAG's imports too")


def list_nodes(options: argparse.Namespace) -> int:
    spec = load_for_planning(options.dag) if options.dag else None
    contracts, rewards = (spec.functions, spec.rewards) if spec else (built_in(), shipped_rewards())
    chosen = [_describe(contract) for name, contract in sorted(contracts.items()) if options.name in (None, name)]
    chosen += [_describe_reward(each) for name, each in sorted(rewards.items()) if options.name in (None, name)]
    modules = [*shipped_modules(), *(spec.dag.imports if spec else ())]
    environments = {each.name: each for module in modules for each in environments_in(module)}
    chosen += [_describe_environment(each) for name, each in sorted(environments.items())
               if options.name in (None, name)]
    if not chosen:
        known = [*contracts, *rewards, *environments]
        raise InvalidInput(f"there is nothing called `{options.name}`. {did_you_mean(str(options.name), known)}")
    print("\n\n".join("\n".join(lines) for lines in chosen))
    return 0


def _describe_reward(reward: RewardContract) -> Iterator[str]:
    yield f"{reward.name}  (a reward, for `reward:` of a score node)"
    if reward.summary:
        yield f"  {reward.summary}"
    reads = [f"{read.name}{' (optional)' * read.optional}" for read in reward.columns.values()]
    yield f"  reads   {', '.join(reads) or 'nothing'}"
    yield from map(_describe_setting, reward.settings.values())


def _describe_environment(environment: EnvironmentContract) -> Iterator[str]:
    yield f"{environment.name}  (an environment, for `environment:` of a converse node)"
    yield f"  reads   {', '.join(environment.columns.values()) or 'nothing'}"
    yield from map(_describe_setting, environment.settings.values())


def _describe_setting(setting: Setting, allowed: str = "") -> str:
    default = "required" if setting.default == REQUIRED else f"default {setting.default}"
    details = "; ".join(part for part in (default, setting.bounds, allowed, setting.description) if part)
    return f"  with    {setting.name}: {setting.annotation or 'any'}  ({details})"


def _describe(contract: Contract) -> Iterator[str]:
    head = ", head: value" if contract.marks.head == "value" else ""
    yield f"{contract.name}  ({contract.marks.type}{head}, {contract.module})"
    if contract.summary:
        yield f"  {contract.summary}"
    reads = [f"{read.name}{f': {read.form}' if read.form else ''}{' (optional)' * read.optional}"
             for read in contract.reads]
    yield f"  reads   {', '.join(reads) or 'nothing'}"
    forms = contract.returns or ("",) * len(contract.marks.writes)
    writes = [f"{name}{f': {form}' if form else ''}" for name, form in zip(contract.marks.writes, forms)]
    yield f"  writes  {', '.join(writes) or 'nothing'}"
    for setting in contract.settings.values():
        other, values = contract.marks.only_with.get(setting.name, ("", ()))
        if setting.name in contract.marks.belongs_to:
            other, *values = contract.marks.belongs_to[setting.name]
        yield _describe_setting(setting, f"only with `{other}: {' | '.join(map(str, values))}`" if other else "")


def list_engines(_: argparse.Namespace) -> int:
    from distflow.data.row_copies import COPIES

    print("\n\n".join("\n".join(_describe_engine(key, name, engine)) for key, table in (
        ("engine", TRAINERS), ("rollout", ROLLOUTS), ("transport", TRANSPORTS)) for name, engine in table.items()))
    print(f"\n{COPIES}")
    return 0


def _describe_engine(key: str, name: str, engine: Engine) -> Iterator[str]:
    yield f"{key}: {name}"
    if engine.packages:
        version = installed(engine)
        has = f"{version} is installed" if version else f"not installed: {engine.pip}"
        tested = ", ".join(f"{known}*" for known in engine.tested)
        yield f"  {' or '.join(engine.packages)}: {has}; tested with {tested}"
    if engine.elsewhere:
        yield f"  may be in another environment: {engine.elsewhere}=…/bin/python"
    for feature, reason in engine.cannot.items():
        yield f"  not  {f'{feature} > 1' if feature in SIZES else _RUN_FILE_WORDS.get(feature, feature)}: {reason}"


VERBS = {
    "nodes": Verb("list the functions that nodes can run, the rewards and the environments: what they read, write and "
                  "accept", _add_nodes_arguments, list_nodes),
    "engines": Verb("list the engines that train and sample, and optional transports of weights: installed and tested "
                    "versions, and what each cannot do; and whether copies of rows are compiled",
                    lambda parser: None, list_engines),
}
