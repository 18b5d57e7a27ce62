"""Fixtures: a folder with a tiny run, and a way to launch it. Tiers of tests, and failures named as they happen.

`make test` leaves out the tests that are marked `run`, which start whole runs or take long, but for those that are
marked `smoke` too; `make test-all` leaves out none.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fork_server
import pytest
from _pytest.pathlib import import_path
from harness import command, environment, with_settings, write_workspace
from hypothesis import settings
from ranks import forget_users
from ready import SCRIPT, Ready, ReadyRun, places
from warm import fork_or_execute

from distflow.config import sizes

settings.register_profile("distflow", derandomize=True, deadline=None)  # the same examples each time, however slow
settings.load_profile("distflow")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts what it puts into the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or Ctrl-C would mean nothing to the runs of tests either
sizes._describing, DESCRIBING = fork_server.describe, sizes._describing
BEGAN, MINUTES = time.monotonic(), os.environ.get("TEST_MINUTES", "")
"""After so many minutes no more whole runs are started: on a machine of many users a suite may last twice as long."""
LEFT_OUT = "the time for whole runs is over"
RUNNING = {"ready", "cluster"}
"""Fixtures that start whole runs."""


_MATTERS = {"dags": 0, "tests": 1}
"""Folders whose whole runs are begun first of those that may be left out."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if RUNNING & set(getattr(item, "fixturenames", ())):
            item.add_marker("run")
    runs = Counter(item.path for item in items if item.get_closest_marker("run"))
    # Files with most whole runs come first, since they take minutes; or behind all others, where some may be left out:
    # those of a part of the product, of which other tests tell much, before those that learn or test it as a whole.
    # Of the others long ones do: so those that are the last to end are short.
    length = {path: path.stat().st_size for path in {item.path for item in items}}
    late = {path: bool(MINUTES) and 1 + _MATTERS.get(path.parent.name, 2) for path in runs}
    items.sort(key=lambda item: (late.get(item.path, 0), -runs[item.path], -length[item.path]))


def pytest_collection() -> None:
    gc.disable()  # what is imported stays: looking through it for cycles takes a second, each time


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if MINUTES and item.get_closest_marker("run") and time.monotonic() - BEGAN > 60 * float(MINUTES):
        pytest.skip(LEFT_OUT)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    left_out = [report for report in terminalreporter.stats.get("skipped", ()) if LEFT_OUT in str(report.longrepr)]
    if left_out:
        terminalreporter.section(f"{len(left_out)} whole runs were left out after {MINUTES} minutes", red=True)
        for report in left_out:
            terminalreporter.write_line(report.nodeid)


class FailureNames:
    """Writes the name of each failed test as soon as it is known, not at the end alone."""

    def __init__(self, terminal: pytest.TerminalReporter):
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.terminal.ensure_newline()
            self.terminal.write_line(f"FAILED {report.nodeid} ({report.when}, {report.duration:.1f} s)", red=True)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr != "gpu":  # `make gpu` alone uses one: what else is shown holds on any machine
        os.environ["CUDA_VISIBLE_DEVICES"] = fork_server.ENVIRONMENT["CUDA_VISIBLE_DEVICES"] = ""
    if hasattr(config, "workerinput"):
        fork_server.join()
    elif getattr(config.option, "numprocesses", None):
        fork_server.share()
    if terminal := config.pluginmanager.get_plugin("terminalreporter"):  # not in a process that xdist starts
        config.pluginmanager.register(FailureNames(terminal))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Load the modules of all tests once, before the processes of xdist are forked."""
    config = session.config
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        return
    places = [Path(argument.partition("::")[0]) for argument in config.args]
    found = [file for place in places for file in (place.rglob("test_*.py") if place.is_dir() else (place,))]
    for file in [file for file in found if not any(part.startswith(".venv") for part in file.parts)]:
        known = {*sys.modules}
        try:
            import_path(file.absolute(), mode="importlib", root=config.rootpath, consider_namespace_packages=False)
        except (Exception, pytest.skip.Exception):  # noqa: BLE001 - its process will say it
            for name in {*sys.modules} - known:
                if getattr(sys.modules[name], "__file__", None) == str(file.absolute()):
                    del sys.modules[name]
    subprocess._fork_exec = fork_or_execute  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(autouse=True)
def _search_path() -> Iterator[None]:
    """Take back users' modules, and their folders that planning adds to Python's path: a later test must not find them.
    """
    before, modules = sys.path[:], {*sys.modules}
    yield
    forget_users(before, modules)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Python commands forked from this process, which has loaded what they need; what runs need too, by `load` of
    `ready.py`."""
    monkeypatch.setattr(subprocess, "_fork_exec", fork_or_execute)


@pytest.fixture
def describing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have models described as users' runs have it: by a process that loads torch."""
    monkeypatch.setattr(sizes, "_describing", DESCRIBING)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A folder with what a tiny run needs."""
    write_workspace(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of this process alone; real collectives."""
    import torch.distributed as dist  # most tests need no torch here

    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def ready() -> Ready:
    return Ready()


@pytest.fixture
def launch(workspace: Path, ready: Ready) -> Callable[..., subprocess.CompletedProcess]:
    """Run to the end in the workspace: `launch(2, "--dag", "grpo.yaml", …)`; fails the test unless `code` is met.

    With `torchrun` it is torchrun that starts the ranks, else a process that has loaded what they need.
    """

    def run(ranks: int, *arguments: str, code: int | None = 0, torchrun: bool = False) -> subprocess.CompletedProcess:
        if torchrun:
            done = subprocess.run(command(ranks, *arguments), cwd=workspace, env=environment(), capture_output=True,
                                  text=True, timeout=300, check=False)
        else:
            done = ready.run(ranks, arguments, workspace, environment())
        assert code is None or done.returncode == code, done.stdout[-2000:] + done.stderr[-6000:]
        return done

    return run


@pytest.fixture
def begin(workspace: Path, ready: Ready) -> Iterator[Callable[..., ReadyRun]]:
    """Begin a run in the workspace: `begin(2, "--dag", "grpo.yaml", …)`; `stdout` has all that it says."""
    begun: list[ReadyRun] = []

    def start(ranks: int, *arguments: str) -> ReadyRun:
        said, theirs = os.pipe()
        try:
            begun.append(ready.start(ranks, arguments, workspace, environment(), theirs, theirs))
        finally:
            os.close(theirs)
        begun[-1].stdout = os.fdopen(said, errors="replace")
        return begun[-1]

    yield start
    for run in begun:
        run.kill()
        run.stdout.close()


@pytest.fixture
def begin_apart(workspace: Path, ready: Ready) -> Iterator[Callable[..., list[ReadyRun]]]:
    """Begin each rank of a run by its own arguments and variables; they meet at a store of this process."""
    import torch.distributed as dist

    store, begun = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), list[ReadyRun]()

    def start(*lines: tuple[str, ...], variables: tuple[dict[str, str], ...] = ({},) * 9) -> list[ReadyRun]:
        for rank, (line, more) in enumerate(zip(lines, variables)):
            own = environment() | places(rank, len(lines), ("127.0.0.1", store.port)) | more
            begun.append(ready.command(str(SCRIPT), *with_settings(line), folder=workspace, environment=own))
        return begun

    yield start
    for rank in begun:
        rank.kill()
        rank.stdout.close()


@pytest.fixture(scope="session")
def run_once(ready: Ready, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`run_once(ranks, *arguments, files=((NAME, TEXT), …))`: the folder of a run that is made once for all tests."""
    made: dict[tuple[Any, ...], Path] = {}

    def run(ranks: int, *arguments: str, files: tuple[tuple[str, str], ...] = ()) -> Path:
        key = ranks, arguments, files
        if key not in made:
            folder = tmp_path_factory.mktemp("once")
            write_workspace(folder)
            for name, text in files:
                (folder / name).write_text(text)
            done = ready.run(ranks, (*arguments, "--name", "once"), folder, environment())
            assert done.returncode == 0, done.stderr[-4000:]
            made[key] = folder / "runs/once"
        return made[key]

    return run


@pytest.fixture
def store() -> Any:
    """A TCPStore that this process hosts."""
    from stores import hosted

    return hosted()


@pytest.fixture
def etcd_of(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`etcd_of(members)`."""
    if not shutil.which("etcd"):
        pytest.skip("etcd is not installed:  apt-get install etcd-server")
    from benchmarks.etcd import Etcd

    made: list[Etcd] = []

    def start(members: int, **more: Any) -> Any:
        made.append(Etcd(tmp_path, members, **more))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.fixture
def etcd(etcd_of: Callable[..., Any]) -> Any:
    return etcd_of(1)
