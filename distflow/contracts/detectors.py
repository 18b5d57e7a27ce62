"""Checks `robust.detectors` of the run file: by the rules of learning, and by the functions under `@detector`, whose
source is read."""

from __future__ import annotations

import ast

from distflow.config.spec import Spec
from distflow.contracts.definitions import definitions
from distflow.contracts.modules import body_of, module_file
from distflow.contracts.read import read_contract
from distflow.contracts.settings import check_given
from distflow.errors import Diagnostic, InvalidInput, did_you_mean

SHIPPED = "distflow.recovery.detectors"
TABLE = "distflow.telemetry.learning_table"
LEARNING = tuple(f"distflow.telemetry.learning_{name}" for name in ("table", "causes", "curves"))


def learning_detectors() -> set[str]:
    """Return the detectors of learning: functions under `@detector`, and those that the table's lines begin with."""
    path = module_file(TABLE)
    calls = [each for item in (body_of(TABLE, path) if path else ()) for each in ast.walk(item)
             if isinstance(each, ast.Call) and ast.unparse(each.func) == "Reading"]
    return {each.name for module in LEARNING for each in definitions(module, "detector")} | \
        {ast.literal_eval(call.args[0]) for call in calls}


def check_detectors(spec: Spec) -> list[Diagnostic]:
    if not spec.run.robust.detectors:
        return []
    known = {each.name: each for module in (SHIPPED, *spec.dag.imports) for each in definitions(module, "detector")}
    rules = learning_detectors()
    mistakes: list[Diagnostic] = []
    for name, values in spec.run.robust.detectors.items():
        path = ("robust", "detectors", name)
        if (name in rules) != isinstance(values, str) and name in (*known, *rules):
            right = "stop   or  note, off, restart" if name in rules else "{SETTING: VALUE}"
            mistakes.append(Diagnostic(f"detector `{name}` takes {'a word' if name in rules else 'settings'}",
                                       spec.run_source.location(path), f"detectors: {{{name}: {right}}}"))
            continue
        if isinstance(values, str) and name in rules:
            continue
        if name not in known or isinstance(values, str):
            near = did_you_mean(name, (*known, *sorted(rules)), "Detectors")
            hint = f"{near}\nOne of your own stands in a module that the DAG imports, under @detector."
            where = spec.run_source.location(path, key=True)
            mistakes.append(Diagnostic(f"there is no detector `{name}`", where, hint))
            continue
        try:
            settings = read_contract("detector", known[name]).settings
        except InvalidInput as error:
            mistakes += error.mistakes
            continue
        wrong = check_given(values, settings, f"detector `{name}`", f"detectors: {{{name}: {{SETTING}}}}")
        mistakes += [Diagnostic(each.what, spec.run_source.location((*path, *each.path), each.key), each.hint)
                     for each in wrong]
    return mistakes
