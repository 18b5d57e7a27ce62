"""Device of a rank: a GPU of its machine, or the CPU."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

import torch

from distflow.config.spec import Spec
from distflow.errors import Diagnostic, EngineError, InvalidInput, Location
from distflow.plan import Group, Plan
from distflow.recovery.store import RunStore
from distflow.telemetry.events import show
from distflow.telemetry.processes import spawn

_COUNTED = 2  # exit status of a process that has counted, less the count


def choose_device(spec: Spec, plan: Plan, store: RunStore) -> tuple[str, int]:
    """Return cuda or cpu, the same on all ranks, and the index of this rank's GPU."""
    here, local = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    gpus = _gpus()
    store.agree("device", "cuda" if gpus else "cpu", "Some machines have GPUs, others have none.")
    if not gpus:
        return "cpu", 0
    first = store.rank - local
    return "cuda", gpu_index(local, gpus, [plan.group_of(rank) for rank in range(first, first + here)])


def gpu_index(local: int, gpus: int, groups: Sequence[tuple[Group | None, int]]) -> int:
    """Return which of a machine's GPUs its rank number `local` takes. `groups`: the group, and its replica, of each of
    its ranks, which may share a GPU with those of others; the first one says so. Raises InvalidInput: one group has
    more ranks than GPUs."""
    if len(groups) <= gpus:
        return local
    largest = max(Counter((group.name if group else "", replica) for group, replica in groups).values())
    if largest <= gpus:  # the ranks of a group are neighbours: no two of them get the same one
        if not local:
            show(f"note: {len(groups)} ranks of this machine share {gpus} GPU{'s' * (gpus > 1)}: those of different "
                 "groups divide memory and time")
        return local % gpus
    hint = f"Start {gpus} ranks on it, or take  CUDA_VISIBLE_DEVICES=  in front of the command to compute on the CPU"
    raise InvalidInput(Diagnostic(f"{len(groups)} ranks on a machine that has {gpus} GPU{'s' * (gpus > 1)}",
                                  Location("torchrun --nproc-per-node"), hint))


def _gpus() -> int:
    """Count the GPUs in a process of its own: one that has called CUDA cannot be forked into workers that use it."""
    count = spawn(lambda: _COUNTED + torch.cuda.device_count()).wait() - _COUNTED
    if count < 0:
        raise EngineError("the GPUs of this machine could not be counted; the output above says why. "
                          "CUDA_VISIBLE_DEVICES= computes on the CPU")
    return count
