"""Generation by SGLang's server, which runs beside the training process and in an environment of its own."""

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

_PULSE = 60.0
"""Seconds in which a server that is well samples a token."""
_BEAT = 10.0
"""Seconds after which the other ranks hear that the server is still starting: no collective waits for long."""
_CACHES = ["kv_cache", "cuda_graph"]


class SGLangRollout(SeparateWeights):
    """A model in SGLang's own form, in a server of its own. With tp > 1 the ranks of a share have one server together.

    Raises:
        EngineError: SGLang is not there, does not know the architecture, or cannot start; it says why.
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
            self.share.tell(lambda: self._start(model, seed))
            while not self.share.tell(lambda: self.server.wait(_BEAT)):
                continue
        except EngineError:
            self.close()
            raise

    def _start(self, model: PreTrainedModel, seed: int) -> None:
        folder = tempfile.TemporaryDirectory(prefix="sglang-")
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        # What else ends a row is said with each request.
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
                 "stream-interval": 1 << 30,  # a row is heard of at its first token and at its end
                 "log-level": "warning", **special(config, settings, self.dtype)}
        switches = ["--skip-tokenizer-init", "--sleep-on-idle",
                    *(["--enable-deterministic-inference"] * settings.batch_invariant),
                    "--enable-memory-saver" if self.device == "cuda" else "--disable-cuda-graph"]
        return [*(str(part) for name, value in flags.items() for part in (f"--{name}", value)), *switches]

    def session(self, key: int, temperature: float | None = None, keeps: bool = False) -> PendingRequests:
        """What was read stays in any case, as long as there is room: the server finds it by its tokens."""
        session = PendingRequests(self, key, self.generation.temperature if temperature is None else temperature)
        self.sessions.add(session)
        return session

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> int:
        """Rows under way are read again: what was kept of them belongs to the old weights."""
        if self.share.leads:
            buckets = Buckets(weights, self.shapes, self.dtype, self.device)
            with self._standing():
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
    def _standing(self) -> Iterator[None]:
        """New weights may come; afterwards nothing is left that was read with the old ones."""
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
    def moving(self) -> Iterator[None]:
        """The server goes on even while the engine is paused: only so do rows end. What it samples meanwhile stays."""
        if self.paused:
            self.server.call("/continue_generation", {})
        yield
        if self.paused:
            self.server.call("/pause_generation", {"mode": "in_place"})

    def end(self, requests: set[str]) -> None:
        """Ask the server to end these."""
        if requests == {request for session in self.sessions for request in session.turns}:
            self.server.call("/abort_request", {"abort_all": True})
            return
        for request in requests:
            self.server.call("/abort_request", {"rid": request})

    def sleep(self) -> None:
        """On a GPU all memory of weights and caches is given back; without one SGLang keeps it."""
        if any(session.turns for session in self.sessions):
            raise EngineError("SGLang cannot sleep while rows are under way: end their turns first, or  abort()")
        if self.server:
            self.server.call("/release_memory_occupation", {})

    def wake(self) -> None:
        """Caches come back only with the weights, when the trainer's copies may have gone."""
        if self.server:
            self.server.call("/resume_memory_occupation", {"tags": ["weights"]})
        self.version, self.cached = -1, False

    def check_health(self) -> None:
        self.share.tell(self._feel)

    def _feel(self) -> None:
        self.server.watch()
        if self.cached and not self.paused:  # else it answers, but cannot sample
            self.server.call("/health_generate", patience=_PULSE)

    def close(self) -> None:
        if self.server:
            self.closing()


def _on_cpu(config: object, settings: Generation, dtype: torch.dtype) -> dict[str, object]:
    tokens, _ = cache_on_cpu(config, settings, dtype)
    return {"device": "cpu", "attention-backend": "torch_native", "sampling-backend": "pytorch",
            "grammar-backend": "none", "max-total-tokens": tokens}


def _on_gpu(config: object, settings: Generation, dtype: torch.dtype) -> dict[str, object]:
    return {"mem-fraction-static": settings.memory_share, "base-gpu-id": torch.cuda.current_device()}
