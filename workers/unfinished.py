"""Rows that one rank has begun and another goes on with, so that no token is sampled twice."""

from __future__ import annotations

import torch

from distflow.data.batch import Batch
from distflow.observe.metrics import current
from workers.engines.rollout import Rollout, Row, Sampler, Samples, Session
from workers.engines.stream import Stream

TOKENS, LOGPROBS, VERSIONS, FINISHED = (f"begun/{name}" for name in ("tokens", "logprobs", "versions", "finished"))


class Unfinished(Sampler):
    """A stream's rows of one prompt in one node: what others have sampled of them is not sampled again, and what is
    left unfinished can be given to others. Conversations begin anew, since their environments do not move."""

    def __init__(self, stream: Stream | Rollout, saved: Batch, restart: bool):
        """
        Args:
            saved: rows that others have begun, in the columns that `begun` has.
            restart: not those that other weights have begun.
        """
        self.stream, self.generation, self.end_tokens = stream, stream.generation, stream.end_tokens
        self.saved, self.restart = saved, restart
        self.rows_begun: list[Row] = []

    def session(self, key: int, temperature: float | None = None, keeps: bool = False) -> Session:
        return self.stream.session(key, temperature, keeps)

    def take_over(self, rows: list[Row]) -> None:
        self.rows_begun = rows
        if not len(self.saved):
            return
        found = dict(zip(self.saved.ids.tolist(), range(len(self.saved))))
        columns = [self.saved[name].rows for name in (TOKENS, LOGPROBS, VERSIONS)]
        for row in (row for row in rows if row.id in found):
            tokens, logprobs, versions = (column[found[row.id]] for column in columns)
            if not (self.restart and bool((versions != self.stream.version).any())):
                row.resume(tokens, logprobs, versions, bool(self.saved[FINISHED][found[row.id]]))
                current().add("response/continued", len(tokens))

    def begun(self) -> Batch:
        """The rows that have tokens, once nothing is sampled any more."""
        rows = [row for row in self.rows_begun if len(row.tokens)]
        samples = Samples.of(rows)
        return Batch(torch.tensor([row.id for row in rows], dtype=torch.int64), {
            TOKENS: samples.tokens, LOGPROBS: samples.logprobs, VERSIONS: samples.versions,
            FINISHED: samples.finished})
