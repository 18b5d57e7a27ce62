"""Loads and checks everything that a plan is made from: DAG, run, cluster, overrides, contracts of the functions."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from distflow.config.cluster import Cluster, check_cluster
from distflow.config.command_line import given_as
from distflow.config.dag import Dag
from distflow.config.downloads import half_download, narrow_weight
from distflow.config.extras import file_system_line
from distflow.config.families import why_contradictory, why_refused
from distflow.config.freeze import check_freeze
from distflow.config.hub import data_set_line, fetched
from distflow.config.loggers import lack_of, loggers_of
from distflow.config.model_code import needs_code, refusal, settings_in
from distflow.config.models import (
    check_engines,
    check_lora,
    check_tokenizers,
)
from distflow.config.overrides import override
from distflow.config.removed_keys import read_older_keys
from distflow.config.run import Run
from distflow.config.shipped import SHIPPED, find, find_yaml, nearest_file, on_hub
from distflow.config.sizes import read_config, shape_of, shape_of_embedded
from distflow.config.spec import Spec
from distflow.config.templates import check_chat_options
from distflow.config.yaml_source import Document, YamlSource, check, read
from distflow.contracts.agents import check_agents
from distflow.contracts.detectors import check_detectors
from distflow.contracts.environments import check_environments
from distflow.contracts.functions import find_functions
from distflow.contracts.losses import check_losses, qualify_losses
from distflow.contracts.rewards import check_rewards
from distflow.contracts.templates import check_templates
from distflow.errors import Diagnostic, InvalidInput, quoted, shown
from distflow.plan import SOURCE

_OTHER_MODEL = "Take a decoder that completes texts, as Qwen/Qwen3-0.6B: one that `AutoModelForCausalLM` loads."
_ENCODER_REWARD = " A classifier of another kind gives rewards as a reward function: see examples/encoder_reward."
_COUNTED = 2**26  # bytes up to which the records of a file are counted while its name is checked
DEFAULT_RUN = "embedded"


def _own_keys(kind: type[Document], *others: type[Document]) -> frozenset[str]:
    return frozenset(kind.model_fields).difference(*(other.model_fields for other in others))


_KINDS = {"DAG": _own_keys(Dag, Run, Cluster) - {"name"}, "run file": _own_keys(Run, Dag, Cluster),
          "cluster": _own_keys(Cluster, Dag, Run)}
"""Top-level keys that only files of this kind have."""
T = TypeVar("T")


def load(dag: str, run: str | None = None, overrides: list[str] | None = None, cluster: str | None = None) -> Spec:
    """Read and check the files. Raises InvalidInput with every mistake in them."""
    spec = load_for_planning(dag, run, overrides, cluster)
    if spec.mistakes:
        raise InvalidInput(spec.mistakes)
    return spec


def load_for_planning(dag: str, run: str | None = None, overrides: list[str] | None = None,
                      cluster: str | None = None) -> Spec:
    """Read and check the files. Mistakes that leave enough are kept in `Spec.mistakes`: the planner adds its own.
    Raises InvalidInput if a file is missing, not YAML, or lacks what nothing can replace."""
    mistakes: list[Diagnostic] = []

    def source(name: str, folder: str, kind: str) -> YamlSource | None:
        path = _try(mistakes, lambda: find_yaml(name, folder, kind))
        return path and _try(mistakes, lambda: read(path, shown(path)))

    dag_source = source(dag, "", "DAG")
    run_source = source(run or default_run(dag), "runs", "run file")
    cluster_source = source(cluster, "clusters", "cluster") if cluster else None
    if dag_source is None or run_source is None:
        raise InvalidInput(mistakes)
    if wrong := _wrong_kinds({"DAG": dag_source, "run file": run_source, "cluster": cluster_source}, dag):
        raise InvalidInput([*mistakes, *wrong])
    for text in overrides or ():
        _try(mistakes, lambda text=text: override(dag_source, run_source, text))
    for each in (dag_source, run_source, cluster_source):
        read_older_keys(each and each.data)
    dag_object, of_dag = check(Dag, dag_source)
    run_object, of_run = check(Run, run_source)
    cluster_object, of_cluster = check(Cluster, cluster_source) if cluster_source else (Cluster(), [])
    mistakes += of_dag + of_run + of_cluster
    mistakes += check_cluster(cluster_object, cluster_source) if cluster_object and cluster_source else []
    if dag_object is None or run_object is None:
        raise InvalidInput(mistakes)
    if unusable := _check_names(dag_object, dag_source):
        raise InvalidInput([*mistakes, *unusable])
    functions = find_functions(dag_object, dag_source, run_source.file, mistakes)
    spec = Spec(dag_object, run_object, dag_source, run_source, functions, cluster_object or Cluster(),
                mistakes=mistakes, cluster_source=cluster_source)
    _check_models(spec)
    _check_data(spec)
    qualify_losses(spec)
    mistakes += _unset_keys(spec)
    for find_mistakes in (check_engines, check_tokenizers, check_lora, check_freeze, check_chat_options, check_rewards,
                          check_environments, check_agents, check_losses, check_templates, check_detectors):
        mistakes += find_mistakes(spec)
    return spec


def default_run(dag: str) -> str:
    """Return the shipped run of this DAG, if its data or roles need one, else the one for all others."""
    own = f"{DEFAULT_RUN}_{Path(dag).stem}"
    return own if (SHIPPED / "runs" / f"{own}.yaml").is_file() else DEFAULT_RUN


def _try(mistakes: list[Diagnostic], act: Callable[[], T]) -> T | None:
    try:
        return act()
    except InvalidInput as error:
        mistakes += error.mistakes
        return None


def reload(folder: Path, overrides: list[str] | None = None, cluster: str | None = None) -> Spec:
    """Load the spec of a finished or interrupted run from its folder, as `load_for_planning` does."""
    return load_for_planning(str(folder / "dag.yaml"), str(folder / "run.yaml"), overrides, cluster)


def _wrong_kinds(sources: dict[str, YamlSource | None], dag: str) -> list[Diagnostic]:
    """Return a mistake for each file that is of another kind than the one it was given as, by its top-level keys."""
    mistakes, swapped = [], "grpo"
    for kind, source in [*sources.items()][::-1]:  # the DAG comes first, and is last
        if source is None:
            continue
        keys = {other: [key for key in source.data if key in own] for other, own in _KINDS.items()}
        likely = max(keys, key=lambda other: len(keys[other]))
        if not keys[kind] and keys[likely]:
            swapped = source.file if likely == "DAG" else swapped
            has = ", ".join(f"`{key}`" for key in keys[likely])
            hint = f"Instead:  {given_as(likely, source.file, kind, swapped)}"
            if kind == "DAG" and (SHIPPED / f"{dag}.yaml").is_file():
                hint = "A file here comes before the shipped DAG of its name. Rename it:  mv " \
                       f"{dag}.yaml {dag}_{likely.split()[0]}.yaml"
            mistakes.append(Diagnostic(f"this is a {likely}, given as the {kind}: it has {has}",
                                       source.location((keys[likely][0],), key=True), hint))
    return mistakes[::-1]


def _check_names(dag: Dag, source: YamlSource) -> list[Diagnostic]:
    mistakes = []
    for kind, names in (("nodes", dag.nodes), ("roles", dag.roles)):
        for name in names:
            where = source.location((kind, name), key=True)
            if not name.strip():
                what = f"a {kind[:-1]} must have a name, not {name!r}"
                mistakes.append(Diagnostic(what, where, "Name it after what it does, as  reference: {…}"))
            elif kind == "nodes" and name == SOURCE:
                what = f"a node cannot be called `{SOURCE}`: that is the name of the dataset, whose columns nodes read"
                mistakes.append(Diagnostic(what, where, "Give it another name, here and in `dependencies`."))
    return mistakes


def _check_models(spec: Spec) -> None:
    for role, settings in spec.run.roles.items():
        model = settings.model
        if model is None or role not in spec.dag.roles:
            continue
        if model.path is None:
            if shape := shape_of_embedded(model):
                spec.shapes[role] = shape
            continue
        what, hint, partly = _check_folder(spec, role, model.path)
        if what:
            where = spec.run_source.location(("roles", role, "model"))
            spec.mistakes.append(Diagnostic(f"role `{role}`: {what}", where, hint, of_machine=partly))


_ROUNDED = re.compile(r"bnb|[48]-?bit|gptq|awq", re.IGNORECASE)
"""What names of quantized models have."""


def _of_variable(path: str, key: str) -> str:
    """Return what to write for a path with a variable of the environment; "" for any other."""
    return "Variables of the environment are not read in a file. A shell reads them on the command line:  " \
        f'--set "{key}={path}"' if "$" in path else ""


def _check_folder(spec: Spec, role: str, path: str) -> tuple[str, str, bool]:
    """Add the shape of the model in a folder to the spec. Return what is wrong, the remedy, and whether only files are
    missing that another machine may have; else empty texts."""
    remedy = ("Give the path of a folder in Hugging Face's format (config.json, *.safetensors, tokenizer.json), or the "
              "name of a model on its hub, as Qwen/Qwen3-0.6B.")
    folder, hub = find(path, "models", spec.folder), on_hub(path, "models", spec.folder)
    if folder is None:
        remedy = _of_variable(path, f"roles.{role}.model") or remedy
        return f"there is no model folder `{path}`" + (f", and {fetched(hub)}" if hub else ""), remedy, False
    has_config = (folder / "config.json").is_file()
    if (folder / "adapter_config.json").is_file():  # which transformers would load with the model
        hint = _merging(folder)
        whole = has_config and not half_download(folder, weights=True)
        return (f"`{shown(folder)}` has an adapter beside a model, which may have it in its weights already",
                f"If it has, take adapter_config.json out of the folder.\n{hint}", False) if whole else \
            (f"`{shown(folder)}` has an adapter, and not the model that it belongs to", hint, False)
    if not has_config:
        run = next((each for each in (folder, *folder.parents[:2]) if (each / "plan.json").is_file()), folder)
        models = [each for place in (folder, run) for each in sorted(place.glob("model*"))
                  if (each / "config.json").is_file()]
        if run != folder or models:
            remedy = f"Instead:  {shown(models[0])}" if models else "A checkpoint is no model. This writes one:  " \
                f"distflow export {quoted(shown(run))}"
        return f"`{shown(folder)}` is no model folder: it has no config.json", remedy, False
    if needs_code(folder):
        return *refusal(folder, f"`{shown(folder)}`"), False
    try:
        content = read_config(folder / "config.json")
        if why := why_refused(content):
            other = _OTHER_MODEL + _ENCODER_REWARD * (spec.dag.roles[role].head == "value")
            return f"`{shown(folder)}` holds no causal language model: {why}", other, False
        what, hint = why_contradictory(content)
        if what:
            return f"{shown(folder / 'config.json')} says two things: {what}", hint, False
        if shape := shape_of(content):
            spec.shapes[role] = shape
        if quantized := content.get("quantization_config") or content.get("compression_config"):
            return _quantized(folder, quantized)
    except ValueError as error:
        return f"{shown(folder / 'config.json')} is not the configuration of a language model: {error}", "", False
    if lack := half_download(folder, weights=not hub):  # which are downloaded later
        return f"`{shown(folder)}` is no whole model folder: {lack}", \
            f"Download what is missing; in a clone:  git lfs pull   {remedy}", True
    if narrow := narrow_weight(folder):
        return _quantized(folder, narrow)
    return "", "", False


_TIED = re.compile(r"\b(lm_head|embed_out|embed_tokens|embed_in|wte|word_embeddings)\b")
"""Names of heads and embeddings, which may be one tensor."""
_UNTIE = "h = m.get_output_embeddings(); h = getattr(h, 'base_layer', h); h.weight = type(h.weight)(h.weight.clone(" \
         ")); m.config.tie_word_embeddings = False; "


def _merging(folder: Path) -> str:
    """Return the line that makes a whole model of an adapter. One of a head that is the embeddings is merged into a
    copy: peft would merge it into both (peft#2777)."""
    adapter = settings_in(folder / "adapter_config.json")
    base, classifier = str(adapter.get("base_model_name_or_path") or ""), adapter.get("task_type") == "SEQ_CLS"
    kind, labels = ("SequenceClassification", ", num_labels=1") if classifier else ("CausalLM", "")
    load = f"peft.AutoPeftModelFor{kind}.from_pretrained({str(folder)!r}{labels}, dtype='float32')"
    untie = _UNTIE if _TIED.search(str(adapter.get("target_modules"))) and not classifier else ""
    here = not base or Path(base).exists() or on_hub(base, "models")
    first = "" if here and not _ROUNDED.search(base) else \
        f"It names the model `{base}`, which is {'quantized' if here else 'not here'}. Write the whole one's in " \
        f"{shown(folder / 'adapter_config.json')}, as `base_model_name_or_path`.\n"
    return f"{first}Merge both, and copy the tokenizer's files:  python -c \"import peft; m = {load}; {untie}" \
           "m.merge_and_unload().save_pretrained('merged')\""


def _quantized(folder: Path, how: Any) -> tuple[str, str, bool]:
    """Return why quantized weights are refused: engines would compute with them as if they were the weights."""
    method = f"quant_method: {how.get('quant_method')}" if isinstance(how, dict) else how
    return (f"`{shown(folder)}` has quantized weights ({method}), and training needs them whole",
            "Take the model that was quantized, or write it with whole weights by transformers, if it dequantizes "
            "this method:  model.dequantize().save_pretrained(…)", True)


def _unset_keys(spec: Spec) -> list[Diagnostic]:
    """Return a mistake for each key and package that nodes, loggers and the object store lack on this machine."""
    named = [(node, settings.settings.get("key_variable")) for node, settings in spec.dag.nodes.items()]
    logs = loggers_of(spec.run.log) if os.environ.get("RANK", "0") == "0" else {}  # of the ranks the first logs
    loggers = [lack_of(name, settings) for name, settings in logs.items()]
    to = spec.run.checkpoint.to
    stores = [file_system_line(to)] if to and os.environ.get("RANK", "0") == "0" else []
    return [Diagnostic(what, spec.run_source.location(("log",)), hint, of_machine=True)
            for what, hint in loggers if what] + [
            Diagnostic("`checkpoint.to` needs a package that is not installed",
                       spec.run_source.location(("checkpoint", "to")), f"Install it:  {line}", of_machine=True)
            for line in stores if line] + [
            Diagnostic(f"node `{node}` takes its key from the environment variable {key}, which is not set",
                       spec.dag_source.location(("nodes", node, "with", "key_variable")), f"export {key}=…",
                       of_machine=True)
            for node, key in named if isinstance(key, str) and not os.environ.get(key)]


def _records(file: Path | None) -> int | None:
    """Return the number of a file's lines; None of a large one, and of one in another form."""
    if file is None or not file.is_file() or file.suffix != ".jsonl" or file.stat().st_size > _COUNTED:
        return None
    return file.read_bytes().count(b"\n") + 1


def _check_data(spec: Spec) -> None:
    named = [(("data", "train"), name) for name in spec.run.data.train]
    if spec.run.validation:
        named += [(("validation", "data", key), path) for key, path in spec.run.validation.data.items()]
    folders, counts = set[Path](), list[int | None]()
    for path, name in named:
        found, hub = spec.data_path(name), on_hub(name, "data", spec.folder)
        if found is None:
            what = str(fetched(hub)) if hub else f"there is no data `{name}`"
            hint = "Give a .jsonl, .json, .csv or .parquet file, a folder that `datasets` saved, or a file on the " \
                   "Hugging Face hub, as hf://datasets/openai/gsm8k/main/train-00000-of-00001.parquet"
            hint = _of_variable(name, ".".join(path)) or hint
            meant = nearest_file(name, "data", spec.folder) if not hub else None
            hint = f"Did you mean `{meant}`?\n{hint}" if meant else data_set_line(name, spec.folder) or hint
            spec.mistakes.append(Diagnostic(what, spec.run_source.location(path), hint, of_machine=True))
        folders |= {found.parent} if found and path == ("data", "train") else set()
        counts += [_records(found)] if path[0] == "validation" else []
    if spec.run.validation and all(counts):
        spec.validated = spec.run.validation.samples * max(filter(None, counts), default=0)
    if spec.run.data.images and len(folders) > 1:
        what = "`data.images` names files beside the data, and `train` has files of several folders"
        spec.mistakes.append(Diagnostic(what, spec.run_source.location(("data", "train")), "Put them into one folder."))
    blind = next((role for role, shape in spec.shapes.items() if not shape.token_pixels), None)
    if spec.run.data.images and blind:
        what = f"`data.images` asks for images, but the model of role `{blind}` takes none"
        hint = "Take `images` out, or give the role a vision-language model, as those of the Qwen-VL family."
        spec.mistakes.append(Diagnostic(what, spec.run_source.location(("data", "images")), hint))
