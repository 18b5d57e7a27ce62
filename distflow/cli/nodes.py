"""`distflow nodes`: the functions that a DAG can use, with what they read, write and accept."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from distflow.schema.bounds import in_words
from distflow.schema.contract import REQUIRED, Contract, built_in
from distflow.schema.errors import InvalidInput, did_you_mean
from distflow.schema.spec import load

HELP = "list the functions that nodes can run: what they read, write and accept"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="show only this function")
    parser.add_argument("--dag", metavar="FILE", help="list the functions of this DAG's imports too")


def main(options: argparse.Namespace) -> int:
    contracts = load(options.dag).functions if options.dag else built_in()
    chosen = [contract for name, contract in sorted(contracts.items()) if options.name in (None, name)]
    if not chosen:
        raise InvalidInput(f"there is no function `{options.name}`. {did_you_mean(options.name, contracts)}")
    print("\n\n".join("\n".join(_describe(contract)) for contract in chosen))
    return 0


def _describe(contract: Contract) -> Iterator[str]:
    head = ", head: value" if contract.marks.head == "value" else ""
    yield f"{contract.name}  ({contract.marks.type}{head}, {contract.module})"
    if contract.summary:
        yield f"  {contract.summary}"
    reads = [f"{read.name}{f': {read.form}' if read.form else ''}{' (optional)' * read.optional}"
             for read in contract.reads]
    yield f"  reads   {', '.join(reads) or 'nothing'}"
    forms = contract.returns or ("",) * len(contract.marks.writes)
    writes = [f"{name}{f': {form}' if form else ''}" for name, form in zip(contract.marks.writes, forms)]
    yield f"  writes  {', '.join(writes) or 'nothing'}"
    for setting in contract.settings.values():
        default = "required" if setting.default == REQUIRED else f"default {setting.default}"
        other, values = contract.marks.only_with.get(setting.name, ("", ()))
        if setting.name in contract.marks.belongs_to:
            other, *values = contract.marks.belongs_to[setting.name]
        allowed = f"only with `{other}: {' | '.join(map(str, values))}`" if other else ""
        more = [in_words(setting.bounds) if setting.bounds else "", allowed]
        said = "; ".join(part for part in (default, *more) if part)
        yield f"  with    {setting.name}: {setting.annotation or 'any'}  ({said})"
