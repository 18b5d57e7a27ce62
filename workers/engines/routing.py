"""Routing replay: the experts that a rollout chose for each token are chosen again where the token is trained.

    Routing   sizes of the choices of a mixture's tokens, and the column of them
    Routers   routers of a model, which record what they choose, or choose what was recorded

Rollout and trainer round differently, so that of two experts that are nearly alike to a token each may choose another,
and the log-probabilities differ by far more than rounding (R3: Ma et al. 2025, "Stabilizing MoE Reinforcement Learning
by Aligning Training and Inference Routers"). Which experts count is then the rollout's choice; how much each of them
counts is still computed by the trainer, with gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from distflow.data.batch import Ragged
from distflow.errors import EngineError

_NAMES = ("gate", "router")  # of the router in a layer's `mlp`, in transformers' models


@dataclass(frozen=True)
class Routing:
    """Sizes of a mixture's choices [tokens, layers, experts of a token], the layers without experts left out."""

    layers: int
    experts_per_token: int
    dtype: torch.dtype

    @classmethod
    def of(cls, model: PreTrainedModel) -> Routing:
        """Raises EngineError if the model has no routers that are known."""
        found, config = len(routers_of(model)), model.config.get_text_config()
        count = getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0)
        if not found or not count:
            raise EngineError(f"`routing_replay` wants a mixture of experts whose layers have a router as transformers "
                              f"builds them, and {type(model).__name__} has none. Take it out of `generation`")
        return cls(found, config.num_experts_per_tok, torch.uint8 if count < 256 else torch.int16)

    @property
    def unknown(self) -> int:
        """Stands for the choice of a token of which none was recorded: the trainer's router chooses."""
        return torch.iinfo(self.dtype).max

    def column(self, recorded: Sequence[Tensor | None], prompts: Tensor, responses: Tensor) -> Ragged:
        """Return the choices of each row's tokens but the last, which no model reads. `prompts`, `responses` [B]:
        numbers of tokens."""
        lengths = prompts + (responses - 1).clamp(min=0)
        values = torch.full((int(lengths.sum()), self.layers, self.experts_per_token), self.unknown, dtype=self.dtype)
        column = Ragged(values, lengths)
        for row, known in zip(column.rows, recorded):
            if known is not None:
                row[: len(known)] = known[: len(row)]
        return column


def routers_of(model: nn.Module) -> list[nn.Module]:
    return [part for module in model.modules() if hasattr(module, "experts")
            for name, part in module.named_children() if name in _NAMES and hasattr(part, "top_k")]


class Routers:
    """Routers of a model, in the order of its layers. `replayed` [tokens, layers, experts of a token]: what they choose
    from now on, in backward passes that compute a layer again too; None: what they would."""

    def __init__(self, model: PreTrainedModel):
        self.routing, self.replayed, self._recorded = Routing.of(model), None, []
        self.replayed: Tensor | None
        self.records = False
        for layer, router in enumerate(routers_of(model)):
            router.forward = functools.partial(self._route, router.forward, layer)

    def _route(self, forward: Callable[..., Any], layer: int, *inputs: Any, **more: Any) -> Any:
        if self.replayed is None:
            found = forward(*inputs, **more)
        else:
            with _Chosen(self.replayed[:, layer].long(), self.routing.unknown) as chosen:
                found = forward(*inputs, **more)
            chosen.check()
        if self.records:
            self._recorded.append(found[-1])
        return found

    def take(self) -> Tensor:
        """Return the choices [tokens, layers, experts of a token] of the pass just made, while `records` is set."""
        taken, self._recorded = torch.stack(self._recorded, 1).to(self.routing.dtype), []
        return taken


class _Chosen(TorchFunctionMode):
    """Replaces the choice of the `topk` in a router by `chosen` [tokens, experts of a token], its values by theirs."""

    def __init__(self, chosen: Tensor, unknown: int):
        super().__init__()
        self.chosen, self.unknown, self.count = chosen, unknown, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        self.count += 1
        if found[1].shape != self.chosen.shape:
            raise EngineError(f"choices of experts {list(self.chosen.shape)} are to be replayed where a router makes "
                              f"{list(found[1].shape)}: they are of other rows, or of another model")
        chosen = torch.where(self.chosen == self.unknown, found[1], self.chosen)
        return args[0].gather(-1, chosen), chosen

    def check(self) -> None:
        if self.count != 1:
            raise EngineError(f"a router of this model calls topk {self.count} times, and choices of experts can be "
                              "replayed where it does so once. Take `routing_replay` out of `generation`")


def alike_before(choices: Ragged, prompts: Tensor) -> Tensor:
    """Return [B - 1]: whether the experts of a row's prompt are those of the row before it."""
    parts = [row[:length] for row, length in zip(choices.rows, prompts.tolist())]
    return torch.tensor([torch.equal(one, other) for one, other in zip(parts, parts[1:])], dtype=torch.bool)


def packed_choices(choices: Ragged, prompts: Tensor, first: Sequence[int]) -> Tensor:
    """Return the choices [T, …] in the order of `policy`'s packed tokens: those of each prompt, by its `first` row, and
    then those of each row after its prompt. `prompts` [B]: numbers of tokens."""
    rows, lengths = choices.rows, prompts.tolist()
    return torch.cat([*(rows[row][: lengths[row]] for row in first),
                      *(row[length:] for row, length in zip(rows, lengths))])
