"""Checks `robust.detectors` of the run file against the functions under `@detector`, whose source is read."""

from __future__ import annotations

from distflow.config.spec import Spec
from distflow.contracts.modules import definitions
from distflow.contracts.settings import check_given
from distflow.contracts.signature import read_signature
from distflow.errors import Diagnostic, InvalidInput, did_you_mean

SHIPPED = "distflow.recovery.detectors"


def check_detectors(spec: Spec) -> list[Diagnostic]:
    if not spec.run.robust.detectors:
        return []
    known = {each.name: each for module in (SHIPPED, *spec.dag.imports) for each in definitions(module, "detector")}
    mistakes: list[Diagnostic] = []
    for name, values in spec.run.robust.detectors.items():
        path = ("robust", "detectors", name)
        if name not in known:
            hint = (f"{did_you_mean(name, known, 'Detectors')}\nOne of your own stands in a module that the DAG "
                    "imports, under @detector.")
            where = spec.run_source.location(path, key=True)
            mistakes.append(Diagnostic(f"there is no detector `{name}`", where, hint))
            continue
        try:
            settings = read_signature(known[name]).settings
        except InvalidInput as error:
            mistakes += error.mistakes
            continue
        wrong = check_given(values, settings, f"detector `{name}`", f"detectors: {{{name}: {{SETTING}}}}")
        mistakes += [Diagnostic(each.what, spec.run_source.location((*path, *each.path), each.key), each.hint)
                     for each in wrong]
    return mistakes
