"""A real etcd for tests and benchmarks: Debian's `etcd-server`."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path


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

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
