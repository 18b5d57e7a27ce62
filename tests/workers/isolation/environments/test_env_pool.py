"""Processes that hold environments, hostile ones among them: what they do stays with them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import ROOT

from distflow.contracts.decorators import Turn
from distflow.errors import EngineError
from workers.isolation.env_pool import EnvFailure, EnvPool, EnvSettings

HOSTILE = {"sleep": "took longer than", "deaf": "took longer than", "raises": "KeyError: 'no such tool'",
           "nonsense": "TypeError: `step` returned {'observation': '?'}", "infinite": "a finite number",
           "leave": "its process ended", "exit": "its process ended", "eat": "MemoryError", "fork": "took longer than",
           "garbage": "", "flood": "no answer"}


@pytest.fixture
def hosted(module):
    hosts = []

    def make(name: str, **settings) -> EnvPool:
        kind = {"safe": name in ("Shared", "Safe", "Patient"), "coroutine": name == "Patient", "seconds": 60.0}
        hosts.append(EnvPool(EnvSettings(f"{module}:{name}", settings.pop("settings", {}), **{**kind, **settings})))
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()


def answers(host: EnvPool, asked: dict[int, str]) -> dict[int, Turn | EnvFailure]:
    """One step of each row."""
    for row, text in asked.items():
        host.step(row, {"question": f"q{row}"}, text)
    found: dict[int, Turn | EnvFailure] = {}
    while host.busy:
        found |= dict(host.turns(60.0))
    return found


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("name", "processes"), [("Counter", 6), ("Shared", 2)])
def test_each_row_has_its_own_instance(hosted, name, processes):
    host = hosted(name)
    first = answers(host, dict.fromkeys(range(6), "a"))
    second = answers(host, dict.fromkeys(range(6), "stop"))
    assert {row: turn.observation.split()[:3] for row, turn in first.items()} == {
        row: [f"q{row}", "1", "a"] for row in range(6)}
    assert {row: turn.observation.split()[:3] for row, turn in second.items()} == {
        row: [f"q{row}", "2", "stop"] for row in range(6)}
    assert all(turn.done and turn.reward == 0.5 for turn in second.values())
    assert len({turn.observation.split()[3] for turn in second.values()}) == processes


@pytest.mark.parametrize("act", HOSTILE)
@pytest.mark.parametrize("name", ["Unsafe", "Safe"])
def test_a_hostile_environment_fails_alone(hosted, tmp_path, name, act):
    host = hosted(name, seconds=2.0 if "longer" in HOSTILE[act] or act == "garbage" else 60.0, memory_gib=2.0,
                  settings={"places": str(tmp_path)})
    assert all(turn.observation == "hello" for turn in answers(host, dict.fromkeys(range(4), "hello")).values())
    found = answers(host, {0: "again", 1: act, 2: "again", 3: "again"})
    assert isinstance(found[1], EnvFailure)
    assert HOSTILE[act] in found[1].reason
    assert found[1].timeout == ("longer" in found[1].reason)
    assert {row: found[row].observation for row in (0, 2, 3)} == dict.fromkeys((0, 2, 3), "hello again")
    host.end(1)
    assert all(turn.observation == "hello again more" for turn in answers(
        host, dict.fromkeys((0, 2, 3), "more")).values())
    if act == "fork":  # both tries of the safe one have left a process that hides
        stray = int((tmp_path / "stray").read_text())
        assert not _lasts(lambda: alive(stray))


def _lasts(condition) -> bool:
    deadline = time.monotonic() + 30
    while condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_a_safe_step_is_tried_again_from_its_beginning_and_an_unsafe_one_is_not(hosted, tmp_path):
    for name in ("Safe", "Unsafe"):
        host = hosted(name, settings={"places": str(tmp_path)})
        answers(host, {7: "hello", 8: "hello"})
        found = answers(host, {7: "once", 8: "once"})
        good = {row: Turn("hello once") for row in (7, 8)}
        assert found == (good if name == "Safe" else dict.fromkeys((7, 8), EnvFailure("its process ended")))
        for file in tmp_path.glob("once-*"):
            file.unlink()


def test_a_slow_step_has_its_process_for_itself(hosted, tmp_path):
    """Twenty steps that come to no end of their own, and twenty that do, in two processes: these are answered while
    all of those are under way."""
    host = hosted("Safe", seconds=3600.0)
    for row in range(20):
        host.step(row, {"question": ""}, "hello")
    while host.busy:
        host.turns(60.0)
    for row in range(20):
        host.step(row, {"question": ""}, "sleep" if row % 2 else "again")
    found = {}
    while len(found) < 10:
        found |= dict(host.turns(60.0))
    assert found == {row: Turn("hello again", False, 0.25) for row in range(0, 20, 2)}
    while sum(bool(each.asked) for each in host._processes()) < 10:
        assert host.turns(1.0) == []
    assert {talk.row for each in host._processes() for talk in each.asked} == set(range(1, 20, 2))
    assert all(len(each.asked) <= 1 for each in host._processes())
    host.step(0, {"question": ""}, "more")
    while 0 not in (late := dict(host.turns(60.0))):
        pass
    assert late[0].observation == "hello again more"


def test_coroutines_wait_together(hosted, tmp_path):
    """As many as may be under way at a time; those behind them wait."""
    host, word = hosted("Patient", processes=1, together=200), tmp_path / "word"
    for row in range(199):
        host.step(row, {"question": str(word)}, "wait")
    host.step(199, {"question": str(word)}, "now")
    assert host.turns(60.0) == [(199, Turn("at last", True, 1.0))]
    for row, text in ((200, "wait"), (201, "now")):
        host.step(row, {"question": str(word)}, text)
    assert host.turns(1.0) == [], "there was no room for it"
    word.touch()
    found = {}
    while host.busy:
        found |= dict(host.turns(60.0))
    assert sorted(found) == [*range(199), 200, 201]


def test_nothing_is_left_behind(hosted):
    host = hosted("Counter")
    pids = [int(turn.observation.split()[3]) for turn in answers(host, dict.fromkeys(range(5), "a")).values()]
    assert all(alive(pid) for pid in pids)
    host.tidy()
    assert not any(_lasts(lambda pid=pid: alive(pid)) for pid in pids)
    more = [int(turn.observation.split()[3]) for turn in answers(host, {0: "a"}).values()]
    host.nursery.kill()
    host.nursery.wait()
    assert not any(_lasts(lambda pid=pid: alive(pid)) for pid in more)
    with pytest.raises(EngineError, match="has ended, with code -9"):
        host.step(1, {"question": "q"}, "a")
    assert alive(os.getpid())


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "", "1 / 0"], ids=["killed", "over", "error"])
def test_nothing_outlives_the_rank(module, tmp_path, end):
    script = f"""
import os, signal, sys, time
sys.path.insert(0, {str(tmp_path)!r})
from workers.isolation.env_pool import EnvPool, EnvSettings
host = EnvPool(EnvSettings("{module}:Safe", {{"places": {str(tmp_path)!r}}}, True, False, seconds=600.0))
host.step(1, {{"question": "q"}}, "fork")
while not os.path.exists({str(tmp_path / 'stray')!r}):
    host.turns(0.01)
{end}
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=120, check=False, stderr=subprocess.DEVNULL)
    assert not _lasts(lambda: alive(int((tmp_path / "stray").read_text())))


@pytest.mark.parametrize("closed", [True, False])
def test_nothing_outlives_the_rank_whatever_interrupts_its_end(hosted, tmp_path, closed):
    host = hosted("Safe", settings={"places": str(tmp_path)}, seconds=600.0)
    host.step(1, {"question": "q"}, "fork")
    while not (tmp_path / "stray").exists():
        host.turns(0.01)
    if closed:
        host.line.shutdown(socket.SHUT_RDWR)
    while host.nursery.poll() is None:
        host.nursery.terminate()
    assert not _lasts(lambda: alive(int((tmp_path / "stray").read_text())))


def test_odd_text_goes_to_and_fro(hosted):
    host = hosted("Safe")
    host.step(1, {"question": "\ud800"}, "odd")
    while host.busy:
        found = host.turns(60.0)
    assert found == [(1, EnvFailure("ValueError: ??"))]


def test_a_module_that_cannot_be_loaded_is_said(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_tools.py").write_text("import nothing_of_that_name")
    with pytest.raises(EngineError, match="nothing_of_that_name"):
        EnvPool(EnvSettings("broken_tools:Any", {}, True, False))
