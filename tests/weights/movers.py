"""Processes that publish and pull, for tests: each executes commands, and answers.

They are forked from a server that has imported everything already: a process of its own costs milliseconds.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fork_server import fork_process

from distflow.rpc.messages import frame

MIB = 1 << 20
_LIMIT = 60.0


class Mover:
    """A process of its own. `kind`: publisher or puller."""

    def __init__(self, kind: str, port: int, token: bytes, **settings: Any):
        self.connection, theirs = Pipe()
        self.process = fork_process(serve, theirs, kind, port, token, settings, daemon=True)
        theirs.close()

    def send(self, do: str, **given: Any) -> Mover:
        """Have it do something; it may take its time until `answer`."""
        self.connection.send((do, given))
        return self

    def answer(self) -> dict[str, Any]:
        assert self.connection.poll(_LIMIT), f"no answer in {_LIMIT} s"
        return self.connection.recv()

    def ask(self, do: str, **given: Any) -> dict[str, Any]:
        return self.send(do, **given).answer()

    def pulls(self, expected: int, mib: float, **given: Any) -> None:
        """Require that it pulls this version, whole and right."""
        assert self.ask("pull", mib=mib, **given) == {"version": expected, "right": True}

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.connection.close()

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def wait_until_stopped(self) -> None:
        while Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert self.process.is_alive()
            time.sleep(0.01)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)


def tensors_of(version: int, mib: float, rank: int = 0, same: int = 0) -> dict[str, Any]:
    """Tensors that follow from version and rank; the first `same` of them do not depend on the version. A torn mixture
    of two versions is not what this gives for either."""
    import torch

    count, index = max(1, int(mib * MIB) // 8 // 65536), torch.arange(65536, dtype=torch.int64)
    return {f"rank{rank}.weight{number}": index * (number + 1) + rank * 7919
            + (0 if number < same else version * 104729) for number in range(count)}


def right(tensors: dict[str, Any], version: int, mib: float, ranks: int = 1, **which: int) -> bool:
    import torch

    expected = {name: tensor for rank in range(ranks)
                for name, tensor in tensors_of(version, mib, rank, **which).items()}
    return expected.keys() == tensors.keys() and all(torch.equal(tensors[name], expected[name]) for name in expected)


def matrices_of(version: int, layers: int) -> dict[str, Any]:
    """Tensors [2048, 1024], of which rows are split, [1024, 2048], of which columns are, and [1024], float32."""
    import torch

    shapes = {"up": (2048, 1024), "down": (1024, 2048), "norm": (1024,)}
    return {f"{layer}.{name}.weight": torch.arange(math.prod(shape)).add(layer + 7 * version).float().view(shape)
            for layer in range(layers) for name, shape in shapes.items()}


def serve(line: Connection, kind: str, port: int, token: bytes, settings: dict[str, Any]) -> None:
    from stores import client

    from distflow.errors import DistflowError
    from distflow.telemetry.events import current

    os.environ.update(settings.pop("environ", {}))
    store = client(port).below(settings.pop("run", "run"))
    if machine := settings.pop("machine", ""):
        os.environ["DISTFLOW_MACHINE"] = machine
    if events := settings.pop("events", ""):
        current().open(Path(events), 0)
    one = {"publisher": Publishing, "puller": Pulling}[kind](store, token, **settings)
    while True:
        do, given = line.recv()
        try:
            said = getattr(one, do)(**given)
        except DistflowError as error:
            said = {"error": type(error).__name__, "message": str(error)}
        line.send(said or {})


class Serving:
    """Commands of both kinds about the chunks that they serve."""

    source: Any
    buffers: Any

    def sent(self) -> dict[str, Any]:
        return {"sent": self.source.sent}

    def port(self) -> dict[str, Any]:
        return {"port": self.source.address[1]}

    def tire(self, seconds: float) -> dict[str, Any]:
        """From now on each chunk takes at least so long."""
        give = self.source._send_chunks

        def slowly(client: Any, header: Any) -> None:
            time.sleep(seconds)
            give(client, header)

        self.source._send_chunks = slowly
        return {"tired": True}

    def die_serving(self, chunks: int) -> None:
        """Serve so many chunks whole, and of the next one a half."""
        give, left = self.source._send_chunks, [chunks]

        def serve(client: Any, header: Any) -> None:
            chunks, (part, first, count) = self.source.stores[header["key"]], header["run"]
            if left[0] < count:
                data, chunk = chunks.view((part, first, count)), chunks.parts[part].chunk
                client.connection.sock.sendall(frame(self.source._have(client, chunks), len(data)))
                client.connection.sock.sendall(memoryview(data)[: left[0] * chunk + chunk // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= count
            give(client, header)

        self.source._send_chunks = serve

    def spoil(self, part: int, chunk: int) -> None:
        """Serve this chunk corrupt."""
        chunks = list(self.source.stores.values())[-1]
        chunks.view((part, chunk, 1))[100] ^= 255

    def files(self) -> dict[str, Any]:
        """Return the files in which the parts of the newest version lie."""
        chunks = list(self.source.stores.values())[-1]
        return {"files": [self.buffers.address_of(memory).inode for memory in chunks.memory.values()]}


class Publishing(Serving):
    def __init__(self, store: Any, token: bytes, **settings: Any):
        from distflow.weights.publisher import Publisher

        self.publisher = Publisher(store, token, **settings)
        self.source, self.buffers = self.publisher.source, self.publisher.buffers

    def publish(self, version: int, mib: float, **which: int) -> None:
        self.publisher.publish(version, tensors_of(version, mib, self.publisher.rank, **which))

    def publish_split(self, version: int, layers: int, ranks: int) -> None:
        import torch

        from distflow.weights.shard_slice import Split

        self.publisher.publish(version, matrices_of(version, layers), torch.float32, {"norm": 1},
                               Split(ranks, ("down.weight",)))

    def die_publishing(self, version: int, mib: float, at: str) -> None:
        """End in the middle of `publish`."""
        def die(*_: Any, **__: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        owner = self.publisher.directory if at == "announce_version" else self.publisher
        setattr(owner, at, die)
        self.publish(version, mib)

    def by_way_of(self, port: int) -> None:
        """Be found at this port from now on."""
        self.publisher.directory.update(address=("127.0.0.1", port))


class Pulling(Serving):
    def __init__(self, store: Any, token: bytes, deadline: float = 3.0, **settings: Any):
        from distflow.weights.puller import Puller

        self.puller = Puller(store, token, deadline=deadline, **settings)
        self.source, self.buffers = self.puller.source, self.puller.buffers

    def pull(self, mib: float, ranks: int = 1, same: int = 0, least: int = 0, **given: Any) -> dict[str, Any]:
        """Pull until the version is no older than `least`."""
        while (weights := self.puller.pull(**given)).version < least:
            self.puller.wait_for_newer(weights.key)
        good = right(dict(weights.tensors()), weights.version, mib, ranks, same=same)
        return {"version": weights.version, "right": good}

    def pull_slices(self, layers: int, least: int = 0, **given: Any) -> dict[str, Any]:
        """Pull as `pull`, and compare what is read."""
        import torch

        while (weights := self.puller.pull(**given)).version < least:
            self.puller.wait_for_newer(weights.key)
        expected, tensors = matrices_of(weights.version, layers), dict(weights.tensors())
        boxes = {name: self.puller.reads.boxes.get(name, [((0,) * whole.ndim, whole.shape)])
                 for name, whole in expected.items()}
        cuts = [(name, tuple(slice(at, at + count) for at, count in zip(*box)))
                for name, each in boxes.items() for box in each]
        good = all(torch.equal(tensors[name][cut], expected[name][cut]) for name, cut in cuts)
        return {"version": weights.version, "right": good and tensors.keys() == expected.keys()}

    def be_patient(self, seconds: float) -> None:
        """From now on take others for dead, and an own lease for lost, after so many seconds without a heartbeat."""
        self.puller.directory.dead = seconds

    def doubt(self, who: str, seconds: float) -> None:
        """From now on take this one for dead after so many seconds without a heartbeat."""
        from distflow.telemetry.heartbeat import Silence

        class Doubted(Silence):
            def of(self, counter: object) -> float:
                return math.inf if super().of(counter) > seconds else 0.0

        directory = self.puller.directory
        directory.silences[f"holder/{directory.store.get(f'relay/{who}')}"] = Doubted()

    def keep(self, mib: float) -> None:
        """Keep only the tensors of the newest version."""
        weights = self.puller.pull()
        self.kept = dict(weights.tensors()), weights.version, mib

    def kept_right(self) -> dict[str, Any]:
        return {"right": right(*self.kept)}

    def drop(self) -> None:
        del self.kept

    def die_pulling(self, chunks: int) -> None:
        """End when so many chunks have been received."""
        _at_chunk(chunks, lambda: os.kill(os.getpid(), signal.SIGKILL))

    def stop_pulling(self, chunks: int, lease: float) -> None:
        """Stand still when so many chunks have been received, between two heartbeats; go on when the next one has found
        that the lease, of so many seconds, was lost."""
        directory = self.puller.directory

        def stand_still() -> None:
            with directory.lock:
                patience, directory.dead = directory.dead, lease
                os.kill(os.getpid(), signal.SIGSTOP)
            while directory.mine.pulling:
                time.sleep(0.01)
            directory.dead = patience

        _at_chunk(chunks, stand_still)

    def newest(self) -> dict[str, Any]:
        return {"newest": self.puller.newest()}


def _at_chunk(number: int, act: Callable[[], None]) -> None:
    """Act when this process has received so many chunks."""
    from distflow.weights.chunk_store import ChunkStore

    verify, left = ChunkStore.verify, [number]

    def count(chunks: Any, chunk: Any, found: bytes) -> bool:
        left[0] -= 1
        if not left[0]:
            act()
        return verify(chunks, chunk, found)

    ChunkStore.verify = count
