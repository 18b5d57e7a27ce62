"""The part of `distflow.config.load.Spec` that contracts are checked against, so that contracts need not import it."""

from __future__ import annotations

from typing import Protocol

from distflow.config.dag import Dag
from distflow.config.run import Run
from distflow.config.yaml_source import YamlSource
from distflow.contracts.environments import EnvironmentContract
from distflow.contracts.rewards import RewardContract
from distflow.contracts.signature import Contract


class CheckedSpec(Protocol):
    """A DAG and a run with their sources, and the contracts of what they name."""

    dag: Dag
    run: Run
    dag_source: YamlSource
    run_source: YamlSource
    functions: dict[str, Contract]
    rewards: dict[str, RewardContract]
    environments: dict[str, EnvironmentContract]
