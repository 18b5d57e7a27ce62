"""Tensor-parallel ranks of one SGLang server: the first rank owns the server and broadcasts its answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distflow.errors import EngineError
from distflow.rpc.shared_memory import machine_name


class TPGroup:
    """The tensor-parallel ranks of a mesh; without such a dimension, this rank alone.

    Raises:
        EngineError: the ranks are on several machines.
    """

    def __init__(self, mesh: DeviceMesh):
        tensor = mesh["tp"] if "tp" in (mesh.mesh_dim_names or ()) else None
        self.size = tensor.size() if tensor else 1
        self.group = tensor.get_group() if self.size > 1 else None
        self.device = mesh.device_type
        self.leads = self.group is None or dist.get_rank(self.group) == 0
        if self.group is not None:
            self._require_one_machine()

    def broadcast(self, ask: Callable[[], Any]) -> Any:
        """Run `ask` on the first rank; return its JSON result, or raise its EngineError, on all ranks. Collective."""
        if self.group is None:
            return ask()
        outcome: dict[str, Any] = {}
        try:
            outcome["answer"] = ask() if self.leads else None
        except EngineError as error:
            outcome["error"] = str(error)
        received = json.loads(self._bytes(json.dumps(outcome).encode()))
        if "error" in received:
            raise EngineError(received["error"])
        return received["answer"]

    def _require_one_machine(self) -> None:
        elsewhere = torch.tensor([int(self.broadcast(machine_name) != machine_name())], device=self.device)
        dist.all_reduce(elsewhere, group=self.group)
        if elsewhere.item():
            raise EngineError(f"SGLang's server is on one machine, and {elsewhere.item()} of the {self.size} ranks "
                              "over which its model is split are on others. Let the role's tp divide the ranks of a "
                              "machine, or write  rollout: vllm")

    def _bytes(self, own: bytes) -> bytes:
        """Broadcast the first rank's bytes."""
        size = torch.tensor([len(own)], device=self.device)
        dist.broadcast(size, group=self.group, group_src=0)
        text = torch.frombuffer(bytearray(own), dtype=torch.uint8) if self.leads else torch.empty(0, dtype=torch.uint8)
        text = text.to(self.device) if self.leads else torch.empty(int(size), dtype=torch.uint8, device=self.device)
        dist.broadcast(text, group=self.group, group_src=0)
        return bytes(text.cpu().numpy())
