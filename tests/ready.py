"""A process that has torch and transformers loaded, and forks the ranks of runs: what takes seconds is done once.

A rank is a process of its own with the environment that torchrun gives, in which `launch.py` runs as a script; nothing
of distflow is loaded before. As torchrun does, its parent holds the store, and ends the others when one fails. What
torchrun itself does is tested by runs that it starts (`harness.command`).
"""

from __future__ import annotations

import atexit
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[1] / "distflow" / "launch.py"
_GRACE = 30.0
"""Seconds that the others have to leave when a rank has failed, as with torchrun."""
_OURS = os.environ.get("PYTHONPATH", "").split(os.pathsep)


class Ready:
    """Starts runs, one at a time."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True)
        atexit.register(self.process.stdin.close)

    def run(self, ranks: int, arguments: tuple[str, ...], folder: Path, environment: dict[str, str],
            timeout: float) -> subprocess.CompletedProcess:
        """`torchrun --nproc-per-node RANKS distflow/launch.py ARGUMENTS` in a folder; its exit code is 1 if any rank's
        is not 0.

        Raises:
            subprocess.TimeoutExpired: it took longer; all its processes are gone.
        """
        from harness import with_settings  # not where ranks are forked

        with tempfile.TemporaryDirectory() as place:
            files = [Path(place, name) for name in ("out", "err")]
            job = {"ranks": ranks, "arguments": with_settings(arguments), "folder": str(folder),
                   "environment": environment, "files": [str(file) for file in files]}
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
            agent = json.loads(self.process.stdout.readline())
            late = not select.select([self.process.stdout], [], [], timeout)[0]
            if late:
                os.killpg(agent, signal.SIGKILL)
            code = json.loads(self.process.stdout.readline())
            out, err = (file.read_text(errors="replace") for file in files)
        if late:
            raise subprocess.TimeoutExpired(arguments, timeout, out, err)
        return subprocess.CompletedProcess(arguments, code, out, err)


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


def serve() -> None:
    """Jobs until the input ends. A rank leaves by the `SystemExit` of its script, as any process does."""
    while line := sys.stdin.readline():
        agent = os.fork()
        if not agent:
            attend(json.loads(line))
        print(agent, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1]), flush=True)


def attend(job: dict[str, Any]) -> None:
    """Fork the ranks into a process group of their own, wait for them, and exit."""
    os.setsid()
    for number, file in enumerate((os.devnull, *job["files"])):
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    listening = socket.create_server(("127.0.0.1", 0))
    address, ranks = listening.getsockname(), []
    for rank in range(job["ranks"]):
        process = os.fork()
        if not process:
            listening.close()
            become(rank, address, job)
        ranks.append(process)
    import torch.distributed as dist

    store = dist.TCPStore(*address, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    good = wait_for(ranks)
    del store
    os._exit(0 if good else 1)


def become(rank: int, address: tuple[str, int], job: dict[str, Any]) -> None:
    """Run the script as this rank. Does not return."""
    os.environ.clear()
    ranks = str(job["ranks"])
    places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank), "WORLD_SIZE": ranks,
              "LOCAL_WORLD_SIZE": ranks, "ROLE_WORLD_SIZE": ranks, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
              "ROLE_NAME": "default", "MASTER_ADDR": address[0], "MASTER_PORT": str(address[1]),
              "TORCHELASTIC_RUN_ID": "ready", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
              "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update(job["environment"] | places)
    os.chdir(job["folder"])
    sys.argv = [str(SCRIPT), *job["arguments"]]
    sys.path[:] = [str(SCRIPT.parent), *search_path()]
    random.seed()
    runpy.run_path(str(SCRIPT), run_name="__main__")
    sys.exit()


def search_path() -> list[str]:
    """Where a script finds modules beside its own folder: PYTHONPATH may be another than ours."""
    given = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    ours = {str(Path(__file__).parent), *filter(None, _OURS)}
    return given + [place for place in sys.path if place not in ours]


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


if __name__ == "__main__":
    load()
    serve()
