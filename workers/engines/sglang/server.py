"""SGLang server process: started in its own environment, called over loopback, ended with its owner."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from distflow.config.models import ROLLOUTS
from distflow.errors import EngineError
from distflow.telemetry.processes import spawn
from workers.engines.external import torchrun_environment

_TIMEOUT = 900.0  # seconds for a server to start, and to answer any call but `/generate`
_END_TIMEOUT = 10.0
"""Seconds for a server to end when it is closed, or after its connections broke off, which is often noticed first."""
_LAST_LINES = 25  # lines of the log in an error
_PROGRAM = """
import contextlib, glob, json, os, runpy, shutil, signal, sys, threading
sys.argv = ["sglang.launch_server", *json.loads(sys.stdin.buffer.readline())]
def end_with_owner():
    os.read(0, 1)  # ends when the owner closes the pipe, or is dead
    for maps in glob.glob("/proc/[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(maps.split("/")[2])) == os.getpgrp():
                for line in open(maps):
                    name = line.split()[-1]
                    if name.startswith("/dev/shm/sgl") and os.path.exists(name):
                        os.unlink(name)
    shutil.rmtree(os.getcwd(), ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=end_with_owner, daemon=True).start()
runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
"""
"""Arguments come by the pipe, since command lines are public; shared memory is removed here when SGLang is killed."""


class SGLangServer:
    """A server process with its children, protected by a key. `DISTFLOW_SGLANG_PYTHON` names the Python of the
    environment that has SGLang (default: this one)."""

    def __init__(self, folder: tempfile.TemporaryDirectory, flags: list[str], device: str, ranks: int = 1):
        self.folder = folder
        self.key, self.log = secrets.token_hex(32), Path(self.folder.name, "server.log")
        self.python = os.environ.get(ROLLOUTS["sglang"].elsewhere, sys.executable)
        self.version = self._version()
        self.began, (self.port, other) = time.monotonic(), _free_ports()
        arguments = [*flags, "--host", "127.0.0.1", "--port", str(self.port), "--nccl-port", str(other), "--api-key",
                     self.key, "--skip-server-warmup", "--log-level-http", "warning", *further_flags()]
        with self.log.open("wb") as log:
            self.process = spawn(
                [self.python, "-c", _PROGRAM], die_with_parent=0, session=True, stdin=subprocess.PIPE, stdout=log,
                stderr=subprocess.STDOUT, cwd=self.folder.name, env=self._environment(device, ranks))
        self.pipe = self.process.stdin  # the server ends when it is closed
        self.pipe.write(json.dumps(arguments).encode() + b"\n")
        self.pipe.flush()

    def _environment(self, device: str, ranks: int) -> dict[str, str]:
        ours = {name: os.environ[name] for name in os.environ.keys() - torchrun_environment()}
        ours["TMPDIR"] = self.folder.name  # its sockets are created and removed there
        if device == "cpu":
            ours["SGLANG_USE_CPU_ENGINE"] = "1"
            if ranks > 1:  # by default SGLang requires a NUMA node for each
                ours.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join([f"0-{(os.cpu_count() or 1) - 1}"] * ranks))
        return {"OMP_NUM_THREADS": "1", **ours}

    def _version(self) -> str:
        asked = [self.python, "-c", "from importlib.metadata import version; print(version('sglang'))"]
        try:
            return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError) as error:
            raise EngineError(f"{self.python} has no SGLang, which needs an environment of its own: it pins another "
                              f"torch. Instead:  {ROLLOUTS['sglang'].pip}") from error

    def wait(self, timeout: float) -> bool:
        """Return whether the server answers within `timeout` seconds. Raises EngineError if it has failed to start."""
        until = time.monotonic() + timeout
        while not self._answers():
            self.watch()
            if time.monotonic() > self.began + _TIMEOUT:
                raise self.failure(f"has not started in {_TIMEOUT:.0f} s")
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
        return True

    def _answers(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException), self._request("/health", None, 5.0) as reply:
            return reply.status == 200
        return False

    def watch(self, timeout: float = 0.0) -> None:
        """Raise EngineError if the server has died, or dies within `timeout` seconds."""
        if self.pipe.closed:
            raise EngineError("this SGLang server was closed")
        if (status := self.process.poll(timeout)) is not None:
            raise self.failure(f"has ended with {_describe_status(status)}")

    def failure(self, what: str) -> EngineError:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        said = "\n".join(f"    {line[:500]}" for line in lines[-_LAST_LINES:])
        return EngineError(f"SGLang's server {what}. It said last:\n\n{said}\n")

    def call(self, path: str, body: dict[str, Any] | None = None, timeout: float = _TIMEOUT) -> bytes:
        """POST `body` (None: GET); return the answer."""
        try:
            with self._request(path, body, timeout) as reply:
                answer = reply.read()
        except (OSError, http.client.HTTPException) as error:
            self.watch(_END_TIMEOUT)
            raise self.failure(f"does not answer {path}: {type(error).__name__}: {error}") from error
        if reply.status != 200:
            raise EngineError(f"SGLang refuses {path} ({reply.status}): {answer[:2000].decode(errors='replace')}")
        return answer

    @contextlib.contextmanager
    def _request(self, path: str, body: dict[str, Any] | None, timeout: float | None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
            connection.request("GET" if body is None else "POST", path,
                               None if body is None else json.dumps(body), headers)
            yield connection.getresponse()
        finally:
            connection.close()

    def generate(self, body: dict[str, Any], events: queue.SimpleQueue) -> None:
        """Request several rows at once; their events, or an EngineError, are put into `events`."""
        threading.Thread(target=self._follow, args=(body, events), daemon=True).start()

    def _follow(self, body: dict[str, Any], events: queue.SimpleQueue) -> None:
        left = set(body["rid"])
        try:
            with self._request("/generate", {**body, "stream": True}, None) as reply:
                if reply.status != 200:
                    events.put(EngineError(f"SGLang refuses rows ({reply.status}): {reply.read(2000).decode()}"))
                    return
                for line in reply:
                    if line.startswith(b"data: {"):
                        event = json.loads(line.removeprefix(b"data: "))
                        if event.get("meta_info", {}).get("finish_reason"):
                            left.discard(event["meta_info"]["id"])
                        events.put(event)
        except (OSError, http.client.HTTPException) as error:
            events.put(self._connection_error(f"{type(error).__name__}: {error}"))
            return
        if left:
            events.put(self._connection_error(f"nothing more was said of {len(left)} rows"))

    def _connection_error(self, how: str) -> EngineError:
        try:
            self.watch(_END_TIMEOUT)
        except EngineError as error:
            return error
        return self.failure(f"broke off its answer ({how})")

    def close(self) -> None:
        """End the server and its children."""
        if self.pipe.closed:
            return
        self.pipe.close()
        self.process.poll(_END_TIMEOUT)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.folder.cleanup()


def further_flags() -> list[str]:
    """Return the flags for the server that the user has named."""
    return shlex.split(os.environ.get("DISTFLOW_SGLANG_FLAGS", ""))


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


def _describe_status(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
