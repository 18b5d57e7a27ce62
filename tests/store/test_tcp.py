"""Client of a TCPStore: what its calls mean, and what they do when the store's process stands still or has ended."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from stores import StoreProcess, client, hosted

from distflow.store.interface import StoreUnavailable
from distflow.store.tcp import TCPStoreClient, store_on


@pytest.fixture
def store() -> TCPStoreClient:
    return hosted()


@pytest.fixture
def process() -> Iterator[StoreProcess]:
    made = StoreProcess()
    yield made
    made.end()


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


def test_a_view_has_the_keys_below_its_prefix(store):
    view = store.below("run").below("7")
    view.put("holder/a", "1")
    view.put("other", "2")
    assert store.list("") == {"run/7/holder/a": "1", "run/7/other": "2"}
    assert (view.list("holder/"), view.root.get("run/7/other")) == ({"holder/a": "1"}, "2")


def test_torchs_own_client_sees_the_same_keys(store):
    torchs = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    store.below("group").put("key", "value")
    assert dist.PrefixStore("group", torchs).get("key") == b"value"
    torchs.set("back", "x" * 300_000)
    assert store.wait(["back"], 60.0)
    assert store.get("back") == "x" * 300_000


def test_counters_of_many_threads(store):
    with ThreadPoolExecutor(8) as threads:
        assert sorted(threads.map(lambda _: store.add("count"), range(400))) == list(range(1, 401))
    assert store.add("count", 0) == 400


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


def test_a_store_that_stands_still_is_not_waited_for_and_counts_nothing_twice(process):
    store = client(process.port, 0.2)
    assert store.add("count") == 1
    process.stop()
    began = time.monotonic()
    for action in (lambda: store.add("count"), lambda: store.has("count"), lambda: store.put_if("a", "1", None),
                   lambda: store.list(""), lambda: store.wait(["a"], 0.1)):
        with pytest.raises(StoreUnavailable, match=f"the store at 127.0.0.1:{process.port} has not answered") as error:
            action()
        assert not error.value.gone
    assert time.monotonic() - began < 10
    process.go_on()
    with store.within(60.0):
        assert store.add("count") == 3, "the first one was under way, and is counted once"
        assert store.get("a") is None


def test_a_signal_is_heard_while_the_store_stands_still(process):
    """The call that it breaks off spoils no later one."""
    class Heard(BaseException):
        pass

    def hear(*_: object) -> None:
        raise Heard

    store, before = client(process.port), signal.signal(signal.SIGALRM, hear)
    store.put("a", "1")
    process.stop()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Heard):
            store.has("a")
    finally:
        signal.signal(signal.SIGALRM, before)
    process.go_on()
    assert store.get_all(["a", "b"]) == ["1", ""]


def test_a_store_that_has_ended_is_gone(process):
    store = client(process.port)
    store.put("a", "1")
    process.end()
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="does not answer any more") as error:
            store.get("a")
        assert error.value.gone


def test_another_service_is_no_store():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as other:
        thread = threading.Thread(target=lambda: other.accept()[0].sendall(b"HTTP"))
        thread.start()
        with pytest.raises(StoreUnavailable, match="it is no TCPStore"):
            TCPStoreClient("127.0.0.1", other.getsockname()[1], 5.0)
        thread.join()


def test_a_store_listens_at_the_address_alone():
    server = store_on("127.0.0.2")
    with pytest.raises(StoreUnavailable):
        TCPStoreClient("127.0.0.1", server.port, 5.0)
