"""Generation by an SGLang server, which runs beside the training process in its own Python environment.

    SGLangRollout   the engine (this module)         PendingRequests   its session (`session`)
    SGLangServer    the server process (`server`)    TPGroup           the ranks that share a server (`share`)
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import tempfile
import warnings
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from distflow.config.models import ROLLOUTS
from distflow.config.run import Generation, RoleRun
from distflow.errors import EngineError
from workers.engines.paging import cache_on_cpu
from workers.engines.precision import is_half
from workers.engines.rollout import SeparateWeights
from workers.engines.sglang.server import SGLangServer
from workers.engines.sglang.session import PendingRequests
from workers.engines.sglang.share import TPGroup
from workers.engines.sglang.weights import Buckets, checked

_HEALTH_TIMEOUT = 60.0
"""Seconds in which a healthy server samples a token."""
_KEEPALIVE = 10.0
"""Seconds between broadcasts while the server starts, so that no collective times out."""
_CACHES = ["kv_cache", "cuda_graph"]


class SGLangRollout(SeparateWeights):
    """A model in an SGLang server. With tp > 1 the ranks of a share use one server together.

    Raises:
        EngineError: SGLang is not installed, does not know the architecture, or cannot start.
    """

    library = "SGLang"

    def __init__(self, model: PreTrainedModel, settings: RoleRun, mesh: DeviceMesh, seed: int, end_tokens: list[int]):
        self.generation: Generation = settings.generation
        self.end_tokens = torch.tensor(end_tokens)
        self.dtype = torch.bfloat16 if is_half(settings, mesh.device_type) else torch.float32
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.vocabulary = model.config.get_text_config().vocab_size
        self.device, self.share, self.cached = mesh.device_type, TPGroup(mesh), True
        self.numbers = itertools.count()
        self.sessions: weakref.WeakSet[PendingRequests] = weakref.WeakSet()
        self.server: SGLangServer | None = None
        try:
            self.share.broadcast(lambda: self._start(model, seed))
            while not self.share.broadcast(lambda: self.server.wait(_KEEPALIVE)):
                continue
        except EngineError:
            self.close()
            raise

    def _start(self, model: PreTrainedModel, seed: int) -> None:
        folder = tempfile.TemporaryDirectory(prefix="sglang-")
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        # End tokens are passed with each request.
        config.eos_token_id = None
        config.save_pretrained(folder.name)
        self.server = SGLangServer(folder, self._flags(config, folder.name, seed), self.device, self.share.size)
        self.closing = weakref.finalize(self, self.server.close)
        known = ROLLOUTS["sglang"].tested
        if not self.server.version.startswith(known):
            warnings.warn(f"SGLang {self.server.version}; distflow was tested with "
                          f"{', '.join(f'{each}*' for each in known)}", stacklevel=2)

    def _flags(self, config: object, folder: str, seed: int) -> list[str]:
        settings, special = self.generation, _on_gpu if self.device == "cuda" else _on_cpu
        flags = {"model-path": folder, "load-format": "dummy", "dtype": str(self.dtype).removeprefix("torch."),
                 "random-seed": seed % 2**31, "max-running-requests": settings.batch_rows, "tp-size": self.share.size,
                 "stream-interval": 1 << 30,  # events come at a row's first token and at its end
                 "log-level": "warning", **special(config, settings, self.dtype)}
        switches = ["--skip-tokenizer-init", "--sleep-on-idle",
                    *(["--enable-deterministic-inference"] * settings.batch_invariant),
                    "--enable-memory-saver" if self.device == "cuda" else "--disable-cuda-graph"]
        return [*(str(part) for name, value in flags.items() for part in (f"--{name}", value)), *switches]

    def session(self, key: int, temperature: float | None = None, keep_cache: bool = False) -> PendingRequests:
        """Open a session. The server's prefix cache keeps sequences in any case, as long as there is memory."""
        session = PendingRequests(self, key, self.generation.temperature if temperature is None else temperature)
        self.sessions.add(session)
        return session

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> int:
        """Load weights; rows under way are prefilled again, since their caches belong to the old weights."""
        if self.share.leads:
            buckets = Buckets(weights, self.shapes, self.dtype, self.device)
            with self._paused_for_update():
                for bucket in buckets:
                    self.server.call("/update_weights_from_tensor", {
                        "serialized_named_tensors": [bucket] * self.share.size, "flush_cache": False,
                        "weight_version": str(version)})
            size = buckets.size
        else:
            size = sum(tensor.numel() for _, tensor in checked(weights, self.shapes)) * self.dtype.itemsize
        self.version = version
        return size

    @contextlib.contextmanager
    def _paused_for_update(self) -> Iterator[None]:
        """Pause the server for new weights, and flush all caches of the old ones afterwards."""
        self.server.call("/pause_generation", {"mode": "retract"})
        self.server.call("/begin_weight_update", {})
        try:
            yield
        finally:
            self.server.call("/end_weight_update", {})
            if not self.cached:
                self.server.call("/resume_memory_occupation", {"tags": _CACHES})
                self.cached = True
            self.server.call("/flush_cache", {})
            if not self.paused:
                self.server.call("/continue_generation", {})

    def pause(self) -> None:
        super().pause()
        if self.server:
            self.server.call("/pause_generation", {"mode": "in_place"})

    def resume(self) -> None:
        super().resume()
        if self.server:
            self.server.call("/continue_generation", {})

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let the server run even if the engine is paused, so that aborted rows end. Tokens sampled meanwhile stay."""
        if self.paused:
            self.server.call("/continue_generation", {})
        yield
        if self.paused:
            self.server.call("/pause_generation", {"mode": "in_place"})

    def end(self, requests: set[str]) -> None:
        """Have the server abort requests."""
        if requests == {request for session in self.sessions for request in session.turns}:
            self.server.call("/abort_request", {"abort_all": True})
            return
        for request in requests:
            self.server.call("/abort_request", {"rid": request})

    def sleep(self) -> None:
        """Free all memory of weights and caches on a GPU; on a CPU SGLang keeps it."""
        if any(session.turns for session in self.sessions):
            raise EngineError("SGLang cannot sleep while rows are under way: end their turns first, or  abort()")
        if self.server:
            self.server.call("/release_memory_occupation", {})

    def wake(self) -> None:
        """Allocate the weights; caches come back in `load`, when the trainer's copies may have been freed."""
        if self.server:
            self.server.call("/resume_memory_occupation", {"tags": ["weights"]})
        self.version, self.cached = -1, False

    def check_health(self) -> None:
        self.share.broadcast(self._check_server)

    def _check_server(self) -> None:
        self.server.watch()
        if self.cached and not self.paused:  # otherwise it answers, but cannot sample
            self.server.call("/health_generate", patience=_HEALTH_TIMEOUT)

    def close(self) -> None:
        if self.server:
            self.closing()


def _on_cpu(config: object, settings: Generation, dtype: torch.dtype) -> dict[str, object]:
    tokens, _ = cache_on_cpu(config, settings, dtype)
    return {"device": "cpu", "attention-backend": "torch_native", "sampling-backend": "pytorch",
            "grammar-backend": "none", "max-total-tokens": tokens}


def _on_gpu(config: object, settings: Generation, dtype: torch.dtype) -> dict[str, object]:
    return {"mem-fraction-static": settings.memory_share, "base-gpu-id": torch.cuda.current_device()}
