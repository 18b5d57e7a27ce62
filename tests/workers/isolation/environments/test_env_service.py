"""Many threads with environments of one kind: each sees its own rows, and one that leaves takes only its own along."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from distflow.contracts.decorators import Turn
from distflow.errors import EngineError
from workers.isolation.env_pool import EnvFailure, EnvSettings
from workers.isolation.env_service import EnvService


@pytest.fixture
def opened(module):
    receptions = []

    def make(name: str, **settings) -> EnvService:
        kind = {"safe": name in ("Shared", "Safe", "Patient"), "coroutine": name == "Patient", "seconds": 60.0}
        receptions.append(EnvService(EnvSettings(f"{module}:{name}", settings.pop("settings", {}),
                                                 **{**kind, **settings})))
        return receptions[-1]

    yield make
    for reception in receptions:
        reception.close()


def answers(guest, asked: dict[int, str], question: str = "q") -> dict[int, Turn | EnvFailure]:
    """One step of each row."""
    for row, text in asked.items():
        guest.step(row, {"question": question}, text)
    found = {}
    while guest.busy:
        found |= dict(guest.turns(60.0))
    return found


@pytest.mark.parametrize("name", ["Counter", "Shared"])
def test_threads_with_rows_of_the_same_ids_see_their_own(opened, name):
    reception, threads, turns = opened(name), 12, 10

    def talk(number: int) -> list[list[str]]:
        said = []
        with reception.guest() as guest:
            for turn in range(turns):
                found = answers(guest, dict.fromkeys(range(4), f"t{turn}"), question=f"n{number}")
                said += [found[row].observation.split()[:3] for row in range(4)]
        return said

    with ThreadPoolExecutor(threads) as pool:
        for number, said in enumerate(pool.map(talk, range(threads))):
            assert said == [[f"n{number}", str(turn + 1), f"t{turn}"] for turn in range(turns) for _ in range(4)]
    with reception.guest() as guest:
        assert answers(guest, {0: "a"})[0].observation.startswith("q 1 a")
    assert not reception.guests


def test_who_leaves_takes_its_own_rows_along(opened):
    """One guest leaves while an environment works for it, in the process that another one's are in."""
    reception = opened("Safe", processes=1)
    with reception.guest() as stays:
        with reception.guest() as leaves:
            assert answers(leaves, {0: "hello"}) == {0: Turn("hello", False, 0.25)}
            assert answers(stays, {0: "hello"}) == {0: Turn("hello", False, 0.25)}
            leaves.step(0, {"question": "q"}, "sleep")
            assert leaves.turns() == []
        assert answers(stays, {0: "again", 1: "new"}) == {0: Turn("hello again", False, 0.25),
                                                          1: Turn("new", False, 0.25)}
        assert len(reception.owners) == 2


def test_an_answer_wakes_who_waits_elsewhere(opened, tmp_path):
    reception, word, woken = opened("Patient"), tmp_path / "word", threading.Event()
    with reception.guest(woken.set) as guest:
        guest.step(3, {"question": str(word)}, "wait")
        assert guest.turns() == []
        assert guest.busy
        assert not woken.is_set()
        word.touch()
        assert woken.wait(60.0)
        assert guest.turns() == [(3, Turn("at last", True, 1.0))]
        assert not guest.busy


def test_patience_ends(opened, tmp_path):
    with opened("Patient").guest() as guest:
        guest.step(0, {"question": str(tmp_path / "word")}, "wait")
        start = time.monotonic()
        assert guest.turns(0.2) == []
        assert time.monotonic() - start >= 0.19  # clocks of a wait and of a test differ a little


def test_everybody_learns_that_the_host_is_lost(opened, tmp_path):
    reception = opened("Unsafe")
    asked = threading.Barrier(5)

    def talk(_: int) -> str:
        with reception.guest() as guest:
            answers(guest, {0: "hello"})
            guest.step(0, {"question": "q"}, "sleep")
            guest.turns()
            asked.wait()
            try:
                guest.turns(float("inf"))
            except EngineError as error:
                return str(error)

    with ThreadPoolExecutor(4) as pool:
        said = pool.map(talk, range(4))
        asked.wait()
        reception.host.nursery.kill()
        reception.host.nursery.wait()
        with reception.guest() as guest:
            guest.step(0, {"question": "q"}, "hello")
            with pytest.raises(EngineError, match="has ended, with code -9"):
                guest.turns(60.0)
        assert all("has ended, with code -9" in each or each == "None" for each in said)


def test_a_module_that_cannot_be_loaded_is_said(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_tools.py").write_text("import nothing_of_that_name")
    with pytest.raises(EngineError, match="nothing_of_that_name"):
        EnvService(EnvSettings("broken_tools:Any", {}, True, False))
