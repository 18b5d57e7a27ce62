"""What the calls of a store mean, whatever keeps it."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from stores import hosted

from distflow.store.etcd import EtcdStore


@pytest.fixture(params=["tcp", "etcd"])
def store(request):
    return hosted() if request.param == "tcp" else EtcdStore(request.getfixturevalue("etcd").address(), 60.0)


def test_values_and_conditions(store):
    assert store.get("a") is None
    store.put("a", "größe")
    assert (store.get("a"), store.get_all(["a", "b"]), store.has("a"), store.has("a", "b")) == ("größe", ["größe", ""],
                                                                                             True, False)
    assert store.put_if("a", "2", "1") == "größe"
    assert store.put_if("a", "2", "größe") == "2"
    assert (store.put_if("c", "first", None), store.put_if("c", "second", None)) == ("first", "first")
    assert store.put_if("none", "2", "1") != "2"
    assert store.get("none") is None
    store.put("empty", "")
    assert store.get("empty") == ""
    store.delete("a")
    assert store.get("a") is None


def test_many_values_at_once(store):
    """More than a transaction of etcd takes; whoever waits for the last of them is woken."""
    values = {f"rank/{number}": str(number) for number in range(250)}
    waiting = threading.Thread(target=lambda: store.wait(["rank/249"], 60.0) and store.put("heard", ""))
    waiting.start()
    store.put_all(values)
    assert store.wait(["heard"], 60.0)
    waiting.join()
    assert store.get_all([*values]) == [*values.values()]
    store.delete(*list(values)[:240], "another")
    assert store.list("rank/") == {f"rank/{number}": str(number) for number in range(240, 250)}
    store.delete()
    store.put_all({})
    assert store.get("rank/240") == "240"


def test_a_view_has_the_keys_below_its_prefix(store):
    view = store.below("run").below("7")
    view.put("holder/a", "1")
    view.put("other", "2")
    assert store.list("") == {"run/7/holder/a": "1", "run/7/other": "2"}
    assert (view.list("holder/"), view.root.get("run/7/other")) == ({"holder/a": "1"}, "2")


def test_counters_of_many_threads(store):
    with ThreadPoolExecutor(8) as threads:
        assert sorted(threads.map(lambda _: store.add("count"), range(400))) == list(range(1, 401))
    assert store.add("count", 0) == 400


def test_who_reads_a_key_that_is_not_there_wakes_nobody_that_waits_for_it(store):
    over = threading.Event()

    def read() -> None:
        while not over.wait(0.01):
            store.get("a")

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert not store.wait(["a"], 0.3)
    finally:
        over.set()
        reader.join()


def test_a_wait_ends_when_the_last_key_is_there(store):
    assert not store.wait(["a", "b"], 0.05)
    store.put("a", "")
    later = threading.Timer(0.1, store.put, ["b", ""])
    later.start()
    assert store.wait(["a", "b"], 60.0)
    assert store.get("a") == "", "what follows a wait that was given up is answered right"


def test_a_forked_process_has_a_connection_of_its_own(store):
    store.put("before", "1")
    if (child := os.fork()) == 0:
        os._exit(0 if [store.get("before") for _ in range(500)] == ["1"] * 500 else 1)
    assert [store.get("before") for _ in range(500)] == ["1"] * 500
    assert os.waitpid(child, 0)[1] == 0


def test_what_is_posted_comes_soon(store):
    for number in range(10):
        store.post("status", str(number))
    assert store.wait(["status"], 60.0)
    store.put("last", "")
    while store.get("status") != "9":
        pass
