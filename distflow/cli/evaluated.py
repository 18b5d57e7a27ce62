"""What an evaluation is of: a model folder, or a run with the settings under which its model was made."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from distflow.config.shipped import find, find_yaml
from distflow.config.yaml_source import read
from distflow.errors import InvalidInput, did_you_mean
from distflow.launch import search_paths

_OF_ROLE = ("generation", "dtype", "rollout")
_NOT_OF_DATA = ("train", "batch")


@dataclass(frozen=True)
class EvaluationSubject:
    """role, data: parts of a run file; reward: settings of the `score` node."""

    role: dict[str, Any]
    data: dict[str, Any] = field(default_factory=dict)
    reward: dict[str, Any] = field(default_factory=dict)
    validation: dict[str, str] = field(default_factory=dict)
    imports: list[str] = field(default_factory=list)
    search: list[str] = field(default_factory=list)
    """Where the imported modules are found."""


def subject(name: str, role: str | None, run: str | None) -> EvaluationSubject:
    """The model to evaluate, from a run's folder or a model folder; `run` is a run file with settings for the latter.

    Raises:
        InvalidInput: it is neither, the run has no model yet, or has several and `role` names none of them.
    """
    folder = Path(name)
    if (folder / "launch.json").is_file():
        return _of_run(folder, role)
    found = find(name, "models")
    if found is None or not (found / "config.json").is_file():
        raise InvalidInput(f"{name} is neither the folder of a run (with launch.json) nor of a model (with "
                           "config.json)")
    settings = yaml.safe_load(find_yaml(run, "runs", "run file").read_text()) if run else {}
    return EvaluationSubject(_role(settings.get("roles", {}).get("actor", {}), found), _data(settings))


def _of_run(folder: Path, role: str | None) -> EvaluationSubject:
    run, dag = (read(folder / f"{kind}.yaml").data for kind in ("run", "dag"))
    if "roles" not in run or not {"nodes", "roles"} <= dag.keys():
        raise InvalidInput(f"{folder}: run.yaml or dag.yaml is damaged: it lacks the sections that every run writes")
    trained = [name for name, item in dag["roles"].items() if item["trained"] and item.get("head", "lm") == "lm"]
    if role is not None and role not in trained:
        raise InvalidInput(f"run {folder} trained no role `{role}` that answers. "
                           f"{did_you_mean(role, trained, 'It trained')}")
    if role is None and len(trained) != 1:
        several = ", ".join(trained) or "no role that answers"
        raise InvalidInput(f"run {folder} trained {several}. Name one:  --role ROLE")
    role = role or trained[0]
    model = next((path for path in (folder / f"model-{role}", folder / "model") if path.is_dir()), None)
    if model is None:
        raise InvalidInput(f"run {folder} has not written its model yet. Write that of its newest checkpoint:  "
                           f"distflow export {folder}")
    validation, imports = run.get("validation") or {}, dag.get("imports", [])
    scores = [node for node in dag["nodes"].values()
              if node["function"] == "score"
              or (node["function"] is None and (node["type"], node["role"]) == ("COMPUTE", "reward"))]
    reward = {"reward": validation["reward"]} if validation else scores[0]["with"] if scores else {}
    return EvaluationSubject(_role(_settings(run, dag, role), model), _data(run), reward, validation.get("data", {}),
                             imports,
                             search_paths(folder))


def _settings(run: dict[str, Any], dag: dict[str, Any], role: str) -> dict[str, Any]:
    """The role's part of the run file, or that of the role it copies: see `Spec.settings_of`."""
    name: str | None = role
    while name is not None and name not in run["roles"]:
        name = dag["roles"][name]["copy_of"]
    return run["roles"].get(name, {})


def _role(settings: dict[str, Any], model: Path) -> dict[str, Any]:
    return {"model": str(model.absolute()), **{key: settings[key] for key in _OF_ROLE if key in settings}}


def _data(run: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in run.get("data", {}).items() if key not in _NOT_OF_DATA}
