"""Starts and ends vLLM in a process that also trains."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import functools
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from distflow.config.run import Generation, Lora
from distflow.data.exchange import gather
from distflow.errors import EngineError
from workers.engines.external import cache_on_cpu, longest_row, torchrun_environment

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.llm_engine import LLMEngine

_OURS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0",
         "VLLM_USE_V2_MODEL_RUNNER": "0"}  # `SamplingProcessor` is written for the V1 model runner
_DEFAULTS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
_CPU_BLOCK = 32  # tokens of a cache block: prompts share whole blocks only, and vLLM's default is 128
_TURN_TIMEOUT, _KEEPALIVE, _POLL_INTERVAL = 240.0, 1.0, 0.05
"""Seconds to wait for other engines to start, between broadcasts meanwhile, and between two polls."""
_open: set[int] = set()  # engines of this process, which share process groups


@contextlib.contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Turn vLLM's errors into EngineError."""
    try:
        yield
    except _failures() as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        said = str(error) or f"{place.line} ({Path(place.filename).name}:{place.lineno})"
        raise EngineError(f"vLLM cannot {what}: {type(error).__name__}: {said}") from error


def _failures() -> tuple[type[Exception], ...]:
    """Return the exceptions that vLLM raises: Python's, and its own if they are defined by now."""
    own = getattr(sys.modules.get("vllm.exceptions"), "VLLMError", RuntimeError)
    return (own, RuntimeError, ValueError, LookupError, AttributeError, TypeError, AssertionError, OSError, ImportError)


def start(model: PreTrainedModel, generation: Generation, dtype: torch.dtype, device: str, split: tuple[int, int],
          seed: int, lora: Lora | None = None) -> LLMEngine:
    """Start an engine for the model's architecture, with undefined weights; with `lora`, those of its frozen base.
    `split`: tp and ep."""
    tp, ep = split
    gpu = torch.cuda.current_device() if device == "cuda" else None
    launched = launcher_environment(tp, gpu)
    with _one_start_at_a_time(device, tp), translate_errors("start"), environment(generation, launched), \
            keep_classes(model), tempfile.TemporaryDirectory() as folder:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from workers.engines.vllm.sampling import MODE, SamplingProcessor

        config, adapters = _write_model(model, device, lora, folder)
        engine = LLMEngine.from_engine_args(EngineArgs(
            model=folder, skip_tokenizer_init=True, trust_remote_code=False, generation_config="vllm",
            load_format="auto" if lora else "dummy", dtype=str(dtype).removeprefix("torch."), seed=seed % 2**32,
            max_num_seqs=generation.batch_rows, max_num_batched_tokens=max(8192, generation.batch_rows),
            enable_prefix_caching=not generation.routing_replay,  # what is not read again has no choices
            logprobs_mode=MODE, logits_processors=[SamplingProcessor],
            async_scheduling=False, disable_log_stats=True, tensor_parallel_size=tp,
            enable_expert_parallel=ep > 1,
            **({"distributed_executor_backend": "external_launcher"} if launched else {}),
            **adapters,
            **(on_cpu(config, generation, dtype) if device == "cpu" else on_gpu(generation))))
        _unlink_shared_memory()
    core = engine.engine_core.engine_core
    _open.add(id(core))
    where = {weight.device.index for weight in core.model_executor.driver_worker.get_model().parameters()}
    if gpu is not None and where != {gpu}:
        raise EngineError(f"vLLM has its weights on the GPUs {sorted(where)}, and this rank's is {gpu}: two engines "
                          "would meet on one. Take a version of vLLM that distflow knows, or  rollout: hf")
    return engine


@contextlib.contextmanager
def keep_classes(model: PreTrainedModel) -> Iterator[None]:
    """Keep the trainer's classes as they are: vLLM takes those of transformers where it has none, and changes them."""
    kinds: dict[Any, Any] = {kind: kind.__init__ for kind in {type(module) for module in model.modules()}}
    try:
        yield
    finally:
        for kind, init in kinds.items():
            if kind.__init__ is not init:
                kind.__init__, kind.__call__ = _init_outside(kind.__init__, init), _call_outside(kind.__call__)


def _init_outside(theirs: Callable[..., None], init: Callable[..., None]) -> Callable[..., None]:
    """Return an initializer that is vLLM's inside vLLM only."""
    from vllm.config import get_current_vllm_config_or_none

    @functools.wraps(init)
    def __init__(module: nn.Module, *values: Any, **settings: Any) -> None:
        (init if get_current_vllm_config_or_none() is None else theirs)(module, *values, **settings)

    return __init__


def _call_outside(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that is vLLM's for its own modules only."""
    def __call__(module: nn.Module, *values: Any, **settings: Any) -> Any:
        return (theirs if hasattr(module, "vllm_config") else nn.Module.__call__)(module, *values, **settings)

    return __call__


def _write_model(model: PreTrainedModel, device: str, lora: Lora | None,
                 folder: str) -> tuple[PretrainedConfig, dict[str, object]]:
    """Write what vLLM reads of a model; return its configuration, and what vLLM is told of adapters."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.tie_word_embeddings &= lora is not None or not tied_copies(model, device)
    config.save_pretrained(folder)
    if not lora:
        return config, {}
    from workers.engines.vllm.adapters import arguments, write_base  # peft takes seconds to import

    write_base(model, folder)
    return config, arguments(lora)


def launcher_environment(tp: int, gpu: int | None) -> dict[str, str]:
    """Return what vLLM's `external_launcher` reads from the environment: the default executor takes the GPU 0, on every
    rank. Empty for an engine of one rank on a CPU, which is not part of the run's group."""
    if tp == 1 and gpu is None:
        return {}
    place = {"RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}  # of the ranks that share an engine
    return {name: str(value) for name, value in (place | ({} if gpu is None else {"LOCAL_RANK": gpu})).items()}


@contextlib.contextmanager
def _one_start_at_a_time(device: str, tp: int) -> Iterator[None]:
    """Start engines with split models one after the other on a CPU, where vLLM uses one name for all of a machine."""
    if device != "cpu" or tp == 1:
        yield
        return
    until, turn = time.monotonic() + _TURN_TIMEOUT, os.open("/dev/shm", os.O_RDONLY)  # the folder of these names
    try:
        while (said := gather(_turn(turn, until))[0]) == b"wait":
            continue
        if said == b"late":
            raise EngineError(f"other engines of this machine have been starting for {_TURN_TIMEOUT:.0f} s, and two "
                              "with split models cannot start at once on a CPU. It is the turn of "
                              f"{_holder(turn)}, which may hang")
        yield
        gather(b"")
    finally:
        fcntl.flock(turn, fcntl.LOCK_UN)
        os.close(turn)


def _turn(turn: int, until: float) -> bytes:
    """Return the first rank's state to broadcast: `ours` (it holds the lock), `wait` or `late`."""
    moment = time.monotonic() + _KEEPALIVE
    while dist.get_rank() == 0 and time.monotonic() < moment:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return b"ours"
        time.sleep(_POLL_INTERVAL)
    return b"wait" if time.monotonic() < until else b"late"


def _holder(turn: int) -> str:
    place = f":{os.fstat(turn).st_ino}"
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines() if " FLOCK " in line]
    return "process " + next((lock[4] for lock in locks if lock[5].endswith(place)), "unknown")


def _unlink_shared_memory() -> None:
    """Unlink a split model's shared memory on a CPU: named alike in every run, it would block later ones."""
    from vllm.distributed import get_tp_group

    name = getattr(getattr(get_tp_group().device_communicator, "dist_module", None), "group_name", "").lstrip("/")
    for path in Path("/dev/shm").iterdir() if name else ():
        if path.name.startswith(f"{name}_"):
            path.unlink(missing_ok=True)


def tied_copies(model: PreTrainedModel, device: str) -> dict[str, str]:
    """Return tied tensors that vLLM has twice, {name: second name}: on a CPU it packs the head at start, so that a
    reload of the tied embeddings would not reach it."""
    tied = device == "cpu" and model.config.tie_word_embeddings
    return {source: target for target, source in model.all_tied_weights_keys.items()} if tied else {}


def forget_kernels(model: nn.Module) -> None:
    """Let vLLM make the kernels of experts on a CPU again with the weights that it is about to read: their weights are
    packed only where the kernel is made (vLLM 0.32, `unquantized_fused_moe_method.py`)."""
    for part in model.modules():
        method: Any = getattr(part, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def weights_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a model by vLLM's names; on a CPU also those that it has packed for its kernels, which
    are read by asking a layer for the images of unit vectors."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        module: Any = modules[name.rpartition(".")[0]]
        packed = getattr(module, "cpu_linear", None) if name.endswith(".weight") else None
        if packed is None or (parameter.numel() and not isinstance(module, ParallelLMHead)):
            yield name, parameter
        else:
            inputs = parameter.shape[1] if parameter.numel() else \
                getattr(module, "input_size_per_partition", module.input_size)
            yield name, packed(torch.eye(inputs, dtype=parameter.dtype), parameter, None)


def on_cpu(config: PretrainedConfig, generation: Generation, dtype: torch.dtype) -> dict[str, object]:
    tokens, size = cache_on_cpu(config, generation, dtype, _CPU_BLOCK)
    return {"enforce_eager": True, "max_model_len": longest_row(config),
            "compilation_config": {"custom_ops": ["-rotary_embedding"]},  # its kernel is wrong where heads have an axis
            "attention_backend": "CPU_MLA",  # with MLA; where a processor has AMX, another that refuses float32
            "block_size": _CPU_BLOCK, "kv_cache_memory_bytes": tokens * size}


def on_gpu(generation: Generation) -> dict[str, object]:
    return {"max_model_len": -1, "enable_sleep_mode": True, "gpu_memory_utilization": generation.memory_share,
            "enforce_eager": not generation.cuda_graphs or generation.routing_replay}


@contextlib.contextmanager
def environment(generation: Generation, launched: dict[str, str]) -> Iterator[None]:
    """Set the environment for vLLM's start, with `launched` in place of torchrun's. vLLM's own variables stay set,
    since it reads them at any time."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ.update(_OURS)
    said = torchrun_environment()
    shown = said | launched if launched else {}
    for name in said:
        del os.environ[name]
    os.environ.update(shown)
    try:
        yield
    finally:
        for name in shown:
            del os.environ[name]
        os.environ.update(said)


def shut_down(core: EngineCore) -> None:
    """End an engine. The last one destroys vLLM's process groups, without the default one as `shutdown` would."""
    from vllm.distributed import parallel_state

    core.model_executor.shutdown()
    core.scheduler.shutdown()
    _open.discard(id(core))
    if not _open and dist.is_initialized():
        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD:
            parallel_state._WORLD.destroy()
        parallel_state._WORLD = None
