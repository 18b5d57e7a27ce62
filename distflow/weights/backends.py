"""Which backend collectives use: asked for by name it is used or is an error; only `auto` chooses, and says what.

That a backend is listed does not mean that it works: each is tried in a process of its own, with one rank, since one
that is broken may end the process. The `ucc` backend needs a torch built with UCC, or the plugin `torch_ucc`; PyPI has
neither for torch 2.13, so that its success is not verified here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import NamedTuple

from distflow.schema.errors import did_you_mean
from distflow.weights.errors import NoTransport

BACKENDS = ("nccl", "gloo", "ucc")
_LIMIT = 60.0
_HINTS = {"ucc": "It needs a torch that was built with UCC, or the plugin torch_ucc. Set  backend: auto",
          "nccl": "It needs NVIDIA GPUs and a torch for CUDA. Set  backend: gloo",
          "gloo": "It needs a torch with distributed support"}
_TRY = """
import importlib.util, json, sys
def tried(name):
    import torch, torch.distributed as dist
    if not dist.is_available() or not getattr(dist, f"is_{name}_available")():
        if name != "ucc" or not importlib.util.find_spec("torch_ucc"):
            return f"this torch ({torch.__version__}) was built without it"
        import torch_ucc
    if name == "nccl" and not torch.cuda.is_available():
        return "there is no GPU"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    dist.init_process_group(name, store=store, rank=0, world_size=1)
    ones = torch.ones(1, device="cuda" if name == "nccl" else "cpu")
    dist.all_reduce(ones)
    return "" if ones.item() == 1.0 else f"all_reduce of one rank's 1.0 gave {ones.item()}"
print(json.dumps(tried(sys.argv[1])))
"""


class Probe(NamedTuple):
    """Whether a backend works here, and if not, why."""

    works: bool
    reason: str


def probe(backend: str) -> Probe:
    """Try a backend in a process of its own: is it there, can it be imported, does one rank's all_reduce work."""
    try:
        done = subprocess.run([sys.executable, "-c", _TRY, backend], capture_output=True, text=True, timeout=_LIMIT,
                              env={"OMP_NUM_THREADS": "1"} | os.environ, check=False)
    except subprocess.TimeoutExpired:
        return Probe(False, f"a one-rank all_reduce did not end in {_LIMIT:g} s")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"its process ended with {done.returncode}"])[-1]
        return Probe(False, last)
    reason = json.loads(done.stdout.splitlines()[-1])
    return Probe(not reason, reason)


def choose(wish: str, device: str) -> tuple[str, str]:
    """The backend to use, and a line that says why.

    Args:
        wish: `auto`, or a backend.
        device: `cuda` or `cpu`.

    Raises:
        NoTransport: the one that was asked for does not work here.
    """
    if wish != "auto" and wish not in BACKENDS:
        raise NoTransport(f"there is no backend `{wish}`. {did_you_mean(wish, ['auto', *BACKENDS])}")
    if wish == "auto":
        first = probe("nccl") if device == "cuda" else Probe(False, "tensors are on the CPU")
        return ("nccl", "auto chose nccl") if first.works else ("gloo", f"auto chose gloo, not nccl: {first.reason}")
    found = probe(wish)
    if not found.works:
        raise NoTransport(f"`backend: {wish}` was asked for and does not work here: {found.reason}. {_HINTS[wish]}")
    return wish, f"{wish} as asked for"
