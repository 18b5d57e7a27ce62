"""Conversation of one row: its turns so far, and the form in which a `TurnLog` keeps them until another goes on.

    tokens, logprobs, versions   of all that follows the prompt, a value for each token
    events                       what has happened, in order, as msgpack:
        ["sampled", tokens, finished]             a whole turn of the model
        ["answered", observation, done, reward]   what its environment said
        ["failed", reason, timeout]               or why it did not
        ["observed", tokens]                      how the model reads that
        ["state", turns, state]                   a snapshot of the environment after so many turns
        ["reset"]                                 what was recorded before does not count
        ["began", digest]                         the prompt, where the environment has added to it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack
import torch
import xxhash
from torch import Tensor

from distflow.contracts.decorators import Turn
from distflow.data.batch import Batch, Ragged
from distflow.telemetry import timeline
from distflow.telemetry.trajectories import trajectories
from workers.engines.chat import sampled_text
from workers.engines.role_engines import RoleEngines
from workers.engines.rollout import EVENTS, LOGPROBS, TOKENS, VERSIONS, SampledRow
from workers.isolation.env_pool import EnvFailure
from workers.isolation.rewards import LONGEST_MARK, opened_thoughts


class Piece(NamedTuple):
    tokens: Tensor
    logprobs: Tensor
    versions: Tensor
    sampled: bool


@dataclass(eq=False)
class Trajectory:
    row: SampledRow
    columns: dict[str, str]
    saved: bool  # its turns are written to the run folder
    pieces: list[Piece] = field(default_factory=list)
    events: list[list[Any]] = field(default_factory=list)
    turns: int = 0
    reward: float = 0.0
    asked: int = 0  # when its environment was, in the timeline's microseconds
    failure: EnvFailure | None = None
    cut: bool = False
    out_of_turns: bool = False  # its environment would have gone on
    state: tuple[int, Any] | None = None  # turns, and the environment's snapshot after them
    recorded: tuple[int, int] = (0, 0)  # events and pieces that the log has
    recorded_state: tuple[int, Any] | None = None  # the snapshot that it has
    known: bool = False  # the session has had the row
    began: bytes = b""  # digest of the prompt, where the environment has added to it
    written: int = -1  # the newest turn that was written to the run folder

    @property
    def length(self) -> int:
        return sum(len(piece.tokens) for piece in self.pieces)

    @property
    def finished(self) -> bool:
        """Whether it came to its end, instead of being cut off by a limit."""
        return self.row.finished and not self.cut and not self.out_of_turns

    @property
    def last(self) -> str:
        """Kind of the last event; "" before the first turn is over."""
        return self.events[-1][0] if self.events else ""

    @property
    def answers(self) -> list[Turn]:
        return [Turn(*values) for kind, *values in self.events if kind == "answered"]

    def text(self, engine: RoleEngines, at: int) -> str:
        """Return what the model said in piece number `at`. Where it was cut off within thoughts that its template has
        opened, their mark stands before it, as environments see no other sign of them."""
        said = text_of(engine, self.pieces[at].tokens)
        turn = sum(piece.sampled for piece in self.pieces[:at])
        if [event for event in self.events if event[0] == "sampled"][turn][2]:
            return said
        before = self.pieces[at - 1].tokens if at else self.row.sequence[: self.row.prompt]
        return opened_thoughts(text_of(engine, before[-LONGEST_MARK:]), said) + said

    def add_turn(self) -> None:
        """Take up the turn that was sampled last."""
        self.turns += 1
        self.pieces.append(Piece(self.row.tokens, self.row.logprobs, self.row.versions, True))
        self.events.append(["sampled", len(self.row.tokens), self.row.finished])
        self.asked = timeline.now()

    def add_observed(self, tokens: Tensor) -> None:
        """Take up tokens after the last turn that the model did not sample."""
        self.pieces.append(Piece(tokens, torch.zeros(len(tokens)), self.row.versions[-1:].expand(len(tokens)), False))
        self.events.append(["observed", len(tokens)])

    def add_answer(self, answer: Turn | EnvFailure) -> None:
        if isinstance(answer, EnvFailure):
            self.failure = answer
            self.events.append(["failed", answer.reason, answer.timeout])
        else:
            self.reward += answer.reward
            self.events.append(["answered", answer.observation, answer.done, answer.reward])

    def record(self, answer: Turn | EnvFailure, engine: RoleEngines) -> None:
        """Write the last turn, and what answered it, to the timeline and the trajectories of the run, if they lack it:
        what follows it may be no turn."""
        if self.written == self.turns:
            return
        self.written = self.turns
        timeline.current().add(timeline.TOOLS, f"row {self.row.id}", self.asked, engine.step + 1, turn=self.turns)
        if not self.saved:
            return
        turn = {"failed": answer.reason} if isinstance(answer, EnvFailure) else {
            "observation": answer.observation, "reward": answer.reward, "done": answer.done}
        trajectories().write(engine.step, self.row.id, {
            "turn": self.turns, "text": text_of(engine, self.row.tokens), "tokens": len(self.row.tokens), **turn,
            "seconds": (timeline.now() - self.asked) / 1e6})

    def rewind(self, turn: int) -> None:
        """Drop what has happened since the model's turn number `turn`."""
        sampled = [index for index, event in enumerate(self.events) if event[0] == "sampled"]
        del self.events[sampled[turn - 1] + 1 :]
        del self.pieces[sum(event[0] in ("sampled", "observed") for event in self.events) :]
        self.turns, self.reward = turn, sum((answer.reward for answer in self.answers), 0.0)
        self.recorded, self.known, self.written = (0, 0), False, turn - 1
        self.state = self.state if self.state and self.state[0] <= turn else None
        self._place_row()
        if self.row.experts is not None:
            self.row.experts = self.row.experts[: self.row.prompt + self.length]

    def restore(self, recorded: Recorded) -> None:
        """Take up what was recorded."""
        at = 0
        for event in _unpacked(recorded.events):
            kind, *values = event
            if kind == "reset":
                self.pieces, self.events, self.state = [], [], None
            elif kind == "state":
                self.state = values[0], values[1]
            elif kind == "began":
                continue
            else:
                self.events.append(event)
            if kind in ("sampled", "observed"):
                stop = at + values[0]
                self.pieces.append(Piece(recorded.tokens[at:stop], recorded.logprobs[at:stop],
                                         recorded.versions[at:stop], kind != "observed"))
                at = stop
        self.turns = sum(event[0] == "sampled" for event in self.events)
        self.reward = sum((answer.reward for answer in self.answers), 0.0)
        if self.last == "failed":
            self.failure = EnvFailure(*self.events[-1][1:])
        self.recorded, self.recorded_state = (len(self.events), len(self.pieces)), self.state
        self.written = self.turns - (self.last == "sampled")
        self._place_row()

    def _place_row(self) -> None:
        """Have the row's last turn be that of the last sampled piece, unless that has been read already."""
        row, prompt = self.row, self.row.sequence[: self.row.prompt]
        last = self.pieces[-1] if self.pieces and self.pieces[-1].sampled else None
        row.sequence = torch.cat([prompt, *(piece.tokens for piece in (self.pieces[:-1] if last else self.pieces))])
        sampled = [piece for piece in self.pieces if piece.sampled]
        if sampled:
            row.tokens, row.logprobs, row.versions, _ = sampled[-1]
        if last is None:
            row.tokens, row.logprobs = row.tokens[:0], row.logprobs[:0]
        row.finished = next((bool(event[2]) for event in reversed(self.events) if event[0] == "sampled"), False)

    def take(self, whole: bool) -> Recorded:
        """Return what has happened since the last `take`, or with `whole` all of it. A turn that is not over is left
        out: sampled again from its beginning it rounds alike."""
        events, pieces = (0, 0) if whole else self.recorded
        news, tokens = self.events[events:], self.pieces[pieces:]
        state = self.state if not events or self.state is not self.recorded_state else None
        self.recorded, self.recorded_state = (len(self.events), len(self.pieces)), self.state
        head = [] if events else [["reset"], *([["began", self.began]] if self.began else [])]
        return _recorded(tokens, [*head, *news, *([["state", *state]] if state else [])])


class Recorded(NamedTuple):
    """What a log keeps of a conversation."""

    tokens: Tensor
    logprobs: Tensor
    versions: Tensor
    events: bytes

    @property
    def began(self) -> bytes:
        found = b""
        for kind, *values in _unpacked(self.events):
            found = values[0] if kind == "began" else b"" if kind == "reset" else found
        return found

    def with_more(self, new: Recorded) -> Recorded:
        return Recorded(torch.cat([self.tokens, new.tokens]), torch.cat([self.logprobs, new.logprobs]),
                        torch.cat([self.versions, new.versions]), self.events + new.events)


_NOTHING = Piece(torch.empty(0, dtype=torch.int64), torch.empty(0), torch.empty(0, dtype=torch.int32), False)


def _recorded(pieces: Sequence[Piece], events: list[list[Any]]) -> Recorded:
    packer = msgpack.Packer(unicode_errors="surrogatepass")
    tokens, logprobs, versions = (torch.cat(parts) for parts in list(zip(_NOTHING, *pieces))[:3])
    return Recorded(tokens, logprobs, versions, b"".join(map(packer.pack, events)))


def _unpacked(events: bytes) -> Iterator[list[Any]]:
    unpacker = msgpack.Unpacker(unicode_errors="surrogatepass", strict_map_key=False)
    unpacker.feed(events)
    yield from unpacker


def digest_of(tokens: Tensor) -> bytes:
    return xxhash.xxh3_64_digest(tokens.numpy().tobytes())


def rows_of(ids: Sequence[int], taken: Sequence[Recorded]) -> Batch:
    """Return conversations as a `TurnLog` keeps them."""
    tokens = Ragged.from_rows([each.tokens for each in taken])
    events = b"".join(each.events for each in taken)
    return Batch(torch.tensor(ids, dtype=torch.int64), {
        TOKENS: tokens, LOGPROBS: tokens.with_values(torch.cat([_NOTHING.logprobs, *(each[1] for each in taken)])),
        VERSIONS: tokens.with_values(torch.cat([_NOTHING.versions, *(each[2] for each in taken)])),
        EVENTS: Ragged(torch.frombuffer(bytearray(events), dtype=torch.uint8) if events else
                       torch.empty(0, dtype=torch.uint8),
                       torch.tensor([len(each.events) for each in taken], dtype=torch.int64))})


def recorded_in(rows: Batch) -> dict[int, Recorded]:
    """Return what is recorded of each row; a row that comes again goes on."""
    found: dict[int, Recorded] = {}
    columns = [rows[name].rows if len(rows) else [] for name in (TOKENS, LOGPROBS, VERSIONS, EVENTS)]
    for row, tokens, logprobs, versions, events in zip(rows.ids.tolist(), *columns):
        new = Recorded(tokens, logprobs, versions, events.numpy().tobytes())
        found[row] = found[row].with_more(new) if row in found else new
    return found


def text_of(engine: RoleEngines, tokens: Tensor) -> str:
    return sampled_text(engine.tokenizer, tokens.tolist(), engine.end_tokens)
