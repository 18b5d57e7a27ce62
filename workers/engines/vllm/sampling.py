"""Sampling of `workers.engines.sampling` inside vLLM, as a logits processor.

vLLM's own seeds belong to requests: an aborted and extended row would draw different tokens, and its log-probabilities
are taken after top-k and top-p. Here a token depends on (key, row id, position), and its log-probability is the one
that the trainer computes.

    SamplingProcessor   the logits processor        Recorder   of the experts that routers choose

vLLM's own record of experts is its second model runner's alone, and logits processors are the first one's. Routers of
both hand what they choose to a function, where they are not part of a captured graph.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from distflow.config.run import Generation
from distflow.errors import EngineError
from workers.engines.routing import Routing
from workers.engines.sampling import TokenLimits, sample_tokens, uniform

_CHUNK = 1 << 23  # logits that are sampled from at a time: vLLM does not account for this memory
MODE = "processed_logits"
"""Makes vLLM report the value at the chosen token after this processor, which is the log-probability."""


class _Choice(NamedTuple):
    """Sampling parameters; rows that share them are sampled together."""

    key: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float


class _Slot(NamedTuple):
    """Row in vLLM's batch: its id, the position of its turn's first token, and the tokens that vLLM appends to."""

    choice: _Choice
    id: int
    first: int
    output: list[int]


def parameters(key: int, temperature: float, limits: Generation | TokenLimits, id: int, first: int, limit: int,
               ends: list[int]) -> SamplingParams:
    """Return a request whose tokens `SamplingProcessor` samples. `first`: position of its first token after the
    prompt, for the random numbers. `limit`: tokens to sample now."""
    choice = _Choice(key, temperature, limits.top_k, limits.top_p, limits.min_p)
    return SamplingParams(
        temperature=0.0, max_tokens=limit, stop_token_ids=ends, ignore_eos=True, logprobs=0, detokenize=False,
        skip_clone=True,
        extra_args={"choice": [*choice], "row": [id, first]})


class SamplingProcessor(LogitsProcessor):
    """Samples a token for each row and sets all logits but its own to -inf, so that vLLM's greedy choice takes it."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        self.device = device
        self.slots: dict[int, _Slot] = {}
        self.groups: list[tuple[_Choice, Tensor, Tensor, list[_Slot]]] = []
        """Rows with one choice: their indices in the batch [R] and their ids [R]."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.slots.pop(index, None)
        for index, params, _, output in batch_update.added:
            self.slots.pop(index, None)
            if params.extra_args:
                id, first = params.extra_args["row"]
                self.slots[index] = _Slot(_Choice(*params.extra_args["choice"]), id, first, output)
        for one, other, way in batch_update.moved:
            moved, replaced = self.slots.pop(one, None), self.slots.pop(other, None)
            if moved is not None:
                self.slots[other] = moved
            if replaced is not None and way == MoveDirectionality.SWAP:
                self.slots[one] = replaced
        self._group()

    def _group(self) -> None:
        indices: dict[_Choice, list[int]] = defaultdict(list)
        for index in sorted(self.slots):
            indices[self.slots[index].choice].append(index)
        self.groups = [(choice, torch.tensor(indices, device=self.device),
                        torch.tensor([self.slots[index].id for index in indices], device=self.device),
                        [self.slots[index] for index in indices]) for choice, indices in indices.items()]

    @torch.inference_mode()
    def apply(self, logits: Tensor) -> Tensor:
        chosen = [self._choose(logits, *group) for group in self.groups]
        if chosen:
            logits.fill_(-torch.inf)
        for (_, indices, _, _), (tokens, logprobs) in zip(self.groups, chosen):
            logits[indices, tokens] = logprobs
        return logits

    def _choose(self, logits: Tensor, choice: _Choice, indices: Tensor, ids: Tensor,
                slots: list[_Slot]) -> tuple[Tensor, Tensor]:
        position = torch.tensor([slot.first + len(slot.output) for slot in slots], device=self.device)
        noise = uniform(choice.key, ids, position)
        count = max(1, _CHUNK // logits.shape[1])
        picked = [sample_tokens(logits[some], part, choice.temperature, choice.top_k, choice.top_p, choice.min_p)
                  for some, part in zip(indices.split(count), noise.split(count))]
        tokens, logprobs = zip(*picked)
        return torch.cat(tokens), torch.cat(logprobs)


class Recorder:
    """Choices by request, each as (position, [tokens, layers, experts of a token]) of every pass that read some of its
    tokens."""

    def __init__(self, model: nn.Module, runner: Any, routing: Routing):
        """`runner`: vLLM's, which knows what tokens of which requests a pass reads."""
        self.routing, self.runner = routing, runner
        self.requests: dict[str, list[tuple[int, Tensor]]] = {}
        self._layers: dict[int, Tensor] = {}
        runners: list[Any] = [part for part in model.modules() if isinstance(part, MoERunner)]
        for layer, part in enumerate(runners):
            if part._quant_method.is_monolithic:
                raise EngineError("`routing_replay` wants the experts that vLLM's routers choose, and here its kernel "
                                  f"chooses them ({type(part._quant_method).__name__}). Take it out of `generation`")
            part.router.set_capture_fn(functools.partial(self._layers.__setitem__, layer))
        model.register_forward_hook(self._take)

    def _take(self, *_: Any) -> None:
        chosen = torch.stack([self._layers.pop(layer) for layer in range(self.routing.layers)], 1)
        chosen, ends = chosen.to(self.routing.dtype).cpu(), self.runner.query_start_loc.np
        for index, request in enumerate(self.runner.input_batch.req_ids):
            first, end = int(ends[index]), int(ends[index + 1])
            self.requests.setdefault(request, []).append((int(self.runner.positions[first]), chosen[first:end]))

    def take(self, request: str, count: int) -> Tensor:
        """Return the choices of the first `count` tokens of a request that has ended. What was read again, with new
        weights, counts as it was read last."""
        table = torch.full((count, self.routing.layers, self.routing.experts_per_token), self.routing.unknown,
                           dtype=self.routing.dtype)
        for start, chosen in self.requests.pop(request, []):
            table[start : start + len(chosen)] = chosen[: max(count - start, 0)]
        return table
