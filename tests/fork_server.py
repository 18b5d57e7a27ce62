"""The server from which tests fork their processes: it has imported what these need, so each costs milliseconds. The
processes that xdist starts share one.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from multiprocessing.forkserver import _forkserver  # pyright: ignore[reportAttributeAccessIssue]
from pathlib import Path
from typing import Any

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload([
    "torch.distributed.checkpoint", "torch.distributed.device_mesh", "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel", "torch.utils.checkpoint", "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3", "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe", "pytest", "hypothesis", "workers.engines.fsdp",
    "distflow.weights.publisher", "distflow.weights.puller"])
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
"""Torch's store asks for the name of each peer. Of many questions at once some stay unanswered, for 5 s each."""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # as `launch.py` has it
"""When tests are collected: the server keeps none of the variables that the test sets which is the first to need it."""
_SHARED = "TESTS_FORK_SERVER"


def share() -> None:
    """Start the server for the processes that this one is about to start."""
    _start()
    os.environ[_SHARED] = _forkserver._forkserver_address


def join() -> None:
    """Use the server of the process that has started this one."""
    if address := os.environ.get(_SHARED):
        _forkserver._forkserver_address, _forkserver.ensure_running = address, lambda: None
        _forkserver._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)  # who has started it keeps it
    own_heartbeat()


def fork_process(target: Callable[..., None], *arguments: Any, daemon: bool = False) -> ForkServerProcess:
    process = FORKED.Process(target=_with_own_heartbeat, args=(target, *arguments), daemon=daemon)
    _start()
    process.start()
    return process


def _with_own_heartbeat(target: Callable[..., None], *arguments: Any) -> None:
    own_heartbeat()
    target(*arguments)


def own_heartbeat() -> None:
    """Make a heartbeat for this fork. Its parent's is memory that all forks share: a test would see the progress of
    others, also of those of other test processes."""
    if heartbeat := sys.modules.get("distflow.telemetry.heartbeat"):
        heartbeat.set_current(heartbeat.Heartbeat())


def _start() -> None:
    own = dict(os.environ)
    try:
        _set_environment(ENVIRONMENT)
        _forkserver.ensure_running()
    finally:
        _set_environment(own)


def describe(config: str) -> subprocess.CompletedProcess[str]:
    """What `workers.engines.description` says of a model's configuration, in a process that need not load torch."""
    with tempfile.TemporaryDirectory() as place:
        given, out, err = (Path(place, name) for name in ("in", "out", "err"))
        given.write_text(config)
        process = fork_process(_describe, str(given), str(out), str(err))
        process.join()
        return subprocess.CompletedProcess([], process.exitcode, out.read_text(), err.read_text())


def _describe(given: str, out: str, err: str) -> None:
    import transformers

    from workers.engines.description import main

    transformers.logging.set_verbosity_error()
    sys.stdin, sys.stdout, sys.stderr = open(given), open(out, "w", buffering=1), \
        open(err, "w", buffering=1)  # noqa: SIM115
    main()


def _set_environment(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


class ForkedScript:
    """`python FILE ARGUMENTS` in a forked process, with what tests use of `subprocess.Popen(…, stderr=PIPE)`."""

    def __init__(self, file: str, *arguments: str, environment: dict[str, str]):
        self.stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - a pipe would hold up whoever says much
        stderr = f"/proc/{os.getpid()}/fd/{self.stderr.fileno()}"
        self.process = fork_process(_execute, file, arguments, environment, stderr)
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    poll = returncode.fget

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[None, str]:
        self.wait(timeout)
        return None, self.stderr.read()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # the server has seen its end, and has not said so yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _execute(file: str, arguments: tuple[str, ...], environment: dict[str, str], stderr: str) -> None:
    output = os.open(stderr, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 2)
    os.close(output)
    _set_environment(environment)
    sys.argv = [file, *arguments]
    atexit._clear()  # what the server has registered
    try:
        runpy.run_path(file, run_name="__main__")
    finally:
        atexit._run_exitfuncs()
