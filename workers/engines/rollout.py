"""What every engine that samples offers, whichever library computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distflow.config.run import Generation, RoleRun
from distflow.data.batch import Ragged
from distflow.errors import EngineError

if TYPE_CHECKING:
    from workers.engines.stopping import StopStrings


@dataclass(eq=False)
class SampledRow:
    """A row that is sampled in one or more turns.

    With the session's key `id` and the position behind the prompt decide the randomness. `tokens`, `logprobs` and
    `versions` (of the weights) are those of the last turn; `finished` says whether it came to an end of its own.
    """

    id: int
    sequence: Tensor
    """Every token before the turn, the prompt included; on the CPU."""
    prompt: int
    """How many of them are the prompt's."""
    limit: int
    """Tokens that the turn may have."""
    tokens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    logprobs: Tensor = field(default_factory=lambda: torch.empty(0))
    versions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    finished: bool = False
    images: Ragged | None = None
    """What the prompt shows, as one row of the column."""
    key: int | None = None
    """Instead of the session's."""
    past: Any = None
    """What its engine keeps of it between turns."""
    begun: tuple[Tensor, Tensor, Tensor] | None = None
    """Tokens of the turn that another engine has sampled, their log-probabilities and versions."""
    over: bool = False
    """That other engine has ended the turn."""

    def resume(self, tokens: Tensor, logprobs: Tensor, versions: Tensor, finished: bool) -> None:
        """It goes on, in this turn, behind these tokens [1 or more], that another engine has sampled."""
        self.over = finished or len(tokens) >= self.limit
        if self.over:
            self.end(tokens, logprobs, versions, finished)
        else:
            self.sequence, self.limit = torch.cat([self.sequence, tokens]), self.limit - len(tokens)
            self.begun = tokens, logprobs, versions

    def extend(self, observation: Tensor, limit: int) -> None:
        """It gets another turn, after `observation`."""
        self.sequence, self.limit = torch.cat([self.sequence, self.tokens, observation]), limit

    def end(self, tokens: Tensor, logprobs: Tensor, versions: Tensor, finished: bool) -> None:
        """Its turn is over: what it got in it."""
        if self.begun is not None:
            before = len(self.begun[0])
            self.sequence, self.limit = self.sequence[: len(self.sequence) - before], self.limit + before
            tokens, logprobs, versions = map(torch.cat, zip(self.begun, (tokens, logprobs, versions)))
            self.begun = None
        self.tokens, self.logprobs, self.versions, self.finished = tokens, logprobs, versions, finished


@dataclass(frozen=True)
class Samples:
    """What generation returns, row by row: `tokens` with their `logprobs` and the `versions` (int32) of the weights
    that sampled them, and whether each row came to its end [B]."""

    tokens: Ragged
    logprobs: Ragged
    versions: Ragged
    finished: Tensor

    @staticmethod
    def of(rows: list[SampledRow]) -> Samples:
        """The last turn of each row."""
        tokens = Ragged.from_rows([row.tokens for row in rows])
        values = {"logprobs": torch.empty(0), "versions": torch.empty(0, dtype=torch.int32)}
        values = {name: torch.cat([getattr(row, name) for row in rows]) if rows else empty
                  for name, empty in values.items()}
        return Samples(tokens, tokens.with_values(values["logprobs"]), tokens.with_values(values["versions"]),
                       torch.tensor([row.finished for row in rows], dtype=torch.bool))


class Session(ABC):
    """Rows that are sampled under one key: they come and go at any time, and each ends by itself.

    It goes on with new weights when they are loaded: each token's version says whose it is.
    """

    key: int
    shared = False
    """Whether the engine samples for others meanwhile; `step` then only waits."""

    def key_of(self, row: SampledRow) -> int:
        return self.key if row.key is None else row.key

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether any row is sampled or waits for it."""

    @abstractmethod
    def add(self, rows: list[SampledRow]) -> None:
        """Samples of one prompt, which is read once for all of them."""

    def extend(self, row: SampledRow, observation: Tensor, limit: int) -> None:
        """Go on with a row whose turn ended: its own tokens stay as they are, `observation` [any length] follows."""
        row.extend(observation, limit)
        self.add([row])

    def forget(self, row: SampledRow) -> None:
        """The row has had its last turn: nothing that was kept of it is needed."""
        row.past = None

    @abstractmethod
    def step(self) -> list[SampledRow]:
        """Go on for a moment: the rows whose turn ended meanwhile. None while the engine is paused."""

    def wake(self) -> None:  # noqa: B027 - most compute, and wait for nothing
        """Have a `step` that only waits return, or the next one. From any thread."""

    @abstractmethod
    def abort(self, rows: Sequence[SampledRow] | None = None) -> list[SampledRow]:
        """End the turns of these rows (None: of all) now. Those that were under way or waited: each has the tokens that
        it got so far, perhaps none, and is not finished; it may be extended like any other."""


class Sampler(ABC):
    """Something to sample with."""

    generation: Generation
    end_tokens: Tensor
    """Any of these [E] ends a row."""

    @abstractmethod
    def session(self, key: int, temperature: float | None = None, keeps: bool = False) -> Session:
        """A new session. With row ids and positions, `key` decides the randomness.

        Args:
            temperature: instead of the role's own; 0 takes the likeliest tokens.
            keeps: what was read of a row that has ended stays, so that it may go on without being read again.
        """

    def generate(self, prompts: Ragged, repeats: int, ids: Tensor, key: int, temperature: float | None = None,
                 max_new_tokens: int | None = None, images: Ragged | None = None) -> Samples:
        """`repeats` samples for each prompt.

        Args:
            prompts: [P] rows of tokens.
            ids: [P * repeats] row ids; with `key` they decide the randomness.
            temperature, max_new_tokens: instead of the role's own; temperature 0 is greedy.
            images: [P] what each prompt shows.
        """
        session = self.session(key, temperature)
        rows = self.rows(prompts, repeats, ids, max_new_tokens, images)
        self.take_over(rows)
        for _, together in groupby((row for row in rows if not row.over), key=lambda row: id(row.sequence)):
            session.add(list(together))
        while session.busy:
            session.step()
        return Samples.of(rows)

    def take_over(self, rows: list[SampledRow]) -> None:  # noqa: B027 - most begin what they end
        """Have rows go on where others have left them."""

    def rows(self, prompts: Ragged, repeats: int, ids: Tensor, max_new_tokens: int | None = None,
             images: Ragged | None = None) -> list[SampledRow]:
        """`repeats` rows for each prompt, which they share."""
        limit = self.generation.max_new_tokens if max_new_tokens is None else max_new_tokens
        shown = images.rows if images is not None else [None] * len(prompts)
        return [SampledRow(id, prompt, len(prompt), limit, images=image) for prompt, image, ids_of_prompt in zip(
            prompts.rows, shown, ids.reshape(-1, repeats).tolist()) for id in ids_of_prompt]


class Rollout(Sampler):
    """An engine that samples. Its weights are replaced in place, never reloaded.

    Where one model is spread over several ranks, those call everything alike, with the same rows, and all get the same
    tokens. Raises EngineError, whatever the library raises.
    """

    dtype: torch.dtype
    """In which it computes, and in which weights should come."""
    version = -1
    """Of the weights, by their trainer's count; -1 as long as nobody says."""
    paused = False
    stop: StopStrings | None = None
    """Texts that end a row too."""

    @classmethod
    @abstractmethod
    def build(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: RoleRun, mesh: DeviceMesh,
              seed: int, end_tokens: list[int], shared: Iterable[nn.Parameter] = ()) -> Rollout:
        """An engine with the weights of `model` (whole, float32, on the CPU, on every rank) and version 0.

        Args:
            mesh: that of its layout, see `workers.engines.meshes`.
            shared: parameters that another engine computes with too, on the mesh's kind of device.

        Raises:
            EngineError: the library cannot run this model.
        """

    @abstractmethod
    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> int:
        """Put whole tensors, by their Hugging Face names, in the place of the ones in use: the bytes that were put.

        A tensor may be overwritten as soon as the next one is asked for. Names that do not come keep what they have.

        Raises:
            EngineError: a name or a shape is not the model's.
        """

    def candidates(self, key: str) -> set[str]:
        """The weights that could be loaded now: those with `key`, which are here, and those that have come to other
        ranks of the engine, which load at the same time. Empty: none have come."""
        return {key}

    def part(self) -> None:  # noqa: B027 - most have nobody who follows them
        """Nothing is sampled any more."""

    def places(self) -> dict[str, Tensor]:
        """Whole weights in use, by name, that may be overwritten directly instead of being copied by `load`."""
        return {}

    @abstractmethod
    def sleep(self) -> None:
        """Give the memory of weights and caches back, as far as the engine can; no row may be under way."""

    @abstractmethod
    def wake(self) -> None:
        """Have them again. The weights mean nothing until they are loaded, and `version` is -1."""

    @abstractmethod
    def check_health(self) -> None:
        """Raises EngineError if it cannot sample any more, with the cause as far as it is known."""

    @abstractmethod
    def close(self) -> None:
        """End its processes and give back what it holds; it may be called twice."""

    def pause(self) -> None:
        """All sessions stand still from now on; what was sampled stays."""
        self.paused = True

    def resume(self) -> None:
        """Sessions go on where they stood."""
        self.paused = False


class SeparateWeights(Rollout):
    """An engine that keeps weights in a form of its own: it starts without any, and gets the first like later ones."""

    library: str
    """Its name, for people."""

    @abstractmethod
    def __init__(self, model: PreTrainedModel, settings: RoleRun, mesh: DeviceMesh, seed: int, end_tokens: list[int]):
        """`model` says what the library has to know of it."""

    @classmethod
    def build(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: RoleRun, mesh: DeviceMesh,
              seed: int, end_tokens: list[int], shared: Iterable[nn.Parameter] = ()) -> Rollout:
        if any(True for _ in shared):
            raise EngineError(f"{cls.library} keeps weights in a form of its own, so that it cannot share a base model "
                              "with the trainer of its adapters. Instead:  rollout: hf   or train the whole model, "
                              "without `lora`")
        engine = cls(model, settings, mesh, seed, end_tokens)
        engine.load(((name, parameter.data) for name, parameter in model.named_parameters()), version=0)
        return engine


def misplaced(name: str, weight: Tensor, shapes: Mapping[str, torch.Size]) -> str:
    """What is wrong with a weight that comes for a model of these shapes; empty if nothing is."""
    if shapes.get(name) == weight.shape:
        return ""
    return (f"weight `{name}` {list(weight.shape)} has no place in the generating model; there it is "
            f"{list(shapes[name]) if name in shapes else 'not known'}")
