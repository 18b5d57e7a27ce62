"""Loads Hugging Face weights into vLLM, which fuses some modules and loads their parts only together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from distflow.errors import EngineError
from workers.engines.rollout import weight_mismatch


class WeightLoader:
    """Whole tensors for vLLM: copies in its dtype, with the parts of fused modules together.

    Iteration stops at a tensor with an unknown name or another shape; vLLM then finishes its load, so that the engine
    stays usable, and `check` raises.
    """

    def __init__(self, weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, torch.Size],
                 fused: Mapping[str, list[str]], copies: Mapping[str, str], dtype: torch.dtype,
                 device: torch.device):
        """`fused`: vLLM's fused modules and their parts. `copies`: second names of tensors that vLLM has twice."""
        self.weights, self.shapes, self.copies, self.dtype, self.device = weights, shapes, copies, dtype, device
        self.whole = {part: name for name, parts in fused.items() for part in parts}
        self.groups: dict[str, set[str]] = {}
        for name in shapes:
            self.groups.setdefault(self._group_of(name), set()).add(name)
        self.waiting: dict[str, dict[str, Tensor]] = {}
        self.problem, self.size = "", 0

    def _group_of(self, name: str) -> str:
        """Return the vLLM module of a tensor, which takes all its tensors at once."""
        parent, _, module = name.rpartition(".")[0].rpartition(".")
        return f"{parent}.{self.whole.get(module, module)}"

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights:
            self.problem = weight_mismatch(name, tensor, self.shapes)
            if self.problem:
                return
            group = self._group_of(name)
            have = self.waiting.setdefault(group, {})
            # vLLM keeps tensors until the module is complete, and the source may be overwritten before.
            have[name] = tensor.detach().to(self.device, self.dtype, copy=True)
            self.size += have[name].nbytes
            if have.keys() == self.groups[group]:
                for each, whole in self.waiting.pop(group).items():
                    yield each, whole
                    if each in self.copies:
                        yield self.copies[each], whole

    def check(self) -> None:
        """Raise EngineError if a tensor was refused or a module is incomplete."""
        if self.problem:
            raise EngineError(self.problem)
        for group, have in self.waiting.items():
            missing = sorted(self.groups[group] - have.keys())
            raise EngineError(f"vLLM keeps `{group}` as one; {', '.join(sorted(have))} came without "
                              f"{', '.join(missing)}. Load them together")
