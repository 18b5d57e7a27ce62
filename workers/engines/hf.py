"""Generation by a transformers model, with continuous batching.

    HFRollout   the engine: model, settings, weights that are replaced in place
    HFSession   its session: rows join the batch at any time, leave it when they end, and may come back with more to
    read

A prompt is read once for all its samples. Keys and values lie in `workers.engines.kv_slots`.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
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
from workers.engines.capabilities import bound_time_steps
from workers.engines.chat import pad_token
from workers.engines.decode_graph import DecodeGraph, can_be_captured
from workers.engines.devices import dtype_of
from workers.engines.kv_slots import PrefilledRow, SlotCache, prefixes
from workers.engines.rollout import Rollout, SampledRow, Session, StopStrings, require_shapes
from workers.engines.routing import Routers
from workers.engines.sampling import TokenLimits, sample_tokens, uniform
from workers.engines.vision import image_inputs, position_inputs

_FRACTION = 8
"""The cache is compacted once an eighth of the slots is empty and no row waits; rows are prefilled by eighths."""
_FRACTION_CAPTURED = 2
"""Where steps are captured, once half of them is: for a capture Python launches a step twice (not timed)."""
_PREFILL_TOKENS = 2**15  # at a time: their activations are beside the cache


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
        self.captures = generation.cuda_graphs and model.device.type == "cuda" and can_be_captured(model)
        self.wakes = 0  # how often the weights have got new places
        self.routers = Routers(model) if generation.routing_replay else None
        if self.routers:
            self.routers.records = True
        other = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers
                 if not isinstance(layer, DynamicLayer)}
        if other:
            raise EngineError(f"{type(model).__name__} keeps {', '.join(sorted(other))} between tokens, not keys and "
                              "values alone; generation by transformers cannot let its rows come and go")

    @classmethod
    def build(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: RoleRun, mesh: DeviceMesh,
              seed: int, end_tokens: list[int], shared: Iterable[nn.Parameter] = ()) -> HFRollout:
        shared, device, dtype = list(shared), mesh.device_type, dtype_of(settings, mesh.device_type)
        own = {*model.parameters()} - {*shared}
        copies = {id(each): nn.Parameter(each.data.to(device, dtype, copy=True), each.requires_grad) for each in own}
        whole = copy.deepcopy(model, copies | {id(each): each for each in shared})
        nn.Module.to(whole, device)
        engine = cls(whole, settings.generation, pad_token(tokenizer), end_tokens, shared)
        engine.version = 0
        return engine

    def session(self, key: int, temperature: float | None = None, keep_cache: bool = False,
                limits: TokenLimits | None = None) -> HFSession:
        keep_cache &= self.generation.batch_rows > 1  # with one slot a row rounds alike, however long its tools take
        temperature = self.generation.temperature if temperature is None else temperature
        return HFSession(self, key, temperature, keep_cache, limits)

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


class HFSession(Session):
    """Session of a transformers model: `step` samples one token for each row in a slot."""

    def __init__(self, engine: HFRollout, key: int, temperature: float, keep_cache: bool = False,
                 limits: TokenLimits | None = None):
        self.engine, self.model, self.key, self.limits = engine, engine.model, key, limits
        self.temperature, self.keep_cache = temperature, keep_cache
        self.device = self.model.device
        self.unread: deque[list[SampledRow]] = deque()  # lists of rows that share their whole sequence; to be prefilled
        self.ready: deque[tuple[SampledRow, PrefilledRow]] = deque()
        self.parked: dict[SampledRow, None] = {}  # rows with a past that are in no slot, longest parked first
        self.returning: set[SampledRow] = set()  # ended rows that may get another turn
        self.rows: list[SampledRow | None] = []  # row of each slot
        self.live = 0  # number of occupied slots
        self.slots, self.state, self.version = SlotCache(), _no_slots(self.device), engine.version
        self.graph: DecodeGraph | None = None
        if engine.routers:
            self.state["experts"] = torch.zeros(0, 0, 0, 0, dtype=engine.routers.routing.dtype, device=self.device)

    @property
    def busy(self) -> bool:
        return bool(self.live or self.unread or self.ready)

    def add(self, rows: list[SampledRow]) -> None:
        self.unread.append(rows)

    def extend(self, row: SampledRow, observation: Tensor, limit: int) -> None:
        row.extend(observation, limit)
        self.unread.appendleft([row])
        self.returning.discard(row)

    def forget(self, row: SampledRow) -> None:
        self._drop(row)
        self.returning.discard(row)

    @torch.inference_mode()
    def abort(self, rows: Sequence[SampledRow] | None = None) -> list[SampledRow]:
        waiting = [row for together in self.unread for row in together] + [row for row, _ in self.ready]
        wanted = {*waiting, *filter(None, self.rows)}.intersection(self.rows + waiting if rows is None else rows)
        self.unread = deque(filter(None, ([row for row in each if row not in wanted] for each in self.unread)))
        self.ready = deque((row, past) for row, past in self.ready if row not in wanted)
        left = [row for row in waiting if row in wanted]
        for row in left:
            row.end_unsampled()
        slots = [slot for slot, row in enumerate(self.rows) if row in wanted]
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
        if not self.rows:
            return []
        if self.version != self.engine.version:
            self._adopt_version()
        heartbeat.current().tick()
        state, slot = self.state, torch.arange(len(self.rows), device=self.device)
        limits = self.limits or self.engine.generation
        chosen, logprobs = sample_tokens(state["logits"], state["noise"][slot, state["count"]], self.temperature,
                                         limits.top_k, limits.top_p, limits.min_p)
        state["tokens"][slot, state["count"]] = chosen
        state["logprobs"][slot, state["count"]] = logprobs
        state["count"] += state["live"]
        end = (chosen[:, None] == self.engine.end_tokens).any(-1)
        if self.engine.stop:
            end |= self._is_stopped(self.engine.stop)
        gone = ((end | (state["count"] >= state["limit"])) & state["live"]).nonzero().squeeze(1)
        left = self._leave(gone, end[gone].tolist()) if len(gone) else []
        if self.live:
            self._advance(chosen)
        return left

    def _adopt_version(self) -> None:
        self.version, versions = self.engine.version, self.state["versions"]
        to_come = torch.arange(versions.shape[1], device=self.device) >= self.state["count"][:, None]
        versions.masked_fill_(to_come, self.version)

    def _is_stopped(self, stop: StopStrings) -> Tensor:
        stopped = torch.zeros_like(self.state["live"])
        live = self.state["live"].nonzero().squeeze(1)
        last = last_tokens(self.state["tokens"], self.state["count"], live, stop.window)
        ends = [stop.reached(self.rows[slot], tokens) for slot, tokens in zip(live.tolist(), last)]
        stopped[live] = torch.tensor(ends, dtype=torch.bool, device=self.device)  # of no live row too
        return stopped

    def _advance(self, chosen: Tensor) -> None:
        fraction = _FRACTION_CAPTURED if self.engine.captures else _FRACTION
        if not self.unread and not self.ready and (len(self.rows) - self.live) * fraction >= len(self.rows):
            chosen = self._compact(chosen)
        self.slots.grow()
        length = self.state["length"]
        read = self._next_logits_by_graph if self.engine.captures else self._next_logits
        self.state["logits"] = read(chosen, length + self.state["shift"], length)
        if self.engine.routers:
            slot = torch.arange(len(self.rows), device=self.device)
            self.state["experts"][slot, self.state["count"] - 1] = self.engine.routers.take()
        length += self.state["live"]

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

    def _compact(self, chosen: Tensor) -> Tensor:
        kept = self.state["live"].nonzero().squeeze(1)
        self.rows = [row for row in self.rows if row is not None]
        self.slots.keep(kept, len(kept), self.slots.width)
        self.state = {name: value[kept] for name, value in self.state.items()}
        return chosen[kept]

    def _leave(self, gone: Tensor, finished: list[bool]) -> list[SampledRow]:
        state, slots = self.state, gone.tolist()
        rows, counts, lengths = ([self.rows[slot] for slot in slots], state["count"][gone].tolist(),
                                 state["length"][gone].tolist())
        tokens, logprobs, versions = (state[name][gone].cpu() for name in ("tokens", "logprobs", "versions"))
        experts = state["experts"][gone].cpu() if self.engine.routers else None
        for index, (row, count) in enumerate(zip(rows, counts)):
            if experts is not None and row.experts is not None:  # the last token has not been read
                row.experts = torch.cat([row.experts, experts[index, : max(count - 1, 0)]])
            row.end(tokens[index, :count], logprobs[index, :count], versions[index, :count], finished[index])
        if self.keep_cache:
            batch = self.slots.take(gone, max(lengths))
            for index, (row, length) in enumerate(zip(rows, lengths)):
                row.past = PrefilledRow(batch, index, length)
                self.parked[row] = None
            self.returning.update(rows)
        state["live"][gone], state["count"][gone] = False, 0
        for slot in slots:
            self.rows[slot] = None
        self.live -= len(slots)
        if self.live:
            self.slots.set_window(int(state["length"][state["live"]].max()))
        return rows

    def _fill(self) -> None:
        free = self.engine.generation.batch_rows - self.live
        enough = not self.live or sum(map(len, self.unread)) * _FRACTION >= self.live + len(self.returning)
        while enough and self.unread and free > len(self.ready):
            self._read_next(max(free - len(self.ready), self.engine.generation.batch_rows // _FRACTION))
        coming = [self.ready.popleft() for _ in range(min(free, len(self.ready)))]
        if coming:
            self._join([row for row, _ in coming], [past for _, past in coming])
        while self.parked and self.live + len(self.parked) > self.engine.generation.batch_rows:
            self._drop(next(iter(self.parked)))  # a dropped row is prefilled from its beginning when it returns

    def _read_next(self, wanted: int) -> None:
        chosen: list[list[SampledRow]] = []
        longest = 0
        while self.unread and sum(map(len, chosen)) < wanted:
            longest = max(longest, len(self.unread[0][0].sequence))
            if chosen and (len(chosen) + 1) * longest > _PREFILL_TOKENS:
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
                                logits_to_keep=1, **inputs)
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
        every = positions.expand(3, *positions.shape).clone()
        every[:, with_images] = inputs["position_ids"]
        return {**inputs, "position_ids": every}, shifts

    def _join(self, rows: list[SampledRow], pasts: list[PrefilledRow]) -> None:
        empty = [slot for slot, row in enumerate(self.rows) if row is None][: len(rows)]
        old, count = len(self.rows), len(self.rows) + len(rows) - len(empty)
        taken = [*empty, *range(old, count)]
        self.rows += [None] * (count - old)
        slots = torch.tensor(taken, device=self.device)
        width = max(SlotCache.width_of(pasts), self.slots.width if self.live else 0)
        if count > old or width > self.slots.width:
            self.slots.keep(None, count, width)
        self.slots.put(slots, pasts)
        self.slots.set_window(width)
        for slot, row in zip(taken, rows):
            self.rows[slot] = row
        self.live += len(rows)
        self._start(rows, pasts, slots, count)

    def _start(self, rows: list[SampledRow], pasts: list[PrefilledRow], slots: Tensor, count: int) -> None:
        limits = torch.tensor([row.limit for row in rows], device=self.device)
        first = torch.tensor([len(row.sequence) - row.prompt for row in rows], device=self.device)
        ids = torch.tensor([row.id for row in rows], device=self.device)
        table = max(int(limits.max()), self.state["tokens"].shape[1])
        keys = torch.tensor([self.key_of(row) for row in rows], device=self.device)
        noise = uniform(keys[:, None], ids[:, None], first[:, None] + torch.arange(table, device=self.device))
        logits = torch.stack([cast(torch.Tensor, past.logits) for past in pasts])
        fresh = {"limit": limits, "length": torch.tensor([past.length for past in pasts], device=self.device),
                 "count": torch.zeros_like(limits), "live": torch.ones_like(limits, dtype=torch.bool),
                 "shift": torch.tensor([past.shift for past in pasts], device=self.device),
                 "logits": logits, "noise": noise,
                 "versions": torch.full_like(noise, self.version, dtype=torch.int32)}
        if self.engine.routers:
            sizes = self.engine.routers.routing
            fresh["experts"] = self.state["experts"].new_zeros(len(rows), table, sizes.layers, sizes.experts_per_token)
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
    """Return the state of zero slots: tables [slots, tokens of a turn], next-token logits [slots, V] and counts."""
    kinds = {"tokens": torch.int64, "logprobs": torch.float32, "versions": torch.int32, "noise": torch.float64}
    numbers = {"limit": torch.int64, "length": torch.int64, "shift": torch.int64, "count": torch.int64,
               "live": torch.bool}
    return {**{name: torch.zeros(0, 0, dtype=kind, device=device) for name, kind in kinds.items()},
            **{name: torch.zeros(0, dtype=kind, device=device) for name, kind in numbers.items()},
            "logits": torch.zeros(0, 0, device=device)}


def last_tokens(tokens: Tensor, counts: Tensor, slots: Tensor, window: int) -> list[list[int]]:
    """Return the last `window` of the `counts` tokens of each slot; only these leave the device."""
    counts = counts[slots]
    columns = counts[:, None] - window + torch.arange(window, device=tokens.device)
    last = tokens[slots[:, None], columns.clamp(min=0)].tolist()
    return [row[max(0, window - count) :] for row, count in zip(last, counts.tolist())]
