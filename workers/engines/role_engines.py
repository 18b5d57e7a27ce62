"""Engines of a role: a model with the engine that trains and infers, and the engine that samples."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.logging import disable_progress_bar

from distflow.config.dag import Head
from distflow.config.freeze import frozen_names
from distflow.config.models import ROLLOUTS, TRAINERS
from distflow.config.run import Lora, RoleRun
from distflow.config.spec import Spec
from distflow.data.batch import Batch, Ragged
from distflow.errors import EngineError
from distflow.plan import Layout
from distflow.telemetry import events
from distflow.telemetry.files import replacing_folder
from distflow.weights.offload import HostOffload
from workers.engines import engine_class
from workers.engines.chat import end_tokens, pad_token, sampled_text
from workers.engines.devices import convert, device_of, dimension, dtype_of, fuse_norms
from workers.engines.loading import generation_config_of, known_ends, load_model, save_tokenizer, source_folder
from workers.engines.rollout import AbsentRollout, Rollout, SampledRow, Sampler, Samples, Session, StopStrings, TurnLog
from workers.engines.routing import Routing, without_router_logits
from workers.engines.sampling import TokenLimits, key_of
from workers.engines.saved_model import ModelDamaged, ModelWriter, Rows, SavedTensors, check_rows
from workers.engines.swap import EngineSwap
from workers.engines.trainer import LossOf, Trainer
from workers.engines.vision import Processor
from workers.engines.weight_route import WeightRoute

disable_progress_bar()


class Meshes(NamedTuple):

    trainer: DeviceMesh | None  # for training and inference; None on ranks without that engine
    rollout: DeviceMesh | None  # for sampling; None on ranks without that engine
    layout: Layout  # of the trainer
    experts: int = 1  # ranks over which the rollout divides experts
    route: WeightRoute | None = None  # of the weights, where the two are not on the same ranks


class RoleEngines:
    """Engines of a role, the first parameter of a model function. All but `decode` are collective, over the
    ranks that have the engine. A rank that has no rows of the role has no model of it."""

    def __init__(self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: RoleRun,
                 meshes: Meshes, spec: Spec, stream: int | None):
        trained, self.head = spec.dag.roles[name].trained, spec.dag.roles[name].head
        self.name, self.tokenizer, self.settings = name, tokenizer, settings
        self.config = model.config
        self.image_processor: Processor | None = getattr(model, "image_processor", None)
        self.has_others = sum(role.trained for role in spec.dag.roles.values()) > 1  # that are trained
        self.seed, self.step, self.stream = spec.run.seed, 0, stream
        self.draw = 0  # of prompts; it is the step's number unless a filter draws again
        self.template_options: dict[str, Any] = {**spec.run.data.chat_template_kwargs}
        self.source = spec.model_of(name)
        self.generation_config = generation_config_of(spec, self.source, model) if self.head == "lm" else b""
        self._load = functools.partial(load_model, spec, head=self.head)
        self._files = ModelWriter(model, self.source and source_folder(spec, self.source), self.head == "lm")
        self._checked = False  # whether a model that was written has been read back
        here = meshes.rollout or meshes.trainer
        device = here.device_type if here else "cpu"
        self.writer = meshes.layout.active_ranks[0]  # rank that writes the trained model
        without_router_logits(model)
        if device == "cuda" and not (meshes.trainer and dimension(meshes.trainer, "tp") > 1):
            fuse_norms(model)
        self.lora = settings.lora if trained else None
        rollout = None if stream is None else engine_class(ROLLOUTS[settings.rollout])
        shares = rollout is not None and rollout.shares_base
        frozen = _adapted(model, self.lora, spec.run.seed, settings, device, shares) if self.lora and here else []
        self.known_ends = known_ends(spec, self.source)
        self.end_tokens = [] if stream is None else end_tokens(tokenizer, self.known_ends, **self.template_options)
        self.routing = Routing.of(model) if settings.generation.routing_replay and stream is not None else None
        self.rollout = rollout and (rollout.build(
            model, tokenizer, settings, meshes.rollout, spec.run.seed, self.end_tokens, frozen,
            **({"ep": meshes.experts} if meshes.experts > 1 else {}))
            if meshes.rollout else AbsentRollout(settings.generation, self.end_tokens, dtype_of(settings, device)))
        if self.rollout is not None and settings.generation.stop:
            self.rollout.stop = StopStrings(tokenizer, settings.generation.stop)
        self._trainer = meshes.trainer and engine_class(TRAINERS[settings.engine])(
            model, settings, meshes.trainer, pad_token(tokenizer), spec.run.steps, spec.dag.roles[name],
            **({"layout": meshes.layout} if settings.engine == "megatron" else {"whole": frozen}))
        if self._trainer and (shape := spec.shape_of(name)):
            self._trainer.shape = shape.with_value_head() if self.head == "value" else shape
        kept = trained or settings.offload or spec.dag.roles[name].follow or self.rollout is not None
        self._weights = HostOffload(self._trainer.resident) if self._trainer and settings.swap and not kept else None
        self._version, self.split = 0, meshes.rollout is not None and meshes.rollout.size() > meshes.rollout.size(0)
        self.engine_swap = self._swap(meshes, settings.swap and trained)
        self.shared_engine: Sampler | None = None  # samples in place of `rollout` for several threads at a time
        self.turn_log: TurnLog | None = None  # of the node that runs, unless the shared engine has one

    def _swap(self, meshes: Meshes, swap: bool) -> EngineSwap | None:
        here = meshes.rollout or meshes.trainer
        if self.rollout is None or here is None or not (self._trainer or meshes.route):
            return None
        return EngineSwap(self._trainer, self.rollout, swap, meshes.route, device_of(here), self.name)

    @property
    def engine(self) -> Trainer:
        """The engine that trains and infers, with its state on the device."""
        if self.engine_swap is not None:
            self.engine_swap.ready()
        if self._weights is not None and self._weights.bytes:
            self._weights.reload()
            self._weights.wait()
        if self._trainer is None:
            why = "it samples" if self.takes_part(samples=True) else "other ranks have its rows"
            raise EngineError(f"role `{self.name}` has no engine on this rank that trains or infers: {why}")
        return self._trainer

    def release(self) -> None:
        """Move the weights of a frozen role that swaps to host memory, until something computes with them."""
        if self._weights is not None:
            self._weights.offload()

    @property
    def has_engine(self) -> bool:
        """Whether this rank has the engine that trains and infers."""
        return self._trainer is not None

    def takes_part(self, samples: bool) -> bool:
        """Return whether this rank has anything to do where the role samples, or where it trains or infers."""
        return self.has_engine or (samples and self.rollout is not None and not self.rollout.absent)

    @property
    def version(self) -> int:
        """Number of optimizer steps and restores of the weights that are trained."""
        return self._trainer.version if self._trainer else self._version

    @version.setter
    def version(self, version: int) -> None:
        if self._trainer:
            self._trainer.version = version
        self._version = version

    def generate(self, prompts: Ragged, ids: Tensor, repeats: int = 1, max_new_tokens: int | None = None,
                 temperature: float | None = None, images: Ragged | None = None,
                 limits: TokenLimits | None = None) -> Samples:
        """Sample `repeats` responses to each prompt [P] with the newest weights, by (seed, draw of prompts, row id).
        `ids` [P * repeats] are the rows' ids; `temperature` 0 takes the likeliest tokens; `limits` are those of
        `generation`, unless others are given."""
        with self.sampling() as rollout:
            return rollout.generate(prompts, repeats, ids, self._key(), temperature, max_new_tokens, images, limits)

    @contextlib.contextmanager
    def converse(self, prompts: Ragged, ids: Tensor, repeats: int,
                 max_new_tokens: int) -> Iterator[tuple[Session, list[SampledRow]]]:
        """Open a session with the newest weights, and make `repeats` rows for each prompt, to be added to it. Only
        opening it is collective; the session concerns this rank alone, and the ranks that it leads."""
        if self.split and self.shared_engine is None:
            raise EngineError(f"role `{self.name}` samples with a model that is split over ranks; what answers it may "
                              "answer each of them otherwise. Instead:  layouts: {…: {tp: 1}}")
        with self.sampling() as rollout:
            session = rollout.session(self._key(), keep_cache=True)
            session.turn_log = session.turn_log or self.turn_log
            yield session, rollout.rows(prompts, repeats, ids, max_new_tokens)

    def _key(self) -> int:
        return key_of(self.seed, self.draw, self.stream) if self.stream else key_of(self.seed, self.draw)

    def of_draw(self, draw: int) -> RoleEngines:
        other = copy.copy(self)
        other.draw = other.step = draw
        return other

    @property
    def sampler(self) -> Rollout:
        if self.rollout is None:
            raise EngineError(f"role `{self.name}` was not prepared for sampling: no node of its repeats rows")
        return self.rollout

    @contextlib.contextmanager
    def sampling(self) -> Iterator[Sampler]:
        """Surround sampling with the newest weights. Collective, unless several threads share the engine."""
        sampler = self.shared_engine or self.sampler
        entered = contextlib.nullcontext(sampler) if self.engine_swap is None or self.shared_engine else \
            self.engine_swap.sampling()
        with entered as engine:
            yield engine

    def logprobs(self, prompts: Ragged, responses: Ragged, images: Ragged | None = None,
                 temperature: float | None = None, routed_experts: Ragged | None = None) -> Ragged:
        """Return the log-probability of each response token, float32, by default at the role's temperature."""
        self._require("lm", "logprobs")
        temperature = self.settings.generation.temperature if temperature is None else temperature
        return self.engine.logprobs(prompts, responses, temperature, images, routed_experts)

    def entropies(self, prompts: Ragged, responses: Ragged, images: Ragged | None = None,
                  routed_experts: Ragged | None = None) -> Ragged:
        """Return the entropy before each response token, float32, in nats, at the role's temperature."""
        self._require("lm", "entropies")
        return self.engine.entropies(prompts, responses, self.settings.generation.temperature, images, routed_experts)

    def top_logprobs(self, prompts: Ragged, responses: Ragged, count: int, images: Ragged | None = None,
                     temperature: float | None = None) -> tuple[Ragged, Ragged]:
        """Return the `count` most probable tokens at each place of a response, and their log-probabilities: see
        `Trainer.top_logprobs`. A vocabulary of fewer tokens gives all of them."""
        self._require("lm", "top_logprobs")
        temperature = self.settings.generation.temperature if temperature is None else temperature
        return self.engine.top_logprobs(prompts, responses, temperature, min(count, self.vocabulary), images)

    @property
    def balances(self) -> bool:
        """Whether rows without a loss of their own are trained too: see `Trainer.balances`."""
        return self.engine.balances

    @property
    def vocabulary(self) -> int:
        """How many tokens the model knows, the unused ones at its end too."""
        return self.config.get_text_config().vocab_size

    def values(self, prompts: Ragged, responses: Ragged) -> Ragged:
        """Return the value before each response token, float32: of the prompt and the tokens before it."""
        self._require("value", "values")
        return self.engine.values(prompts, responses)

    def score(self, prompts: Ragged, responses: Ragged) -> Tensor:
        """Return the value of each whole response [B], float32, at its last token (the prompt's if it has none) but
        padding, which an end token may be for the model."""
        self._require("value", "score")
        return self.engine.scores(prompts, responses)

    def _require(self, head: Head, method: str) -> None:
        if self.head != head:
            raise EngineError(f"`{method}` needs a role with  head: {head}  and role `{self.name}` has  head: "
                              f"{self.head}. Mark the function that calls it:  @node(…, head={head!r})")

    def update(self, batch: Batch, loss_of: LossOf, temperature: float | None = None,
               together: bool = False) -> dict[str, float]:
        """Make one optimizer step over this rank's rows: see `Trainer.update`."""
        temperature = self.settings.generation.temperature if temperature is None else temperature
        return self.engine.update(batch, loss_of, temperature, self.step, together)

    def total(self, values: Tensor) -> Tensor:
        return self.engine.total(values)

    def routed_experts(self, recorded: Sequence[Tensor | None], prompts: Tensor,
                       responses: Tensor) -> tuple[Ragged, ...]:
        """Return the column of the experts chosen while rows were sampled, where they are recorded."""
        return () if self.routing is None else (self.routing.column(recorded, prompts, responses),)

    def decode(self, tokens: Ragged) -> list[str]:
        """Return the text of sampled tokens: see `sampled_text`."""
        return [sampled_text(self.tokenizer, row.tolist(), self.end_tokens) for row in tokens.rows
                if isinstance(row, Tensor)]

    def save_pretrained(self, folder: Path) -> None:
        """Write a Hugging Face model folder, and adapters alone next to it, each whole or not at all. The first one is
        read back and compared with what was trained, with its source, and with the numbers of the engine. Collective;
        the first rank with the engine writes. Raises ModelDamaged: what was read back is not what it should be."""
        if not self.has_engine:
            return
        checks, self._checked = not self._checked, True
        rows = check_rows(self.tokenizer, self.config) if checks else []
        numbers = self._numbers(rows) if rows and self._files.computes else None
        first, weights = dist.get_rank() == self.writer, {}
        for name, tensor in self.engine.export():
            if first:  # the others only help to gather it
                weights[name] = tensor.to("cpu", torch.float32, copy=True)
        if not first:
            return
        with contextlib.ExitStack() as checked:
            partial = checked.enter_context(replacing_folder(folder, keeps=ModelDamaged))
            beside = folder.with_name(folder.name.replace("model", "adapter", 1))
            saved = self._saved(weights, checked.enter_context(replacing_folder(beside)) if self.lora else None)
            self._files.write(saved.all, torch.float32, partial)
            if self.generation_config:
                (partial / GENERATION_CONFIG_NAME).write_bytes(self.generation_config)
            save_tokenizer(self.tokenizer, partial)
            if self.image_processor:
                self.image_processor.save(partial)
            if checks:
                dtype = dtype_of(self.settings, self.engine.device.type)
                found = self._files.check(partial, saved, rows, numbers, dtype)
                events.record("model_checked", role=self.name, folder=folder.name, tensors=found.tensors,
                              unchanged=found.unchanged, difference=found.difference, seconds=found.seconds)

    def _numbers(self, rows: Rows) -> list[Tensor]:
        """Return the log-probability, or the value, of each response token. Collective."""
        prompts, responses = (Ragged.from_rows([row[part] for row in rows]) for part in (0, 1))
        found = self.engine.logprobs(prompts, responses, 1.0) if self.head == "lm" else \
            self.engine.values(prompts, responses)
        return found.rows

    def _saved(self, weights: dict[str, Tensor], adapters: Path | None) -> SavedTensors:
        """Return the tensors to be saved, of those that were gathered; write adapters alone to a folder."""
        if not self.lora or adapters is None:
            return self._files.tensors(weights, weights.keys() - frozen_names(self.settings.freeze, weights))
        from workers.engines.adapters import merge_adapters  # imports peft, in seconds: for runs with adapters alone

        assert self.source
        merged, changed = merge_adapters(self._load(self.source)[0], self.lora, weights, adapters)
        return self._files.tensors(dict(merged.named_parameters()), changed)


def _adapted(model: PreTrainedModel, lora: Lora, seed: int, settings: RoleRun, device: str,
             shares: bool) -> list[nn.Parameter]:
    """Attach adapters to the model. Return its own parameters if the rollout shares them unsharded."""
    from workers.engines import adapters

    adapters.attach(model, lora, seed)
    frozen = adapters.frozen_parameters(model)
    convert(frozen, dtype_of(settings, device))  # they are never updated, so that no float32 is needed
    if shares:
        model.to(torch.device(device))  # pyright: ignore[reportArgumentType]
    return frozen if shares else []
