"""Library of the collectives: chosen by the run file (`backend`), and tried in a process of its own before ranks meet.

What UCC does when it is there has not been verified: no torch with it was to be had.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from distflow.config.run import Backend
from distflow.errors import EngineError

_AUTO = {"cpu": "gloo", "cuda": "nccl"}
_SECONDS = 120
_INSTEAD = {"ucc": "UCC needs a torch that is built with it (USE_UCC=1), or the plugin torch_ucc:  "
                   "https://github.com/openucx/torch-ucc . Else  backend: auto",
            "nccl": "NCCL needs a torch for CUDA, and a GPU for each rank. Else  backend: auto",
            "gloo": "Take  backend: auto"}
_TRY = """
import importlib, sys, tempfile
import torch, torch.distributed as dist
name, device, plugin = sys.argv[1:]
if plugin: importlib.import_module(plugin)
if not dist.is_backend_available(name): sys.exit(f"this torch ({torch.__version__}) is built without it")
with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group(name, store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1, device=device))
    dist.destroy_process_group()
"""


def choose_backend(asked: Backend, device: str) -> str:
    """Return the backend for tensors on `device`. Raises EngineError: the one that was asked for does not work here."""
    if asked == "auto":
        return _AUTO[device]
    plugin = "torch_ucc" if asked == "ucc" and importlib.util.find_spec("torch_ucc") else ""
    try:
        tried = subprocess.run([sys.executable, "-P", "-c", _TRY, asked, "cuda" if asked == "nccl" else device, plugin],
                               capture_output=True, text=True, timeout=_SECONDS, check=False)
        failure = tried.stderr.strip().rpartition("\n")[2] or f"exit status {tried.returncode}"
    except subprocess.TimeoutExpired:
        failure = f"no answer in {_SECONDS} s"
    else:
        if not tried.returncode:
            return asked
    raise EngineError(f"`backend: {asked}` does not work here: {failure}. {_INSTEAD[asked]}")


def torch_name(backend: str, device: str) -> str:
    """Return what `init_process_group` calls it; tensors of a GPU run have some of their collectives on the CPU."""
    if device == "cpu":
        return backend
    return f"cpu:{'gloo' if backend == 'nccl' else backend},cuda:{backend}"
