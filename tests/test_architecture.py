"""The rules of the house, enforced: floors, budgets, names, what may be imported and caught."""

from __future__ import annotations

import ast
import functools
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import house
import networkx
import pytest

import distflow
from distflow import cli
from distflow.config.load import load
from planners import plan

ROOT = Path(__file__).resolve().parents[1]
OURS = ("distflow", "planners", "workers")
FLOORS = {"distflow": 0, "distflow.config": 0, "distflow.contracts": 0, "distflow.errors": 0, "distflow.plan": 0,
          "distflow.measurements": 0, "planners": 1, "distflow.rpc": 2, "distflow.store": 2, "distflow.telemetry": 2,
          "distflow.data": 2, "distflow.dock": 2, "distflow.weights": 2, "distflow.recovery": 2, "workers": 3,
          "distflow.cli": 4, "distflow.launch": 4, "distflow.options": 4, "distflow.run_handle": 4,
          "distflow.api_client": 4,
          "distflow.__main__": 4, "benchmarks": 4}
STAIRS = {"workers.isolation.sandbox": 0, "workers.isolation.user_code": 0, "workers.isolation": 1,
          "workers.engines": 0, "workers.endpoint": 1,
          "workers.roles": 1, "workers.functions": 2, "workers": 3}
"""Inside workers/: engines ← roles ← functions ← loop and what stands beside it."""
FACE = "distflow"
"""Module with the public names, for users. It may import any home of one; no other module imports a name from it."""
MAY_CATCH_ANYTHING = ("distflow.recovery.supervisor", "distflow.cli", "distflow.launch")
HEAVY = {"torch", "transformers", "datasets", "numpy", "scipy", "pyarrow", "tokenizers", "networkx"}
MAY_IMPORT_HEAVY = {"planners": {"networkx"}, "planners.heterogeneous": {"numpy", "scipy"}}
"""Which heavy packages a package may import on a floor whose modules import none: graphs inside functions."""
IMPURE = HEAVY | {"time", "datetime", "random", "os", "pathlib", "subprocess", "socket", "threading"}
MAY_UNPICKLE = {"distflow.recovery.checkpoint"}
"""By an unpickler of its own, which knows torch's metadata classes and nothing else."""
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
PICKLING_CALLS = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
                  "send_object_list", "recv_object_list", "read_pickle"}
FILE_LINES, FUNCTION_LINES, DAG_LINES = 600, 60, 40

IDEAS_OF_THEIR_OWN = {
    "distflow", "distflow.config.live_changes",
    "distflow.contracts.detectors",
    "distflow.weights.transport.tcp", "planners.heterogeneous.efficiency",
    "workers.device", "workers.engines.sglang.weights", "workers.functions.entropy",
    "workers.isolation.sandbox.landlock", "workers.profiler"}

Sources = dict[str, str]
Rule = Callable[[str, ast.Module], Iterator[str]]


@functools.cache
def sources(*folders: str) -> Sources:
    """Source text by module name."""
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
            for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))}


parsed = functools.cache(ast.parse)


def broken(rule: Rule, texts: Sources) -> list[str]:
    return [f"{module}: {problem}" for module, text in texts.items() for problem in rule(module, parsed(text))]


@functools.cache
def imports(tree: ast.Module) -> list[tuple[str, int]]:
    """All that is imported: inside functions and for type checkers too."""
    found: list[tuple[str, int]] = []
    for item in ast.walk(tree):
        if isinstance(item, ast.Import):
            found += [(alias.name, item.lineno) for alias in item.names]
        elif isinstance(item, ast.ImportFrom) and item.level == 0:
            found += [(f"{item.module}.{alias.name}", item.lineno) for alias in item.names]
    return found


def level(module: str, levels: dict[str, int]) -> int | None:
    """That of the longest prefix that has one."""
    parts = module.split(".")
    prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((levels[prefix] for prefix in prefixes if prefix in levels), None)


def floors(module: str, tree: ast.Module) -> Iterator[str]:
    mine = level(module, FLOORS)
    for name, line in imports(tree):
        other = level(name, FLOORS)
        if other is None or module == FACE:
            continue
        if other > mine or {mine, other} == {1, 2}:
            yield f"line {line}: floor {mine} imports {name} of floor {other}"
        if mine == other == 3 and level(name, STAIRS) > level(module, STAIRS):
            yield f"line {line}: imports {name}, which stands above it"


def homes(module: str, tree: ast.Module) -> Iterator[str]:
    """Yield public names that are imported from the face rather than from the module that defines them."""
    yield from (f"line {line}: import {name.rpartition('.')[2]} from {distflow._HOMES[name.rpartition('.')[2]]}"
                for name, line in imports(tree) if name.removeprefix(f"{FACE}.") in distflow._HOMES)


_COMMAND = re.compile(r"(^(resume|report|faults)|distflow (resume|report|export|faults|plan|validate|watch|why)) $")


def unquoted_paths(module: str, tree: ast.Module) -> Iterator[str]:
    """Yield messages that name a command to copy, with a path as it is: one with a space would be two words."""
    for item in (item for item in ast.walk(tree) if isinstance(item, ast.JoinedStr)):
        for text, value in itertools.pairwise(item.values):
            if isinstance(text, ast.Constant) and isinstance(value, ast.FormattedValue) and \
                    _COMMAND.search(str(text.value)) and not ast.unparse(value.value).startswith(("quoted(", "shlex.")):
                yield f"line {item.lineno}: write quoted({ast.unparse(value.value)})"


def relative_imports(module: str, tree: ast.Module) -> Iterator[str]:
    yield from (f"line {item.lineno}: relative import" for item in ast.walk(tree)
                if isinstance(item, ast.ImportFrom) and item.level)


def contracts_below_load(module: str, tree: ast.Module) -> Iterator[str]:
    """`config.load` alone joins files and contracts: contracts check its `Spec`, which has their forms, as data."""
    if module in ("distflow.config.load", "distflow.config.spec"):
        return
    forbidden = "distflow.config.load" if module.startswith("distflow.contracts") else "distflow.contracts"
    yield from (f"line {line}: imports {name}" for name, line in imports(tree)
                if f"{name}.".startswith(f"{forbidden}."))


def purity(module: str, tree: ast.Module) -> Iterator[str]:
    forbidden = IMPURE if level(module, FLOORS) == 1 else HEAVY
    for place, allowed in MAY_IMPORT_HEAVY.items():
        forbidden = forbidden - allowed if f"{module}.".startswith(f"{place}.") else forbidden
    yield from (f"line {line}: imports {name}" for name, line in imports(tree) if name.split(".")[0] in forbidden)


def function_budget(module: str, tree: ast.Module) -> Iterator[str]:
    for item in ast.walk(tree):
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and item.end_lineno - item.lineno >= FUNCTION_LINES:
            yield f"line {item.lineno}: {item.name} has {item.end_lineno - item.lineno + 1} lines"


def broad_excepts(module: str, tree: ast.Module) -> Iterator[str]:
    if any(f"{module}.".startswith(f"{place}.") for place in MAY_CATCH_ANYTHING):
        return
    for item in ast.walk(tree):
        if isinstance(item, ast.ExceptHandler):
            kinds = item.type.elts if isinstance(item.type, ast.Tuple) else [item.type]
            if any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds):
                yield f"line {item.lineno}: catches everything"


def modes(module: str, tree: ast.Module) -> Iterator[str]:
    """Yield comparisons of a run's mode: `Run.has_samplers` and `Run.trainer_samples` answer what they ask."""
    for item in (item for item in ast.walk(tree) if isinstance(item, ast.Compare)):
        if any(getattr(value, "attr", "") == "mode" or getattr(value, "value", "") in ("sync", "semi_sync", "async")
               for value in (item.left, *item.comparators)):
            yield f"line {item.lineno}: {ast.unparse(item)}"


def names(module: str, tree: ast.Module) -> Iterator[str]:
    last = module.rpartition(".")[2]
    if last in sys.stdlib_module_names:
        yield "is named like a module of the standard library"
    if last in ("utils", "util", "helpers", "misc", "common_utils"):
        yield "has a name that says nothing"


def pickles(module: str, tree: ast.Module) -> Iterator[str]:
    yield from (f"line {line}: imports {name}" for name, line in imports(tree)
                if PICKLES & set(name.split(".")) and module not in MAY_UNPICKLE)
    for item in ast.walk(tree):
        if not isinstance(item, ast.Call):
            continue
        function, given = ast.unparse(item.func), {word.arg: ast.unparse(word.value) for word in item.keywords}
        if function.rpartition(".")[2] in PICKLING_CALLS or given.get("allow_pickle") == "True":
            yield f"line {item.lineno}: {function} unpickles"
        if function == "torch.load" and given.get("weights_only") != "True":
            yield f"line {item.lineno}: torch.load without weights_only=True"


@pytest.mark.parametrize(("rule", "folders"), [
    (floors, (*OURS, "benchmarks")), (homes, OURS), (relative_imports, OURS), (unquoted_paths, OURS),
    (contracts_below_load, ("distflow/config", "distflow/contracts")),
    (purity, ("distflow/config", "distflow/contracts", "planners")),
    (function_budget, OURS), (broad_excepts, OURS), (names, OURS), (pickles, OURS),
    (modes, ("planners", "workers")),
], ids=lambda value: getattr(value, "__name__", "in"))
def test_rule(rule, folders):
    assert not broken(rule, sources(*folders))


@pytest.mark.parametrize(("rule", "module", "text"), [
    (floors, "distflow.config.x", "from planners import plan"),
    (contracts_below_load, "distflow.contracts.x", "from distflow.config.load import Spec"),
    (floors, "planners.x", "from distflow.data.batch import Batch"),
    (homes, "planners.x", "def f():\n    from distflow import Batch"),
    (floors, "distflow.telemetry.x", "def late():\n    import distflow.cli.run"),
    (floors, "workers.engines.x", "from workers.roles import RoleEngines"),
    (relative_imports, "planners.x", "from . import order"),
    (unquoted_paths, "workers.x", 'f"Go on:  distflow resume {folder}"'),
    (purity, "distflow.config.x", "def f():\n    import torch.nn"),
    (purity, "planners.x", "from time import time"),
    (purity, "planners.heterogeneous.x", "import torch"),
    (function_budget, "planners.x", "def f():\n" + "    pass\n" * FUNCTION_LINES),
    (broad_excepts, "workers.x", "try:\n    pass\nexcept Exception:\n    pass"),
    (broad_excepts, "workers.x", "try:\n    pass\nexcept (OSError, BaseException):\n    pass"),
    (names, "workers.utils", ""),
    (modes, "planners.x", 'if spec.run.mode != "sync":\n    pass'),
    (pickles, "workers.x", "import pickle"),
    (pickles, "workers.x", "torch.load(path, weights_only=False)"),
    (pickles, "workers.x", "dist.all_gather_object(out, value)"),
])
def test_rule_can_fail(rule, module, text):
    assert broken(rule, {module: text})


def test_failures_are_contained_where_users_code_runs():
    """Elsewhere it would be a broad `except` by another name."""
    users = {module for module, text in sources(*OURS).items()
             if any(name == "workers.isolation.user_code.guarded" for name, _ in imports(parsed(text)))}
    assert users == {"workers.isolation.rewards_worker", "workers.isolation.env_worker", "workers.isolation.child"}


def test_every_module_has_a_floor():
    """A new folder must be given its place."""
    rooms = {name: floor for name, floor in FLOORS.items() if name != "distflow"}
    assert [module for module in sources(*OURS) if level(module, rooms) is None] == ["distflow"]


def test_files_fit_their_budget():
    lengths = {module: len(text.splitlines()) for module, text in sources(*OURS).items()}
    assert {module: count for module, count in lengths.items() if count > FILE_LINES} == {}


def test_light_modules_import_nothing_heavy():
    """Help, validation and planning answer at once."""
    modules = [*sources("distflow/config", "distflow/contracts", "planners", "distflow/cli"), "distflow",
               "distflow.launch",
               "distflow.telemetry.run_folder"]
    modules = [module for module in modules if not module.endswith("__main__")]
    script = (f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
              f"sys.exit(' '.join(sorted({HEAVY - {'numpy'}!r} & set(sys.modules))) or None)")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60,
                          check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr


DAGS = sorted((ROOT / "dags").glob("*.yaml"), key=lambda path: path.name)


@pytest.mark.parametrize("path", DAGS, ids=lambda path: path.stem)
def test_shipped_dags_are_short_and_plan_without_mistakes(path):
    assert len(path.read_text().splitlines()) <= DAG_LINES
    own = ROOT / f"dags/runs/embedded_{path.stem}.yaml"
    for ranks in (1, 2, 4):
        made = plan(load(str(path), str(own) if own.exists() else None), ranks)
        assert {task.layout.dp for task in made.tasks} == {ranks}


def test_the_default_run_and_its_plan_fit_each_other():
    assert [path.stem for path in DAGS]
    assert plan(load("grpo.yaml"), 2).tasks[0].node == "rollout"


def test_no_class_has_the_name_of_another():
    homes: dict[str, list[str]] = {}
    for module, text in sources(*OURS).items():
        for item in ast.walk(parsed(text)):
            if isinstance(item, ast.ClassDef):
                homes.setdefault(item.name, []).append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


@functools.cache
def import_graph() -> networkx.DiGraph:
    """The modules, and which imports which: inside functions and for types too."""
    texts = sources(*OURS)
    graph = networkx.DiGraph()
    for module, text in texts.items():
        graph.add_node(module)
        for name, _ in imports(parsed(text)):
            other = name if name in texts else name.rpartition(".")[0]
            if other in texts and other != module:
                graph.add_edge(module, other)
    return graph


def test_no_modules_import_each_other():
    circles = networkx.strongly_connected_components(import_graph())
    assert [sorted(circle) for circle in circles if len(circle) > 1] == []


def test_the_face_leads_to_no_worker_and_no_launcher():
    """`distflow.run` starts processes: those import what they need."""
    reached = networkx.descendants(import_graph(), FACE)
    assert {module for module in reached if module.split(".")[0] == "workers" or module == "distflow.launch"
            or module.startswith("distflow.cli")} == set()


def test_few_modules_import_those_that_stand_alone_in_workers():
    """Engines, functions and isolation are packages; what stands beside them is what a newcomer reads first."""
    graph = import_graph()
    arrows = [(module, other) for module, other in graph.edges if module.startswith("workers.")
              and other.startswith("workers.") and other.count(".") == 1]
    assert len(arrows) <= 65


def test_kinds_stay_few():
    """A feature that adds one takes one away: `python -m tests.house` prints them."""
    gone = [symbol for symbols in house.KINDS.values() for symbol in symbols if not house.exists(symbol)]
    assert not gone, f"take {gone} out of KINDS"
    counts = {"YAML keys": sum(map(len, house.yaml_keys().values())), "verbs": len(cli.MODULES),
              "arguments of a constructor": max(house.constructors().values())}
    assert {name: count for name, count in counts.items() if count > house.MOST[name]} == {}


def test_a_sliver_is_part_of_the_one_that_imports_it():
    """A module below 80 lines with one importer belongs into it, unless a reader would look for it by its name."""
    graph, texts = import_graph(), sources(*OURS)
    slivers = {module for module, text in texts.items() if 1 < len(text.splitlines()) < 80
               and graph.in_degree(module) == 1 and not text.startswith('"""The libraries')}
    assert slivers == IDEAS_OF_THEIR_OWN
