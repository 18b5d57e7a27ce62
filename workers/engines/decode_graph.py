"""A decoding step of fixed shapes, captured as a CUDA graph: one launch in place of some twenty for each layer."""

from __future__ import annotations

import functools
import re
import threading
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distflow.errors import EngineError
from workers.engines.attention import NAME, NO_MASK, LastColumns, has_flash
from workers.engines.capabilities import Capabilities
from workers.engines.kv_slots import SlotCache

_MIXTURE = re.compile(r"moe|mixture|expert", re.IGNORECASE)
_FREE = 2 * 2**30
"""Bytes that should be free on the device before a capture: torch gives none of its cache back in the middle of one."""
_CAPTURING = threading.Lock()


def can_be_captured(model: PreTrainedModel) -> bool:
    """Return whether a step of this model is the same kernels whatever the tokens are."""
    found = Capabilities.of(model)  # rotary embeddings that look at lengths read positions back from the device
    mixture = any(hasattr(module, "experts") or _MIXTURE.search(type(module).__name__) for module in model.modules())
    return found.packs and not found.own_length and not mixture and model.config._attn_implementation == NAME


@functools.cache
def _stream() -> torch.cuda.Stream:
    """Return the stream of all captures: matrix products have a workspace of 32 MiB for each stream, for good."""
    return torch.cuda.Stream()


class DecodeGraph:
    """Reads one token of every slot, for as long as the slots have the same buffers and the model its weights' places.
    The first step is computed as it is, which loads kernels; the second is captured, without a GPU it is not."""

    def __init__(self, model: PreTrainedModel, slots: SlotCache, wakes: int, former: DecodeGraph | None):
        """`wakes`: how often the weights have got new places. `former`: the graph whose memory is used again."""
        self.model, self.slots = model, slots
        self.former = former if former is None or former.graph else former.former
        self.made_for, self.warm = (slots.resized, wakes), False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.tokens, self.positions, self.lengths = torch.zeros(
            3, slots.count, 1, dtype=torch.int64, device=model.device)
        self.columns = torch.arange(slots.room, device=model.device)
        self.column = torch.zeros(1, dtype=torch.int64, device=model.device)

    def step(self, tokens: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
        """Return the logits [B, V] after `tokens` [B], which have `lengths` [B] tokens before them."""
        for mine, given in ((self.tokens, tokens), (self.positions, positions), (self.lengths, lengths)):
            mine.copy_(given[:, None])
        self.column.fill_(self.slots.end)
        if self.graph is None and self.warm and torch.cuda.is_available():
            with _CAPTURING:
                self._capture()
        if self.graph is None:
            self.logits = self._forward()
        else:
            self.graph.replay()
        self.warm = True
        self.slots.advance()
        return self.logits

    def _forward(self) -> Tensor:
        if has_flash(self.model):
            seen: dict[str, Any] = {"attention_mask": self.tokens.new_empty(NO_MASK),
                                    "attention_pattern": LastColumns(self.column, self.lengths)}
        else:
            mask = (self.columns >= self.column - self.lengths) & (self.columns <= self.column)
            seen = {"attention_mask": mask[:, None, None]}
        with self.slots.show_all(self.column):
            return self.model(self.tokens, position_ids=self.positions, past_key_values=self.slots, use_cache=True,
                              **seen).logits[:, -1]

    def _capture(self) -> None:
        if torch.cuda.mem_get_info()[0] < _FREE:
            torch.cuda.empty_cache()
        graph, stream, current = torch.cuda.CUDAGraph(), _stream(), torch.cuda.current_stream()
        memory = self.former.graph.pool() if self.former and self.former.graph else None
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(memory, "thread_local")  # other threads copy weights meanwhile
                self.logits = self._forward()
                graph.capture_end()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise EngineError(f"a decoding step of {type(self.model).__name__} cannot be captured as a CUDA graph: "
                              f"{error}. Set  generation: {{cuda_graphs: false}}  for its role") from error
        current.wait_stream(stream)
        self.graph, self.former = graph, None
