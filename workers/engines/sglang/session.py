"""Session of an SGLang server: each turn of a row is a request."""

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

_STEP_TIMEOUT, _FIRST_TIMEOUT = 0.1, 1.0
"""Seconds that a step waits for a turn to end, and for the first tokens of new rows."""


class TurnResult(NamedTuple):
    """Server's result of a finished turn."""

    request: str
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    aborted: bool


class PendingRequests(Session):
    """Requests of one session; the server continues between two steps and its events are queued."""

    def __init__(self, engine: SGLangRollout, key: int, temperature: float):
        self.engine, self.key, self.temperature = engine, key, temperature
        self.new: dict[str, SampledRow] = {}
        """Turns that have yet to be sent to the server, by request."""
        self.turns: dict[str, SampledRow] = {}
        """Turns under way."""
        self.ended: list[SampledRow] = []
        """Rows whose turns ended while others were being aborted."""
        self.aborting: set[str] = set()
        """Requests that are being aborted."""
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self.ends = set(engine.end_tokens.tolist())
        weakref.finalize(self, _abandon, engine.server, self.turns).atexit = False

    @property
    def busy(self) -> bool:
        return bool(self.new or self.turns or self.ended)

    def add(self, rows: list[SampledRow]) -> None:
        for row in rows:
            if row.images is not None and len(row.images.values):
                raise EngineError("SGLang is not given images here; transformers is. Instead:  rollout: hf")
            self.new[f"{next(self.engine.numbers)}."] = row  # the dot: SGLang aborts by prefix

    def step(self) -> list[SampledRow]:
        if self.engine.paused:
            return []
        new, self.new = self.new, {}
        self.turns.update(new)
        if self.turns:
            heartbeat.current().tick()
            self._take(self.engine.share.broadcast(lambda: self._advance(new)))
        ended, self.ended = self.ended, []
        return ended

    def abort(self, rows: Sequence[SampledRow] | None = None) -> list[SampledRow]:
        chosen = {*self.new.values(), *self.turns.values()} if rows is None else set(rows)
        left = [self.new.pop(request) for request, row in list(self.new.items()) if row in chosen]
        for row in left:
            row.end(row.tokens[:0], row.logprobs[:0], row.versions[:0], finished=False)
        self.aborting = {request for request, row in self.turns.items() if row in chosen}
        return left + self._take(self.engine.share.broadcast(self._abort)) if self.aborting else left

    def _take(self, turns: list[TurnResult]) -> list[SampledRow]:
        """End the turns; return the aborted rows and keep the others for the next step."""
        aborted = []
        for turn in itertools.starmap(TurnResult, turns):
            row = self.turns.pop(turn.request)
            row.end(torch.tensor(turn.tokens, dtype=torch.int64), torch.tensor(turn.logprobs, dtype=torch.float32),
                    torch.tensor(turn.versions, dtype=torch.int32), bool(turn.tokens) and turn.tokens[-1] in self.ends)
            (aborted if turn.aborted else self.ended).append(row)
        return aborted

    def _advance(self, new: dict[str, SampledRow]) -> list[TurnResult]:
        if new:
            self.engine.server.generate(self._body(new), self.events)
        return self._receive(0.0 if self.ended else _FIRST_TIMEOUT if new else _STEP_TIMEOUT)

    def _body(self, new: dict[str, SampledRow]) -> dict[str, Any]:
        settings = self.engine.generation
        # SGLang draws differently once any row of a batch is greedy or has a top-k: with seeds, give a top-k to all.
        no_limit = self.engine.vocabulary if settings.batch_invariant else -1
        common = {"temperature": self.temperature, "top_p": settings.top_p, "top_k": settings.top_k or no_limit,
                  "stop_token_ids": sorted(self.ends)}
        return {"rid": list(new), "input_ids": [row.sequence.tolist() for row in new.values()],
                "return_logprob": True, "sampling_params": [
                    {**common, "max_new_tokens": row.limit, "sampling_seed": key_of(self.key_of(row), row.id)}
                    for row in new.values()]}

    def _receive(self, patience: float) -> list[TurnResult]:
        """Return the turns that have ended. Raises EngineError if the server has ended."""
        results = []
        with contextlib.suppress(queue.Empty):
            results.append(self._turn(self.events.get(timeout=patience)))
            while True:
                results.append(self._turn(self.events.get_nowait()))
        if not results:
            self.engine.server.watch()
        return list(filter(None, results))

    def _turn(self, event: dict[str, Any] | EngineError) -> TurnResult | None:
        """Return the result of a turn; None while it continues."""
        if isinstance(event, EngineError):
            raise event
        if "error" in event:
            raise EngineError(f"SGLang refuses rows: {event['error']}")
        meta, tokens = event["meta_info"], event["output_ids"]
        reason, request = meta["finish_reason"], meta["id"]
        if reason is None:
            return None
        row = self.turns[request]
        complete = bool(tokens) and (tokens[-1] in self.ends or len(tokens) >= row.limit)
        if reason["type"] == "abort" and request not in self.aborting:
            raise EngineError(f"SGLang gave a row of {len(row.sequence)} tokens up after {len(tokens)} more: "
                              f"{reason.get('message')}")
        versions = [int(span["version"]) for span in meta.get("weight_versions", ())
                    for _ in range(span["start"], span["end"])]
        logprobs = [chosen[0] for chosen in meta.get("output_token_logprobs", [])]
        return TurnResult(request, tokens, logprobs, versions, reason["type"] == "abort" and not complete)

    def _abort(self) -> list[TurnResult]:
        left, results = set(self.aborting), []
        with self.engine.running():
            while left:  # repeated: the server forgets an abort that arrives before its request
                self.engine.end(left)
                turns = self._receive(_STEP_TIMEOUT)
                results += turns
                left -= {turn.request for turn in turns}
        return results


def _abandon(server: SGLangServer | None, turns: dict[str, SampledRow]) -> None:
    """Abort the requests of a session that nobody uses any more."""
    with contextlib.suppress(EngineError):
        for request in turns if server else ():
            server.call("/abort_request", {"rid": request})
