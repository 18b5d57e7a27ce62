"""Base of the engines that sample by another library, with weights in its own format and a request for each turn.

    ExternalRollout   a Rollout that starts without weights and loads the first version like all later ones
    RequestSession    its session: the requests under way, and the rows that have ended
    FileNames         turns a model's parameters into the tensors of its files, which other libraries read
"""

from __future__ import annotations

import copy
import itertools
import os
import weakref
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from distflow.config.run import Generation, RoleRun
from distflow.errors import EngineError, listing
from distflow.weights.fingerprint import sums_of
from workers.engines.devices import dimension, dtype_of
from workers.engines.rollout import Rollout, SampledRow, Session
from workers.engines.sampling import TokenLimits

_MAX_CACHE_BYTES = 4 << 30
_LONGEST_ROW = 2048  # tokens, of models without an end
_TORCHRUN = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")


class ExternalRollout(Rollout):
    """Engine of another library. With tp > 1 the ranks of a share run one engine together."""

    library: str  # display name
    session_type: type[RequestSession]

    def __init__(self, model: PreTrainedModel, settings: RoleRun, mesh: DeviceMesh, seed: int, end_tokens: list[int],
                 ep: int = 1):
        """`ep`: ranks of a share that have whole experts, of which each has a part; 1: a part of each expert."""
        self.generation, self.end_tokens = settings.generation, torch.tensor(end_tokens)
        self.device, self.tp, self.ep = mesh.device_type, dimension(mesh, "tp"), ep
        self.dtype = dtype_of(settings, self.device)
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.constants, self.tied = constant_tensors(model), dict(model.all_tied_weights_keys)
        self.files = FileNames(model)
        self.ranks = self.tp
        self.vocabulary: int = model.config.get_text_config().vocab_size
        self.cached, self.numbers = True, itertools.count()
        self.sessions: weakref.WeakSet[RequestSession] = weakref.WeakSet()

    @classmethod
    def build(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: RoleRun, mesh: DeviceMesh,
              seed: int, end_tokens: list[int], shared: Iterable[nn.Parameter] = (), ep: int = 1) -> Rollout:
        engine = cls(model, settings, mesh, seed, end_tokens, ep)

        def first() -> Iterator[tuple[str, Tensor]]:  # one at a time: there may be no room for all in another dtype
            yield from ((name, parameter.data.to(engine.dtype)) for name, parameter in model.named_parameters()
                        if parameter.requires_grad or not engine.constants)  # those that are frozen are there

        engine.load(first(), version=0)
        engine.prove(type(model).__name__, sums_of(first(), engine.dtype))
        engine.proved = Rollout.proved
        return engine

    def session(self, key: int, temperature: float | None = None, keep_cache: bool = False,
                limits: TokenLimits | None = None) -> RequestSession:
        """Open a session. The library's prefix cache keeps sequences in any case, as long as there is memory."""
        temperature = self.generation.temperature if temperature is None else temperature
        session = self.session_type(self, key, temperature, limits)
        self.sessions.add(session)
        return session

    def sleep(self) -> None:
        if any(session.turns for session in self.sessions):
            raise EngineError(f"{self.library} cannot sleep while rows are under way: end their turns first, or  "
                              "abort()")
        self._release()

    @abstractmethod
    def _release(self) -> None:
        """Free the memory."""


class RequestSession(Session):
    """Session in which each turn of a row is a request."""

    def __init__(self, engine: Any, key: int, temperature: float, limits: TokenLimits | None = None):
        self.engine, self.key, self.temperature, self.limits = engine, key, temperature, limits
        self.turns: dict[str, Any] = {}  # turns under way, by request
        self.ended: list[SampledRow] = []  # rows whose turns ended since the last step

    @property
    def busy(self) -> bool:
        return bool(self.turns or self.ended)

    def request_for(self, row: SampledRow) -> str:
        """Return the name of a new request. Raises EngineError if the row has images."""
        if row.images is not None and len(row.images.values):
            raise EngineError(f"{self.engine.library} is not given images here; transformers is. Instead:  rollout: hf")
        return str(next(self.engine.numbers))

    def step(self) -> list[SampledRow]:
        if self.engine.paused:
            return []
        self._advance()
        ended, self.ended = self.ended, []
        return ended

    @abstractmethod
    def _advance(self) -> None:
        """Sample for a moment; append the rows whose turn has ended to `ended`."""


def end_turn(row: SampledRow, tokens: list[int], logprobs: list[float], versions: list[int],
             finished: bool) -> SampledRow:
    row.end(torch.tensor(tokens, dtype=torch.int64), torch.tensor(logprobs, dtype=torch.float32),
            torch.tensor(versions, dtype=torch.int32), finished)
    return row


def constant_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors that no trainer sends, by their names in model files: persistent buffers, such as biases of
    routers, and parameters that the family builds frozen. Empty with adapters, whose base is read from files."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if any(".lora_" in name for name in parameters):
        return {}
    return revert_weight_conversion(model, {
        name: tensor.cpu() for name, tensor in model.state_dict().items()
        if tensor.is_floating_point() and not (name in parameters and parameters[name].requires_grad)})


class FileNames:
    """Turns parameters into the tensors of a model's files: transformers renames what it reads, and stacks experts."""

    def __init__(self, model: PreTrainedModel):
        conversions: list[Any] | None = getattr(model, "_weight_conversions", None)
        if conversions is None:
            conversions = [each for each in get_model_conversion_mapping(model, add_legacy=False)
                           if not isinstance(each, PrefixChange)]
        self.model: Any = None  # one without weights, that transformers reads its conversions from
        if conversions:
            with torch.device("meta"):
                self.model = type(model)(copy.deepcopy(model.config))
            self.model._weight_conversions = conversions
        reverse = [each.reverse_transform() for each in conversions[::-1]]
        renamings = [each for each in reverse if isinstance(each, WeightRenaming)]
        converters = [each for each in reverse if isinstance(each, WeightConverter)]
        by_tensor = dict[str, list[str]]()
        for name, _ in model.named_parameters():
            tensor_name = rename_source_key(name, renamings, converters, reverse=True)[0]
            by_tensor.setdefault(tensor_name, []).append(name)
        self.group = {name: tuple(names) for names in by_tensor.values() for name in names}
        """Name of a parameter → the names of all that become tensors of files together with it."""

    def convert(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of files that these parameters become; they are all that belong together."""
        return revert_weight_conversion(self.model, {**weights}) if self.model else {**weights}

    def stream(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors of files as soon as they can be made. A parameter may be overwritten once the next one is
        requested. Raises EngineError: one came without those that belong to it."""
        waiting: dict[tuple[str, ...], dict[str, Tensor]] = {}
        for name, tensor in weights:
            group = self.group[name]
            if len(group) == 1:
                yield from self.convert({name: tensor}).items()
                continue
            arrived = waiting.setdefault(group, {})
            arrived[name] = tensor.clone()
            if arrived.keys() == set(group):
                yield from self.convert(waiting.pop(group)).items()
        for arrived in waiting.values():
            raise EngineError(f"{listing(sorted(arrived))} came without the weights that are one tensor with them in "
                              "the model's files. Load them together")


def cache_on_cpu(config: PretrainedConfig, generation: Generation, dtype: torch.dtype,
                 block: int = 1) -> tuple[int, int]:
    """Return a paged cache's (tokens, bytes per token): all rows at full length, at most 4 GiB, at least two rows."""
    text = config.get_text_config()
    layers = [text.per_layer_config[index] for index in range(text.num_hidden_layers)]
    token = 2 * len(layers) * max(map(_cached, layers)) * dtype.itemsize
    row = -(-longest_row(config) // block) * block
    return max(2 * row, min(row * generation.batch_rows, _MAX_CACHE_BYTES // token)), token


def _cached(layer: PretrainedConfig) -> int:
    """Return how many numbers a layer's keys of a token are."""
    heads = getattr(layer, "num_attention_heads", None) or 1
    size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    return (getattr(layer, "num_key_value_heads", None) or heads) * size


def longest_row(config: PretrainedConfig) -> int:
    """Return the tokens of the longest row that a model may have on a CPU."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or _LONGEST_ROW


def torchrun_environment() -> dict[str, str]:
    """Return the environment variables of torchrun, which the processes of an engine must not inherit."""
    return {name: value for name, value in os.environ.items() if name.startswith(_TORCHRUN)}
