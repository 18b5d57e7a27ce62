"""Interface of engines that sample, whichever library computes.

    Rollout      an engine with weights that are replaced in place; a Sampler
    Session      rows sampled together; `step` returns those whose turn has ended
    SampledRow   one row over its turns: WAITING (added) → SAMPLED → ended (returned), then extended or forgotten
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distflow.config.run import Generation, RoleRun
from distflow.data.batch import Batch, Ragged
from distflow.errors import EngineError
from distflow.telemetry import events, timeline
from distflow.weights.fingerprint import HeldWeights, Sums, fingerprint_of
from distflow.weights.shard_slice import Box
from workers.engines.sampling import TokenLimits


@dataclass(eq=False)
class SampledRow:
    """A row that is sampled in one or more turns. `tokens`, `logprobs` and `versions` (of the weights) belong to the
    last turn; `finished` is False where it was cut off by the limit or aborted."""

    id: int
    sequence: Tensor  # all tokens before the turn, the prompt included; on the CPU
    prompt: int  # number of prompt tokens
    limit: int  # longest turn in tokens
    tokens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    logprobs: Tensor = field(default_factory=lambda: torch.empty(0))
    versions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    finished: bool = False
    images: Ragged | None = None  # images of the prompt: one row of the column
    key: int | None = None  # replaces the session's key
    past: Any = None  # whatever the engine keeps of the row between turns
    partial: tuple[Tensor, Tensor, Tensor] | None = None  # sampled by another engine: tokens, logprobs, versions
    done: bool = False  # the other engine has ended the turn
    experts: Tensor | None = None
    """Experts chosen for each token of the row that the engine has read [tokens, layers, experts of a token]; None if
    they are not recorded."""
    began: int = 0  # when the engine took up the turn, in the timeline's microseconds; 0: it has not

    def begin(self) -> None:
        self.began = timeline.now()

    def resume(self, tokens: Tensor, logprobs: Tensor, versions: Tensor, finished: bool) -> None:
        """Continue the turn after `tokens` [1 or more] that another engine has sampled."""
        self.done = finished or len(tokens) >= self.limit
        if self.done:
            self.end(tokens, logprobs, versions, finished)
        else:
            self.sequence, self.limit = torch.cat([self.sequence, tokens]), self.limit - len(tokens)
            self.partial = tokens, logprobs, versions

    def extend(self, observation: Tensor, limit: int) -> None:
        self.sequence, self.limit = torch.cat([self.sequence, self.tokens, observation]), limit

    def end(self, tokens: Tensor, logprobs: Tensor, versions: Tensor, finished: bool) -> None:
        if self.began:
            timeline.current().add(timeline.ROWS, f"row {self.id}", self.began, tokens=len(tokens))
            self.began = 0
        if self.partial is not None:
            before = len(self.partial[0])
            self.sequence, self.limit = self.sequence[: len(self.sequence) - before], self.limit + before
            tokens, logprobs, versions = map(torch.cat, zip(self.partial, (tokens, logprobs, versions)))
            self.partial = None
        self.tokens, self.logprobs, self.versions, self.finished = tokens, logprobs, versions, finished

    def end_unsampled(self) -> None:
        self.end(self.tokens[:0], self.logprobs[:0], self.versions[:0], finished=False)


_EXTRA_TOKENS = 4  # additional tokens to decode: the first of a list may decode differently than within the text


class StopStrings:
    """Texts that end a turn (`generation.stop`), with the token that completes one of them: no token is cut off."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]):
        self.tokenizer, self.texts = tokenizer, tuple(texts)
        self.window = max(len(text.encode()) for text in self.texts) + _EXTRA_TOKENS  # tokens decoded: each >= 1 byte

    def reached(self, row: SampledRow, tokens: Sequence[int]) -> bool:
        """Return whether the last of `tokens`, sampled here after `row.partial`, completes a text."""
        last = list(tokens[-self.window :])
        if row.partial is not None and len(last) < self.window:
            last = row.partial[0][len(last) - self.window :].tolist() + last
        decoded = self.tokenizer.decode(last)
        return any(text in decoded for text in self.texts)


@dataclass(frozen=True)
class Samples:
    """Result of generation, with weight `versions` (int32), and `finished` [B]: False where a row was cut off."""

    tokens: Ragged
    logprobs: Ragged
    versions: Ragged
    finished: Tensor
    experts: tuple[Tensor | None, ...] = ()  # of each row: see `SampledRow`

    @staticmethod
    def of(rows: list[SampledRow]) -> Samples:
        tokens = Ragged.from_rows([row.tokens for row in rows])
        values = {"logprobs": torch.empty(0), "versions": torch.empty(0, dtype=torch.int32)}
        values = {name: torch.cat([getattr(row, name) for row in rows]) if rows else empty
                  for name, empty in values.items()}
        return Samples(tokens, tokens.with_values(values["logprobs"]), tokens.with_values(values["versions"]),
                       torch.tensor([row.finished for row in rows], dtype=torch.bool),
                       tuple(row.experts for row in rows))


TOKENS, LOGPROBS, VERSIONS, FINISHED, EVENTS = (
    f"partial/{name}" for name in ("tokens", "logprobs", "versions", "finished", "events"))
"""Columns of rows that are not complete: `finished` of single answers, `events` of conversations."""


class TurnLog(ABC):
    """Record of a node's conversations, where it outlives the process that samples them."""

    appends = False  # what is saved of a row follows what was saved before, and does not replace it
    under_way: Callable[[], Batch] | None = None  # returns all conversations as they stand, once nothing is sampled

    @abstractmethod
    def recorded(self) -> Batch:
        """Return the conversations that others have begun; a row that comes again goes on."""

    @abstractmethod
    def save(self, rows: Batch) -> None:
        """Keep conversations whose newest turn is over. Does not wait for the network."""


class Session(ABC):
    """Rows sampled under one key: they join at any time, and each ends on its own. New weights do not end it."""

    key: int
    turn_log: TurnLog | None = None
    shared = False  # the engine serves other callers too; `step` then only waits

    def key_of(self, row: SampledRow) -> int:
        return self.key if row.key is None else row.key

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether any row is being sampled or waits for it."""

    @abstractmethod
    def add(self, rows: list[SampledRow]) -> None:
        """Add samples of one prompt, which is read once for all of them."""

    def extend(self, row: SampledRow, observation: Tensor, limit: int) -> None:
        """Start another turn of a row after `observation` [any length]; the tokens sampled so far stay as they are."""
        row.extend(observation, limit)
        self.add([row])

    def forget(self, row: SampledRow) -> None:
        row.past = None

    @abstractmethod
    def step(self) -> list[SampledRow]:
        """Sample for a moment; return the rows whose turn has ended. Does nothing while the engine is paused."""

    def wake(self) -> None:  # noqa: B027 - most compute, and wait for nothing
        """Make a waiting `step`, or the next one, return at once. Thread-safe."""

    def wait(self) -> None:  # noqa: B027
        """Wait for `wake`, where nothing is sampled; raise EngineStopped if nothing drives the engine any more."""

    def check(self) -> None:  # noqa: B027 - most are driven by their caller
        """Raise EngineStopped if nothing drives the engine any more."""

    @abstractmethod
    def abort(self, rows: Sequence[SampledRow] | None = None) -> list[SampledRow]:
        """End the turns of these rows (None: of all) now; return those that were under way or waiting, unfinished."""


class Sampler(ABC):
    """Anything that opens sessions: an engine, or a view of one."""

    generation: Generation
    end_tokens: Tensor  # [E]

    @abstractmethod
    def session(self, key: int, temperature: float | None = None, keep_cache: bool = False,
                limits: TokenLimits | None = None) -> Session:
        """Open a session. `key`, row ids and positions decide the randomness; `temperature` 0 takes likeliest tokens.
        `keep_cache`: keep the KV cache of ended rows, so that their next turn need not read them again. `limits`: in
        place of those of `generation`."""

    def generate(self, prompts: Ragged, repeats: int, ids: Tensor, key: int, temperature: float | None = None,
                 max_new_tokens: int | None = None, images: Ragged | None = None,
                 limits: TokenLimits | None = None) -> Samples:
        """Sample `repeats` responses to each of P prompts; `ids` are [P * repeats] row ids."""
        session = self.session(key, temperature, False, limits)
        rows = self.rows(prompts, repeats, ids, max_new_tokens, images)
        self.take_over(rows)
        for _, together in groupby((row for row in rows if not row.done), key=lambda row: id(row.sequence)):
            session.add(list(together))
        while session.busy:
            session.step()
        return Samples.of(rows)

    def take_over(self, rows: list[SampledRow]) -> None:  # noqa: B027 - most start every row afresh
        """Resume partial rollouts that other engines have left."""

    def rows(self, prompts: Ragged, repeats: int, ids: Tensor, max_new_tokens: int | None = None,
             images: Ragged | None = None) -> list[SampledRow]:
        """Return `repeats` rows for each prompt; they share its tensor."""
        limit = self.generation.max_new_tokens if max_new_tokens is None else max_new_tokens
        shown = images.rows if images is not None else [None] * len(prompts)
        return [SampledRow(id, prompt, len(prompt), limit, images=image) for prompt, image, ids_of_prompt in zip(
            prompts.rows, shown, ids.reshape(-1, repeats).tolist()) for id in ids_of_prompt]


class Rollout(Sampler):
    """Engine that samples; its weights are replaced in place. It raises EngineError, whatever its library raises. The
    ranks of a split model make the same calls with the same rows, and get the same tokens."""

    shares_base = False  # whether the base of adapters is one for this engine and the trainer
    dtype: torch.dtype  # of the computation and of the weights to load
    version = -1  # of the weights; -1 if unknown
    paused = False
    absent = False  # whether the model is on other ranks alone
    stop: StopStrings | None = None  # texts that end a turn, besides `end_tokens`
    tied: Mapping[str, str] = {}  # names of tied weights, by that of each copy
    ranks = 1  # over which what is held adds up
    reads: Mapping[str, Sequence[Box]] = {}  # what this rank reads of tensors; of others that `load` is given, all
    proved: tuple[tuple[int, int], ...] = ((0, 0),)
    """Versions that it has sampled with, each with the fingerprint of the weights that it was proved to hold; 0: those
    that the model was loaded with."""

    @classmethod
    @abstractmethod
    def build(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: RoleRun, mesh: DeviceMesh,
              seed: int, end_tokens: list[int], shared: Iterable[nn.Parameter] = ()) -> Rollout:
        """Build an engine with the whole weights of `model`, version 0. `shared`: parameters of another engine too."""

    @abstractmethod
    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> int:
        """Replace weights by whole tensors under their Hugging Face names; return the number of bytes. A tensor may be
        overwritten once the next one is requested. Weights that are not named stay as they are."""

    @abstractmethod
    def held(self) -> Sums:
        """Return the checksums of the parameters that the engine computes with, read where it has them, under its
        library's names and added up over its ranks. See `distflow.weights.fingerprint`."""

    @cached_property
    def _held_weights(self) -> HeldWeights:
        return HeldWeights()

    def differing(self, published: Sums) -> list[str]:
        """Return the names of published weights that the engine does not hold. Collective over its ranks."""
        held = self.held()
        copies = {copy: published[name] for copy, name in self.tied.items() if name in published and copy in held}
        return self._held_weights.differing(published | copies, held, self.ranks)

    def prove(self, role: str, published: Sums, fingerprint: int = 0) -> None:
        """Prove that the engine holds what was published as its version. Raises EngineError, with an event: it does
        not. `published`: checksums in the engine's `dtype`; `fingerprint`: of those in another."""
        if odd := self.differing(published):
            events.record("policy_refused", role=role, version=self.version, tensor=odd[0], tensors=len(odd))
            raise EngineError(f"role `{role}`: the engine that samples ({type(self).__name__}) does not hold version "
                              f"{self.version} of the weights as the trainer published it: `{odd[0]}` differs"
                              f"{f', and {len(odd) - 1} more' if odd[1:] else ''}. Its rows would be of another "
                              "policy, so that none is sampled. The usual cause: a weight that the engine's library "
                              "did not take, or keeps in another dtype."
                              f"{'' if self.shares_base else ' Instead:  rollout: hf'}")
        self.proved = (*self.proved, (self.version, fingerprint or fingerprint_of(published)))

    def candidates(self, key: str) -> set[str]:
        """Return the keys of the weights that have arrived on the engine's ranks ("": none); `key` is this rank's."""
        return {key}

    def release_followers(self) -> None:  # noqa: B027 - most have no followers
        """End the follower ranks of the engine."""

    def weight_buffers(self) -> dict[str, Tensor]:
        """Return the whole weights in use, by name, that may be overwritten in place of a copy by `load`."""
        return {}

    @abstractmethod
    def sleep(self) -> None:
        """Free the memory of weights and caches, as far as the engine can; no row may be under way."""

    @abstractmethod
    def wake(self) -> None:
        """Allocate the memory again. The weights are undefined until `load`, and `version` is -1."""

    @abstractmethod
    def check_health(self) -> None:
        """Raise EngineError, with the cause if known, if the engine cannot sample any more."""

    @abstractmethod
    def close(self) -> None:
        """End the engine's processes and free its memory; may be called twice."""

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False


class AbsentRollout(Rollout):
    """Rollout on a rank that has no rows of its role, and no model: it takes part in what is collective."""

    absent = True

    def __init__(self, generation: Generation, end_tokens: list[int], dtype: torch.dtype):
        self.generation, self.end_tokens, self.dtype = generation, torch.tensor(end_tokens), dtype

    @classmethod
    def build(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: RoleRun, mesh: DeviceMesh,
              seed: int, end_tokens: list[int], shared: Iterable[nn.Parameter] = ()) -> Rollout:
        raise NotImplementedError("it has no model")

    def session(self, key: int, temperature: float | None = None, keep_cache: bool = False,
                limits: TokenLimits | None = None) -> Session:
        return _EmptySession(key)

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> int:
        """Drop the weights: only the others need them."""
        for _ in weights:
            continue
        self.version = version
        return 0

    def held(self) -> Sums:
        return {}

    def prove(self, role: str, published: Sums, fingerprint: int = 0) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def check_health(self) -> None: ...

    def close(self) -> None: ...


class _EmptySession(Session):

    def __init__(self, key: int):
        self.key = key

    @property
    def busy(self) -> bool:
        return False

    def add(self, rows: list[SampledRow]) -> None:
        raise ValueError(f"{len(rows)} rows are to be sampled on a rank that has no model for it")

    def step(self) -> list[SampledRow]:
        return []

    def abort(self, rows: Sequence[SampledRow] | None = None) -> list[SampledRow]:
        return []


def require_shapes(weights: Iterable[tuple[str, Tensor]],
                   shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights. Raises EngineError: one does not fit a model of these shapes."""
    for name, weight in weights:
        if wrong := weight_mismatch(name, weight, shapes):
            raise EngineError(wrong)
        yield name, weight


def weight_mismatch(name: str, weight: Tensor, shapes: Mapping[str, torch.Size]) -> str:
    """Return what is wrong with a weight for a model of these shapes; "" if nothing is."""
    if shapes.get(name) == weight.shape:
        return ""
    return (f"weight `{name}` {list(weight.shape)} has no place in the generating model; there it is "
            f"{list(shapes[name]) if name in shapes else 'not known'}")
