"""The server from which tests fork their processes: it has imported what these need, so each costs milliseconds."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from multiprocessing.connection import Connection

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload([
    "torch.distributed.checkpoint", "torch.distributed.device_mesh", "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel", "torch.utils.checkpoint", "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3", "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe", "pytest", "hypothesis", "workers.engines.fsdp",
    "distflow.weights.publisher", "distflow.weights.puller"])


class ForkedScript:
    """`python FILE ARGUMENTS` in a forked process, with what tests use of `subprocess.Popen(…, stderr=PIPE)`."""

    def __init__(self, file: str, *arguments: str, environment: dict[str, str]):
        ours, theirs = FORKED.Pipe(duplex=False)
        self.process = FORKED.Process(target=_execute, args=(file, arguments, environment, theirs))
        self.process.start()
        self.pid = self.process.pid
        self.stderr = os.fdopen(os.dup(ours.fileno()))
        ours.close()
        theirs.close()

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
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _execute(file: str, arguments: tuple[str, ...], environment: dict[str, str], stderr: Connection) -> None:
    os.dup2(stderr.fileno(), 2)
    stderr.close()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [file, *arguments]
    atexit._clear()  # what the server has registered
    try:
        runpy.run_path(file, run_name="__main__")
    finally:
        atexit._run_exitfuncs()
