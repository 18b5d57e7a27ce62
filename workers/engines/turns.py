"""What sessions of transformers models share, however they keep what has been read.

    TransformersSession   settings, and the rows that wait
    Turns                 the turns of rows in slots: what was sampled, and what the next tokens are drawn from
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from workers.engines.rollout import Rollout, SampledRow, Session, StopStrings
from workers.engines.sampling import TokenLimits, sample_tokens, uniform

PREFILL_TOKENS = 2**15
"""Tokens that are read at a time: their activations lie next to the cache."""


def last_place(device: torch.device) -> Tensor:
    """Return `logits_to_keep` for the last token of each row. The number 1 means the same to transformers, but keeps a
    view, for which torch copies the vocabulary's matrix once a row: on a CPU 500 times as slow in bfloat16."""
    return torch.tensor([-1], device=device)


class TransformersSession(Session):

    def __init__(self, engine: Rollout, model: PreTrainedModel, key: int, temperature: float,
                 limits: TokenLimits | None = None):
        self.engine, self.model, self.key, self.temperature = engine, model, key, temperature
        self.limits, self.device = limits, model.device
        self.unread: deque[list[SampledRow]] = deque()  # lists of rows that share their whole sequence; to be prefilled

    def add(self, rows: list[SampledRow]) -> None:
        self.unread.append(rows)

    def extend(self, row: SampledRow, observation: Tensor, limit: int) -> None:
        row.extend(observation, limit)
        self.unread.appendleft([row])

    def abort_unread(self, wanted: set[SampledRow]) -> list[SampledRow]:
        """End the turns of `wanted` rows that wait; return these rows."""
        left = [row for together in self.unread for row in together if row in wanted]
        self.unread = deque(filter(None, ([row for row in each if row not in wanted] for each in self.unread)))
        for row in left:
            row.end_unsampled()
        return left


class Turns:
    """Turns of the rows in slots, as tables [slots, tokens of a turn] and columns [slots]. A session may have further
    ones: `more`, of zero slots."""

    def __init__(self, session: TransformersSession, more: dict[str, Tensor]):
        self.session, self.version = session, session.engine.version
        self.rows: list[SampledRow | None] = []  # row of each slot
        self.live = 0  # number of occupied slots
        self.state = {**_no_slots(session.device), **more}

    def start(self, rows: list[SampledRow], slots: Tensor, fresh: dict[str, Tensor]) -> None:
        """Put `rows` into `slots`. `fresh`: their logits [rows, V], and the session's further columns."""
        device = slots.device
        self.rows += [None] * (int(slots.max()) + 1 - len(self.rows))
        for slot, row in zip(slots.tolist(), rows):
            self.rows[slot] = row
        self.live += len(rows)
        limits = torch.tensor([row.limit for row in rows], device=device)
        first = torch.tensor([len(row.sequence) - row.prompt for row in rows], device=device)
        ids = torch.tensor([row.id for row in rows], device=device)
        table = max(int(limits.max()), self.state["tokens"].shape[1])
        keys = torch.tensor([self.session.key_of(row) for row in rows], device=device)
        noise = uniform(keys[:, None], ids[:, None], first[:, None] + torch.arange(table, device=device))
        fresh = {"limit": limits, "count": torch.zeros_like(limits), "live": torch.ones_like(limits, dtype=torch.bool),
                 "noise": noise, "versions": torch.full_like(noise, self.version, dtype=torch.int32), **fresh}
        for name, old in self.state.items():
            new = fresh.get(name)
            shape = (len(self.rows), table, *old.shape[2:]) if new is None else (len(self.rows), *new.shape[1:])
            if old.shape != shape:
                grown = (old if new is None else new).new_zeros(shape)
                grown[: len(old), *(slice(0, size) for size in old.shape[1:])] = old
                self.state[name] = old = grown
            if new is not None:
                old[slots] = new

    def sample(self) -> tuple[Tensor, Tensor, list[bool]]:
        """Draw a token for each slot. Return the tokens [slots], the slots [N] whose turns they end, and which of these
        turns are finished and not cut off."""
        session, state, slot = self.session, self.state, torch.arange(len(self.rows), device=self.session.device)
        if self.version != session.engine.version:
            self._adopt_version()
        limits = session.limits or session.engine.generation
        chosen, logprobs = sample_tokens(state["logits"], state["noise"][slot, state["count"]], session.temperature,
                                         limits.top_k, limits.top_p, limits.min_p)
        state["tokens"][slot, state["count"]] = chosen
        state["logprobs"][slot, state["count"]] = logprobs
        state["count"] += state["live"]
        end = (chosen[:, None] == session.engine.end_tokens).any(-1)
        if session.engine.stop:
            end |= self._is_stopped(session.engine.stop)
        gone = ((end | (state["count"] >= state["limit"])) & state["live"]).nonzero().squeeze(1)
        return chosen, gone, end[gone].tolist() if len(gone) else []

    def _adopt_version(self) -> None:
        self.version, versions = self.session.engine.version, self.state["versions"]
        to_come = torch.arange(versions.shape[1], device=versions.device) >= self.state["count"][:, None]
        versions.masked_fill_(to_come, self.version)

    def _is_stopped(self, stop: StopStrings) -> Tensor:
        stopped = torch.zeros_like(self.state["live"])
        live = self.state["live"].nonzero().squeeze(1)
        last = last_tokens(self.state["tokens"], self.state["count"], live, stop.window)
        ends = [stop.reached(self.rows[slot], tokens) for slot, tokens in zip(live.tolist(), last)]
        stopped[live] = torch.tensor(ends, dtype=torch.bool, device=stopped.device)  # of no live row too
        return stopped

    def end(self, gone: Tensor, finished: Sequence[bool]) -> list[SampledRow]:
        """End the turns in the slots `gone` [N]; return their rows."""
        state, slots = self.state, gone.tolist()
        rows, counts = [self.rows[slot] for slot in slots], state["count"][gone].tolist()
        tokens, logprobs, versions = (state[name][gone].cpu() for name in ("tokens", "logprobs", "versions"))
        for index, (row, count) in enumerate(zip(rows, counts)):
            row.end(tokens[index, :count], logprobs[index, :count], versions[index, :count], finished[index])
        state["live"][gone], state["count"][gone] = False, 0
        for slot in slots:
            self.rows[slot] = None
        self.live -= len(slots)
        return rows

    def keep_live(self) -> Tensor:
        """Drop the empty slots; return which were kept [N]."""
        kept = self.state["live"].nonzero().squeeze(1)
        self.rows = [row for row in self.rows if row is not None]
        self.state = {name: value[kept] for name, value in self.state.items()}
        return kept


def _no_slots(device: torch.device) -> dict[str, Tensor]:
    tables = {"tokens": torch.int64, "logprobs": torch.float32, "versions": torch.int32, "noise": torch.float64}
    columns = {"limit": torch.int64, "count": torch.int64, "live": torch.bool}
    return {**{name: torch.zeros(0, 0, dtype=kind, device=device) for name, kind in tables.items()},
            **{name: torch.zeros(0, dtype=kind, device=device) for name, kind in columns.items()},
            "logits": torch.zeros(0, 0, device=device)}


def last_tokens(tokens: Tensor, counts: Tensor, slots: Tensor, window: int) -> list[list[int]]:
    """Return the last `window` of the `counts` tokens of each slot; only these leave the device."""
    counts = counts[slots]
    columns = counts[:, None] - window + torch.arange(window, device=tokens.device)
    last = tokens[slots[:, None], columns.clamp(min=0)].tolist()
    return [row[max(0, window - count) :] for row, count in zip(last, counts.tolist())]
