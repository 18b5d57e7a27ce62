"""`distflow export`: the models of a run's newest checkpoint, as Hugging Face folders."""

from __future__ import annotations

import argparse
from pathlib import Path

from distflow.cli.common import add_ranks
from distflow.cli.launcher import torchrun
from distflow.launch import load_spec
from planners import plan

HELP = "write the models of a run's newest checkpoint as Hugging Face folders"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("resume", metavar="RUN", help="the run's folder, as runs/grpo-1")
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="where to; default: the run's own folder")
    add_ranks(parser)
    parser.set_defaults(overrides=[])


def main(options: argparse.Namespace) -> int:
    ranks = options.ranks or 1
    options.overrides = ["mode=sync"]  # whoever samples has no model of its own to write
    plan(load_spec(options), ranks)
    folder = Path(options.folder or options.resume)
    code = torchrun(ranks, ["--resume", options.resume, "--export", str(folder), "--set", "mode=sync"])
    if not code:
        print("\n".join(f"wrote {path}" for path in sorted(folder.glob("model*")) if path.is_dir()))
    return code
