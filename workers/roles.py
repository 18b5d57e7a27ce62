"""A role: a model, the engine that computes with it, and the engine that samples from it."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from distflow.data.batch import Batch, Ragged
from distflow.data.records import open_records
from distflow.schema.errors import EngineError, InvalidInput, Mistake, Spot, shown
from distflow.schema.run import Model, RoleRun
from distflow.schema.shipped import find
from distflow.schema.spec import Spec
from distflow.weights.reshard import gather_into
from workers.engines import attention
from workers.engines.decoding import Row, Session
from workers.engines.embedded import build_model, build_tokenizer
from workers.engines.fsdp import FSDPEngine, LossOf
from workers.engines.hf import HFRollout, Samples
from workers.engines.sampling import key_of

disable_progress_bar()


class Role:
    """What a model function gets as its first parameter. All methods but `decode` are collective over the ranks."""

    def __init__(self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: RoleRun,
                 mesh: DeviceMesh, spec: Spec, stream: int | None):
        """`stream` numbers the roles that sample, so that no two of them draw alike; None for one that does not."""
        trained = spec.dag.roles[name].trained
        self.name, self.tokenizer, self.settings = name, tokenizer, settings
        self.config, self.generation_config = model.config, model.generation_config
        self.seed, self.step, self.stream = spec.run.seed, 0, stream
        if mesh.device_type == "cpu":
            model.set_attn_implementation(attention.NAME)
        self.rollout = _rollout(model, tokenizer, settings, mesh) if stream is not None else None
        self.engine = FSDPEngine(model, settings, mesh, _pad_token(tokenizer), spec.run.steps, trained)

    def generate(self, prompts: Ragged, ids: Tensor, repeats: int = 1, max_new_tokens: int | None = None,
                 temperature: float | None = None) -> Samples:
        """`repeats` samples for each prompt [P], drawn by (seed, step, row id) with the newest weights.

        `ids` [P * repeats] are the rows' ids; `temperature` 0 takes the likeliest tokens.
        """
        self._refresh()
        return self.rollout.generate(prompts, repeats, ids, self._key(), temperature, max_new_tokens)

    def converse(self, prompts: Ragged, ids: Tensor, repeats: int, max_new_tokens: int) -> tuple[Session, list[Row]]:
        """A session with the newest weights, and `repeats` rows for each prompt that are yet to be added to it.

        Only this call is collective; what happens in the session concerns this rank alone.
        """
        self._refresh()
        session = self.rollout.session(self._key(), keeps=True)
        return session, self.rollout.rows(prompts, repeats, ids, max_new_tokens)

    def _key(self) -> int:
        return key_of(self.seed, self.step, self.stream) if self.stream else key_of(self.seed, self.step)

    def _refresh(self) -> None:
        """Bring the newest weights to the engine that samples."""
        if self.rollout is None:
            raise EngineError(f"role `{self.name}` was not prepared for sampling: no node of its repeats rows")
        if self.rollout.version != self.engine.version:
            gather_into(self.engine.shards(), self.rollout.weights())
            self.rollout.version = self.engine.version

    def logprobs(self, prompts: Ragged, responses: Ragged) -> Ragged:
        """The log-probability of each response token, float32."""
        return self.engine.logprobs(prompts, responses, self.settings.generation.temperature)

    def update(self, batch: Batch, loss_of: LossOf, temperature: float | None = None) -> dict[str, float]:
        """One optimizer step over this rank's rows: see `FSDPEngine.update`."""
        temperature = self.settings.generation.temperature if temperature is None else temperature
        return self.engine.update(batch, loss_of, temperature, self.step)

    def total(self, values: Tensor) -> Tensor:
        """The sum over all ranks."""
        values = values.to(self.engine.device)
        dist.all_reduce(values, group=self.engine.mesh.get_group())
        return values.cpu()

    def decode(self, tokens: Ragged) -> list[str]:
        """The text of each row, without special tokens."""
        return [self.tokenizer.decode(row.tolist(), skip_special_tokens=True) for row in tokens.rows]

    def save_pretrained(self, folder: Path) -> None:
        """Write a Hugging Face model folder. Every rank calls it, the first writes."""
        whole = {name: torch.empty(shard.shape, dtype=shard.dtype) for name, shard in self.engine.shards().items()}
        gather_into(self.engine.shards(), whole)
        if dist.get_rank() > 0:
            return
        model = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32)
        expected = {name for name, _ in model.named_parameters()}
        if expected != set(whole):
            raise EngineError(f"the weights to be saved differ from the model's: {sorted(expected ^ set(whole))[:5]}")
        model.load_state_dict(whole, strict=False)  # what else it has are buffers and tied weights
        model.tie_weights()
        model.generation_config = self.generation_config
        model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def build_roles(spec: Spec, names: set[str], sampling: set[str], mesh: DeviceMesh) -> dict[str, Role]:
    """The roles of this rank, with their models loaded and sharded."""
    roles, streams = {}, {name: number for number, name in enumerate(sorted(sampling))}
    for name in sorted(names):
        model, tokenizer = load_model(spec, spec.model_of(name))
        roles[name] = Role(name, model, tokenizer, spec.settings_of(name), mesh, spec, streams.get(name))
    return roles


def load_model(spec: Spec, model: Model) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """In float32 on the CPU; a tiny architecture gets random weights by the run's seed and a tokenizer of its data."""
    if model.path:
        folder = find(model.path, "models", spec.folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        _require_end(tokenizer, folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer
    tokenizer = _tokenizer_of(spec)
    sizes = model.model_dump(exclude={"path"})
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "bos", "eos")}
    return build_model(len(tokenizer), spec.run.seed, **sizes, **ids), tokenizer


def _require_end(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Refuse a tokenizer without an end: the targets could teach none, and padding would have no token.

    Raises:
        InvalidInput: proposes the end that the model's configuration names. It is not taken in silence, since the
            tokenizer's chat template may end a turn with another.
    """
    if tokenizer.eos_token_id is not None:
        return
    named = GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder)).eos_token_id
    if (folder / "generation_config.json").is_file():
        named = GenerationConfig.from_pretrained(folder).eos_token_id or named
    first = next(iter(named), None) if isinstance(named, list) else named
    token = tokenizer.convert_ids_to_tokens(first) if first is not None else None
    what = "the tokenizer has no end-of-sequence token, so that no answer could end or learn to"
    hint = f'Add to it:  "eos_token": {json.dumps(token or "TOKEN", ensure_ascii=False)}'
    hint += "   (the model's configuration names it)" if token else "   with the token that ends an answer"
    raise InvalidInput(Mistake(what, Spot(shown(folder / "tokenizer_config.json")), hint))


def _tokenizer_of(spec: Spec) -> PreTrainedTokenizerBase:
    """Trained on the first records of the training data, so that every rank builds the same."""
    records = open_records(spec.data_path(spec.run.data.train))
    first = records.get(range(min(len(records), 2000)))
    return build_tokenizer(f"{record[spec.run.data.question]} {record[spec.run.data.answer]}" for record in first)


def _rollout(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: RoleRun,
             mesh: DeviceMesh) -> HFRollout:
    device = torch.device(mesh.device_type)
    half = settings.dtype == "bfloat16" or (settings.dtype == "auto" and device.type == "cuda")
    whole = copy.deepcopy(model).to(device)
    if half:
        for parameter in whole.parameters():  # buffers stay float32: rounded rotary frequencies are another model
            parameter.data = parameter.data.to(torch.bfloat16)
    ends = model.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends or [])
    return HFRollout(whole, settings.generation, _pad_token(tokenizer), sorted({*ends, tokenizer.eos_token_id}))


def _pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
