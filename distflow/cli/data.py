"""`distflow data`: what a run trains and validates on, and which questions of the two are the same, or nearly so."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from distflow.cli.common import Verb, add_dag_arguments, load_and_plan, table
from distflow.config.load import Spec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dag_arguments(parser, of_run=False)
    parser.set_defaults(plan=None)


def main(options: argparse.Namespace) -> int:
    for line in _described(load_and_plan(options, obey=False)[0]):
        print(line, flush=True)
    return 0


def _described(spec: Spec) -> Iterator[str]:
    from distflow.data.checks import open_validation_sets
    from distflow.data.dataset import filters_of, open_training_sets
    from distflow.data.duplicates import NEAR, overlaps, repeated

    field, turns = spec.run.data.question, spec.run.data.turns
    training, tested = open_training_sets(spec.run.data, spec.data_path), open_validation_sets(spec)
    rows = [["training set", "records", "share of prompts", "repeated questions"]]
    rows += [[name, f"{len(records):,}", f"{count / sum(turns):.1%}", f"{repeated(records, field):,}"]
             for (name, records), count in zip(training.items(), turns)]
    yield from table(rows)
    for name, found in ((name, filters_of(records)) for name, records in training.items()):
        if found:
            yield f"{name}: {len(found):,} of {len(found.records):,} records are kept; {found.describe()}"
    for name, other, found in overlaps(training, tested, field):
        yield (f"\n{other} ({len(tested[other]):,} questions): {found.exact:,} are in {name}, and {found.near:,} "
               f"others nearly so (at least {NEAR:.0%} of their runs of eight letters are the same)")
        for here, there in found.examples:
            yield f"  {tested[other].location(there)}  {_shown(tested[other].get([there])[0][field])}"
            yield f"  {training[name].location(here)}  {_shown(training[name].get([here])[0][field])}"


def _shown(question: object) -> str:
    text = " ".join(str(question).split())
    return text if len(text) <= 100 else f"{text[:99]}…"


VERBS = {"data": Verb("say what a run trains and validates on, what filters drop, and which validation questions are "
                      "in the training data, equal or nearly so", add_arguments, main)}
