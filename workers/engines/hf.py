"""Generation by a transformers model, with continuous batching.

    HFRollout   the engine: model, settings, weights that are replaced in place
    HFSession   its session: rows join the batch at any time, leave it when they end, and may come back with more to
    read

A prompt is read once for all its samples. Keys and values lie in `workers.engines.kv_slots`. A model that keeps other
things between tokens, or is not understood, gets a `workers.engines.plain_session` in place of an HFSession.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from distflow.config.run import Generation, RoleRun
from distflow.data.batch import Ragged
from distflow.errors import EngineError
from distflow.telemetry import heartbeat
from distflow.weights.fingerprint import Sums, sums_of
from workers.engines.capabilities import bound_time_steps, prepare
from workers.engines.chat import pad_token
from workers.engines.decode_graph import DecodeGraph, can_be_captured
from workers.engines.devices import dtype_of
from workers.engines.kv_slots import PrefilledRow, SlotCache, prefixes
from workers.engines.plain_session import PlainSession, keeps_rows
from workers.engines.rollout import Rollout, SampledRow, require_shapes
from workers.engines.routing import Routers
from workers.engines.sampling import TokenLimits
from workers.engines.turns import PREFILL_TOKENS, TransformersSession, Turns, last_place
from workers.engines.vision import image_inputs, position_inputs

_FRACTION = 8
"""The cache is compacted once an eighth of the slots is empty and no row waits; rows are prefilled by eighths."""
_FRACTION_CAPTURED = 2
"""Where steps are captured, once half of them is: for a capture Python launches a step twice (not timed)."""


class HFRollout(Rollout):

    shares_base = True

    def __init__(self, model: PreTrainedModel, generation: Generation, pad_token: int, end_tokens: list[int],
                 shared: Iterable[nn.Parameter] = ()):
        """`shared`: parameters of the model that another engine uses too."""
        self.model = model.eval().requires_grad_(False)
        bound_time_steps(self.model)
        self.generation, self.pad_token = generation, pad_token
        self.end_tokens = torch.tensor(end_tokens, device=model.device)
        self.dtype, self.shared = model.dtype, set(shared)
        self.plain = prepare(model).plain  # why rows cannot share slots
        self.captures = generation.cuda_graphs and model.device.type == "cuda" and can_be_captured(model)
        self.wakes = 0  # how often the weights have got new places
        if self.plain and generation.routing_replay:
            raise EngineError(f"`routing_replay` cannot record the experts of {type(model).__name__}, since it "
                              f"{self.plain}. Take it out of `generation`")
        self.routers = Routers(model) if generation.routing_replay else None
        if self.routers:
            self.routers.records = True

    @classmethod
    def build(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: RoleRun, mesh: DeviceMesh,
              seed: int, end_tokens: list[int], shared: Iterable[nn.Parameter] = ()) -> HFRollout:
        shared, device, dtype = list(shared), mesh.device_type, dtype_of(settings, mesh.device_type)
        own = {*model.parameters()} - {*shared}
        copies = {id(each): nn.Parameter(each.data.to(device, dtype, copy=True), each.requires_grad) for each in own}
        whole = copy.deepcopy(model, copies | {id(each): each for each in shared})
        nn.Module.to(whole, device)
        engine = cls(whole, settings.generation, pad_token(tokenizer), end_tokens, shared)
        engine.version, engine.tied = 0, dict(model.all_tied_weights_keys)
        return engine

    def session(self, key: int, temperature: float | None = None, keep_cache: bool = False,
                limits: TokenLimits | None = None) -> HFSession | PlainSession:
        keep_cache &= self.generation.batch_rows > 1  # with one slot a row rounds alike, however long its tools take
        temperature = self.generation.temperature if temperature is None else temperature
        if self.plain:
            return PlainSession(self, self.model, key, temperature, limits, self._keeps_rows)
        return HFSession(self, key, temperature, keep_cache, limits)

    @cached_property
    def _keeps_rows(self) -> bool:
        return keeps_rows(self.model)

    def weight_buffers(self) -> dict[str, Tensor]:
        return {name: parameter.data for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> int:
        own, size = self.weight_buffers(), 0
        shapes = {name: weight.shape for name, weight in own.items()}
        for name, whole in require_shapes(weights, shapes):
            if own[name].data_ptr() != whole.data_ptr():
                own[name].copy_(whole)
            size += own[name].nbytes
        self.version = version
        return size

    def held(self) -> Sums:
        return sums_of(self.model.named_parameters(), self.dtype)

    def sleep(self) -> None:
        for parameter in self._alone():
            parameter.data.untyped_storage().resize_(0)

    def wake(self) -> None:
        for parameter in self._alone():
            parameter.data.untyped_storage().resize_(parameter.nbytes)
        self.version, self.wakes = -1, self.wakes + 1

    def _alone(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter not in self.shared]

    def check_health(self) -> None: ...

    def close(self) -> None: ...


class HFSession(TransformersSession):
    """Session of a model that keeps keys and values: `step` samples one token for each row in a slot."""

    engine: HFRollout

    def __init__(self, engine: HFRollout, key: int, temperature: float, keep_cache: bool = False,
                 limits: TokenLimits | None = None):
        super().__init__(engine, engine.model, key, temperature, limits)
        self.keep_cache = keep_cache
        self.ready: deque[tuple[SampledRow, PrefilledRow]] = deque()
        self.parked: dict[SampledRow, None] = {}  # rows with a past that are in no slot, longest parked first
        self.returning: set[SampledRow] = set()  # ended rows that may get another turn
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        more = {"length": none, "shift": none}
        if engine.routers:
            sizes = engine.routers.routing
            more["experts"] = torch.zeros(0, 0, sizes.layers, sizes.experts_per_token, dtype=sizes.dtype,
                                          device=self.device)
        self.slots, self.turns = SlotCache(), Turns(self, more)
        self.graph: DecodeGraph | None = None

    @property
    def busy(self) -> bool:
        return bool(self.turns.live or self.unread or self.ready)

    def extend(self, row: SampledRow, observation: Tensor, limit: int) -> None:
        super().extend(row, observation, limit)
        self.returning.discard(row)

    def forget(self, row: SampledRow) -> None:
        self._drop(row)
        self.returning.discard(row)

    @torch.inference_mode()
    def abort(self, rows: Sequence[SampledRow] | None = None) -> list[SampledRow]:
        under_way = {row for row in self.turns.rows if row}
        waiting = {row for row, _ in self.ready}.union(*self.unread)
        wanted = (under_way | waiting).intersection(under_way | waiting if rows is None else rows)
        left = self.abort_unread(wanted)
        for row in (row for row, _ in self.ready if row in wanted):
            row.end_unsampled()
            left.append(row)
        self.ready = deque((row, past) for row, past in self.ready if row not in wanted)
        slots = [slot for slot, row in enumerate(self.turns.rows) if row in wanted]
        if slots:
            left += self._leave(torch.tensor(slots, device=self.device), [False] * len(slots))
        return left

    def _drop(self, row: SampledRow) -> None:
        self.parked.pop(row, None)
        row.past = None

    @torch.inference_mode()
    def step(self) -> list[SampledRow]:
        if self.engine.paused:
            return []
        self._fill()
        if not self.turns.rows:
            return []
        heartbeat.current().tick()
        chosen, gone, finished = self.turns.sample()
        left = self._leave(gone, finished) if len(gone) else []
        if self.turns.live:
            self._advance(chosen)
        return left

    def _advance(self, chosen: Tensor) -> None:
        fraction = _FRACTION_CAPTURED if self.engine.captures else _FRACTION
        empty = len(self.turns.rows) - self.turns.live
        if not self.unread and not self.ready and empty * fraction >= len(self.turns.rows):
            kept = self.turns.keep_live()
            self.slots.keep(kept, len(kept), self.slots.width)
            chosen = chosen[kept]
        self.slots.grow()
        state = self.turns.state
        read = self._next_logits_by_graph if self.engine.captures else self._next_logits
        state["logits"] = read(chosen, state["length"] + state["shift"], state["length"])
        if self.engine.routers:
            slot = torch.arange(len(self.turns.rows), device=self.device)
            state["experts"][slot, state["count"] - 1] = self.engine.routers.take()
        state["length"] += state["live"]

    def _next_logits(self, tokens: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
        """Return the logits [B, V] after `tokens` [B], which have `lengths` [B] tokens before them."""
        width = self.slots.width + 1
        mask = torch.arange(width, device=self.device) >= width - 1 - lengths[:, None]
        return self.model(tokens[:, None], attention_mask=mask, position_ids=positions[:, None],
                          past_key_values=self.slots, use_cache=True).logits[:, -1]

    def _next_logits_by_graph(self, tokens: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
        if self.graph is None or self.graph.made_for != (self.slots.resized, self.engine.wakes):
            self.graph = DecodeGraph(self.model, self.slots, self.engine.wakes, self.graph)
        return self.graph.step(tokens, positions, lengths)

    def _leave(self, gone: Tensor, finished: list[bool]) -> list[SampledRow]:
        state = self.turns.state
        lengths, counts = state["length"][gone].tolist(), state["count"][gone].tolist()
        experts = state["experts"][gone].cpu() if self.engine.routers else [None] * len(gone)
        rows = self.turns.end(gone, finished)
        for row, count, choices in zip(rows, counts, experts):
            if choices is not None and row.experts is not None:  # the last token has not been read
                row.experts = torch.cat([row.experts, choices[: max(count - 1, 0)]])
        if self.keep_cache:
            batch = self.slots.take(gone, max(lengths))
            for index, (row, length) in enumerate(zip(rows, lengths)):
                row.past = PrefilledRow(batch, index, length)
                self.parked[row] = None
            self.returning.update(rows)
        if self.turns.live:
            self.slots.set_window(int(state["length"][state["live"]].max()))
        return rows

    def _fill(self) -> None:
        free = self.engine.generation.batch_rows - self.turns.live
        enough = not self.turns.live or \
            sum(map(len, self.unread)) * _FRACTION >= self.turns.live + len(self.returning)
        while enough and self.unread and free > len(self.ready):
            self._read_next(max(free - len(self.ready), self.engine.generation.batch_rows // _FRACTION))
        coming = [self.ready.popleft() for _ in range(min(free, len(self.ready)))]
        if coming:
            self._join([row for row, _ in coming], [past for _, past in coming])
        while self.parked and self.turns.live + len(self.parked) > self.engine.generation.batch_rows:
            self._drop(next(iter(self.parked)))  # a dropped row is prefilled from its beginning when it returns

    def _read_next(self, wanted: int) -> None:
        chosen: list[list[SampledRow]] = []
        longest = 0
        while self.unread and sum(map(len, chosen)) < wanted:
            longest = max(longest, len(self.unread[0][0].sequence))
            if chosen and (len(chosen) + 1) * longest > PREFILL_TOKENS:
                break
            chosen.append(self.unread.popleft())
        for row in (row for rows in chosen for row in rows):
            row.begin()
        for rows, past in zip(chosen, self._read([rows[0] for rows in chosen])):
            self.ready.extend((row, past) for row in rows)
            if past.experts is not None:
                before = past.experts[:0] if rows[0].experts is None else rows[0].experts
                for row in rows:
                    row.experts = torch.cat([before[: past.length - len(past.experts)], past.experts])
            self._drop(rows[0])

    def _read(self, rows: list[SampledRow]) -> list[PrefilledRow]:
        """Prefill what the model has not read of these rows. Every row reads as many tokens as the row with most unread
        ones, some of them again instead of padding: the columns of a row then have no gap."""
        lengths = torch.tensor([len(row.sequence) for row in rows], device=self.device)
        # The last token is always read, for its logits; an image cannot be read from its middle on.
        read = torch.tensor([min(row.past.length, len(row.sequence) - 1) if row.past and not row.images else 0
                             for row in rows], device=self.device)
        longest = int((lengths - read).max())
        before = (lengths - longest).clamp(min=0)
        cache: Cache = DynamicCache()
        for keys, values in prefixes([row.past for row in rows], before) if bool(before.any()) else ():
            layer = DynamicLayer()
            layer.update(keys, values)
            cache.layers.append(layer)
        tokens = torch.full((len(rows), longest), self.engine.pad_token)
        for index, row in enumerate(rows):
            tail = row.sequence[-longest:]
            tokens[index, longest - len(tail) :] = tail
        width = longest + int(before.max())
        mask = torch.arange(width, device=self.device) >= width - lengths[:, None]
        positions = (lengths[:, None] - longest + torch.arange(longest, device=self.device)).clamp(min=0)
        inputs, shifts = self._position_inputs(rows, tokens.to(self.device), positions)
        with self._chosen_before(rows, longest):
            output = self.model(tokens.to(self.device), attention_mask=mask, past_key_values=cache, use_cache=True,
                                logits_to_keep=last_place(self.device), **inputs)
        batch = [(layer.keys, layer.values) for layer in output.past_key_values.layers]
        chosen = self._choices(lengths, longest)
        of_rows = zip(lengths.tolist(), output.logits[:, -1], shifts, chosen)
        return [PrefilledRow(batch, index, *of_row) for index, of_row in enumerate(of_rows)]

    @contextlib.contextmanager
    def _chosen_before(self, rows: list[SampledRow], width: int) -> Iterator[None]:
        """Choose the experts again that were chosen when a token was first read, among the last `width` of each row."""
        routers = self.engine.routers
        if routers and any(row.experts is not None for row in rows):
            sizes = routers.routing
            table = torch.full((len(rows), width, sizes.layers, sizes.experts_per_token), sizes.unknown,
                               dtype=sizes.dtype)
            for row, choices in zip(rows, table):
                unseen = len(row.sequence) - width  # tokens before the first column; below 0 with padding
                known = choices[:0] if row.experts is None else row.experts[max(unseen, 0) : len(row.sequence)]
                choices[max(-unseen, 0) :][: len(known)] = known
            routers.replayed = table.flatten(0, 1).to(self.device)
        yield
        if routers:
            routers.replayed = None

    def _choices(self, lengths: Tensor, width: int) -> list[Tensor | None]:
        """Return the experts chosen for what each row has just read, the last of `width` columns."""
        if not self.engine.routers:
            return [None] * len(lengths)
        chosen = self.engine.routers.take().unflatten(0, (len(lengths), width)).cpu()
        return [row[width - min(width, length) :] for row, length in zip(chosen, lengths.tolist())]

    def _position_inputs(self, rows: list[SampledRow], tokens: Tensor,
                         positions: Tensor) -> tuple[dict[str, Tensor], list[int]]:
        """Return the model's inputs for positions and images, and how many more positions than tokens each row has."""
        with_images, shifts = [index for index, row in enumerate(rows) if row.images], [0] * len(rows)
        if not with_images:
            return {"position_ids": positions}, shifts
        lengths = torch.tensor([len(rows[index].sequence) for index in with_images], device=self.device)
        mask = torch.arange(tokens.shape[1], device=self.device) >= tokens.shape[1] - lengths[:, None]
        images = image_inputs(self.model, Ragged.from_rows([row.images for row in rows if row.images]))
        images = {name: values.to(self.device) for name, values in images.items()}
        inputs, following = position_inputs(self.model, tokens[with_images], mask.long(), images)
        for index, shift in zip(with_images, (following - lengths).tolist()):
            shifts[index] = shift
        if inputs["position_ids"].ndim == 2:
            if "token_type_ids" in inputs:
                inputs["token_type_ids"] = torch.eq(tokens, self.model.config.image_token_id).int()
            return {**inputs, "position_ids": positions}, shifts
        every = positions.expand(3, *positions.shape).clone()
        every[:, with_images] = inputs["position_ids"]
        return {**inputs, "position_ids": every}, shifts

    def _join(self, rows: list[SampledRow], pasts: list[PrefilledRow]) -> None:
        empty = [slot for slot, row in enumerate(self.turns.rows) if row is None][: len(rows)]
        old, count = len(self.turns.rows), len(self.turns.rows) + len(rows) - len(empty)
        slots = torch.tensor([*empty, *range(old, count)], device=self.device)
        width = max(SlotCache.width_of(pasts), self.slots.width if self.turns.live else 0)
        if count > old or width > self.slots.width:
            self.slots.keep(None, count, width)
        self.slots.put(slots, pasts)
        self.slots.set_window(width)
        fresh = {"logits": torch.stack([cast(torch.Tensor, past.logits) for past in pasts]),
                 "length": torch.tensor([past.length for past in pasts], device=self.device),
                 "shift": torch.tensor([past.shift for past in pasts], device=self.device)}
        self.turns.start(rows, slots, fresh)
