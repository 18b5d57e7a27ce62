"""The `distflow` command: parses the command line and runs one verb. `MODULES` says which module has which verb."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from distflow import __version__
from distflow.config.overrides import joined
from distflow.config.run import Run
from distflow.errors import DistflowError, did_you_mean, listing, quoted
from distflow.launch import INVALID, refuse_foreign_packages
from distflow.telemetry.events import show
from distflow.telemetry.screen import guarded

MODULES = {"demo": "demo", "validate": "runs", "probe": "probe", "plan": "plan",
           "run": "runs", "resume": "runs",
           "watch": "look", "why": "look", "report": "look",
           "faults": "running_job", "inject": "running_job", "scale": "running_job", "set": "running_job",
           "export": "runs", "evaluate": "evaluate", "nodes": "catalog", "engines": "catalog", "new": "author",
           "convert": "convert", "schema": "author"}
"""Module of `distflow.cli` that describes each verb in its `VERBS`, in the order of the help."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="distflow", description="RL post-training with no controller process.")
    parser.add_argument("--version", action="version", version=f"distflow {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of mistakes in the input too")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, module in MODULES.items():
        verb = importlib.import_module(f"distflow.cli.{module}").VERBS[name]
        child = verbs.add_parser(name, help=verb.help, description=verb.help)
        verb.add_arguments(child)
        child.set_defaults(main=verb.main)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; exit code 2 for mistakes in what the user wrote."""
    with guarded():
        return _main(sys.argv[1:] if arguments is None else arguments)


def _main(arguments: list[str]) -> int:
    try:
        refuse_foreign_packages()  # verbs import them
    except DistflowError as error:
        show(str(error), sys.stderr)
        return INVALID
    parser = make_parser()
    arguments = joined(arguments)
    verb = next((word for word in arguments if not word.startswith("-")), None)  # no option before it takes a value
    if verb is not None and verb not in MODULES:
        meant = {"check": "validate", "train": "run", "init": "new", "status": "watch", "doctor": "engines"}.get(verb)
        hint = f"Did you mean `{meant}`? {listing(MODULES, 'Commands')}" if meant else \
            did_you_mean(verb, MODULES, "Commands")
        show(f"distflow has no command `{verb}`. {hint}", sys.stderr)
        return INVALID
    options, left = parser.parse_known_args(arguments)
    if left:
        show(_unknown(left, options), sys.stderr)
        return INVALID
    try:
        return options.main(options)
    except DistflowError as error:
        if options.debug:
            raise
        show(str(error), sys.stderr)
        return INVALID
    except BrokenPipeError:  # the reader of our output has gone, as in `distflow nodes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def _unknown(left: list[str], options: argparse.Namespace) -> str:
    """Return what is wrong with arguments that a verb does not take, and what was probably meant."""
    first, overrides = left[0], getattr(options, "overrides", None)
    name, _, value = first.lstrip("-").partition("=")
    key = name.replace("-", "_")
    what = f"distflow {options.verb} takes no `{first}`."
    if options.verb == "resume" and key in ("dag", "run", "run_file"):
        return f"{what} A run continues with the DAG and the run file that its folder has.\n" \
               "Change values of them:  distflow resume RUN --set KEY=VALUE  , or begin another run with its model:  " \
               "distflow run DAG --run FILE --set roles.actor.model=RUN/model"
    if first.startswith("--") and overrides is not None and (key in Run.model_fields or "." in key):
        value = value or (left[1] if len(left) > 1 else "VALUE")
        return f"{what}\nInstead:  --set {quoted(f'{key}={value}')}"
    if overrides and not overrides[-1].partition("=")[2]:
        meant = f"{overrides[-1].removesuffix('=')}={first}"
        return f"{what}\nInstead:  --set {quoted(meant)}"
    if Path(first).suffix in (".yaml", ".yml") and getattr(options, "run", "") is None:
        return f"{what}\nInstead:  --run {quoted(first)}"
    return f"{what} What it takes:  distflow {options.verb} --help"
