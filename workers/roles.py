"""A role: a model, the engine that computes with it, and the engine that samples from it."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from distflow.config.dag import Head
from distflow.config.load import Spec
from distflow.config.models import ROLLOUTS, TRAINERS, base_of
from distflow.config.run import Lora, RoleRun
from distflow.data.batch import Batch, Ragged
from distflow.errors import EngineError
from distflow.plan import Plan
from distflow.telemetry.metrics import current
from workers.engines import attention, engine_class
from workers.engines.chat import encoding
from workers.engines.loading import load_model
from workers.engines.meshes import mesh_of
from workers.engines.precision import halve, is_half, pad_token
from workers.engines.rollout import SampledRow, Sampler, Samples, Session
from workers.engines.sampling import key_of
from workers.engines.shared_engine import SharedEngine
from workers.engines.stopping import StopStrings
from workers.engines.swap import EngineSwap
from workers.engines.trainer import LossOf, Trainer

disable_progress_bar()


class Meshes(NamedTuple):
    """How the ranks split a role's model between them: for training and inference, and for sampling."""

    trainer: DeviceMesh | None
    """None where a role only samples."""
    rollout: DeviceMesh
    experts: int = 1
    """Ways in which the trainer cuts experts."""


class RoleEngines:
    """What a model function gets as its first parameter. All methods but `encode` and `decode` are
    collective over the ranks."""

    def __init__(self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: RoleRun,
                 meshes: Meshes, spec: Spec, stream: int | None):
        """`stream` numbers the roles that sample, so that no two of them draw alike; None for one that does not."""
        trained, self.head = spec.dag.roles[name].trained, spec.dag.roles[name].head
        self.name, self.tokenizer, self.settings = name, tokenizer, settings
        self.kind, self.config, self.sight = type(model), model.config, getattr(model, "sight", None)
        self.generation_config = model.generation_config if self.head == "lm" else None
        self.seed, self.step, self.stream = spec.run.seed, 0, stream
        self.draw = 0
        """The number of the prompts' draw, which is that of the step unless a filter draws again."""
        self.max_target_tokens = spec.run.data.max_target_tokens
        self._load = functools.partial(load_model, spec, spec.model_of(name), self.head)
        device = meshes.rollout.device_type
        if device == "cpu":
            model.set_attn_implementation(attention.NAME)
        self.lora = settings.lora if trained else None
        whole = _adapted(model, self.lora, spec.run.seed, settings, device, stream is not None) if self.lora else []
        self.rollout = None if stream is None else engine_class(ROLLOUTS[settings.rollout]).build(
            model, tokenizer, settings, meshes.rollout, spec.run.seed, _end_tokens(model, tokenizer), whole)
        if self.rollout is not None and settings.generation.stop:
            self.rollout.stop = StopStrings(tokenizer, settings.generation.stop)
        self._trainer = meshes.trainer and engine_class(TRAINERS[settings.engine])(
            model, settings, meshes.trainer, pad_token(tokenizer), spec.run.steps, trained, self.head, whole,
            meshes.experts)
        self.split = meshes.rollout.size() > meshes.rollout.size(0)
        both = self.rollout is not None and self._trainer is not None
        self.handover = EngineSwap(self._trainer, self.rollout, settings.swap and trained) if both else None
        self.many: SharedEngine | None = None
        """What samples instead, for several threads at a time."""

    @property
    def engine(self) -> Trainer:
        """Trains and infers."""
        if self.handover is not None:
            self.handover.ready()
        if self._trainer is None:
            raise EngineError(f"role `{self.name}` has no engine on this rank that trains or infers: it samples")
        return self._trainer

    @property
    def version(self) -> int:
        """Of the weights: see `Trainer.version`."""
        return self._trainer.version

    def generate(self, prompts: Ragged, ids: Tensor, repeats: int = 1, max_new_tokens: int | None = None,
                 temperature: float | None = None, images: Ragged | None = None) -> Samples:
        """`repeats` samples for each prompt [P], drawn by (seed, draw of the prompts, row id) with the newest weights.

        `ids` [P * repeats] are the rows' ids; `temperature` 0 takes the likeliest tokens.
        """
        with self._sampling() as rollout:
            return rollout.generate(prompts, repeats, ids, self._key(), temperature, max_new_tokens, images)

    @contextlib.contextmanager
    def converse(self, prompts: Ragged, ids: Tensor, repeats: int,
                 max_new_tokens: int) -> Iterator[tuple[Session, list[SampledRow]]]:
        """A session with the newest weights, and `repeats` rows for each prompt that are yet to be added to it.

        Only its beginning is collective; what happens in the session concerns this rank alone, and those that it leads.

        Raises:
            EngineError: the model that samples is split over ranks, and none of them leads the others.
        """
        if self.split and self.many is None:
            raise EngineError(f"role `{self.name}` samples with a model that is split over ranks; what answers it may "
                              "answer each of them otherwise. Instead:  layouts: {…: {tp: 1}}")
        with self._sampling() as rollout:
            yield rollout.session(self._key(), keeps=True), rollout.rows(prompts, repeats, ids, max_new_tokens)

    def _key(self) -> int:
        return key_of(self.seed, self.draw, self.stream) if self.stream else key_of(self.seed, self.draw)

    def of_draw(self, draw: int) -> RoleEngines:
        """The same role, which samples for a draw of prompts."""
        other = copy.copy(self)
        other.draw = other.step = draw
        return other

    def _sampling(self) -> contextlib.AbstractContextManager[Sampler]:
        if self.rollout is None:
            raise EngineError(f"role `{self.name}` was not prepared for sampling: no node of its repeats rows")
        if self.many is not None:
            return contextlib.nullcontext(self.many)
        return self.handover.sampling()

    def logprobs(self, prompts: Ragged, responses: Ragged, images: Ragged | None = None,
                 temperature: float | None = None) -> Ragged:
        """The log-probability of each response token, float32, by default at the role's temperature."""
        self._require("lm", "logprobs")
        temperature = self.settings.generation.temperature if temperature is None else temperature
        return self.engine.logprobs(prompts, responses, temperature, images)

    def values(self, prompts: Ragged, responses: Ragged) -> Ragged:
        """The value before each response token, float32: of the prompt and of the tokens that came before."""
        self._require("value", "values")
        return self.engine.values(prompts, responses)

    def score(self, prompts: Ragged, responses: Ragged) -> Tensor:
        """[B] float32: the value of each whole response, at its last token (at the prompt's if it has none)."""
        self._require("value", "score")
        return self.engine.scores(prompts, responses)

    def _require(self, head: Head, method: str) -> None:
        if self.head != head:
            raise EngineError(f"`{method}` needs a role with  head: {head}  and role `{self.name}` has  head: "
                              f"{self.head}. Mark the function that calls it:  @node(…, head={head!r})")

    def update(self, batch: Batch, loss_of: LossOf, temperature: float | None = None,
               together: bool = False) -> dict[str, float]:
        """One optimizer step over this rank's rows: see `Trainer.update`."""
        temperature = self.settings.generation.temperature if temperature is None else temperature
        return self.engine.update(batch, loss_of, temperature, self.step, together)

    def total(self, values: Tensor) -> Tensor:
        """The sum over all ranks' rows."""
        return self.engine.total(values)

    def encode(self, answers: list[str]) -> Ragged:
        """The tokens of each answer, with an end; cut and counted as the targets of the data are."""
        return encode_targets(self.tokenizer, self.max_target_tokens, answers)

    def decode(self, tokens: Ragged) -> list[str]:
        """The text of each row, without special tokens."""
        return [self.tokenizer.decode(row.tolist(), skip_special_tokens=True) for row in tokens.rows]

    def save_pretrained(self, folder: Path) -> None:
        """Write a Hugging Face model folder; adapters also beside it, alone. Every rank calls it, the first writes."""
        first, whole = dist.get_rank() == 0, {}
        for name, tensor in self.engine.export():
            if first:  # the others only help to gather it
                whole[name] = tensor.cpu().clone()
        if not first:
            return
        model = self._merged(whole, folder) if self.lora else self._filled(whole)
        if self.generation_config:
            model.generation_config = self.generation_config
        model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        if self.sight:
            self.sight.save(folder)

    def _filled(self, whole: dict[str, Tensor]) -> PreTrainedModel:
        model = self.kind(self.config).float()
        expected = {name for name, _ in model.named_parameters()}
        if expected != set(whole):
            raise EngineError(f"the weights to be saved differ from the model's: {sorted(expected ^ set(whole))[:5]}")
        model.load_state_dict(whole, strict=False)  # what else it has are buffers and tied weights
        model.tie_weights()
        return model

    def _merged(self, whole: dict[str, Tensor], folder: Path) -> PreTrainedModel:
        from workers.engines.adapters import merged  # peft takes seconds to import; only runs with adapters pay for it

        beside = folder.with_name(folder.name.replace("model", "adapter", 1))
        return merged(self._load()[0], self.lora, whole, beside)


def encode_targets(tokenizer: PreTrainedTokenizerBase, longest: int, answers: list[str]) -> Ragged:
    """The answers' tokens with an end; one longer than `longest` loses its end, and the metrics count it."""
    with encoding:
        targets = [[*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
                   for answer in answers]
    current().add("data/targets_cut", sum(len(row) > longest for row in targets))
    return Ragged.from_rows([torch.tensor(row[:longest], dtype=torch.int64) for row in targets])


def build_roles(spec: Spec, plan: Plan, names: set[str], sampling: set[str], device: str,
                training: bool = True) -> dict[str, RoleEngines]:
    """The roles of this rank, with their models loaded and sharded. `training`: whether they train and infer here."""
    roles, streams = {}, {name: number for number, name in enumerate(sorted(sampling))}
    sharing = {name: base_of(spec, name) for name in sorted(names - sampling) if base_of(spec, name) in names}
    for name in sorted(names - sharing.keys()):
        model, tokenizer = load_model(spec, spec.model_of(name), spec.dag.roles[name].head)
        roles[name] = RoleEngines(name, model, tokenizer, spec.settings_of(name),
                                  _meshes(plan, name, device, training), spec, streams.get(name))
    for name, owner in sharing.items():
        roles[name] = _base_role(name, roles[owner])
    _require_one_vocabulary(roles)
    return roles


def _meshes(plan: Plan, role: str, device: str, training: bool) -> Meshes:
    layouts = [plan.layout_of(role, samples) for samples in (False, True)]
    trainer, rollout = (mesh_of(replace(layout, ep=1), device) for layout in layouts)
    return Meshes(trainer if training else None, rollout, layouts[0].ep)


def _require_one_vocabulary(roles: dict[str, RoleEngines]) -> None:
    """Roles hand tokens to each other, so a token must mean the same to all of them.

    Raises:
        EngineError: two tokenizers number their tokens differently.
    """
    first, *others = roles.values()
    for other in others:
        ours, theirs = first.tokenizer.get_vocab(), other.tokenizer.get_vocab()
        odd = [token for token, number in ours.items() if theirs.get(token, number) != number]
        if odd or not (ours.keys() <= theirs.keys() or theirs.keys() <= ours.keys()):
            odd = odd or sorted(ours.keys() ^ theirs.keys())
            raise EngineError(f"roles `{first.name}` and `{other.name}` have different tokenizers, so that the tokens "
                              f"of one mean nothing to the other (first difference: {odd[0]!r}). Give them models of "
                              "one family")


def _base_role(name: str, owner: RoleEngines) -> RoleEngines:
    """A frozen role that computes with the base of an adapted one."""
    from workers.engines.adapters import BaseEngine

    role = copy.copy(owner)
    role.name, role.rollout, role._trainer = name, None, BaseEngine(owner.engine)
    return role


def _adapted(model: PreTrainedModel, lora: Lora, seed: int, settings: RoleRun, device: str,
             samples: bool) -> list[nn.Parameter]:
    """Give the model adapters; its own parameters, if they are to stay whole for the rollout to share."""
    from workers.engines import adapters

    adapters.attach(model, lora, seed)
    frozen = adapters.base(model)
    if is_half(settings, device):
        halve(frozen)  # they are never updated, so that no float32 is needed
    if samples:
        model.to(device)
    return frozen if samples else []


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Those that the model's generation settings name, and the tokenizer's."""
    ends = model.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends or [])
    return sorted({*ends, tokenizer.eos_token_id})
