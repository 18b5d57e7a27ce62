"""Hugging Face weights on their way into vLLM, which fuses some of them into one and loads those only together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from distflow.errors import EngineError
from workers.engines.rollout import misplaced


class WeightLoader:
    """Whole tensors as vLLM may have them: in its dtype, its own copies, and fused ones only when all parts are there.

    Iteration ends early at a tensor that the model does not have, or that has another shape: vLLM then finishes what
    it began, so that the engine stays usable. `check` says what was wrong.
    """

    def __init__(self, weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, torch.Size],
                 fused: Mapping[str, list[str]], copies: Mapping[str, str], dtype: torch.dtype,
                 device: torch.device):
        """`fused`: names of modules in vLLM, and those of the modules that they are made of. `copies`: names under
        which vLLM wants a tensor once more."""
        self.weights, self.shapes, self.copies, self.dtype, self.device = weights, shapes, copies, dtype, device
        self.whole = {part: name for name, parts in fused.items() for part in parts}
        self.groups: dict[str, set[str]] = {}
        for name in shapes:
            self.groups.setdefault(self._group_of(name), set()).add(name)
        self.waiting: dict[str, dict[str, Tensor]] = {}
        self.wrong, self.size = "", 0

    def _group_of(self, name: str) -> str:
        """The module in vLLM that holds it, which takes all its tensors at once."""
        parent, _, module = name.rpartition(".")[0].rpartition(".")
        return f"{parent}.{self.whole.get(module, module)}"

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights:
            self.wrong = misplaced(name, tensor, self.shapes)
            if self.wrong:
                return
            group = self._group_of(name)
            have = self.waiting.setdefault(group, {})
            # vLLM keeps what it is given until the module is complete, and it may be overwritten before.
            have[name] = tensor.detach().to(self.device, self.dtype, copy=True)
            self.size += have[name].nbytes
            if have.keys() == self.groups[group]:
                for each, whole in self.waiting.pop(group).items():
                    yield each, whole
                    if each in self.copies:
                        yield self.copies[each], whole

    def check(self) -> None:
        """Raises EngineError if anything did not find its place."""
        if self.wrong:
            raise EngineError(self.wrong)
        for group, have in self.waiting.items():
            missing = sorted(self.groups[group] - have.keys())
            raise EngineError(f"vLLM keeps `{group}` as one; {', '.join(sorted(have))} came without "
                              f"{', '.join(missing)}. Load them together")
