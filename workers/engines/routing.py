"""Routers of mixtures of experts: routing replay and the load-balancing loss.

    Routing         sizes of the choices of a mixture's tokens, and the column of them
    Routers         routers of a model, which record what they choose, or choose what was recorded
    RouterBalance   loss that a model's configuration may ask for, so that experts get equally many tokens

Routing replay: the experts that a rollout chose for each token are chosen again where the token is trained.

Rollout and trainer round differently, so that of two experts that are nearly alike to a token each may choose another,
and the log-probabilities differ by far more than rounding (R3: Ma et al. 2025, "Stabilizing MoE Reinforcement Learning
by Aligning Training and Inference Routers"). Which experts count is then the rollout's choice; how much each of them
counts is still computed by the trainer, with gradients.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from distflow.data.batch import Ragged
from distflow.errors import EngineError
from distflow.telemetry import events

_NAMES = ("gate", "router")  # of the router in a layer's `mlp`, in transformers' and Megatron's models


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
            for name, part in module.named_children() if name in _NAMES and {"top_k", "topk"} & vars(part).keys()]


class Routers:
    """Routers of `stage`, in the order of its layers, of which `first` come before it in the model. `replayed` [tokens,
    layers, experts of a token]: what they choose from now on, in backward passes that compute a layer again too; None:
    what they would."""

    def __init__(self, model: PreTrainedModel, stage: nn.Module | None = None, first: int = 0):
        self.routing, self._recorded, self.records = Routing.of(model), [], False
        self.replayed: Tensor | None = None
        for layer, router in enumerate(routers_of(stage or model), first):
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


def packed_choices(choices: Ragged, prompts: Tensor, first: Sequence[int], rest: Tensor, unknown: int) -> Tensor:
    """Return the choices [T, …] in the order of `policy`'s packed tokens: those of each prompt, by its `first` row, and
    then those of the `rest` [B] tokens that are read of each row after its prompt. `prompts` [B]: numbers of tokens."""
    rows, lengths = choices.rows, prompts.tolist()
    parts = [*(rows[row][: lengths[row]] for row in first)]
    for row, length, count in zip(rows, lengths, rest.tolist()):
        known = row[length : length + count]
        parts += [known, known.new_full((count - len(known), *known.shape[1:]), unknown)]
    return torch.cat(parts)


class RouterBalance:
    """Load-balancing loss (Fedus et al. 2021, equations 4 to 6) of passes with gradients, by the model's own function.

    `weights` [rows, columns] are set before each pass: how many times each of its tokens counts. A prompt that is read
    once for several responses counts once for each of them, and padding does not, as if each row was read alone.
    """

    def __init__(self, model: PreTrainedModel, function: Callable[..., Tensor], join: Callable[[Tensor], Tensor]):
        """See `balance_of`, which makes it."""
        self.coefficient, self._function, self._join = balance_coefficient(model), function, join
        self.weights = torch.empty(0)
        config = model.config.get_text_config()
        self._top_k: int = getattr(model, "num_experts_per_tok", 0) or config.num_experts_per_tok
        self._weights: list[Tensor] = []
        self._logits: list[list[Tensor]] = []
        model.get_decoder().register_forward_pre_hook(_with_router_logits, with_kwargs=True)
        model.get_decoder().register_forward_hook(self._take)

    def _take(self, _: nn.Module, inputs: Any, output: Any) -> None:
        logits, output.router_logits = getattr(output, "router_logits", None), None
        if logits is not None:
            self._weights.append(self._join(self.weights.float()).flatten())
            self._logits.append([self._join(layer.view(*self.weights.shape, -1)).flatten(0, 1) for layer in logits])

    def take(self) -> Tensor:
        """Return the loss of the passes since the last call, without its coefficient."""
        logits = tuple(torch.cat(layers) for layers in zip(*self._logits))
        loss = self._function(logits, logits[0].shape[-1], self._top_k, torch.cat(self._weights))
        self._weights, self._logits = [], []
        return loss


def balance_coefficient(model: PreTrainedModel) -> float:
    """Return the weight of the load-balancing loss that the model's configuration asks for, 0.0 if it does not."""
    config = model.config.get_text_config()
    coefficient = getattr(model, "router_aux_loss_coef", None) or getattr(config, "router_aux_loss_coef", None)
    asked = any(getattr(each, "output_router_logits", False) for each in (model.config, config))
    return float(coefficient or 0.0) if asked else 0.0


def balance_of(model: PreTrainedModel, join: Callable[[Tensor], Tensor] | None = None) -> RouterBalance | None:
    """Return the load-balancing loss that the model's configuration asks for; None, with a note, if transformers has
    none for its family. `join` gathers [rows, columns, …] of the ranks that split rows by columns."""
    if not balance_coefficient(model):
        return None
    if (function := _balance_function(model)) is None:
        note_no_balance(model, "transformers has none for this family")
        return None
    return RouterBalance(model, function, join or (lambda own: own))


def note_no_balance(model: PreTrainedModel, why: str) -> None:
    """Say once that a load-balancing loss that is asked for is not computed; say nothing if none is asked for."""
    if (coefficient := balance_coefficient(model)) and dist.get_rank() == 0:
        events.show(f"note: the configuration of {type(model).__name__} asks for a load-balancing loss "
                    f"(output_router_logits, router_aux_loss_coef: {coefficient:g}), which is not computed: {why}")


def _balance_function(model: PreTrainedModel) -> Any:
    function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    taken = [*inspect.signature(function).parameters] if function else []
    return function if taken == ["gate_logits", "num_experts", "top_k", "attention_mask"] else None


def without_router_logits(model: PreTrainedModel) -> None:
    """Stop a model from computing a load-balancing loss of its own in each pass, for masks that it understands alone,
    where its configuration asks for one."""
    if any(getattr(each, "output_router_logits", False) for each in (model.config, model.config.get_text_config())):
        model.get_decoder().register_forward_pre_hook(_without_router_logits, with_kwargs=True)


def _without_router_logits(_: nn.Module, inputs: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return inputs, {**kwargs, "output_router_logits": False}


def _with_router_logits(_: nn.Module, inputs: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return inputs, {**kwargs, "output_router_logits": torch.is_grad_enabled()}
