"""Sampling with whatever a model itself keeps between tokens, for models whose layers are not understood.

Nothing is padded and nothing is masked: rows are read and decoded together where their sequences have one length, and
get from the model what each would get alone.

    PlainSession   the session: rows of one length become a cohort once there is room for them
    _Cohort        rows that began together, and what the model keeps of them
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from distflow.errors import EngineError
from distflow.telemetry import heartbeat
from workers.engines.rollout import SampledRow
from workers.engines.turns import PREFILL_TOKENS, TransformersSession, Turns

_FRACTION = 8
"""A cohort begins once an eighth of the batch is free, or as much as its first prompt's rows need."""


class PlainSession(TransformersSession):
    """Session of any causal language model: `step` samples one token for each row of each cohort."""

    cohorts: tuple[_Cohort, ...] = ()

    @property
    def busy(self) -> bool:
        return bool(self.cohorts or self.unread)

    @torch.inference_mode()
    def abort(self, rows: Sequence[SampledRow] | None = None) -> list[SampledRow]:
        known = {row for cohort in self.cohorts for row in cohort.turns.rows if row}.union(*self.unread)
        wanted = known.intersection(known if rows is None else rows)
        left = self.abort_unread(wanted)
        for cohort in self.cohorts:
            slots = [slot for slot, row in enumerate(cohort.turns.rows) if row in wanted]
            left += cohort.leave(torch.tensor(slots, device=self.device), [False] * len(slots)) if slots else []
        self.cohorts = tuple(cohort for cohort in self.cohorts if cohort.turns.live)
        return left

    @torch.inference_mode()
    def step(self) -> list[SampledRow]:
        if self.engine.paused:
            return []
        self._fill()
        left = []
        for cohort in self.cohorts:
            heartbeat.current().tick()
            left += cohort.step()
        self.cohorts = tuple(cohort for cohort in self.cohorts if cohort.turns.live)
        return left

    def _fill(self) -> None:
        rows = self.engine.generation.batch_rows
        free = rows - sum(cohort.turns.live for cohort in self.cohorts)
        while self.unread and free >= min(len(self.unread[0]), max(rows // _FRACTION, 1)):
            together = self._take(free)
            free -= sum(map(len, together))
            self.cohorts += (_Cohort(self, together),)

    def _take(self, free: int) -> list[list[SampledRow]]:
        """Take up to `free` waiting rows whose sequences are as long as that of the first, by prompt."""
        length = len(self.unread[0][0].sequence)
        taken: list[list[SampledRow]] = []
        left: deque[list[SampledRow]] = deque()
        for rows in self.unread:
            fits = len(rows[0].sequence) == length and (not taken or (len(taken) + 1) * length <= PREFILL_TOKENS)
            count = min(len(rows), free) if fits else 0
            if count:
                taken.append(rows[:count])
                free -= count
            if count < len(rows):
                left.append(rows[count:])
        self.unread = left
        return taken


class _Cohort:

    def __init__(self, session: PlainSession, together: list[list[SampledRow]]):
        """`together`: the rows of each prompt."""
        rows = [row for group in together for row in group]
        if any(row.images for row in rows):
            raise EngineError(f"{type(session.model).__name__} is sampled by its own cache, which is done for text "
                              "alone, and a prompt has images. Give the role another `rollout`")
        for row in rows:
            row.begin()
        self.reader, self.turns = _Reader(session.model), Turns(session, {})
        prompts = torch.stack([group[0].sequence for group in together]).to(session.device)
        logits = self.reader.read(prompts)
        places = torch.arange(len(rows), device=session.device)
        repeated = torch.repeat_interleave(torch.tensor([len(group) for group in together], device=session.device))
        if len(rows) > len(together):
            self.reader.select(repeated)
        self.turns.start(rows, places, {"logits": logits[repeated]})

    def step(self) -> list[SampledRow]:
        chosen, gone, finished = self.turns.sample()
        live = self.turns.state["live"].clone()
        live[gone] = False
        left = self.leave(gone, finished) if len(gone) else []
        if self.turns.live:
            self.turns.state["logits"] = self.reader.read(chosen[live, None])
        return left

    def leave(self, gone: Tensor, finished: list[bool]) -> list[SampledRow]:
        rows = self.turns.end(gone, finished)
        if self.turns.live:
            self.reader.select(self.turns.keep_live())
        return rows


class _Reader:
    """Model that reads rows [B] of one length, a few tokens at a time, with what it keeps of them itself. If that
    cannot be divided among rows, it reads all tokens again for each new one."""

    def __init__(self, model: PreTrainedModel):
        self.model, self.takes = model, inspect.signature(model.forward).parameters
        self.kept: dict[str, Cache] | None = None
        self.length = 0  # tokens that were read of each row
        self.tokens: Tensor | None = None  # they themselves [B, L], where nothing is kept

    def read(self, tokens: Tensor) -> Tensor:
        """Return the logits [B, V] after `tokens` [B, 1 or more], which follow those read before."""
        self.length += tokens.shape[1]
        if self.kept is None:
            output = self._forward(tokens, use_cache=True)
            self.kept = {name: value for name, value in output.items()
                         if name in self.takes and isinstance(value, Cache)}
            self.tokens = None if self.kept else tokens
            return output.logits[:, -1]
        if self.tokens is None:
            return self._forward(tokens, use_cache=True, **self.kept).logits[:, -1]
        self.tokens = torch.cat([self.tokens, tokens], 1)
        some = self.tokens.split(max(PREFILL_TOKENS // self.tokens.shape[1], 1))
        return torch.cat([self._forward(each, use_cache=False).logits[:, -1] for each in some])

    def _forward(self, tokens: Tensor, **given: Any) -> Any:
        count, width = tokens.shape
        # Without them some models count the tokens of their first layer, also if that keeps none (MiniMax).
        places = torch.arange(self.length - width, self.length, device=tokens.device).expand(count, width)
        given = {"position_ids": places, "logits_to_keep": 1, **given}
        return self.model(tokens, **{name: value for name, value in given.items() if name in self.takes})

    def select(self, rows: Tensor) -> None:
        """Continue with these `rows` [any number], in this order."""
        self.kept, self.tokens = _select(self.kept, rows), _select(self.tokens, rows)


def _select(kept: Any, rows: Tensor) -> Any:
    """Return what a model keeps, with these `rows` of each tensor in it. Some caches of transformers have tensors that
    their `reorder_cache` does not reorder (MiniMax, DeepSeek-V4)."""
    if isinstance(kept, Tensor):
        return kept.index_select(0, rows) if kept.ndim else kept
    if isinstance(kept, dict):
        return {name: _select(value, rows) for name, value in kept.items()}
    if isinstance(kept, (list, tuple)):
        return type(kept)(_select(value, rows) for value in kept)
    if isinstance(kept, (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin)):
        vars(kept).update(_select(vars(kept), rows))
    return kept
