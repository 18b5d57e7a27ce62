"""Continuous decoding: rows join the batch at any time, leave it when they end, and may come back with more to read."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from distflow.data.batch import Ragged
from distflow.telemetry import heartbeat
from workers.engines.kv_slots import Past, Slots, beginnings
from workers.engines.rollout import SampledRow, Session
from workers.engines.sampling import pick, uniform
from workers.engines.stopping import last_tokens
from workers.engines.vision import places_of, shown

if TYPE_CHECKING:
    from workers.engines.hf import HFRollout

_SHARE = 8
"""Empty slots that nobody waits for are given up once they are an eighth of all: that copies the cache. Rows are read
for an eighth of the slots at a time; those that come back wait until as many have."""


class Decoding(Session):
    """A transformers model's session: `step` adds a token to each row in a slot."""

    def __init__(self, engine: HFRollout, key: int, temperature: float, keeps: bool = False):
        """`keeps`: what was read of a row that has ended stays, so that it may go on without being read again."""
        self.engine, self.model, self.key = engine, engine.model, key
        self.temperature, self.keeps = temperature, keeps
        self.device = self.model.device
        self.unread: deque[list[SampledRow]] = deque()
        """Rows that share all that is to be read."""
        self.ready: deque[tuple[SampledRow, Past]] = deque()
        self.parked: dict[SampledRow, None] = {}
        """Rows with a past that are in no slot, the longest away first."""
        self.away: set[SampledRow] = set()
        """Rows that may come back."""
        self.rows: list[SampledRow | None] = []
        """By slot."""
        self.live = 0
        """Slots that are taken."""
        self.slots, self.state, self.version = Slots(), _no_slots(self.device), engine.version

    @property
    def busy(self) -> bool:
        return bool(self.live or self.unread or self.ready)

    def add(self, rows: list[SampledRow]) -> None:
        self.unread.append(rows)

    def extend(self, row: SampledRow, observation: Tensor, limit: int) -> None:
        row.extend(observation, limit)
        self.unread.appendleft([row])
        self.away.discard(row)

    def forget(self, row: SampledRow) -> None:
        self._drop(row)
        self.away.discard(row)

    @torch.inference_mode()
    def abort(self, rows: Sequence[SampledRow] | None = None) -> list[SampledRow]:
        waiting = [row for together in self.unread for row in together] + [row for row, _ in self.ready]
        wanted = {*waiting, *filter(None, self.rows)}.intersection(self.rows + waiting if rows is None else rows)
        self.unread = deque(filter(None, ([row for row in each if row not in wanted] for each in self.unread)))
        self.ready = deque((row, past) for row, past in self.ready if row not in wanted)
        left = [row for row in waiting if row in wanted]
        for row in left:
            row.end(row.tokens[:0], row.logprobs[:0], row.versions[:0], finished=False)
        slots = [slot for slot, row in enumerate(self.rows) if row in wanted]
        if slots:
            left += self._leave(torch.tensor(slots, device=self.device), [False] * len(slots))
        return left

    def _drop(self, row: SampledRow) -> None:
        self.parked.pop(row, None)
        row.past = None

    @torch.inference_mode()
    def step(self) -> list[SampledRow]:
        """One token more for each row in a slot; the rows whose turn ended with it."""
        if self.engine.paused:
            return []
        self._fill()
        if not self.rows:
            return []
        if self.version != self.engine.version:
            self._renew()
        heartbeat.current().tick()
        state, slot = self.state, torch.arange(len(self.rows), device=self.device)
        settings = self.engine.generation
        chosen, logprobs = pick(state["logits"], state["noise"][slot, state["count"]], self.temperature,
                                settings.top_k, settings.top_p)
        state["tokens"][slot, state["count"]] = chosen
        state["logprobs"][slot, state["count"]] = logprobs
        state["count"] += state["live"]
        end = self._is_end(chosen) | self._is_stopped() if self.engine.stop else self._is_end(chosen)
        gone = ((end | (state["count"] >= state["limit"])) & state["live"]).nonzero().squeeze(1)
        left = self._leave(gone, end[gone].tolist()) if len(gone) else []
        if self.live:
            self._advance(chosen)
        return left

    def _renew(self) -> None:
        """There are new weights: all tokens to come are theirs."""
        self.version, versions = self.engine.version, self.state["versions"]
        to_come = torch.arange(versions.shape[1], device=self.device) >= self.state["count"][:, None]
        versions.masked_fill_(to_come, self.version)

    def _is_end(self, tokens: Tensor) -> Tensor:
        return (tokens[:, None] == self.engine.end_tokens).any(-1)

    def _is_stopped(self) -> Tensor:
        """Whether the newest token of each slot's row completes a text that ends it."""
        stop, stopped = self.engine.stop, torch.zeros_like(self.state["live"])
        live = self.state["live"].nonzero().squeeze(1)
        last = last_tokens(self.state["tokens"], self.state["count"], live, stop.window)
        ends = [stop.reached(self.rows[slot], said) for slot, said in zip(live.tolist(), last)]
        stopped[live] = torch.tensor(ends, device=self.device)
        return stopped

    def _advance(self, chosen: Tensor) -> None:
        """The model reads the chosen tokens."""
        if not self.unread and not self.ready and (len(self.rows) - self.live) * _SHARE >= len(self.rows):
            chosen = self._compact(chosen)
        self.slots.make_room()
        width, length = self.slots.width + 1, self.state["length"]
        mask = torch.arange(width, device=self.device) >= width - 1 - length[:, None]
        output = self.model(chosen[:, None], attention_mask=mask, position_ids=(length + self.state["shift"])[:, None],
                            past_key_values=self.slots, use_cache=True)
        self.state["logits"] = output.logits[:, -1]
        length += 1

    def _compact(self, chosen: Tensor) -> Tensor:
        """Give up empty slots."""
        kept = self.state["live"].nonzero().squeeze(1)
        self.rows = [row for row in self.rows if row is not None]
        self.slots.keep(kept, len(kept), self.slots.width)
        self.state = {name: value[kept] for name, value in self.state.items()}
        return chosen[kept]

    def _leave(self, gone: Tensor, finished: list[bool]) -> list[SampledRow]:
        """Take rows out of their slots; each gets what it sampled."""
        state, slots = self.state, gone.tolist()
        rows, counts, lengths = ([self.rows[slot] for slot in slots], state["count"][gone].tolist(),
                                 state["length"][gone].tolist())
        tokens, logprobs, versions = (state[name][gone].cpu() for name in ("tokens", "logprobs", "versions"))
        for place, (row, count) in enumerate(zip(rows, counts)):
            row.end(tokens[place, :count], logprobs[place, :count], versions[place, :count], finished[place])
        if self.keeps:
            batch = self.slots.take(gone, max(lengths))
            for place, (row, length) in enumerate(zip(rows, lengths)):
                row.past = Past(batch, place, length)
                self.parked[row] = None
            self.away.update(rows)
        state["live"][gone], state["count"][gone] = False, 0
        for slot in slots:
            self.rows[slot] = None
        self.live -= len(slots)
        if self.live:
            self.slots.see(int(state["length"][state["live"]].max()))
        return rows

    def _fill(self) -> None:
        """Rows that wait take the free slots."""
        free = self.engine.generation.batch_rows - self.live
        enough = not self.live or sum(map(len, self.unread)) * _SHARE >= self.live + len(self.away)
        while enough and self.unread and free > len(self.ready):
            self._read_next(max(free - len(self.ready), self.engine.generation.batch_rows // _SHARE))
        coming = [self.ready.popleft() for _ in range(min(free, len(self.ready)))]
        if coming:
            self._join([row for row, _ in coming], [past for _, past in coming])
        while self.parked and self.live + len(self.parked) > self.engine.generation.batch_rows:
            self._drop(next(iter(self.parked)))  # it is read from its beginning when it comes back

    def _read_next(self, wanted: int) -> None:
        """Read for at least `wanted` rows, as long as there are as many."""
        chosen: list[list[SampledRow]] = []
        while self.unread and sum(map(len, chosen)) < wanted:
            chosen.append(self.unread.popleft())
        for rows, past in zip(chosen, self._read([rows[0] for rows in chosen])):
            self.ready.extend((row, past) for row in rows)
            self._drop(rows[0])

    def _read(self, rows: list[SampledRow]) -> list[Past]:
        """The model reads what it has not read of these rows.

        All of them read as many tokens as the one with most, instead of padding some that they had read before: the
        columns of a row then follow each other without a hole.
        """
        lengths = torch.tensor([len(row.sequence) for row in rows], device=self.device)
        # The last token is read in any case, for the logits after it; an image cannot be read from its middle on.
        read = torch.tensor([min(row.past.length, len(row.sequence) - 1) if row.past and not row.images else 0
                             for row in rows], device=self.device)
        longest = int((lengths - read).max())
        before = (lengths - longest).clamp(min=0)
        cache: Cache = DynamicCache()
        for keys, values in beginnings([row.past for row in rows], before) if bool(before.any()) else ():
            cache.layers.append(DynamicLayer())
            cache.layers[-1].update(keys, values)
        tokens = torch.full((len(rows), longest), self.engine.pad_token)
        for place, row in enumerate(rows):
            tail = row.sequence[-longest:]
            tokens[place, longest - len(tail) :] = tail
        width = longest + int(before.max())
        mask = torch.arange(width, device=self.device) >= width - lengths[:, None]
        positions = (lengths[:, None] - longest + torch.arange(longest, device=self.device)).clamp(min=0)
        places, shifts = self._places(rows, tokens.to(self.device), positions)
        output = self.model(tokens.to(self.device), attention_mask=mask, past_key_values=cache, use_cache=True,
                            logits_to_keep=1, **places)
        batch = [(layer.keys, layer.values) for layer in output.past_key_values.layers]
        return [Past(batch, place, length, logits, shift) for place, (length, logits, shift) in enumerate(zip(
            lengths.tolist(), output.logits[:, -1], shifts))]

    def _places(self, rows: list[SampledRow], tokens: Tensor, positions: Tensor) -> tuple[dict[str, Tensor], list[int]]:
        """The positions of what is read and what it shows; and how many positions each row has more than tokens."""
        seeing, shifts = [place for place, row in enumerate(rows) if row.images], [0] * len(rows)
        if not seeing:
            return {"position_ids": positions}, shifts
        lengths = torch.tensor([len(rows[place].sequence) for place in seeing], device=self.device)
        mask = torch.arange(tokens.shape[1], device=self.device) >= tokens.shape[1] - lengths[:, None]
        images = shown(self.model, Ragged.from_rows([rows[place].images for place in seeing]))
        images = {name: values.to(self.device) for name, values in images.items()}
        places, following = places_of(self.model, tokens[seeing], mask.long(), images)
        for place, shift in zip(seeing, (following - lengths).tolist()):
            shifts[place] = shift
        every = positions.expand(3, *positions.shape).clone()
        every[:, seeing] = places["position_ids"]
        return {**places, "position_ids": every}, shifts

    def _join(self, rows: list[SampledRow], pasts: list[Past]) -> None:
        """Put rows into slots: empty ones first, then new ones."""
        empty = [slot for slot, row in enumerate(self.rows) if row is None][: len(rows)]
        old, count = len(self.rows), len(self.rows) + len(rows) - len(empty)
        taken = [*empty, *range(old, count)]
        self.rows += [None] * (count - old)
        slots = torch.tensor(taken, device=self.device)
        width = max(Slots.width_of(pasts), self.slots.width if self.live else 0)
        if count > old or width > self.slots.width:
            self.slots.keep(None, count, width)
        self.slots.put(slots, pasts)
        self.slots.see(width)
        for slot, row in zip(taken, rows):
            self.rows[slot] = row
        self.live += len(rows)
        self._start(rows, pasts, slots, count)

    def _start(self, rows: list[SampledRow], pasts: list[Past], slots: Tensor, count: int) -> None:
        """The state of `count` slots, with these rows at their beginnings."""
        limits = torch.tensor([row.limit for row in rows], device=self.device)
        first = torch.tensor([len(row.sequence) - row.prompt for row in rows], device=self.device)
        ids = torch.tensor([row.id for row in rows], device=self.device)
        table = max(int(limits.max()), self.state["tokens"].shape[1])
        keys = torch.tensor([self.key_of(row) for row in rows], device=self.device)
        noise = uniform(keys[:, None], ids[:, None], first[:, None] + torch.arange(table, device=self.device))
        logits = torch.stack([past.logits for past in pasts])
        fresh = {"limit": limits, "length": torch.tensor([past.length for past in pasts], device=self.device),
                 "count": torch.zeros_like(limits), "live": torch.ones_like(limits, dtype=torch.bool),
                 "shift": torch.tensor([past.shift for past in pasts], device=self.device),
                 "logits": logits, "noise": noise,
                 "versions": torch.full_like(noise, self.version, dtype=torch.int32)}
        for name, old in self.state.items():
            new = fresh.get(name)
            shape = (count, table) if new is None else (count, *new.shape[1:])
            if old.shape != shape:
                grown = (old if new is None else new).new_zeros(shape)
                grown[: len(old), *(slice(0, size) for size in old.shape[1:])] = old
                self.state[name] = old = grown
            if new is not None:
                old[slots] = new


def _no_slots(device: torch.device) -> dict[str, Tensor]:
    """What is known of each slot: tables [slots, tokens of a turn], the logits of the next token, and counts."""
    kinds = {"tokens": torch.int64, "logprobs": torch.float32, "versions": torch.int32, "noise": torch.float64}
    numbers = {"limit": torch.int64, "length": torch.int64, "shift": torch.int64, "count": torch.int64,
               "live": torch.bool}
    return {**{name: torch.zeros(0, 0, dtype=kind, device=device) for name, kind in kinds.items()},
            **{name: torch.zeros(0, dtype=kind, device=device) for name, kind in numbers.items()},
            "logits": torch.zeros(0, 0, device=device)}
