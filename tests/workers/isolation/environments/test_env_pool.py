"""Environment processes, hostile ones among them: a failure stays within its own row."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import ROOT

from distflow.contracts.decorators import Turn
from distflow.errors import EngineError
from workers.isolation.env_pool import EnvFailure, EnvSettings
from workers.isolation.env_service import EnvClient, EnvService

HOSTILE = {"raises": "KeyError: 'no such tool'",
           "nonsense": "TypeError: `step` returned {'observation': '?'}", "infinite": "a finite number",
           "tensors": "ValueError",
           "exit": "its process ended", "fork": "took longer than",
           "garbage": "", "flood": "no answer"}


@pytest.fixture
def open_pool(module):
    with contextlib.ExitStack() as stack:
        def make(name: str, **settings) -> EnvClient:
            kind = {"safe": name in ("Shared", "Safe", "Patient"), "coroutine": name == "Patient", "seconds": 60.0}
            service = EnvService(EnvSettings(f"{module}:{name}", settings.pop("settings", {}), **{**kind, **settings}))
            stack.callback(service.close)
            return stack.enter_context(service.client())

        yield make


def answers(pool: EnvClient, asked: dict[int, str]) -> dict[int, Turn | EnvFailure]:
    """Run one step of each row."""
    for row, text in asked.items():
        pool.step(row, {"question": f"q{row}"}, text)
    found: dict[int, Turn | EnvFailure] = {}
    while pool.busy:
        found |= dict(pool.turns(60.0))
    return found


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_rewards_of_numpy_are_numbers(open_pool):
    assert answers(open_pool("Safe"), {0: "tensor"}) == {0: Turn("", True, 0.5)}


@pytest.mark.parametrize(("name", "processes"), [("Counter", 6), ("Shared", 2)])
def test_env_pool_gives_each_row_its_own_instance(open_pool, name, processes):
    pool = open_pool(name)
    first = answers(pool, dict.fromkeys(range(6), "a"))
    second = answers(pool, dict.fromkeys(range(6), "stop"))
    assert {row: turn.observation.split()[:3] for row, turn in first.items()} == {
        row: [f"q{row}", "1", "a"] for row in range(6)}
    assert {row: turn.observation.split()[:3] for row, turn in second.items()} == {
        row: [f"q{row}", "2", "stop"] for row in range(6)}
    assert all(turn.done and turn.reward == 0.5 for turn in second.values())
    assert len({turn.observation.split()[3] for turn in second.values()}) == processes


@pytest.mark.parametrize("act", HOSTILE)
@pytest.mark.parametrize("name", ["Unsafe", "Safe"])
def test_env_pool_contains_a_hostile_environment(open_pool, tmp_path, name, act):
    pool = open_pool(name, seconds=1.5 if "longer" in HOSTILE[act] or act == "garbage" else 60.0, memory_gib=2.0,
                     settings={"places": str(tmp_path)})
    assert all(turn.observation == "hello" for turn in answers(pool, dict.fromkeys(range(4), "hello")).values())
    found = answers(pool, {0: "again", 1: act, 2: "again", 3: "again"})
    assert isinstance(found[1], EnvFailure)
    assert HOSTILE[act] in found[1].reason
    assert found[1].timeout == ("longer" in found[1].reason)
    assert {row: found[row].observation for row in (0, 2, 3)} == dict.fromkeys((0, 2, 3), "hello again")
    pool.end(1)
    assert all(turn.observation == "hello again more" for turn in answers(
        pool, dict.fromkeys((0, 2, 3), "more")).values())
    if act == "fork":  # both tries of the safe one have left a process that hides
        stray = int((tmp_path / "stray").read_text())
        assert not _lasts(lambda: alive(stray))


def _lasts(condition) -> bool:
    deadline = time.monotonic() + 30
    while condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_env_pool_retries_safe_steps_alone(open_pool, tmp_path):
    for name in ("Safe", "Unsafe"):
        pool = open_pool(name, settings={"places": str(tmp_path)})
        answers(pool, {7: "hello", 8: "hello"})
        found = answers(pool, {7: "once", 8: "once"})
        good = {row: Turn("hello once") for row in (7, 8)}
        assert found == (good if name == "Safe" else dict.fromkeys((7, 8), EnvFailure("its process ended with code 1")))
        for file in tmp_path.glob("once-*"):
            file.unlink()


def test_env_pool_gives_a_slow_step_its_own_process(open_pool, tmp_path):
    """Ten endless steps and ten short ones share two processes: the short ones are answered meanwhile."""
    pool = open_pool("Safe", seconds=3600.0)
    for row in range(20):
        pool.step(row, {"question": ""}, "hello")
    while pool.busy:
        pool.turns(60.0)
    for row in range(20):
        pool.step(row, {"question": ""}, "sleep" if row % 2 else "again")
    found = {}
    while len(found) < 10:
        found |= dict(pool.turns(60.0))
    assert found == {row: Turn("hello again", False, 0.25) for row in range(0, 20, 2)}
    while sum(bool(each.pending) for each in pool.service.pool.children) < 10:
        assert pool.turns(1.0) == []
    pending = [[episode.row for episode in each.pending.values()] for each in pool.service.pool.children]
    assert sorted(filter(None, pending)) == [[row] for row in range(1, 20, 2)]
    pool.step(0, {"question": ""}, "more")
    while 0 not in (late := dict(pool.turns(60.0))):
        pass
    assert late[0].observation == "hello again more"


def test_env_pool_runs_coroutines_concurrently_up_to_a_limit(open_pool, tmp_path):
    """`together` coroutines run at a time; the next ones wait."""
    pool, word = open_pool("Patient", processes=1, together=200), tmp_path / "word"
    for row in range(199):
        pool.step(row, {"question": str(word)}, "wait")
    pool.step(199, {"question": str(word)}, "now")
    assert pool.turns(60.0) == [(199, Turn("at last", True, 1.0))]
    for row, text in ((200, "wait"), (201, "now")):
        pool.step(row, {"question": str(word)}, text)
    assert pool.turns(1.0) == [], "there was no room for it"
    word.touch()
    found = {}
    while pool.busy:
        found |= dict(pool.turns(60.0))
    assert sorted(found) == [*range(199), 200, 201]


def test_env_pool_ends_the_processes_of_a_caller_that_leaves(open_pool):
    pool = open_pool("Counter")
    pids = [int(turn.observation.split()[3]) for turn in answers(pool, dict.fromkeys(range(5), "a")).values()]
    assert all(alive(pid) for pid in pids)
    pool.__exit__()
    assert not any(_lasts(lambda pid=pid: alive(pid)) for pid in pids)


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "", "1 / 0"], ids=["killed", "over", "error"])
def test_env_pool_processes_end_with_their_rank(module, tmp_path, end):
    script = f"""
import os, signal, sys, time
sys.path.insert(0, {str(tmp_path)!r})
from workers.isolation.env_pool import EnvSettings
from workers.isolation.env_service import EnvService
settings = EnvSettings("{module}:Safe", {{"places": {str(tmp_path)!r}}}, True, False, seconds=600.0)
pool = EnvService(settings).client().__enter__()
pool.step(1, {{"question": "q"}}, "fork")
while not os.path.exists({str(tmp_path / 'stray')!r}):
    pool.turns(0.01)
{end}
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=120, check=False, stderr=subprocess.DEVNULL)
    assert not _lasts(lambda: alive(int((tmp_path / "stray").read_text())))


def test_env_pool_passes_text_that_is_no_unicode(open_pool):
    pool = open_pool("Safe")
    pool.step(1, {"question": "\ud800"}, "odd")
    while pool.busy:
        found = pool.turns(60.0)
    assert found == [(1, EnvFailure("ValueError: ??"))]


def test_env_pool_names_a_module_that_cannot_be_imported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_tools.py").write_text("import nothing_of_that_name")
    with pytest.raises(EngineError, match="nothing_of_that_name"):
        EnvService(EnvSettings("broken_tools:Any", {}, True, False))
