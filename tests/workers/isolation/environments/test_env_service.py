"""Threads that share a pool of environments: each sees its own rows, and drops only these when it leaves."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from distflow.contracts.decorators import Turn
from distflow.errors import EngineError
from workers.isolation.env_pool import EnvFailure, EnvSettings
from workers.isolation.env_service import EnvService


@pytest.fixture
def open_service(module):
    services = []

    def make(name: str, keeps: bool = False, **settings) -> EnvService:
        kind = {"safe": name in ("Alike", "Safe", "Patient"), "coroutine": name == "Patient", "seconds": 60.0}
        services.append(EnvService(EnvSettings(f"{module}:{name}", settings.pop("settings", {}),
                                               **{**kind, **settings}), keeps))
        return services[-1]

    yield make
    for service in services:
        service.close()


def answers(client, asked: dict[int, str], question: str = "q") -> dict[int, Turn | EnvFailure]:
    """Run one step of each row."""
    for row, text in asked.items():
        client.step(row, {"question": question}, text)
    found = {}
    while client.busy:
        found |= dict(client.turns(60.0))
    return found


@pytest.mark.parametrize("name", ["Counter", "Alike"])
def test_env_service_keeps_rows_of_threads_with_equal_ids_apart(open_service, name):
    service, threads, turns = open_service(name), 12, 10

    def talk(number: int) -> list[list[str]]:
        said = []
        with service.client() as client:
            for turn in range(turns):
                found = answers(client, dict.fromkeys(range(4), f"t{turn}"), question=f"n{number}")
                said += [found[row].observation.split()[:3] for row in range(4)]
        return said

    with ThreadPoolExecutor(threads) as pool:
        for number, said in enumerate(pool.map(talk, range(threads))):
            assert said == [[f"n{number}", str(turn + 1), f"t{turn}"] for turn in range(turns) for _ in range(4)]
    with service.client() as client:
        assert answers(client, {0: "a"})[0].observation.startswith("q 1 a")
    assert not service.clients


def test_env_service_drops_only_rows_of_a_client_that_leaves(open_service):
    """One client leaves during its step, in a process that also holds another client's environments."""
    service = open_service("Safe", processes=1)
    with service.client() as stays:
        with service.client() as leaves:
            assert answers(leaves, {0: "hello"}) == {0: Turn("hello", False, 0.25)}
            assert answers(stays, {0: "hello"}) == {0: Turn("hello", False, 0.25)}
            leaves.step(0, {"question": "q"}, "sleep")
            assert leaves.turns() == []
        assert answers(stays, {0: "again", 1: "new"}) == {0: Turn("hello again", False, 0.25),
                                                          1: Turn("new", False, 0.25)}
        assert [len(each.episodes) for each in service.pool.children] == [2]


def test_env_service_wakes_its_client_at_an_answer(open_service, tmp_path):
    service, word, woken = open_service("Patient"), tmp_path / "word", threading.Event()
    with service.client(woken.set) as client:
        client.step(3, {"question": str(word)}, "wait")
        assert client.turns() == []
        assert client.busy
        assert not woken.is_set()
        word.touch()
        assert woken.wait(60.0)
        assert client.turns() == [(3, Turn("at last", True, 1.0))]
        assert not client.busy


@pytest.mark.parametrize("answered", [False, True], ids=["under way", "answered"])
def test_env_service_keeps_a_step_in_progress_for_the_next_client(open_service, tmp_path, answered):
    """Where the rank trains meanwhile: the step is not done twice, whether its answer has come by then or not."""
    service, word = open_service("Patient", keeps=True), tmp_path / "word"
    columns = {"question": str(word)}
    with service.client() as first:
        first.step(3, columns, "hello")
        turn, = first.turns(60.0)
        first.step(3, columns, "wait")
        assert first.turns() == []
    if answered:
        word.touch()
        with service.client() as other:  # the same thread reads both answers, in the order in which they come
            while not any(episode.answer for episode, _ in service.left.values()):
                answers(other, {8: "hello"}, question=str(tmp_path / "other"))
                other.end(8)
    service.submit(service.begin_phase)
    with service.client() as again:
        again.resume(3, columns, ["hello"], [turn[1]])
        again.step(3, columns, "wait")
        word.touch()
        assert again.turns(60.0) == [(3, Turn("at last", True, 1.0))]
    asked = tmp_path / "word.asked"
    assert asked.read_text().splitlines().count("wait") == 1
    assert not service.left


def test_env_service_drops_kept_steps_that_no_client_resumes(open_service, tmp_path):
    """It is taken up with the same text alone."""
    service, word, other = open_service("Patient", keeps=True), tmp_path / "word", str(tmp_path / "other")

    def phase(text: str = "hello") -> None:
        service.submit(service.begin_phase)
        with service.client() as client:
            assert answers(client, {4: text}, question=other) == {4: Turn("at last", True, 1.0)}

    with service.client() as first:
        first.step(4, {"question": str(word)}, "wait")
        first.turns()
    for _ in range(3):
        phase()
    assert len(service.left) == 1, "it is under way"
    word.touch()
    while service.left:  # until its answer has come, and a phase has begun after that
        phase()
    with service.client() as last:
        assert answers(last, {4: "hello"}, question=other) == {4: Turn("at last", True, 1.0)}
        assert sum(len(each.episodes) for each in service.pool.children) == 1


def test_env_service_repeats_failed_steps(open_service):
    """Whether its failure was read or not; nobody waits for an answer that has been given."""
    service = open_service("Unsafe", keeps=True)
    for _ in range(3):
        with service.client() as client:
            client.step(3, {"question": "q"}, "raises")
            (_, failure), = client.turns(60.0)
            assert failure == EnvFailure("KeyError: 'no such tool'")
    assert not service.left


def test_env_service_keeps_nothing_of_a_client_that_restarts_its_rows(open_service, tmp_path):
    service, columns = open_service("Patient", keeps=True), {"question": str(tmp_path / "word")}
    with service.client(again=False) as first:
        first.step(3, columns, "wait")
        first.turns()
    with service.client() as other:
        assert answers(other, {4: "hello"}, question=str(tmp_path / "other")) == {4: Turn("at last", True, 1.0)}
    assert not service.left


def lose_server(service) -> None:
    service.pool.server.signal(signal.SIGKILL)
    service.pool.server.wait()


@pytest.mark.parametrize("name", ["Safe", "Unsafe"])
def test_env_service_goes_on_with_all_conversations_when_the_fork_server_is_lost(open_service, name):
    service = open_service(name)
    for _ in range(2):
        with service.client() as client:
            for text, answer in (("hello", "hello"), ("again", "hello again")):
                found = answers(client, dict.fromkeys(range(4), text))
                assert found == dict.fromkeys(range(4), Turn(answer, reward=0.25))
                lose_server(service)


def test_env_service_repeats_a_step_that_was_under_way_when_the_fork_server_was_lost(open_service, tmp_path):
    service, word = open_service("Patient"), tmp_path / "word"
    asked = tmp_path / "word.asked"
    with service.client() as client:
        client.step(0, {"question": str(word)}, "wait")
        client.turns()
        until = time.monotonic() + 60
        while not asked.exists():
            assert time.monotonic() < until
        lose_server(service)
        word.touch()
        assert client.turns(60.0) == [(0, Turn("at last", True, 1.0))]
    assert asked.read_text() == "wait\n" * 2


def test_env_service_tells_all_clients_of_a_step_that_ends_the_fork_server_twice(open_service):
    service = open_service("Unsafe")
    asked = threading.Barrier(4)

    def talk(row: int) -> None:
        with service.client() as client:
            asked.wait()
            with pytest.raises(EngineError, match="has ended, with code -9"):
                answers(client, {row: "ends_server" if row == 0 else "sleep"})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(talk, range(4)))
