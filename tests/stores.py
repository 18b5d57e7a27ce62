"""A real store for tests: a TCPStore of this process, or of one of its own that can be stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

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


class CountingStore(TCPStoreClient):
    """Counts the operations of all its views, and of all threads."""

    def __init__(self, port: int):
        self.operations: list[str] = []
        self.keys: list[int] = []  # of each call of get_all
        super().__init__("127.0.0.1", port, SECONDS)

    def _call(self, function, wait=0.0):
        self.operations.append("call")
        return super()._call(function, wait)

    def get_all(self, keys):
        self.keys.append(len(keys))
        return super().get_all(keys)
