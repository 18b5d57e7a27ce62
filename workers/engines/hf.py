"""Generation by a transformers model: prompts are read once for all their samples, rows join and leave at any time."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from distflow.config.run import Generation, RoleRun
from distflow.errors import EngineError
from workers.engines.decoding import Decoding
from workers.engines.precision import halve, is_half, pad_token
from workers.engines.rollout import Rollout, misplaced


class HFRollout(Rollout):
    """A plain transformers model that samples.

    Raises:
        EngineError: a layer keeps something else than keys and values, so that rows could not come and go.
    """

    def __init__(self, model: PreTrainedModel, generation: Generation, pad_token: int, end_tokens: list[int],
                 shared: Iterable[nn.Parameter] = ()):
        """`shared`: parameters of the model that another engine computes with too."""
        self.model = model.eval().requires_grad_(False)
        self.generation, self.pad_token = generation, pad_token
        self.end_tokens = torch.tensor(end_tokens, device=model.device)
        self.dtype, self.shared = model.dtype, set(shared)
        other = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers
                 if not isinstance(layer, DynamicLayer)}
        if other:
            raise EngineError(f"{type(model).__name__} keeps {', '.join(sorted(other))} between tokens, not keys and "
                              "values alone; generation by transformers cannot let its rows come and go")

    @classmethod
    def build(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: RoleRun, mesh: DeviceMesh,
              seed: int, end_tokens: list[int], shared: Iterable[nn.Parameter] = ()) -> HFRollout:
        shared = list(shared)
        whole = copy.deepcopy(model, {id(parameter): parameter for parameter in shared}).to(mesh.device_type)
        if is_half(settings, mesh.device_type):
            halve(whole.parameters())
        engine = cls(whole, settings.generation, pad_token(tokenizer), end_tokens, shared)
        engine.version = 0
        return engine

    def session(self, key: int, temperature: float | None = None, keeps: bool = False) -> Decoding:
        return Decoding(self, key, self.generation.temperature if temperature is None else temperature, keeps)

    def places(self) -> dict[str, Tensor]:
        return {name: parameter.data for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> int:
        own, size = self.places(), 0
        shapes = {name: weight.shape for name, weight in own.items()}
        for name, whole in weights:
            if wrong := misplaced(name, whole, shapes):
                raise EngineError(wrong)
            if own[name].data_ptr() != whole.data_ptr():
                own[name].copy_(whole)
            size += own[name].nbytes
        self.version = version
        return size

    def sleep(self) -> None:
        for parameter in self._alone():
            parameter.data.untyped_storage().resize_(0)

    def wake(self) -> None:
        for parameter in self._alone():
            parameter.data.untyped_storage().resize_(parameter.nbytes)
        self.version = -1

    def _alone(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter not in self.shared]

    def check_health(self) -> None: ...

    def close(self) -> None: ...
