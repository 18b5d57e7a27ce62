"""Load everything that a plan is made from: DAG, run, cluster, overrides and the contracts of the functions."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distflow.schema import contract as contracts
from distflow.schema.cluster import Cluster
from distflow.schema.contract import Contract
from distflow.schema.dag import Dag
from distflow.schema.document import check
from distflow.schema.errors import InvalidInput, Mistake, did_you_mean
from distflow.schema.run import Model, Run
from distflow.schema.shipped import find, find_yaml
from distflow.schema.source import Source, parse_value, read

_DAG_KEYS = {"nodes", "imports"}
_DAG_ROLE_KEYS = {"trained", "copy_of"}
DEFAULT_RUN = "embedded"


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, as far as memory depends on them."""

    parameters: int
    layers: int
    kv_width: int
    """Elements of one layer's keys of one token: key-value heads × head size."""
    vocabulary: int
    hidden: int


@dataclass
class Spec:
    """A DAG and a run that belong together, with their sources for messages that name lines."""

    dag: Dag
    run: Run
    dag_source: Source
    run_source: Source
    functions: dict[str, Contract]
    """Contracts by the name that the DAG uses."""
    cluster: Cluster = field(default_factory=Cluster)
    shapes: dict[str, Shape] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    """What loading found wrong; the planner adds to them and raises them all."""

    @property
    def folder(self) -> Path:
        """Where the run file lies; its relative paths are tried there too."""
        return Path(self.run_source.file).parent

    def data_path(self, name: str) -> Path | None:
        return find(name, "data", self.folder)

    def model_of(self, role: str) -> Model | None:
        """The role's model: its own, or that of the role it copies."""
        own = self.run.roles.get(role)
        if own and own.model:
            return own.model
        origin = self.dag.roles[role].copy_of if role in self.dag.roles else None
        return self.model_of(origin) if origin and origin != role else None

    def resolved(self) -> dict[str, Any]:
        """Every value in force, defaults included and paths absolute; what a run folder keeps."""
        dag, run = self.dag.model_dump(mode="json", by_alias=True), self.run.model_dump(mode="json")
        run["data"]["train"] = str(self.data_path(self.run.data.train).absolute())
        for name, path in self.run.validation.data.items() if self.run.validation else ():
            run["validation"]["data"][name] = str(self.data_path(path).absolute())
        for role in run["roles"].values():
            if role["model"] and role["model"]["path"]:
                role["model"]["path"] = str(find(role["model"]["path"], "models", self.folder).absolute())
        return {"dag": dag, "run": run}


def load(dag: str, run: str | None = None, overrides: list[str] | None = None, cluster: str | None = None) -> Spec:
    """Read and check the files.

    Mistakes that leave enough to go on with are kept in `Spec.mistakes`, so that the planner can add its own.

    Raises:
        InvalidInput: a file is missing, not YAML, or lacks what nothing can replace.
    """
    dag_source = _read(find_yaml(dag, "", "DAG"))
    run_source = _read(find_yaml(run or DEFAULT_RUN, "runs", "run file"))
    for text in overrides or ():
        _override(dag_source, run_source, text)
    dag_object, mistakes = check(Dag, dag_source)
    run_object, run_mistakes = check(Run, run_source)
    mistakes += run_mistakes
    cluster_object: Cluster | None = Cluster()
    if cluster:
        cluster_object, more = check(Cluster, _read(find_yaml(cluster, "clusters", "cluster")))
        mistakes += more
    if dag_object is None or run_object is None or cluster_object is None:
        raise InvalidInput(mistakes)
    functions = _functions(dag_object, dag_source, mistakes)
    spec = Spec(dag_object, run_object, dag_source, run_source, functions, cluster_object, mistakes=mistakes)
    _check_models(spec)
    _check_data(spec)
    return spec


def reload(folder: Path, overrides: list[str] | None = None) -> Spec:
    """The spec of a finished or interrupted run, from its folder."""
    return load(str(folder / "dag.yaml"), str(folder / "run.yaml"), overrides)


def _read(path: Path) -> Source:
    return read(path, _shown(path))


def _shown(path: Path) -> str:
    """A path as short as it can be said."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _override(dag: Source, run: Source, text: str) -> None:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise InvalidInput(f"--set {text}: expected KEY=VALUE, as in --set roles.actor.learning_rate=1e-6")
    path = tuple(key.strip().split("."))
    in_dag = path[0] in _DAG_KEYS or (path[0] == "roles" and len(path) == 3 and path[2] in _DAG_ROLE_KEYS)
    (dag if in_dag else run).override(path, parse_value(value), text)


def _functions(dag: Dag, source: Source, mistakes: list[Mistake]) -> dict[str, Contract]:
    """The contracts of all functions that the DAG may name; user modules are found beside the DAG file too."""
    for place in (str(Path(source.file).resolve().parent), str(Path.cwd())):
        if place not in sys.path:
            sys.path.append(place)
    found = contracts.built_in()
    for index, module in enumerate(dag.imports):
        try:
            found.update({contract.name: contract for contract in contracts.of_module(module)})
        except InvalidInput as error:
            mistakes.append(Mistake(str(error), source.spot(("imports", index))))
    for name, item in dag.nodes.items():
        if item.function and item.function not in found:
            where = source.spot(("nodes", name, "function"))
            try:
                contract = _outside(item.function, dag.imports)
            except InvalidInput as error:
                mistakes.append(Mistake(str(error), where))
                continue
            if contract:
                found[item.function] = contract
            else:
                what = f"node `{name}`: there is no function `{item.function}`"
                mistakes.append(Mistake(what, where, did_you_mean(item.function, found)))
    return found


def _outside(function: str, imports: list[str]) -> Contract | None:
    """A function named `module:function`, or one that an imported module registers dynamically."""
    module, separator, name = function.rpartition(":")
    if not separator:
        return next(filter(None, (contracts.imported(other, name) for other in imports)), None)
    shown = {contract.name: contract for contract in contracts.of_module(module)}
    return shown.get(name) or contracts.imported(module, name)


def _check_models(spec: Spec) -> None:
    for role, settings in spec.run.roles.items():
        model = settings.model
        if model is None or model.path is None:
            continue
        where = spec.run_source.spot(("roles", role, "model"))
        folder = find(model.path, "models", spec.folder)
        config = folder / "config.json" if folder else None
        if config is None or not config.is_file():
            what = f"role `{role}`: there is no model folder `{model.path}`" + (" (it has no config.json)" if folder else "")
            hint = ("Give the path of a folder in Hugging Face's format (config.json, *.safetensors, tokenizer.json). "
                    "For the demonstration's weak start, run: distflow run sft --run embedded_sft --name sft")
            spec.mistakes.append(Mistake(what, where, hint))
            continue
        try:
            spec.shapes[role] = shape_of(json.loads(config.read_text()))
        except (ValueError, KeyError) as error:
            spec.mistakes.append(Mistake(f"role `{role}`: {config} is not a model configuration: {error!r}", where))


def shape_of(config: dict[str, Any]) -> Shape:
    """Sizes from a Hugging Face `config.json` of the Llama and Qwen families."""
    hidden, layers, vocabulary = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_width = config.get("num_key_value_heads", heads) * head_dim
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_width
    per_layer = attention + 3 * hidden * config["intermediate_size"] + 2 * hidden
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return Shape(layers * per_layer + embeddings + hidden, layers, kv_width, vocabulary, hidden)


def _check_data(spec: Spec) -> None:
    named = [(("data", "train"), spec.run.data.train)]
    if spec.run.validation:
        named += [(("validation", "data", key), path) for key, path in spec.run.validation.data.items()]
    for path, name in named:
        if spec.data_path(name) is None:
            what, hint = f"there is no data `{name}`", "Give a .jsonl or .parquet file or a folder that `datasets` saved."
            spec.mistakes.append(Mistake(what, spec.run_source.spot(path), hint))
