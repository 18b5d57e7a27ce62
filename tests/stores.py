"""A real store for tests: a TCPStore of this process, or of one of its own that can be stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from harness import ROOT, environment

from distflow.store.tcp import TCPStoreClient, store_on

SECONDS = 60.0


def hosted(seconds: float = SECONDS) -> TCPStoreClient:
    return TCPStoreClient.hosting(store_on("127.0.0.1"), seconds)


def client(port: int, seconds: float = SECONDS) -> TCPStoreClient:
    return TCPStoreClient("127.0.0.1", port, seconds)


class StoreProcess:
    """A TCPStore in a process of its own."""

    def __init__(self):
        code = "from distflow.store.tcp import store_on\nstore = store_on('127.0.0.1')\n" \
               "print(store.port, flush=True)\ninput()"
        self.process = subprocess.Popen([sys.executable, "-c", code], text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, env={**environment(), "PYTHONPATH": str(ROOT)})
        self.port = int(self.process.stdout.readline())

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Etcd:
    """Members of one etcd, each in a process of its own."""

    def __init__(self, folder: Path, members: int = 1, certificate: tuple[Path, Path] | None = None,
                 tokens: str = "simple"):
        """certificate: its file and its key's, of both the members and their clients. tokens: of users, by
        `--auth-token`."""
        self.tls = ["--cert-file", certificate[0], "--key-file", certificate[1], "--client-cert-auth",
                    "--trusted-ca-file", certificate[0]] if certificate else []
        self.tokens = tokens
        ports = [_free_port() for _ in range(2 * members)]
        self.clients, self.peers, self.folder = ports[:members], ports[members:], folder
        self.processes = [self.start(number) for number in range(members)]

    def start(self, number: int) -> subprocess.Popen:
        own, peer = f"http{'s' * bool(self.tls)}://127.0.0.1:{self.clients[number]}", f"http://127.0.0.1:{self.peers[number]}"
        cluster = ",".join(f"m{each}=http://127.0.0.1:{port}" for each, port in enumerate(self.peers))
        return subprocess.Popen(
            ["etcd", "--name", f"m{number}", "--data-dir", str(self.folder / f"m{number}"),
             "--listen-client-urls", own, "--advertise-client-urls", own, "--listen-peer-urls", peer,
             "--initial-advertise-peer-urls", peer, "--initial-cluster", cluster,
             "--auth-token", self.tokens, *self.tls],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def address(self, run: str = "run") -> str:
        return f"etcd://{','.join(f'127.0.0.1:{port}' for port in self.clients)}/{run}"

    def signal(self, number: int, which: int) -> None:
        os.kill(self.processes[number].pid, which)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class CountingStore(TCPStoreClient):
    """Counts the operations of all its views, and of all threads."""

    def __init__(self, port: int):
        self.operations: list[str] = []
        self.keys: list[int] = []  # of each list of keys
        super().__init__("127.0.0.1", port, SECONDS)

    def _call(self, query, read):
        self.operations.append("call")
        return super()._call(query, read)

    def _keys(self, keys):
        self.keys.append(len(keys))
        return super()._keys(keys)

    def wait(self, keys, seconds):
        self.operations.append("wait")
        return super().wait(keys, seconds)
