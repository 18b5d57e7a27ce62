"""Sampling with whatever a model itself keeps between tokens, for models whose layers are not understood.

Nothing is padded and nothing is masked: rows are read and decoded together where their sequences have one length, and
get from the model what each would get alone.

    PlainSession   the session: rows of one length become a cohort once there is room for them
    _Cohort        rows that began together, and what the model keeps of them
    keeps_rows     whether what a model keeps is to be relied on; else all tokens are read again for each new one
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from distflow.errors import EngineError
from distflow.telemetry import heartbeat
from workers.engines.rollout import Rollout, SampledRow
from workers.engines.rounding import ROUNDING
from workers.engines.sampling import TokenLimits
from workers.engines.turns import PREFILL_TOKENS, TransformersSession, Turns, last_place

_FRACTION = 8
"""A cohort begins once an eighth of the batch is free, or as much as its first prompt's rows need."""


class PlainSession(TransformersSession):
    """Session of any causal language model: `step` samples one token for each row of each cohort."""

    def __init__(self, engine: Rollout, model: PreTrainedModel, key: int, temperature: float,
                 limits: TokenLimits | None, keeps: bool):
        """`keeps`: see `keeps_rows`."""
        super().__init__(engine, model, key, temperature, limits)
        self.keeps = keeps
        self.cohorts: tuple[_Cohort, ...] = ()

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
        self.reader, self.turns = _Reader(session.model, session.keeps), Turns(session, {})
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
    """Model that reads rows [B] of one length, a few tokens at a time, with its own cache or without one."""

    def __init__(self, model: PreTrainedModel, keeps: bool):
        self.model, self.keeps, self.takes = model, keeps, inspect.signature(model.forward).parameters
        self.length = 0  # tokens that were read of each row
        self.kept: dict[str, Cache] = {}
        self.tokens: Tensor | None = None  # they themselves [B, L], where nothing is kept

    def read(self, tokens: Tensor) -> Tensor:
        """Return the logits [B, V] after `tokens` [B, 1 or more], which follow those read before."""
        start, self.length = self.length, self.length + tokens.shape[1]
        if self.keeps:
            output = self.forward(tokens, start, logits_to_keep=last_place(tokens.device), use_cache=True, **self.kept)
            self.kept = {name: value for name, value in output.items()
                         if name in self.takes and isinstance(value, Cache)}
            return output.logits[:, -1]
        self.tokens = tokens if self.tokens is None else torch.cat([self.tokens, tokens], 1)
        some = self.tokens.split(max(PREFILL_TOKENS // self.length, 1))
        last = last_place(tokens.device)
        return torch.cat([self.forward(each, 0, logits_to_keep=last, use_cache=False).logits[:, -1] for each in some])

    def forward(self, tokens: Tensor, start: int, **given: Any) -> Any:
        """Return the model's output for `tokens` [B, L] at the positions from `start` on."""
        # Without positions some models count the tokens of their first layer, also if that keeps none (MiniMax).
        places = torch.arange(start, start + tokens.shape[1], device=tokens.device).expand_as(tokens)
        given = {"position_ids": places, **given}
        return self.model(tokens, **{name: value for name, value in given.items() if name in self.takes})

    def select(self, rows: Tensor) -> None:
        """Continue with these `rows` [any number], in this order."""
        self.kept, self.tokens = _select(self.kept, rows), _select(self.tokens, rows)


@torch.inference_mode()
def keeps_rows(model: PreTrainedModel) -> bool:
    """Return whether what a model keeps of some rows can be divided among them, and continues them as one forward pass
    of the whole rows does. In transformers some steps compute otherwise (Nemotron-H, Zamba2), and some models keep a
    part in their modules (RecurrentGemma)."""
    count, first, last = 5, 11, 19
    vocabulary = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    tokens = (torch.arange(count * last, device=model.device) * 7919 % vocabulary).view(count, last)
    reader, other, order = _Reader(model, True), _Reader(model, True), torch.tensor([3, 0, 0, 4, 2, 1, 3])
    reader.read(tokens[:, :first])
    if not reader.kept or any(len(each) != count for each in _tensors(reader.kept) if each.ndim):
        return False
    reader.select(order.to(model.device))
    stepwise = []
    for column in range(first, last):
        other.read(tokens[:2, column : column + 1])
        stepwise.append(reader.read(tokens[order, column : column + 1]))
    whole = other.forward(tokens[order], 0, use_cache=False).logits[:, first:]
    difference = (torch.stack(stepwise, 1).float().log_softmax(-1) - whole.float().log_softmax(-1)).abs().mean()
    return bool(difference <= ROUNDING[model.dtype.itemsize].again)


def _tensors(kept: Any) -> Iterator[Tensor]:
    if isinstance(kept, Tensor):
        yield kept
    for part in _parts(kept).values():
        yield from _tensors(part)


def _parts(kept: Any) -> dict[Any, Any]:
    """Return what a model keeps by name, number or attribute, of one level; that of a cache may be replaced."""
    if isinstance(kept, (list, tuple)):
        return dict(enumerate(kept))
    if isinstance(kept, (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin)):
        return vars(kept)
    return kept if isinstance(kept, dict) else {}


def _select(kept: Any, rows: Tensor) -> Any:
    """Return what a model keeps, with these `rows` of each tensor in it. Some caches of transformers have tensors that
    their `reorder_cache` does not reorder (MiniMax, DeepSeek-V4)."""
    if isinstance(kept, Tensor):
        return kept.index_select(0, rows) if kept.ndim else kept
    parts = {name: _select(part, rows) for name, part in _parts(kept).items()}
    if isinstance(kept, dict):
        return parts
    if isinstance(kept, (list, tuple)):
        return type(kept)(parts.values())
    if parts:
        vars(kept).update(parts)
    return kept
