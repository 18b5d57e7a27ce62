"""A process of the fork server's, which forks the ranks of runs: what takes seconds is loaded once. It forks the
command line too, with torchrun and the ranks that this starts (`warm.py`), which load distflow again.

A rank is a process of its own with the environment that torchrun gives, in which `launch.py` runs as a script. As
torchrun does, its parent holds the store, and ends the others when one fails. What torchrun itself does is tested by
runs that it starts (`harness.command`).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from subprocess import TimeoutExpired
from typing import IO, Any, NoReturn

from fork_server import fork_process
from warm import become, forget_modules, forget_parent

SCRIPT = Path(__file__).resolve().parents[1] / "distflow" / "launch.py"
_OURS = ("distflow.launch", "distflow.recovery.scale", "distflow.recovery.supervisor", "planners", "workers.context",
         "workers.engines.hf", "workers.engines.turns", "workers.functions.advantages", "workers.functions.inference",
         "workers.preflight.tokens", "workers.worker")
"""Modules that each rank loads, and by these nearly all others."""
_GRACE = 30.0
"""Seconds that the others have to leave when a rank has failed, as with torchrun."""
_LONGEST = 1 << 20
"""Bytes of a job, with its environment."""


class ReadyRun:
    """A run that has begun, with what tests use of `subprocess.Popen`. Its process stands where torchrun's would, and
    leads a group of which all its processes are. `stdout`: what it says, if it was started with a pipe."""

    def __init__(self, status: socket.socket, stdout: IO[str] | None = None):
        self.status, self.stdout, self.returncode = status, stdout, None
        self.pid = json.loads(status.recv(100))

    def poll(self) -> int | None:
        with contextlib.suppress(TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self.status], [], [], timeout)[0]:
                raise TimeoutExpired("a run", timeout or 0.0)
            self.returncode = json.loads(self.status.recv(100))
        return self.returncode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End all its processes at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


class Ready:
    """Starts runs, several at a time if need be."""

    def __init__(self) -> None:
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = fork_process(serve, theirs)
        atexit.register(self.line.close)

    def start(self, ranks: int, arguments: tuple[str, ...], folder: Path, environment: dict[str, str], out: int,
              err: int) -> ReadyRun:
        """Begin `torchrun --nproc-per-node RANKS distflow/launch.py ARGUMENTS` in a folder, or `python ARGUMENTS` with
        0 ranks; the output goes to two descriptors. The exit code is 1 if any rank's is not 0."""
        from harness import with_settings  # not where ranks are forked

        job = {"ranks": ranks, "line": [str(SCRIPT), *with_settings(arguments)] if ranks else arguments,
               "folder": str(folder), "environment": environment}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self.line, [json.dumps(job).encode()], [out, err, theirs.fileno()])
        return ReadyRun(ours)

    def command(self, *line: str, folder: Path, environment: dict[str, str]) -> ReadyRun:
        """Begin `python LINE` in a folder; `stdout` has all that it says."""
        said, theirs = os.pipe()
        try:
            run = self.start(0, line, folder, environment, theirs, theirs)
        finally:
            os.close(theirs)
        run.stdout = os.fdopen(said, errors="replace")
        return run

    def run(self, ranks: int, arguments: tuple[str, ...], folder: Path, environment: dict[str, str],
            timeout: float = 300) -> subprocess.CompletedProcess:
        """The same to its end.

        Raises:
            subprocess.TimeoutExpired: it took longer; all its processes are gone.
        """
        with tempfile.TemporaryDirectory() as place:
            files = [Path(place, name) for name in ("out", "err")]
            with files[0].open("a") as out, files[1].open("a") as err:
                run = self.start(ranks, arguments, folder, environment, out.fileno(), err.fileno())
            try:
                run.wait(timeout)
            except TimeoutExpired:
                run.kill()
                raise TimeoutExpired(arguments, timeout, *map(_text, files)) from None
            return subprocess.CompletedProcess(arguments, run.returncode, *map(_text, files))


def _text(file: Path) -> str:
    return file.read_text(errors="replace")


def load() -> None:
    """All that a run of a small model needs and that is not distflow's, but for what starts threads."""
    import msgpack
    import networkx
    import pydantic
    import rich.live
    import rich.markup
    import rich.progress
    import rich.table
    import torch.distributed.checkpoint
    import torch.distributed.device_mesh
    import torch.distributed.fsdp
    import torch.distributed.run
    import torch.distributed.tensor.parallel
    import torch.nn.attention.varlen
    import torch.utils.checkpoint
    import torch.utils.tensorboard
    import transformers
    import xxhash
    import yaml
    from transformers.utils.logging import disable_progress_bar

    pydantic.create_model("Warm", field=(int, 0))
    del msgpack, networkx, pydantic, rich, torch, xxhash, yaml
    for name in ("Qwen2ForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM", "Qwen3VLForConditionalGeneration",
                 "PreTrainedTokenizerFast", "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoTokenizer",
                 "AutoModelForTokenClassification", "AutoModelForSequenceClassification"):
        getattr(transformers, name)
    config = transformers.Qwen3Config(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                      num_attention_heads=1, num_key_value_heads=1, head_dim=32)
    disable_progress_bar()  # which has a thread
    with tempfile.TemporaryDirectory() as place:  # the first time compiles some hundred patterns
        transformers.Qwen3ForCausalLM(config).save_pretrained(place)


def serve(line: socket.socket) -> None:
    """Jobs until the tests are over. A rank leaves by the `SystemExit` of its script, as any process does."""
    forget_parent()
    forget_modules()
    load()
    sys.path.insert(0, str(SCRIPT.parents[1]))
    for name in _OURS:
        importlib.import_module(name)
    sys.modules["distflow.contracts.functions"].built_in()  # reads what stands in many files, once
    gc.freeze()  # or each fork looks through it for cycles, and copies it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        job, descriptors, _, _ = socket.recv_fds(line, _LONGEST, 3)
        if not job:
            return
        *outputs, status = descriptors
        if not os.fork():
            line.close()
            watch(json.loads(job), outputs, socket.socket(fileno=status))
        for descriptor in (*outputs, status):
            os.close(descriptor)


def watch(job: dict[str, Any], outputs: list[int], status: socket.socket) -> None:
    """Fork the run's first process, say which it is, and then how it has ended. Does not return."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    agent = os.fork()
    if not agent:
        status.close()
        attend(job, outputs)
    for descriptor in outputs:
        os.close(descriptor)
    status.send(json.dumps(agent).encode())
    status.send(json.dumps(os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])).encode())
    os._exit(0)


def attend(job: dict[str, Any], outputs: list[int]) -> NoReturn:
    """Be the job's command, or fork its ranks, wait for them, and exit; in a process group of its own."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, *outputs)):
        os.dup2(descriptor, number)
    for descriptor in {nothing, *outputs} - {0, 1, 2}:
        os.close(descriptor)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    if not job["ranks"]:
        begin(job["line"])
    listening = socket.create_server(("127.0.0.1", 0))
    address, ranks = listening.getsockname(), []
    for rank in range(job["ranks"]):
        process = os.fork()
        if not process:
            listening.close()
            os.environ.update(places(rank, job["ranks"], address))
            begin(job["line"])
        ranks.append(process)
    import torch.distributed as dist

    store = dist.TCPStore(*address, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    good = wait_for(ranks)
    del store
    os._exit(0 if good else 1)


def begin(line: list[str]) -> NoReturn:
    from distflow.telemetry import heartbeat

    heartbeat.set_current(heartbeat.Heartbeat())  # which is memory that forks share
    become(line)


def places(rank: int, ranks: int, address: tuple[str, int]) -> dict[str, str]:
    """What torchrun tells a rank of a machine by variables."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank), "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks), "ROLE_WORLD_SIZE": str(ranks), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default", "MASTER_ADDR": address[0], "MASTER_PORT": str(address[1]),
            "TORCHELASTIC_RUN_ID": "ready", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True"}


def wait_for(ranks: list[int]) -> bool:
    """Whether all ended well; when one has not, the others are told to end, and ended if they do not."""
    left, good = {os.pidfd_open(process): process for process in ranks}, True
    while left:
        over = select.select(list(left), [], [], None if good else _GRACE)[0]
        for process in left.values() if not over else ():
            os.kill(process, signal.SIGKILL)
        for descriptor in over:
            failed = os.waitpid(left.pop(descriptor), 0)[1] != 0
            os.close(descriptor)
            if failed and good:
                good = False
                for process in left.values():
                    os.kill(process, signal.SIGTERM)
    return good
