"""Measures the house: code by package, kinds of things, and the walks of a batch and of a weight.

    python -m tests.house            code tokens by package, kinds, the widest constructors, circles of imports
    python -m tests.house --walks    also runs GRPO in modes sync and async, and counts the files that each walk enters

A code token is one of Python's, without comments, line ends and indentation; a string, also a docstring, is one.
A walk counts the files of which at least one function runs while the walk is under way, in all processes. Files are
counted as they are passed, not as a reader would have to open them.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import io
import os
import pkgutil
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("distflow", "planners", "workers")
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
           tokenize.ENDMARKER}

KINDS = {
    "kinds of rank process": ("workers.loop:train", "workers.loop:rollout", "workers.loop:infer",
                              "workers.engines.tp_leader:TPFollowerEngine", "distflow.launch:main"),
    "sources of a step's rows": ("distflow.data.dataloader:Dataloader", "workers.dock_source:DockSource"),
    "ways to give a role ranks of its own": ("planners.groups:assign_ranks",),
    "places that validate": ("workers.validation:Validator",),
    "wire forms of columns": ("distflow.data.columns:ColumnEntry",),
    "plan languages": ("distflow.plan:Plan", "distflow.config.run:Run"),
}
"""What there is of each kind, by the symbol that it stands or falls with. One that is taken away leaves this table."""
MOST = {"YAML keys": 150, "verbs": 20, "arguments of a constructor": 7}
"""What must not grow. Lower a number when it can be."""


def code_tokens(text: str) -> int:
    return sum(token.type not in _LAYOUT for token in tokenize.generate_tokens(io.StringIO(text).readline))


def python_files(folder: str) -> list[Path]:
    """Files of a folder that Python can read; bad inputs of tests are none."""
    return [path for path in sorted((ROOT / folder).rglob("*.py")) if "bad_inputs" not in path.parts]


def package_of(path: Path) -> str:
    """Return a file's package, to the second level."""
    parts = path.relative_to(ROOT).parts[:-1]
    return ".".join(parts[:2])


def sizes(*folders: str) -> dict[str, tuple[int, int, int]]:
    """Return files, lines and code tokens by package."""
    found: dict[str, tuple[int, int, int]] = {}
    for path in (path for folder in folders for path in python_files(folder)):
        text, package = path.read_text(), package_of(path)
        files, lines, tokens = found.get(package, (0, 0, 0))
        found[package] = files + 1, lines + text.count("\n"), tokens + code_tokens(text)
    return found


def exists(symbol: str) -> bool:
    module, _, name = symbol.partition(":")
    path = ROOT / (module.replace(".", "/") + ".py")
    return path.exists() and any(getattr(item, "name", "") == name for item in ast.walk(ast.parse(path.read_text())))


def yaml_keys() -> dict[str, list[str]]:
    """Return the keys that users can write, by the model that has them."""
    import distflow.config as config
    from distflow.config.yaml_source import Document

    for module in pkgutil.iter_modules(config.__path__):
        importlib.import_module(f"distflow.config.{module.name}")

    def below(parent: type) -> Iterator[type]:
        for child in parent.__subclasses__():
            yield child
            yield from below(child)

    return {model.__name__: [*vars(model).get("__annotations__", ())] for model in {*below(Document)}
            if model.__module__.startswith(config.__name__)}


def constructors() -> dict[str, int]:
    """Return how many arguments each constructor takes, without `self`; dataclasses and documents are data."""
    found = {}
    for path in (path for folder in PRODUCT for path in python_files(folder)):
        for item in ast.walk(ast.parse(path.read_text())):
            for method in item.body if isinstance(item, ast.ClassDef) else ():
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    given = method.args
                    count = len([*given.posonlyargs, *given.args, *given.kwonlyargs]) - 1
                    found[f"{path.relative_to(ROOT)}:{method.lineno} {item.name}"] = count
    return found


_TRACER = '''
import os, sys, threading
ROOT, OUT, ROOTS = {root!r}, {out!r}, {roots!r}
OURS = tuple(os.path.join(ROOT, name) + os.sep for name in ("distflow", "planners", "workers"))
seen, depth = set(), threading.local()

def look(frame, event, argument):
    code = frame.f_code
    if event not in ("call", "return") or not code.co_filename.startswith(OURS):
        return
    walks = ROOTS.get((code.co_filename[len(ROOT) + 1:], code.co_qualname))
    active = depth.__dict__.setdefault("active", dict())
    if walks and event == "call":
        active[walks] = active.get(walks, 0) + 1
    if event == "call" and code.co_name != "<module>":
        for walk in (walk for walk, times in active.items() if times):
            if (walk, code.co_filename) not in seen:
                seen.add((walk, code.co_filename))
                with open(OUT, "a") as file:
                    file.write(walk + " " + code.co_filename[len(ROOT) + 1:] + "\\n")
    if walks and event == "return":
        active[walks] -= 1

sys.setprofile(look)
threading.setprofile(look)
'''
WALKS = {
    "batch": (("workers/train_context.py", "TrainContext.next_prompts"), ("workers/loop.py", "run_chain"),
              ("workers/rollout.py", "RolloutContext.run"), ("workers/rollout.py", "RolloutContext.lease"),
              ("workers/rollout.py", "RolloutContext.put")),
    "weight": (("workers/weight_sync.py", "WeightPublication.publish"), ("workers/weight_sync.py", "load_if_newer")),
}
"""The functions in which a walk is under way, and in all that these call."""
_MODES = {"sync": ("--ranks", "2"), "async": ("--ranks", "2", "--set", "mode=async", "--set", "groups.rollout=1")}


def walk_files(mode: str) -> dict[str, set[str]]:
    """Return the files that each walk enters in a run of three steps."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "walks")
        roots = {place: walk for walk, places in WALKS.items() for place in places}
        Path(folder, "sitecustomize.py").write_text(_TRACER.format(root=str(ROOT), out=str(out), roots=roots))
        environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
        command = (sys.executable, "-m", "distflow", "run", "grpo", "--set", "steps=3", "--name", f"{folder}/run")
        subprocess.run((*command, *_MODES[mode]), env=environment, cwd=ROOT, check=True, capture_output=True)
        entered: dict[str, set[str]] = {walk: set() for walk in WALKS}
        for line in out.read_text().splitlines():
            walk, _, file = line.partition(" ")
            entered[walk].add(file)
    return entered


def _print_table(rows: Iterator[tuple[object, ...]]) -> None:
    for name, *numbers in rows:
        cells = (f"{number:>12,}" if isinstance(number, int) else f"  {number}" for number in numbers)
        print(f"{name!s:44}" + "".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--walks", action="store_true", help="run GRPO twice, and count the files of each walk")
    arguments = parser.parse_args()
    print(f"{'package':44}{'files':>12}{'lines':>12}{'tokens':>12}")
    for folders in (PRODUCT, ("tests",), ("benchmarks",)):
        found = sizes(*folders)
        _print_table((package, *numbers) for package, numbers in found.items())
        _print_table(iter([(" + ".join(folders), *map(sum, zip(*found.values())))]))
    from distflow.cli import MODULES

    print("\nkinds")
    _print_table((kind, sum(map(exists, symbols)), ", ".join(filter(exists, symbols)))
                 for kind, symbols in KINDS.items())
    keys = yaml_keys()
    widest = sorted(constructors().items(), key=lambda item: -item[1])[:5]
    _print_table(iter([("YAML keys", sum(map(len, keys.values()))), ("verbs", len(MODULES)),
                       ("arguments of a constructor, at most", widest[0][1],
                        ", ".join(f"{name} ({count})" for name, count in widest))]))
    for mode in _MODES if arguments.walks else ():
        for walk, files in walk_files(mode).items():
            print(f"\nwalk of a {walk}, mode {mode}: {len(files)} files\n  " + " ".join(sorted(files)))


if __name__ == "__main__":
    main()
