"""The `distflow` command: one file per verb, each with `HELP`, `add_arguments` and `main`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from distflow import __version__
from distflow.errors import DistflowError, did_you_mean
from distflow.launch import INVALID, refuse_foreign_packages

VERBS = ("demo", "validate", "probe", "plan", "run", "resume", "board", "faults", "inject", "scale", "set", "export",
         "evaluate", "nodes", "engines")


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; exit code 2 for mistakes in what the user wrote."""
    try:
        refuse_foreign_packages()  # verbs import them
    except DistflowError as error:
        print(error, file=sys.stderr)
        return INVALID
    parser = argparse.ArgumentParser(prog="distflow", description="RL post-training with no controller process.")
    parser.add_argument("--version", action="version", version=f"distflow {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of mistakes in the input too")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in VERBS:
        module = importlib.import_module(f"distflow.cli.{verb}")
        child = verbs.add_parser(verb, help=module.HELP, description=module.HELP)
        module.add_arguments(child)
        child.set_defaults(main=module.main)
    arguments = sys.argv[1:] if arguments is None else arguments
    if unknown := _unknown_verb(arguments):
        print(f"distflow has no command `{unknown}`. {did_you_mean(unknown, VERBS, 'Commands')}", file=sys.stderr)
        return INVALID
    options = parser.parse_args(arguments)
    try:
        return options.main(options)
    except DistflowError as error:
        if options.debug:
            raise
        print(error, file=sys.stderr)
        return INVALID
    except BrokenPipeError:  # the reader of our output has gone, as in `distflow nodes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def _unknown_verb(arguments: list[str]) -> str | None:
    """Return the word that stands where a verb belongs and is none. No option before the verb takes a value."""
    verb = next((word for word in arguments if not word.startswith("-")), None)
    return None if verb in VERBS else verb
