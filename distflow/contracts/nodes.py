"""What nodes read: their functions, with their rewards, environments, agents and templates. What of it is tokens."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator

from distflow.config.spec import Spec
from distflow.contracts.agents import with_agent_columns
from distflow.contracts.environments import with_environment_columns
from distflow.contracts.forms import TYPES, Contract, Read, plain_form
from distflow.contracts.functions import contract_of
from distflow.contracts.rewards import with_reward_columns
from distflow.contracts.templates import with_template_columns

TARGETS = "targets"  # column of the tokens of a record's answer
_FURTHER = (with_reward_columns, with_environment_columns, with_agent_columns, with_template_columns)


def whole_contract(spec: Spec, node: str) -> Contract | None:
    """Return the contract of a node's function, with all columns that the node reads; None if it has no function."""
    contract = contract_of(spec.functions, spec.dag.nodes[node])
    return functools.reduce(lambda known, more: more(spec, node, known), _FURTHER, contract) if contract else None


def columns_read(spec: Spec, types: Collection[str] = TYPES) -> Iterator[tuple[str, Read]]:
    """Yield each column that a node of these types reads, by its name in the DAG, and how."""
    for name, node in spec.dag.nodes.items():
        if node.type in types and (contract := whole_contract(spec, name)):
            yield from ((node.reads.get(read.name, read.name), read) for read in contract.reads)


def token_columns(spec: Spec, types: Collection[str] = TYPES) -> set[str]:
    """Return the columns in which the dataset gives an answer as tokens: `targets` if a node of these types reads it,
    and each of `data.columns` that its function takes as Ragged. All others are texts, as rewards, agents and templates
    take them."""
    return {column for column, read in columns_read(spec, types) if column == TARGETS or (
        column in spec.run.data.columns and plain_form(read.form) == "Ragged" and not read.reader)}


def samples(spec: Spec) -> bool:
    """Return whether answers are sampled behind the dataset's prompts."""
    contracts = (contract_of(spec.functions, node) for node in spec.dag.nodes.values())
    return any(contract.samples for contract in contracts if contract)
