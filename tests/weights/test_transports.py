"""Each transport moves the same bytes; one that is requested and not available is an error."""

import contextlib
import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch

from distflow.rpc.shared_memory import SharedMemoryPool, memory_name
from distflow.telemetry.events import Events
from distflow.weights.errors import NoTransport
from distflow.weights.publisher import Publisher
from distflow.weights.puller import Puller
from distflow.weights.transport import transports
from distflow.weights.transport.memory import SharedMemoryTransport

UCX = pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed")
ALL = ["memory", "tcp", pytest.param("ucx", marks=UCX)]
WHOLE = 8 << 20


def relayed(mover, transport: str) -> tuple:
    """Return a relay that has a version, and a rollout that is pulling it."""
    between = {"transport": transport, "environ": {"UCX_TLS": "tcp"}}
    trainer, relay = mover("publisher", **between), mover("puller", who="relay", **between)
    trainer.ask("publish", version=1, mib=8)
    relay.pulls(1, 8)
    relay.ask("tire", seconds=0.02)
    return relay, mover("puller", who="a", **between).send("pull", mib=8)


@pytest.mark.parametrize("transport", ALL)
def test_each_moves_weights_and_survives_its_source(mover, events, transport):
    relay, rollout = relayed(mover, transport)
    relay.kill()
    assert rollout.answer() == {"version": 1, "right": True}
    assert {tuple(event["transports"]) for event in events("weights_pulled")} == {(transport,)}
    assert WHOLE <= events("weights_pulled")[-1]["bytes"] <= WHOLE + (256 << 10)


@pytest.mark.parametrize("transport", ALL)
def test_a_source_that_stands_still_may_wake_up_late(mover, events, transport):
    """Chunks under way must not arrive later: their memory has another use by then."""
    relay, rollout = relayed(mover, transport)
    relay.stop()
    assert rollout.answer() == {"version": 1, "right": True}
    relay.go_on()
    rollout.pulls(1, 8)


def sockets() -> set[str]:
    """Those of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return found


@UCX
def test_ucx_stays_on_loopback_with_its_host():
    """It opens a port on each interface that it may use."""
    before = sockets()
    inlet = transports("ucx", SharedMemoryPool("weights"))["ucx"].puller_end({}, 1.0)
    facts = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    new = sockets() - before
    listening = {fact[1].partition(":")[0] for fact in facts if fact[3] == "0A" and f"socket:[{fact[9]}]" in new}
    assert listening == {"0100007F"}
    inlet.close()


@pytest.mark.parametrize("transport", ["auto", "memory"])
def test_puller_takes_a_transport_that_both_ends_can_use(mover, events, transport):
    mover("publisher", transport="tcp").ask("publish", version=1, mib=1)
    said = mover("puller", who="a", transport=transport).ask("pull", mib=1)
    if transport == "auto":
        assert said["right"]
        assert events("weights_pulled")[0]["transports"] == ["tcp"]
        return
    assert said["error"] == "NoTransport"
    assert "`transport: memory` is asked for here, trainer-0 offers tcp. Set  transport: auto" in said["message"]


def test_what_is_not_here_is_an_error(monkeypatch):
    monkeypatch.setattr("distflow.config.models.installed", lambda engine: None)
    with pytest.raises(NoTransport, match=r"needs ucxx-cu12, which is not installed:  pip install .*\[ucx\]'"):
        transports("ucx", SharedMemoryPool("weights"))
    monkeypatch.setenv("DISTFLOW_MACHINE", "")
    with pytest.raises(NoTransport, match="Set  transport: auto"):
        transports("memory", SharedMemoryPool("weights"))
    with pytest.raises(NoTransport, match="Did you mean `memory`"):
        transports("memry", SharedMemoryPool("weights"))


def test_a_machine_is_proved_not_believed():
    def of(token: bytes) -> SharedMemoryTransport:
        return SharedMemoryTransport(SharedMemoryPool(memory_name("weights", token)))

    memory = of(b"a" * 32)
    offer = memory.offer()
    assert memory.puller_end(offer, 1.0) is not None
    assert of(b"b" * 32).puller_end(offer, 1.0) is None, "the token is another"
    assert memory.puller_end(offer | {"address": [os.getpid(), 0, 9, 32]}, 1.0) is None, "that is no memory"
    assert memory.puller_end(offer | {"machine": "elsewhere"}, 1.0) is None


def test_no_file_of_another_process_is_taken_for_weights(forged):
    memory = SharedMemoryTransport(SharedMemoryPool("weights"))
    puller_end = memory.puller_end(memory.offer(), 1.0)
    for wrong in forged("weights"):
        assert memory.puller_end(memory.offer() | {"address": wrong}, 1.0) is None
        puller_end.on_reply({"addresses": {0: wrong}})
        with pytest.raises(ConnectionError, match="not its shared memory|not as large as it says"):
            puller_end.map(0)


@UCX
def test_ucx_that_cannot_start_says_why_or_is_left_out(store, token, tmp_path, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "no_such_way")
    monkeypatch.setenv("DISTFLOW_MACHINE", "")  # no memory that both see
    with pytest.raises(NoTransport, match="cannot start: .*UCX_TLS=no_such_way. Correct them, or set  transport: tcp"):
        transports("ucx", SharedMemoryPool("weights"))
    recorded = Events()
    recorded.open(tmp_path / "events.jsonl", 0)
    monkeypatch.setattr("distflow.telemetry.events._current", recorded)
    trainer = Publisher(store, token, rank=0, ranks=1)
    trainer.publish(1, {"weight": torch.arange(1000)})
    rollout = Puller(store, token, "a")
    assert torch.equal(dict(rollout.pull().tensors())["weight"], torch.arange(1000))
    rollout.close()
    trainer.close()
    said = list(map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines()))
    assert [event["transport"] for event in said if event["event"] == "transport_left_out"] == ["ucx"]
    assert [event["transports"] for event in said if event["event"] == "weights_pulled"] == [["tcp"]]
