"""`distflow evaluate`: run the DAG `evaluate` on held-out problems, and report pass@k with confidence intervals."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import yaml
from pydantic import ValidationError

from distflow.cli.common import Verb, table
from distflow.cli.launcher import torchrun
from distflow.config.hub import fetch, fetched
from distflow.config.overrides import given_value
from distflow.config.removed_keys import read_older_keys
from distflow.config.run import Data
from distflow.config.shipped import find, find_yaml, on_hub
from distflow.config.yaml_source import dump, read
from distflow.contracts.functions import built_in
from distflow.errors import Diagnostic, InvalidInput, did_you_mean, quoted
from distflow.options import gpu_count
from distflow.telemetry.accuracy import interval
from distflow.telemetry.run_folder import choose, search_paths
from distflow.telemetry.run_reader import RunReader

_PROBLEM_LIMIT = 300.0
"""Seconds for the rewards of a problem's answers, which are all earned in one step. A call has the run's timeout."""
_CONVERSING = ("converse", "run_agent")
_OF_ROLE = ("generation", "dtype", "rollout")
_NOT_OF_DATA = ("train", "batch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN_OR_MODEL", help="a run's folder, as runs/grpo-1, or a model folder")
    parser.add_argument("--data", metavar="[NAME=]FILE", action="append", default=[],
                        help="problems; may be given several times. Default: what the run validates on")
    parser.add_argument("--samples", type=int, default=1, metavar="K",
                        help="answers to each problem: 1 takes the likeliest tokens; more are drawn at the role's "
                        "temperature, and give pass@k up to K")
    parser.add_argument("--role", help="which one, of a run that trained several")
    parser.add_argument("--run-file", "--run", metavar="FILE", dest="run", help="settings for a model folder")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides",
                        help="override one value, as roles.actor.generation.temperature=0.6")
    parser.add_argument("--ranks", type=int, metavar="N",
                        help="processes, one per GPU; default: all GPUs of this machine, or 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="runs", help="folder for each data set's answers and figures")
    parser.add_argument("--json", action="store_true", help="one JSON object a data set, and nothing else")


def main(options: argparse.Namespace) -> int:
    options.ranks = max(gpu_count(), 1) if options.ranks is None else options.ranks
    if options.samples < 1 or options.ranks < 1:
        raise InvalidInput("--samples and --ranks must be at least 1")
    model = subject(options.model, options.role, options.run)
    sets = dict(_named(text) for text in options.data) or model.validation
    if not sets:
        raise InvalidInput(f"{options.model} has no validation data. Name the problems:  --data test.jsonl")
    os.environ["PYTHONPATH"] = os.pathsep.join([*model.search, *filter(None, [os.environ.get("PYTHONPATH")])])
    results = []
    for name, path in sets.items():
        folder = choose(options.output, f"evaluate-{name}", None)
        with tempfile.TemporaryDirectory() as temporary:
            file, problems, left_out = _problems(path, _data(model, options.overrides), Path(temporary))
            if code := _answer(options, model, str(file), problems, folder):
                return code
        results.append({"data": name, "folder": str(folder), "problems": problems, "left_out": left_out,
                        **_figures(folder)})
    for result in results:
        print(json.dumps(result) if options.json else "\n".join(_report(result)))
    return 0


def _named(text: str) -> tuple[str, str]:
    name, separator, path = text.partition("=")
    return (name, path) if separator else (Path(text).stem, text)


def _data(model: EvaluationSubject, overrides: list[str]) -> Data:
    given = dict(model.data)
    for name, value in (text.split("=", 1) for text in overrides if text.startswith("data.") and "=" in text):
        given[name.removeprefix("data.")] = given_value(Data, (name.removeprefix("data."),), value,
                                                           f"--set {name}={value}")
    known = {name: given[name] for name in ("question", "answer", "tools", "columns", "images")
             if name in given}
    try:
        return Data(train={"": 1.0}, **known)
    except ValidationError as error:
        wrong = error.errors()[0]
        name = ".".join(map(str, wrong["loc"]))
        raise InvalidInput(f"`data.{name}` cannot be {wrong['input']!r}: {wrong['msg']}") from None


def _problems(path: str, data: Data, folder: Path) -> tuple[Path, int, int]:
    """Return the file of the problems, how many they are, and how many are left out since a field of them is empty, as
    validation leaves them out; then the file is a new one in `folder`."""
    from distflow.data.dataset import check_records, fields_of, open_records

    hub = on_hub(path, "data")
    found = fetch(hub) if hub else find(path, "data")
    if found is None:
        raise InvalidInput(f"there is no data `{path}`. Give a .jsonl or .parquet file, or a folder that `datasets` "
                           "saved.")
    records = open_records(found, data)
    empty = set(check_records(records, fields_of(data, data.columns)))
    if not empty:
        return found, len(records), 0
    if data.images:
        raise InvalidInput(Diagnostic(f"a field of {len(empty)} records is empty, and records with images cannot be "
                                      "left out", records.location(min(empty)), "Take them out of the data."))
    with (folder / "problems.jsonl").open("w", encoding="utf-8") as file:
        for index in (index for index in range(len(records)) if index not in empty):
            file.write(json.dumps(records.get([index])[0], default=str) + "\n")
    return folder / "problems.jsonl", len(records) - len(empty), len(empty)


def _answer(options: argparse.Namespace, model: EvaluationSubject, path: str, problems: int, folder: Path) -> int:
    dag = yaml.safe_load(find_yaml("evaluate", "", "DAG").read_text(encoding="utf-8"))
    dag["imports"], nodes = model.imports, dag["nodes"]
    nodes["rollout"] = {**nodes["rollout"], **model.rollout}
    nodes["rollout"]["with"]["group_size"] = nodes["tally"]["with"]["samples"] = options.samples
    if model.reward is None:
        del nodes["reward"]
        nodes["tally"] |= {"dependencies": ["rollout"], "reads": {"rewards": "environment_rewards"}}
    else:
        limit = max(model.reward.get("limit", 0.0), _PROBLEM_LIMIT * problems)
        nodes["reward"]["with"] = {**model.reward, "limit": limit}
    role = dict(model.role)
    if options.samples == 1:
        role["generation"] = {**role.get("generation", {}), "temperature": 0.0}
    run = {"steps": 1, "seed": options.seed, "ranks": options.ranks, "output": options.output,
           "data": {**model.data, "train": str(Path(path).absolute()), "batch": problems},
           "roles": {"actor": role}, "layouts": {"tally": {"dp": 1}}, "samples": problems * options.samples,
           "checkpoint": {"every": 0}}
    with tempfile.TemporaryDirectory() as temporary:
        for kind, content in (("dag", dag), ("run", run)):
            Path(temporary, f"{kind}.yaml").write_text(dump(content), encoding="utf-8")
        changes = [part for text in options.overrides for part in ("--set", text)]
        return torchrun(options.ranks, ["--dag", f"{temporary}/dag.yaml", "--run-file", f"{temporary}/run.yaml",
                                        "--name", folder.name, *changes], quiet=options.json)


def _figures(folder: Path) -> dict[str, Any]:
    """Return each figure with its confidence interval and the number of problems behind it; and what a right answer
    earns at least, beside the highest reward."""
    values = RunReader(folder).rows("metrics")[-1]
    settings = read(folder / "dag.yaml").data["nodes"]["tally"]["with"]
    threshold = settings.get("threshold", built_in()["tally"].settings["threshold"].value)
    found: dict[str, Any] = {}
    for name in (name for name in values if name.startswith("evaluation/") and name.count("/") == 1):
        problems = int(values[f"{name}/problems"])
        figure = {"value": values[name], "problems": problems}
        if values[name] >= 0 and values[f"{name}/squared"] <= values[name] + 1e-9:
            figure["low"], figure["high"] = interval(values[name], values[f"{name}/squared"], problems)
        found[name.partition("/")[2]] = figure
    return {"figures": found, "threshold": threshold, "highest_reward": values.get("reward/max")}


def _report(result: dict[str, Any]) -> Iterator[str]:
    left_out = f" ({result['left_out']} with an empty field left out)" if result["left_out"] else ""
    yield f"\n{result['data']}: {result['problems']} problems{left_out}, answers in {result['folder']}/samples.jsonl"
    rows = []
    for name, figure in sorted(result["figures"].items(), key=lambda item: (len(item[0]), item[0])):
        between = f"{figure['low']:.3f} to {figure['high']:.3f}" if "low" in figure else ""
        missing = result["problems"] - figure["problems"]
        rows.append((name, f"{figure['value']:.3f}", between, f"without {missing} whose reward failed" * bool(missing)))
    yield from table(rows)
    yield "  ranges: 95% confidence, problems being the sample"
    least, most = result["threshold"], result["highest_reward"]
    if most and numpy.float32(least) != numpy.float32(most):  # as `tally` compares
        shown = numpy.float32(most)  # its text is the shortest one of this number
        another = f"; to count from another reward on:  --set nodes.tally.with.threshold={shown}" if most > 0 else ""
        yield f"  pass@k counts answers that earn {least:g} or more, and the best earned {shown}{another}"


@dataclass(frozen=True)
class EvaluationSubject:
    """What is evaluated: a model, and settings of its training: parts `role` and `data` of a run file, the `score`
    node's `reward` (None: that of the environment), `validation` files by name, the folders `search` of `imports`, and
    `function` and `with` of a `rollout` that converses."""

    role: dict[str, Any]
    data: dict[str, Any] = field(default_factory=dict)
    reward: dict[str, Any] | None = field(default_factory=dict)
    validation: dict[str, str] = field(default_factory=dict)
    imports: list[str] = field(default_factory=list)
    search: list[str] = field(default_factory=list)
    rollout: dict[str, Any] = field(default_factory=dict)


def subject(name: str, role: str | None, run: str | None) -> EvaluationSubject:
    """Return the model in a run's folder, or in a model folder with the run file `run`. Raises InvalidInput."""
    folder = Path(name)
    if (folder / "launch.json").is_file():
        return _of_run(folder, role)
    hub = on_hub(name, "models")
    found = fetched(hub, weights=True) if hub else find(name, "models")
    if not isinstance(found, Path) or not (found / "config.json").is_file():
        inner = f"Instead:  {folder / 'model'}" if (folder / "model/config.json").is_file() else ""
        raise InvalidInput(Diagnostic(f"{name} is neither the folder of a run (with launch.json) nor of a model (with "
                                      f"config.json){f', and {found}' if hub else ''}", None, inner))
    file = find_yaml(run, "runs", "run file") if run else None
    settings = read(file, run).data if file else {}
    read_older_keys(settings)
    validation, beside = settings.get("validation") or {}, file.resolve().parent if file else None
    sets = {name: str(find(path, "data", beside) or path) for name, path in validation.get("data", {}).items()}
    reward = {"reward": validation["reward"]} if "reward" in validation else {}
    role_settings = _role_settings(settings.get("roles", {}).get("actor", {}), found)
    return EvaluationSubject(role_settings, _data_settings(settings), reward, sets,
                             search=[str(beside)] if beside else [])


def _of_run(folder: Path, role: str | None) -> EvaluationSubject:
    run, dag = (read(folder / f"{kind}.yaml").data for kind in ("run", "dag"))
    read_older_keys(run)
    if "roles" not in run or not {"nodes", "roles"} <= dag.keys():
        raise InvalidInput(f"{folder}: run.yaml or dag.yaml is damaged: it lacks the sections that every run writes")
    trained = [name for name, item in dag["roles"].items() if item["trained"] and item.get("head", "lm") == "lm"]
    if role is not None and role not in trained:
        raise InvalidInput(f"run {folder} trained no role `{role}` that answers. "
                           f"{did_you_mean(role, trained, 'It trained')}")
    if role is None and len(trained) != 1:
        several = ", ".join(trained) or "no role that answers"
        raise InvalidInput(f"run {folder} trained {several}. Name one:  --role ROLE")
    role = role or str(trained[0])
    model = next((path for path in (folder / f"model-{role}", folder / "model") if path.is_dir()), None)
    if model is None:
        raise InvalidInput(f"run {folder} has not written its model yet. Write that of its newest checkpoint:  "
                           f"distflow export {quoted(folder)}")
    validation, imports = run.get("validation") or {}, dag.get("imports", [])
    scores = [node for node in dag["nodes"].values()
              if node["function"] == "score"
              or (node["function"] is None and (node["type"], node["role"]) == ("COMPUTE", "reward"))]
    reward = {"reward": validation["reward"]} if validation else scores[0]["with"] if scores else {}
    rollout = next(({"function": node["function"], "with": node["with"]} for node in dag["nodes"].values()
                    if node["function"] in _CONVERSING and node["role"] == role), {})
    if rollout:  # its validation has asked for single turns
        reward = scores[0]["with"] if scores else None
    role_settings = _role_settings(_inherited_settings(run, dag, role), model)
    return EvaluationSubject(role_settings, _data_settings(run), reward, validation.get("data", {}), imports,
                             search_paths(folder), rollout)


def _inherited_settings(run: dict[str, Any], dag: dict[str, Any], role: str) -> dict[str, Any]:
    """Return the role's part of the run file, or that of the role it copies: see `Spec.settings_of`."""
    name: str | None = role
    while name is not None and name not in run["roles"]:
        name = dag["roles"][name]["copy_of"]
    return run["roles"].get(name, {})


def _role_settings(settings: dict[str, Any], model: Path) -> dict[str, Any]:
    return {"model": str(model.absolute()), **{key: settings[key] for key in _OF_ROLE if key in settings}}


def _data_settings(run: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in run.get("data", {}).items() if key not in _NOT_OF_DATA}


VERBS = {"evaluate": Verb("pass@k and mean reward of a run's model, or of a model folder, with confidence intervals",
                          add_arguments, main)}
