"""Generation by vLLM in the training process: continuous batching, paged caches, weights replaced in place."""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from distflow.config.run import RoleRun
from distflow.data.exchange import gather_values
from distflow.errors import EngineError
from distflow.telemetry import heartbeat
from distflow.weights.fingerprint import Sums, add_up, sums_of
from distflow.weights.shard_slice import Box
from workers.engines.devices import as_world
from workers.engines.external import ExternalRollout, FileNames, RequestSession, end_turn
from workers.engines.rollout import SampledRow, require_shapes, weight_mismatch
from workers.engines.routing import Routing
from workers.engines.sampling import TokenLimits
from workers.engines.vllm.start import forget_kernels, shut_down, start, tied_copies, translate_errors, weights_of

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.core_client import EngineCoreClient

    from workers.engines.vllm.sampling import Recorder


@dataclass
class _SampledTurn:
    row: SampledRow
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def end(self, finished: bool) -> SampledRow:
        return end_turn(self.row, self.tokens, self.logprobs, self.versions, finished)


class VLLMSession(RequestSession):
    engine: VLLMRollout
    turns: dict[str, _SampledTurn]

    def __init__(self, engine: VLLMRollout, key: int, temperature: float, limits: TokenLimits | None = None):
        super().__init__(engine, key, temperature, limits)
        weakref.finalize(self, _abandon, engine.core, self.turns, engine.recorder).atexit = False

    def add(self, rows: list[SampledRow]) -> None:
        from workers.engines.vllm.sampling import parameters

        self.engine.check_health()
        if not self.engine.cached:
            raise EngineError("vLLM has no weights since it slept:  wake()  and  load(…)  come before rows")
        for row in rows:
            row.begin()
            request = self.request_for(row)
            params = parameters(self.key_of(row), self.temperature, self.limits or self.engine.generation, id=row.id,
                                first=len(row.sequence) - row.prompt, limit=row.limit, ends=self.engine.ends)
            with translate_errors(f"take a row of {len(row.sequence)} tokens"):
                self.engine.core.add_request(self.engine.llm.input_processor.process_inputs(
                    request, {"prompt_token_ids": row.sequence.tolist(), "cache_salt": str(self.engine.version)},
                    params, self.engine.tasks, lora_request=self.engine.adapter))
            self.turns[request] = _SampledTurn(row)

    def _advance(self) -> None:
        if self.turns:
            self.engine.advance()

    def receive(self, output: EngineCoreOutput) -> None:
        turn = self.turns[output.request_id]
        turn.tokens += output.new_token_ids
        heartbeat.current().tick()
        turn.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
        turn.versions += [self.engine.version] * len(output.new_token_ids)
        stopped = self.engine.stop is not None and self.engine.stop.reached(turn.row, turn.tokens)
        if stopped and not output.finished:
            with translate_errors("end a row"):
                self.engine.core.abort_requests([output.request_id])
        if stopped or output.finished:
            ended = stopped or turn.tokens[-1] in self.engine.ends
            self.ended.append(self._end(output.request_id, ended))

    def _end(self, request: str, finished: bool) -> SampledRow:
        turn, recorder = self.turns.pop(request), self.engine.recorder
        if recorder:  # the last token has not been read
            turn.row.experts = recorder.take(request, max(len(turn.row.sequence) + len(turn.tokens) - 1, 0))
        return turn.end(finished)

    def abort(self, rows: Sequence[SampledRow] | None = None) -> list[SampledRow]:
        chosen = None if rows is None else set(rows)
        wanted = [request for request, turn in self.turns.items() if chosen is None or turn.row in chosen]
        with translate_errors("abort"):
            self.engine.core.abort_requests(wanted)
        return [self._end(request, False) for request in wanted]


def _abandon(core: EngineCoreClient, turns: dict[str, _SampledTurn], recorder: Recorder | None) -> None:
    """Abort the requests of a session that nobody uses any more."""
    core.abort_requests(list(turns))
    if recorder:
        for request in turns:
            recorder.requests.pop(request, None)


class VLLMRollout(ExternalRollout):
    library, session_type = "vLLM", VLLMSession
    sessions: weakref.WeakSet[VLLMSession]
    adapter: LoRARequest | None = None  # once its weights have come

    def __init__(self, model: PreTrainedModel, settings: RoleRun, mesh: DeviceMesh, seed: int, end_tokens: list[int],
                 ep: int = 1):
        super().__init__(model, settings, mesh, seed, end_tokens, ep)
        self.ends = [token for token in end_tokens if token < self.vocabulary]  # vLLM refuses others
        self.failure = ""
        self.adapters = {name: shape for name, shape in self.shapes.items() if ".lora_" in name}
        self.lora = settings.lora if self.adapters else None
        with as_world(mesh.mesh):
            self.llm = start(model, self.generation, self.dtype, self.device, (self.tp, ep), seed, self.lora)
        self.core = self.llm.engine_core
        """vLLM's engine core: the layers around it detokenize, which takes as long as a small model."""
        self.core._finalizer.detach()  # it would destroy the default process group, which is not vLLM's
        self.closing = weakref.finalize(self, shut_down, self.core.engine_core)
        self.tasks = self.core.get_supported_tasks()
        worker = self.core.engine_core.model_executor.driver_worker
        self.model: nn.Module = worker.get_model()
        modules = [f".{module}" for module, _ in self.model.named_modules()]
        self.copies = {name: head for name, head in tied_copies(model, self.device).items()
                       if any(module.endswith(f".{head.rpartition('.')[0]}") for module in modules)}
        self.fused = getattr(self.model, "packed_modules_mapping", {})
        self.recorder = self._recorder(model, worker.model_runner) if self.generation.routing_replay else None
        self.group = mesh["tp"].get_group() if self.tp > 1 else None

    def _recorder(self, model: PreTrainedModel, runner: Any) -> Recorder:
        from workers.engines.vllm.sampling import Recorder

        return Recorder(self.model, runner, Routing.of(model))

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> int:
        """Load weights; rows under way are prefilled again, since their caches belong to the old weights."""
        self.check_health()
        size = self._load_adapter(weights) if self.lora else self._load_whole(weights)
        with translate_errors("take new weights"):
            if not self.cached:
                self.llm.wake_up(tags=["kv_cache"])
                self.cached = True
            if not self.llm.reset_prefix_cache(reset_running_requests=True):
                raise EngineError("vLLM keeps what older weights have read: its prefix cache cannot be emptied")
        self.version = version
        return size

    def held(self) -> Sums:
        if self.lora:
            from workers.engines.vllm.adapters import adapters_of

            named = adapters_of(self.model, self.lora if self.adapter else None)
        else:
            named = weights_of(self.model)
        own = sums_of(((name, tensor) for name, tensor in named if name not in self.constants), self.dtype)
        if self.group is None:
            return own
        parts = gather_values(own, self.group)
        return {name: add_up(part[name] for part in parts) for name in own}

    def _load_whole(self, weights: Iterable[tuple[str, Tensor]]) -> int:
        device = self.llm.vllm_config.device_config.device
        loader = WeightLoader(weights, self.shapes, self.files, self.fused, self.copies, self.dtype, device)
        constants = ((name, tensor.to(device)) for name, tensor in self.constants.items())  # in their own dtype
        if self.device == "cpu":
            forget_kernels(self.model)
        recorder = loader.recorder if self.tp > 1 and self.version < 0 else contextlib.nullcontext()
        with translate_errors("take new weights"), recorder:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": itertools.chain(loader, constants)})
        loader.check()
        self.reads = self.reads or loader.recorder.boxes
        return loader.size

    def _load_adapter(self, weights: Iterable[tuple[str, Tensor]]) -> int:
        """Replace the adapter; the base, which is frozen, was read at the start."""
        from workers.engines.vllm import adapters

        assert self.lora
        found = {name: tensor.detach().to("cpu", self.dtype, copy=True)
                 for name, tensor in require_shapes(weights, self.shapes) if name in self.adapters}
        if missing := sorted(self.adapters.keys() - found):
            raise EngineError(f"vLLM takes adapters as a whole; {', '.join(missing[:5])} did not come")
        with translate_errors("take new adapters"):
            adapters.load(self.core, self.lora, found)
        self.adapter = adapters.request()
        return sum(tensor.nbytes for tensor in found.values())

    def _release(self) -> None:
        with translate_errors("sleep"):
            self.llm.sleep(level=1 if self.lora else 2)  # a base does not come again: it waits in host memory
        self.cached = False

    def wake(self) -> None:
        """Allocate the weights; caches come back in `load`, when the trainer's copies may have been freed."""
        with translate_errors("wake"):
            self.llm.wake_up(tags=["weights"])
        self.version = -1

    def check_health(self) -> None:
        if not self.closing.alive:
            raise EngineError("this vLLM engine was closed")
        if self.failure:
            raise EngineError(self.failure)

    def close(self) -> None:
        self.closing()

    def advance(self) -> None:
        self.check_health()
        try:
            with translate_errors("sample"):
                outputs = self.core.get_output().outputs
        except EngineError as error:
            self.failure = str(error)
            raise
        sessions = list(self.sessions)
        for output in outputs:
            for session in sessions:
                if output.request_id in session.turns:
                    session.receive(output)


class ReadRecorder(TorchDispatchMode):
    """Records which parts of tensors operators read, in `boxes`. A part that is no box counts with all of its rows; a
    tensor of which nothing is read is not named."""

    def __init__(self) -> None:
        super().__init__()
        self.watched: dict[int, tuple[str, torch.Size, int, StorageWeakRef]] = {}
        """By storage, of which the reference keeps the number from being used again."""
        self.boxes: dict[str, list[Box]] = {}

    def watch(self, name: str, tensor: Tensor) -> None:
        if tensor.ndim and tensor.is_contiguous():
            storage = tensor.untyped_storage()
            self.watched[storage._cdata] = name, tensor.shape, tensor.element_size(), StorageWeakRef(storage)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in () if function.is_view else tree_leaves((args, kwargs)):
            found = self.watched.get(each.untyped_storage()._cdata) if isinstance(each, Tensor) else None
            if found and each.numel() and (box := _box(each, *found[1:3])) not in self.boxes.setdefault(found[0], []):
                self.boxes[found[0]].append(box)
        return function(*args, **(kwargs or {}))


def _box(part: Tensor, shape: torch.Size, width: int) -> Box:
    """Return the part of a contiguous tensor of this shape and bytes of an element that a view has, or its rows; all
    of it where the view has elements of another width."""
    if part.element_size() != width:
        return [0] * len(shape), [*shape]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    begin = int(part.storage_offset())
    last = sum((int(size) - 1) * int(step) for size, step in zip(part.shape, part.stride()))
    if [*part.stride()] == strides:
        return [begin // step % size for step, size in zip(strides, shape)], [*part.shape]
    rows = begin // strides[0], (begin + last) // strides[0] + 1
    return [rows[0], *[0] * (len(shape) - 1)], [rows[1] - rows[0], *shape[1:]]


class WeightLoader:
    """Tensors of files for vLLM: copies in its dtype, with the parts of fused modules together. Iteration stops at an
    unknown name or shape, so that vLLM finishes its load and stays usable; `check` raises."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, torch.Size], files: FileNames,
                 fused: Mapping[str, list[str]], copies: Mapping[str, str], dtype: torch.dtype, device: torch.device):
        """`fused`: vLLM's fused modules and their parts. `copies`: second names of tensors that vLLM has twice."""
        self.weights, self.shapes, self.copies, self.dtype, self.device = weights, shapes, copies, dtype, device
        self.files = files
        self.whole = {part: name for name, parts in fused.items() for part in parts}
        self.groups: dict[str, set[str]] = {}
        for name in shapes:
            self.groups.setdefault(self._group_of(name), set()).add(name)
        self.waiting: dict[str, dict[str, Tensor]] = {}
        self.recorder = ReadRecorder()
        self.problem, self.size = "", 0

    def _group_of(self, name: str) -> str:
        parent, _, module = self.files.group[name][0].rpartition(".")[0].rpartition(".")
        return f"{parent}.{self.whole.get(module, module)}"

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights:
            self.problem = weight_mismatch(name, tensor, self.shapes)
            if self.problem:
                return
            group = self._group_of(name)
            have = self.waiting.setdefault(group, {})
            # vLLM keeps tensors until the module is complete, and the source may be overwritten before.
            have[name] = tensor.detach().to(self.device, self.dtype, copy=True)
            self.size += have[name].nbytes
            self.recorder.watch(name, have[name])
            if have.keys() == self.groups[group]:
                whole = self.waiting.pop(group)
                twice = {self.copies[each]: whole[each] for each in whole.keys() & self.copies.keys()}
                yield from self.files.convert(whole | twice).items()

    def check(self) -> None:
        """Raise EngineError if a tensor was refused or a module is incomplete."""
        if self.problem:
            raise EngineError(self.problem)
        for group, have in self.waiting.items():
            missing = sorted(self.groups[group] - have.keys())
            raise EngineError(f"vLLM keeps `{group}` as one; {', '.join(sorted(have))} came without "
                              f"{', '.join(missing)}. Load them together")
