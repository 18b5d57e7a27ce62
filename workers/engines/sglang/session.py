"""A session of rows that are sampled elsewhere: each turn of a row is a request to SGLang's server."""

from __future__ import annotations

import contextlib
import itertools
import queue
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from distflow.errors import EngineError
from distflow.telemetry import heartbeat
from workers.engines.rollout import SampledRow, Session
from workers.engines.sampling import key_of

if TYPE_CHECKING:
    from workers.engines.sglang.engine import SGLangRollout
    from workers.engines.sglang.server import SGLangServer

_MOMENT, _FIRST = 0.1, 1.0
"""Seconds that a step waits for a row to end, and for the first tokens of new rows."""


class TurnResult(NamedTuple):
    """What the server says of a row whose turn is over."""

    request: str
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    aborted: bool


class PendingRequests(Session):
    """The server goes on between two steps; what it says meanwhile waits here."""

    def __init__(self, engine: SGLangRollout, key: int, temperature: float):
        self.engine, self.key, self.temperature = engine, key, temperature
        self.fresh: dict[str, SampledRow] = {}
        """Turns that the server does not know of yet, by request."""
        self.turns: dict[str, SampledRow] = {}
        """Turns under way."""
        self.ended: list[SampledRow] = []
        """Rows whose turns came to an end while others were aborted."""
        self.asked: set[str] = set()
        """Turns that are to be aborted."""
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self.ends = set(engine.end_tokens.tolist())
        weakref.finalize(self, _abandon, engine.server, self.turns).atexit = False

    @property
    def busy(self) -> bool:
        return bool(self.fresh or self.turns or self.ended)

    def add(self, rows: list[SampledRow]) -> None:
        for row in rows:
            if row.images is not None and len(row.images.values):
                raise EngineError("SGLang is not given images here; transformers is. Instead:  rollout: hf")
            self.fresh[f"{next(self.engine.numbers)}."] = row  # the dot: SGLang aborts all that begin alike

    def step(self) -> list[SampledRow]:
        if self.engine.paused:
            return []
        fresh, self.fresh = self.fresh, {}
        self.turns.update(fresh)
        if self.turns:
            heartbeat.current().tick()
            self._take(self.engine.share.tell(lambda: self._advance(fresh)))
        ended, self.ended = self.ended, []
        return ended

    def abort(self, rows: Sequence[SampledRow] | None = None) -> list[SampledRow]:
        chosen = {*self.fresh.values(), *self.turns.values()} if rows is None else set(rows)
        left = [self.fresh.pop(request) for request, row in list(self.fresh.items()) if row in chosen]
        for row in left:
            row.end(row.tokens[:0], row.logprobs[:0], row.versions[:0], finished=False)
        self.asked = {request for request, row in self.turns.items() if row in chosen}
        return left + self._take(self.engine.share.tell(self._abort)) if self.asked else left

    def _take(self, turns: list[TurnResult]) -> list[SampledRow]:
        """Those that were aborted; the others wait for the next step."""
        aborted = []
        for turn in itertools.starmap(TurnResult, turns):
            row = self.turns.pop(turn.request)
            row.end(torch.tensor(turn.tokens, dtype=torch.int64), torch.tensor(turn.logprobs, dtype=torch.float32),
                    torch.tensor(turn.versions, dtype=torch.int32), bool(turn.tokens) and turn.tokens[-1] in self.ends)
            (aborted if turn.aborted else self.ended).append(row)
        return aborted

    def _advance(self, fresh: dict[str, SampledRow]) -> list[TurnResult]:
        if fresh:
            self.engine.server.generate(self._body(fresh), self.events)
        return self._hear(0.0 if self.ended else _FIRST if fresh else _MOMENT)

    def _body(self, fresh: dict[str, SampledRow]) -> dict[str, Any]:
        settings = self.engine.generation
        # SGLang draws differently as soon as any row in the batch is greedy or has a top-k: with seeds, all have one.
        no_limit = self.engine.vocabulary if settings.batch_invariant else -1
        common = {"temperature": self.temperature, "top_p": settings.top_p, "top_k": settings.top_k or no_limit,
                  "stop_token_ids": sorted(self.ends)}
        return {"rid": list(fresh), "input_ids": [row.sequence.tolist() for row in fresh.values()],
                "return_logprob": True, "sampling_params": [
                    {**common, "max_new_tokens": row.limit, "sampling_seed": key_of(self.key_of(row), row.id)}
                    for row in fresh.values()]}

    def _hear(self, patience: float) -> list[TurnResult]:
        """The turns that are over. Raises EngineError if the server is."""
        heard = []
        with contextlib.suppress(queue.Empty):
            heard.append(self._turn(self.events.get(timeout=patience)))
            while True:
                heard.append(self._turn(self.events.get_nowait()))
        if not heard:
            self.engine.server.watch()
        return list(filter(None, heard))

    def _turn(self, event: dict[str, Any] | EngineError) -> TurnResult | None:
        """None while it goes on."""
        if isinstance(event, EngineError):
            raise event
        if "error" in event:
            raise EngineError(f"SGLang refuses rows: {event['error']}")
        said, tokens = event["meta_info"], event["output_ids"]
        reason, request = said["finish_reason"], said["id"]
        if reason is None:
            return None
        row = self.turns[request]
        complete = bool(tokens) and (tokens[-1] in self.ends or len(tokens) >= row.limit)
        if reason["type"] == "abort" and request not in self.asked:
            raise EngineError(f"SGLang gave a row of {len(row.sequence)} tokens up after {len(tokens)} more: "
                              f"{reason.get('message')}")
        versions = [int(span["version"]) for span in said.get("weight_versions", ())
                    for _ in range(span["start"], span["end"])]
        logprobs = [chosen[0] for chosen in said.get("output_token_logprobs", [])]
        return TurnResult(request, tokens, logprobs, versions, reason["type"] == "abort" and not complete)

    def _abort(self) -> list[TurnResult]:
        left, heard = set(self.asked), []
        with self.engine.moving():
            while left:  # again and again: the server forgets an abort that comes before its row
                self.engine.end(left)
                turns = self._hear(_MOMENT)
                heard += turns
                left -= {turn.request for turn in turns}
        return heard


def _abandon(server: SGLangServer | None, turns: dict[str, SampledRow]) -> None:
    """Nobody waits for these any more."""
    with contextlib.suppress(EngineError):
        for request in turns if server else ():
            server.call("/abort_request", {"rid": request})
