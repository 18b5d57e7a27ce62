"""Client of a TCPStore whose process stands still or has ended."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from stores import StoreProcess, client

from distflow.store.interface import StoreUnavailable
from distflow.store.tcp import TCPStoreClient, store_on


@pytest.fixture
def process(forked):
    made = StoreProcess()
    yield made
    made.end()


def test_torchs_own_client_sees_the_same_keys(store):
    torchs = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    store.below("group").put("key", "value")
    assert dist.PrefixStore("group", torchs).get("key") == b"value"
    torchs.set("back", "x" * 300_000)
    assert store.wait(["back"], 60.0)
    assert store.get("back") == "x" * 300_000


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
        assert store.add("count") == 3, "the first one was in progress, and is counted once"
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


def test_threads_of_a_store_leave_signals_to_the_main_thread():
    """Which may block them for a moment; a thread that does not would take them all the same."""
    before = {*os.listdir("/proc/self/task")}
    store = store_on("127.0.0.1")
    threads = {*os.listdir("/proc/self/task")} - before
    assert store.port
    assert threads
    for thread in threads:
        blocked = re.search(r"SigBlk:\s*(\w+)", Path(f"/proc/self/task/{thread}/status").read_text())[1]
        assert int(blocked, 16) >> signal.SIGTERM - 1 & 1
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_store_listens_at_the_address_alone():
    server = store_on("127.0.0.2")
    with pytest.raises(StoreUnavailable):
        TCPStoreClient("127.0.0.1", server.port, 5.0)


def test_a_store_of_a_machine_with_ipv6():
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    store = TCPStoreClient.hosting(store_on("::1"), 60.0)
    store.put("a", "1")
    assert (store.get("a"), store.own_host) == ("1", "::1")
