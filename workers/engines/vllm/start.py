"""How vLLM starts and ends in a process that also trains."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from transformers import PretrainedConfig, PreTrainedModel

from distflow.config.run import Generation
from distflow.data.exchange import gather
from distflow.errors import EngineError
from workers.engines.paging import cache_on_cpu
from workers.engines.torchrun import torchrun_says

if TYPE_CHECKING:
    from vllm import LLMEngine
    from vllm.v1.engine.core import EngineCore

_OURS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0",
         "VLLM_USE_V2_MODEL_RUNNER": "0"}  # `Drawing` is written for the first one
_DEFAULTS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
_CPU_BLOCK = 32
"""Tokens whose keys and values lie together: prompts share whole blocks only, and vLLM's own choice is 128."""
_PATIENCE, _MOMENT, _LOOK = 240.0, 1.0, 0.05
"""Seconds for which engines may wait for others to start, until the other ranks hear of it, and between two looks."""
_open: set[int] = set()
"""The engines of this process, which share their process groups."""


@contextlib.contextmanager
def translated(what: str) -> Iterator[None]:
    """vLLM's errors as ours."""
    try:
        yield
    except _failures() as error:
        raise EngineError(f"vLLM cannot {what}: {type(error).__name__}: {error}") from error


def _failures() -> tuple[type[Exception], ...]:
    """What vLLM raises in our process: errors of its own, if it got as far as defining them, and Python's."""
    own = getattr(sys.modules.get("vllm.exceptions"), "VLLMError", RuntimeError)
    return (own, RuntimeError, ValueError, LookupError, AttributeError, TypeError, AssertionError, OSError, ImportError)


def start(model: PreTrainedModel, generation: Generation, dtype: torch.dtype, device: str, tp: int,
          seed: int) -> LLMEngine:
    """An engine for the model's architecture, with weights that mean nothing yet."""
    with _by_turns(device, tp), translated("start"), _surroundings(generation, tp), \
            tempfile.TemporaryDirectory() as folder:
        from vllm import EngineArgs, LLMEngine

        from workers.engines.vllm.sampling import MODE, Drawing

        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.tie_word_embeddings &= not untied(model, device)
        config.save_pretrained(folder)
        engine = LLMEngine.from_engine_args(EngineArgs(
            model=folder, skip_tokenizer_init=True, load_format="dummy", generation_config="vllm",
            dtype=str(dtype).removeprefix("torch."), seed=seed % 2**32,
            max_num_seqs=generation.batch_rows, max_num_batched_tokens=max(8192, generation.batch_rows),
            enable_prefix_caching=True, logprobs_mode=MODE, logits_processors=[Drawing], async_scheduling=False,
            disable_log_stats=True, tensor_parallel_size=tp,
            **({"distributed_executor_backend": "external_launcher"} if tp > 1 else {}),
            **(on_cpu(config, generation, dtype) if device == "cpu" else _on_gpu(generation))))
        _unname_shared_memory()
    _open.add(id(engine.engine_core.engine_core))
    return engine


@contextlib.contextmanager
def _by_turns(device: str, tp: int) -> Iterator[None]:
    """On CPU the ranks of a split model find each other by a name that all such engines of the machine have: those of
    another group of ranks start before or after, not at the same time.

    Raises:
        EngineError: on all ranks; others have been starting for too long.
        RankMissing: a rank has ended meanwhile.
    """
    if device != "cpu" or tp == 1:
        yield
        return
    until, turn = time.monotonic() + _PATIENCE, os.open("/dev/shm", os.O_RDONLY)  # where these names are
    try:
        while (said := gather(_turn(turn, until))[0]) == b"wait":
            continue
        if said == b"late":
            raise EngineError(f"other engines of this machine have been starting for {_PATIENCE:.0f} s, and two with "
                              "split models cannot start at once on a CPU. It is the turn of "
                              f"{_whose(turn)}, which may hang")
        yield
        gather(b"")
    finally:
        fcntl.flock(turn, fcntl.LOCK_UN)
        os.close(turn)


def _turn(turn: int, until: float) -> bytes:
    """What the first rank tells the others, within a moment: whether it is their turn."""
    moment = time.monotonic() + _MOMENT
    while dist.get_rank() == 0 and time.monotonic() < moment:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return b"ours"
        time.sleep(_LOOK)
    return b"wait" if time.monotonic() < until else b"late"


def _whose(turn: int) -> str:
    """Who has the lock, as far as the kernel tells."""
    place = f":{os.fstat(turn).st_ino}"
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines() if " FLOCK " in line]
    return "process " + next((lock[4] for lock in locks if lock[5].endswith(place)), "unknown")


def _unname_shared_memory() -> None:
    """On CPU the ranks of a split model talk through shared memory. They have it by now; its name, which is the same in
    every run, would outlive a run that is killed and stop all later ones."""
    from vllm.distributed import get_tp_group

    name = getattr(getattr(get_tp_group().device_communicator, "dist_module", None), "group_name", "").lstrip("/")
    for path in Path("/dev/shm").iterdir() if name else ():
        if path.name.startswith(f"{name}_"):
            path.unlink(missing_ok=True)


def untied(model: PreTrainedModel, device: str) -> dict[str, str]:
    """What is one tensor in the model and two in vLLM: its name, and the other one's. On CPU vLLM packs what follows
    the last layer when it starts, and a reload of the embeddings that it is tied to would not reach it."""
    tied = device == "cpu" and model.config.tie_word_embeddings
    return {source: target for target, source in model.all_tied_weights_keys.items()} if tied else {}


def on_cpu(config: PretrainedConfig, generation: Generation, dtype: torch.dtype) -> dict[str, object]:
    """Arguments where there is no GPU."""
    tokens, size = cache_on_cpu(config, generation, dtype, _CPU_BLOCK)
    return {"enforce_eager": True, "max_model_len": config.get_text_config().max_position_embeddings,
            "block_size": _CPU_BLOCK, "kv_cache_memory_bytes": tokens * size}


def _on_gpu(generation: Generation) -> dict[str, object]:
    """Rows may be as long as the memory allows, and the model."""
    return {"max_model_len": -1, "enable_sleep_mode": True, "gpu_memory_utilization": generation.memory_share}


@contextlib.contextmanager
def _surroundings(generation: Generation, tp: int) -> Iterator[None]:
    """The environment in which vLLM starts. Its own settings stay, since it reads them at any time, some of them when
    it is imported."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ.update(_OURS)
    if generation.batch_invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    said = torchrun_says()
    # An engine of one rank alone is no part of the run's group; ranks that share one may have a group of their own.
    shown = said | {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())} if tp > 1 else {}
    for name in said:
        del os.environ[name]
    os.environ.update(shown)
    try:
        yield
    finally:
        for name in shown:
            del os.environ[name]
        os.environ.update(said)


def shut(core: EngineCore) -> None:
    """End an engine. The last one of a process gives the process groups back that vLLM made, but not the default one,
    which vLLM's own `shutdown` would destroy."""
    from vllm.distributed import parallel_state

    core.model_executor.shutdown()
    core.scheduler.shutdown()
    _open.discard(id(core))
    if not _open and dist.is_initialized():
        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD:
            parallel_state._WORLD.destroy()
        parallel_state._WORLD = None
