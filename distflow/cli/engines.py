"""`distflow engines`: the libraries that can train and sample, what is installed, and what each cannot do."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from distflow.config.models import ROLLOUTS, TRAINERS, Engine, installed

HELP = "list the engines that train and sample: installed and tested versions, and what each cannot do"
SIZES = ("tp", "pp", "cp", "ep")
_ASKED = {"images": "data.images", "value": "head: value"}
"""What an engine may be asked for, where the run file has another word for it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def main(options: argparse.Namespace) -> int:
    print("\n\n".join("\n".join(_describe(key, name, engine)) for key, table in (
        ("engine", TRAINERS), ("rollout", ROLLOUTS)) for name, engine in table.items()))
    return 0


def _describe(key: str, name: str, engine: Engine) -> Iterator[str]:
    yield f"{key}: {name}"
    if engine.packages:
        found = installed(engine)
        has = f"{found} is installed" if found else f"not installed: {engine.pip}"
        tested = ", ".join(f"{known}*" for known in engine.tested)
        yield f"  {' or '.join(engine.packages)}: {has}; tested with {tested}"
    if engine.elsewhere:
        yield f"  may be in another environment: {engine.elsewhere}=…/bin/python"
    for wish, reason in engine.cannot.items():
        yield f"  not  {f'{wish} > 1' if wish in SIZES else _ASKED.get(wish, wish)}: {reason}"
