"""Everything that a plan is made from, as `distflow.config.load` has read and checked it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distflow.config.cluster import Cluster
from distflow.config.dag import Dag
from distflow.config.hub import fetch, pinned
from distflow.config.run import Model, RoleRun, Run
from distflow.config.shipped import find, on_hub
from distflow.config.sizes import Shape, embedded_config, parts_of, read_config
from distflow.config.yaml_source import YamlSource
from distflow.contracts.forms import Contract, EnvironmentContract, RewardContract
from distflow.errors import Diagnostic


@dataclass
class Spec:
    dag: Dag
    run: Run
    dag_source: YamlSource
    run_source: YamlSource
    functions: dict[str, Contract]  # contracts by the name that the DAG uses
    cluster: Cluster = field(default_factory=Cluster)
    shapes: dict[str, Shape] = field(default_factory=dict)
    adapters: dict[str, int] = field(default_factory=dict)
    """Number of adapter parameters by role; 0 if the model's files do not say."""
    frozen: dict[str, int] = field(default_factory=dict)
    """Number of parameters that `freeze` of a trained role names, by role; 0 if the model's files do not say."""
    on_cpus: bool = False
    """Whether memory is counted for CPUs, on which `dtype: auto` is float32."""
    validated: int | None = None
    """Answers of the largest validation set; None if its file does not say at once."""
    mistakes: list[Diagnostic] = field(default_factory=list)
    """Mistakes found by loading; the planner adds its own and raises them all."""
    cluster_source: YamlSource | None = None
    rewards: dict[str, RewardContract] = field(default_factory=dict)
    """Contracts of all rewards that can be named, by name."""
    environments: dict[str, EnvironmentContract] = field(default_factory=dict)  # contracts of environments by node

    @property
    def folder(self) -> Path:
        """Folder of the run file; its relative paths are tried there too."""
        return Path(self.run_source.file).parent

    @property
    def cluster_name(self) -> str:
        """Name of the cluster's file."""
        return Path(self.cluster_source.file).stem if self.cluster_source else "local"

    def data_path(self, name: str) -> Path | None:
        return find(name, "data", self.folder)

    def _absolute(self, name: str, kind: str) -> str:
        """Return a name that says the same everywhere: an absolute path, or a commit on the hub."""
        path, hub = find(name, kind, self.folder), on_hub(name, kind, self.folder)
        return str(pinned(hub, path) if path and hub else (path or Path(name)).absolute())

    @property
    def hub_commits(self) -> list[str]:
        """Models and data of the hub, with their commits on this machine."""
        sets = [*self.run.data.train, *(self.run.validation.data.values() if self.run.validation else ())]
        named = [*(("data", name) for name in sets), *(("models", path) for path in self._model_paths)]
        return [self._absolute(name, kind) for kind, name in named if on_hub(name, kind, self.folder)]

    def download_models(self) -> None:
        """Download the weights of the hub's models that this machine does not have. Raises InvalidInput."""
        for path in self._model_paths:
            if hub := on_hub(path, "models", self.folder):
                fetch(pinned(hub, fetch(hub)), weights=True)

    @property
    def _model_paths(self) -> list[str]:
        models = (settings.model for role, settings in self.run.roles.items() if role in self.dag.roles)
        return [model.path for model in models if model and model.path]

    def lineage(self, role: str) -> list[str]:
        """Return the role, the role that it copies, the one that this copies, and so on."""
        roles: list[str] = []
        current: str | None = role
        while current is not None and current not in roles:
            roles.append(current)
            current = self.dag.roles[current].copy_of if current in self.dag.roles else None
        return roles

    def model_of(self, role: str) -> Model | None:
        settings = (self.run.roles[name] for name in self.lineage(role) if name in self.run.roles)
        return next((own.model for own in settings if own.model), None)

    def settings_of(self, role: str) -> RoleRun | None:
        return next((self.run.roles[name] for name in self.lineage(role) if name in self.run.roles), None)

    def shape_of(self, role: str) -> Shape | None:
        return next((self.shapes[name] for name in self.lineage(role) if name in self.shapes), None)

    def parts_of(self, role: str) -> Shape | None:
        """Return sizes of a role's model with the names of its parts; None if they cannot be known before it is loaded.
        The first time it takes seconds."""
        model = self.model_of(role)
        folder = find(model.path, "models", self.folder) if model and model.path else None
        try:
            config = read_config(folder / "config.json") if folder else model and model.architecture and \
                embedded_config(model)
            return parts_of(config) if config else None
        except (OSError, ValueError):  # which another check reports
            return None

    def resolved(self) -> dict[str, Any]:
        """Return every value in force, defaults included and paths absolute, for the run's folder."""
        dag, run = self.dag.model_dump(mode="json", by_alias=True), self.run.model_dump(mode="json")
        run["data"]["train"] = {self._absolute(name, "data"): weight for name, weight in self.run.data.train.items()}
        for name, path in self.run.validation.data.items() if self.run.validation else ():
            run["validation"]["data"][name] = self._absolute(path, "data")
        for role in run["roles"].values():
            if role["model"] and role["model"]["path"]:
                role["model"]["path"] = self._absolute(role["model"]["path"], "models")
        cluster = {"cluster": self.cluster.model_dump(mode="json")} if self.cluster_source else {}
        return {"dag": dag, "run": run, **cluster}
