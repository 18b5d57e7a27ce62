"""Generation by an SGLang server, which runs beside the training process in its own Python environment.

    SGLangRollout   the engine                        SGLangSession     its session
    SGLangServer    the server process (`server`)     TPGroup           the ranks that share a server
"""

from __future__ import annotations

import base64
import contextlib
import copy
import itertools
import json
import queue
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig, PreTrainedModel

from distflow.config.models import ROLLOUTS
from distflow.config.run import Generation, RoleRun
from distflow.errors import EngineError
from distflow.rpc.shared_memory import machine_name
from distflow.telemetry import heartbeat
from distflow.weights import fingerprint
from distflow.weights.fingerprint import Sums, add_up
from workers.engines.capabilities import decoder_layers
from workers.engines.devices import dimension
from workers.engines.external import ExternalRollout, RequestSession, cache_on_cpu, end_turn
from workers.engines.rollout import SampledRow, require_shapes
from workers.engines.routing import Routing, routers_of
from workers.engines.sampling import TokenLimits, key_of
from workers.engines.sglang.server import SGLangServer, further_flags
from workers.engines.sglang.weights import Buckets, serialize_handles

_HEALTH_TIMEOUT = 60.0  # seconds in which a healthy server samples a token
_KEEPALIVE = 10.0  # seconds between broadcasts while the server starts, so that no collective times out
_STEP_TIMEOUT, _FIRST_TIMEOUT = 0.1, 1.0  # seconds that a step waits: for a turn to end, for first tokens
_KINDS = {"linear_attention": "mamba", "full_attention": "attention"}
_BLOCKS = ("layers_block_type", "mtp_layers_block_type")
_CACHES = ["kv_cache", "cuda_graph"]
_READ = f"distflow_fingerprint.{fingerprint.write_sums.__name__}"
"""Function that the server's processes call to read their weights, from a copy of `distflow.weights.fingerprint`."""


class TPGroup:
    def __init__(self, mesh: DeviceMesh):
        self.size, self.device = dimension(mesh, "tp"), mesh.device_type
        self.group = mesh["tp"].get_group() if self.size > 1 else None
        self.leads = self.group is None or dist.get_rank(self.group) == 0
        if self.group is not None:
            self._require_one_machine()

    def broadcast(self, ask: Callable[[], Any]) -> Any:
        """Run `ask` on the first rank; return its JSON result, or raise its EngineError, on all ranks. Collective."""
        if self.group is None:
            return ask()
        outcome: dict[str, Any] = {}
        try:
            outcome["answer"] = ask() if self.leads else None
        except EngineError as error:
            outcome["error"] = str(error)
        received = json.loads(self._bytes(json.dumps(outcome).encode()))
        if "error" in received:
            raise EngineError(received["error"])
        return received["answer"]

    def _require_one_machine(self) -> None:
        elsewhere = torch.tensor([int(self.broadcast(machine_name) != machine_name())], device=self.device)
        dist.all_reduce(elsewhere, group=self.group)
        if elsewhere.item():
            raise EngineError(f"SGLang's server is on one machine, and {elsewhere.item()} of the {self.size} ranks "
                              "over which its model is split are on others. Let the role's tp divide the ranks of a "
                              "machine, or write  rollout: vllm")

    def _bytes(self, own: bytes) -> bytes:
        size = torch.tensor([len(own)], device=self.device)
        dist.broadcast(size, group=self.group, group_src=0)
        text = torch.frombuffer(bytearray(own), dtype=torch.uint8) if self.leads else torch.empty(0, dtype=torch.uint8)
        text = text.to(self.device) if self.leads else torch.empty(int(size), dtype=torch.uint8, device=self.device)
        dist.broadcast(text, group=self.group, group_src=0)
        return bytes(text.cpu().numpy())


class TurnResult(NamedTuple):
    """Server's result of a finished turn."""

    request: str
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    aborted: bool
    experts: str
    """Base64 of int32 [tokens read, layers, experts of a token], "" if they were not asked for."""


class SGLangSession(RequestSession):
    """Requests of one session; the server continues between two steps and its events are queued."""

    engine: SGLangRollout
    turns: dict[str, SampledRow]

    def __init__(self, engine: SGLangRollout, key: int, temperature: float, limits: TokenLimits | None = None):
        super().__init__(engine, key, temperature, limits)
        self.new: dict[str, SampledRow] = {}  # turns that have yet to be sent to the server, by request
        self.aborting: set[str] = set()  # requests that are being aborted
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self.ends = set(engine.end_tokens.tolist())
        if engine.server:
            weakref.finalize(self, _abandon, engine.server, self.turns).atexit = False

    @property
    def busy(self) -> bool:
        return bool(self.new) or super().busy

    def add(self, rows: list[SampledRow]) -> None:
        for row in rows:
            row.begin()
            self.new[f"{self.request_for(row)}."] = row  # the dot: SGLang aborts by prefix

    def _advance(self) -> None:
        new, self.new = self.new, {}
        self.turns.update(new)
        if self.turns:
            heartbeat.current().tick()
            self._take(self.engine.share.broadcast(lambda: self._send(new)))

    def abort(self, rows: Sequence[SampledRow] | None = None) -> list[SampledRow]:
        chosen = {*self.new.values(), *self.turns.values()} if rows is None else set(rows)
        left = [self.new.pop(request) for request, row in list(self.new.items()) if row in chosen]
        for row in left:
            row.end_unsampled()
        self.aborting = {request for request, row in self.turns.items() if row in chosen}
        return left + self._take(self.engine.share.broadcast(self._abort)) if self.aborting else left

    def _take(self, turns: list[TurnResult]) -> list[SampledRow]:
        """End the turns; return the aborted rows and keep the others for the next step."""
        aborted = []
        for turn in itertools.starmap(TurnResult, turns):
            row = self.turns.pop(turn.request)
            row.experts = self.engine.experts_of(turn.experts)
            (aborted if turn.aborted else self.ended).append(end_turn(
                row, turn.tokens, turn.logprobs, turn.versions, bool(turn.tokens) and turn.tokens[-1] in self.ends))
        return aborted

    def _send(self, new: dict[str, SampledRow]) -> list[TurnResult]:
        if new:
            self.engine.own_server.generate(self._body(new), self.events)
        return self._receive(0.0 if self.ended else _FIRST_TIMEOUT if new else _STEP_TIMEOUT)

    def _body(self, new: dict[str, SampledRow]) -> dict[str, Any]:
        settings = self.engine.generation
        limits = self.limits or settings
        # SGLang draws differently once any row of a batch is greedy or has a top-k: with seeds, give a top-k to all.
        whole = self.engine.vocabulary if self.engine.seeded else -1
        common = {"temperature": self.temperature, "top_p": limits.top_p, "top_k": limits.top_k or whole,
                  "stop_token_ids": sorted(self.ends)}
        return {"rid": list(new), "input_ids": [row.sequence.tolist() for row in new.values()],
                "extra_key": str(self.engine.version), "return_logprob": True,
                "return_routed_experts": settings.routing_replay, "sampling_params": [
                    {**common, "max_new_tokens": row.limit, "sampling_seed": key_of(self.key_of(row), row.id)}
                    for row in new.values()]}

    def _receive(self, timeout: float) -> list[TurnResult]:
        results = []
        with contextlib.suppress(queue.Empty):
            results.append(self._turn(self.events.get(timeout=timeout)))
            while True:
                results.append(self._turn(self.events.get_nowait()))
        if not results:
            self.engine.own_server.watch()
        return list(filter(None, results))

    def _turn(self, event: dict[str, Any] | EngineError) -> TurnResult | None:
        if isinstance(event, EngineError):
            raise event
        if "error" in event:
            raise EngineError(f"SGLang refuses rows: {event['error']}")
        meta, tokens = event["meta_info"], event["output_ids"]
        reason, request = meta["finish_reason"], meta["id"]
        if reason is None:
            return None
        row = self.turns[request]
        complete = bool(tokens) and (tokens[-1] in self.ends or len(tokens) >= row.limit)
        if reason["type"] == "abort" and request not in self.aborting:
            raise EngineError(f"SGLang gave a row of {len(row.sequence)} tokens up after {len(tokens)} more: "
                              f"{reason.get('message')}")
        versions = [int(span["version"]) for span in meta.get("weight_versions", ())
                    for _ in range(span["start"], span["end"])]
        logprobs = [chosen[0] for chosen in meta.get("output_token_logprobs", [])]
        return TurnResult(request, tokens, logprobs, versions, reason["type"] == "abort" and not complete,
                          meta.get("routed_experts") or "")

    def _abort(self) -> list[TurnResult]:
        left, results = set(self.aborting), []
        with self.engine.running():
            while left:  # repeated: the server forgets an abort that arrives before its request
                self.engine.end(left)
                turns = self._receive(_STEP_TIMEOUT)
                results += turns
                left -= {turn.request for turn in turns}
        return results


def _abandon(server: SGLangServer, turns: dict[str, SampledRow]) -> None:
    """Abort the requests of a session that nobody uses any more."""
    with contextlib.suppress(EngineError):
        for request in turns:
            server.call("/abort_request", {"rid": request})


class SGLangRollout(ExternalRollout):

    library, session_type = "SGLang", SGLangSession

    def __init__(self, model: PreTrainedModel, settings: RoleRun, mesh: DeviceMesh, seed: int, end_tokens: list[int],
                 ep: int = 1):
        super().__init__(model, settings, mesh, seed, end_tokens, ep)
        self.share = TPGroup(mesh)
        self.routing = Routing.of(model) if self.generation.routing_replay else None
        self.seeded = not any(flag.startswith("--sampling-backend") for flag in further_flags())
        """Whether rows are drawn by seeds: SGLang does so by its deterministic kernels and its own sampler alone."""
        layers = decoder_layers(model)
        self.layers, self.sparse = len(layers), [index for index, layer in enumerate(layers) if routers_of(layer)]
        self.server: SGLangServer | None = None  # the server, on the rank that owns it
        try:
            self.share.broadcast(lambda: self._start(model, seed))
            while not self.share.broadcast(lambda: self.own_server.wait(_KEEPALIVE)):
                continue
        except EngineError:
            self.close()
            raise

    @property
    def own_server(self) -> SGLangServer:
        if self.server is None:
            raise EngineError("another rank of the share has the SGLang server")
        return self.server

    def _call(self, path: str, body: dict[str, Any]) -> None:
        if self.server:
            self.server.call(path, body)

    def _start(self, model: PreTrainedModel, seed: int) -> None:
        folder = tempfile.TemporaryDirectory(prefix="sglang-")
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.eos_token_id = None  # end tokens are passed with each request
        config.save_pretrained(folder.name)
        name_layers_as_files_do(Path(folder.name, "config.json"))
        shutil.copy(fingerprint.__file__, Path(folder.name, f"{_READ.partition('.')[0]}.py"))
        self.server = SGLangServer(folder, self._flags(config, folder.name, seed), self.device, self.share.size)
        self.closing = weakref.finalize(self, self.server.close)
        known = ROLLOUTS["sglang"].tested
        if not self.server.version.startswith(known):
            warnings.warn(f"SGLang {self.server.version}; distflow was tested with "
                          f"{', '.join(f'{each}*' for each in known)}", stacklevel=2)

    def _flags(self, config: PretrainedConfig, folder: str, seed: int) -> list[str]:
        settings, special = self.generation, _on_gpu if self.device == "cuda" else _on_cpu
        flags = {"model-path": folder, "load-format": "dummy", "dtype": str(self.dtype).removeprefix("torch."),
                 "random-seed": seed % 2**31, "max-running-requests": settings.batch_rows, "tp-size": self.share.size,
                 "ep-size": self.ep,
                 "stream-interval": 1 << 30,  # events come at a row's first token and at its end
                 "custom-weight-loader": _READ,
                 "log-level": "warning", **special(config, settings, self.dtype)}
        switches = ["--skip-tokenizer-init", "--sleep-on-idle",
                    *(["--enable-deterministic-inference"] * self.seeded),
                    *(["--enable-return-routed-experts"] * settings.routing_replay),
                    *(["--enable-memory-saver"] if self.device == "cuda" else []),
                    *([] if self.device == "cuda" and self.generation.cuda_graphs else ["--disable-cuda-graph"])]
        return [*(str(part) for name, value in flags.items() for part in (f"--{name}", value)), *switches]

    def experts_of(self, encoded: str) -> Tensor | None:
        """Return what the server's routers chose [tokens, layers with routers, experts of a token]."""
        if self.routing is None or not encoded:
            return None
        found = torch.frombuffer(bytearray(base64.b64decode(encoded)), dtype=torch.int32)
        return found.view(-1, self.layers, self.routing.experts_per_token)[:, self.sparse].to(self.routing.dtype)

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> int:
        """Load weights; rows under way are prefilled again, since their caches belong to the old weights."""
        if self.share.leads:
            buckets = Buckets(weights, self.shapes, self.dtype, self.device, self.files)
            constants = Buckets(self.constants.items(), {name: tensor.shape for name, tensor in self.constants.items()},
                                torch.float32, self.device)
            with self._paused_for_update():
                for bucket in itertools.chain(buckets, constants):
                    self._call("/update_weights_from_tensor", {
                        "serialized_named_tensors": [bucket] * self.share.size, "flush_cache": False,
                        "weight_version": str(version)})
            size = buckets.size
        else:
            size = sum(tensor.numel() for _, tensor in require_shapes(weights, self.shapes)) * self.dtype.itemsize
        self.version = version
        return size

    def held(self) -> Sums:
        sums = self.share.broadcast(self._read)
        return {name: value for name, value in sums.items() if name not in self.constants}

    def _read(self) -> Sums:
        """Have each of the server's processes write the sums of its parameters into the server's folder."""
        asked = serialize_handles([(str(self.dtype).removeprefix("torch."), torch.zeros(1))])
        if not self.paused:
            self._call("/pause_generation", {"mode": "in_place"})
        self._call("/begin_weight_update", {})
        self._call("/update_weights_from_tensor", {"serialized_named_tensors": [asked] * self.share.size,
                                                   "load_format": _READ, "flush_cache": False})
        self._call("/end_weight_update", {})
        if not self.paused:
            self._call("/continue_generation", {})
        files = [*Path(self.own_server.folder.name).glob("sums-*.json")]
        parts = [json.loads(file.read_text()) for file in files]
        for file in files:
            file.unlink()
        return {name: add_up(part[name] for part in parts) for name in parts[0]}

    @contextlib.contextmanager
    def _paused_for_update(self) -> Iterator[None]:
        self._call("/pause_generation", {"mode": "retract"})
        self._call("/begin_weight_update", {})
        try:
            yield
        finally:
            self._call("/end_weight_update", {})
            if not self.cached:
                self._call("/resume_memory_occupation", {"tags": _CACHES})
                self.cached = True
            self._call("/flush_cache", {})
            if not self.paused:
                self._call("/continue_generation", {})

    def pause(self) -> None:
        super().pause()
        self._call("/pause_generation", {"mode": "in_place"})

    def resume(self) -> None:
        super().resume()
        self._call("/continue_generation", {})

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let the server run even if the engine is paused, so that aborted rows end. Tokens sampled meanwhile stay."""
        if self.paused:
            self._call("/continue_generation", {})
        yield
        if self.paused:
            self._call("/pause_generation", {"mode": "in_place"})

    def end(self, requests: set[str]) -> None:
        if requests == {request for session in self.sessions for request in session.turns}:
            self._call("/abort_request", {"abort_all": True})
            return
        for request in requests:
            self._call("/abort_request", {"rid": request})

    def _release(self) -> None:
        self._call("/release_memory_occupation", {})

    def wake(self) -> None:
        """Allocate the weights; caches come back in `load`, when the trainer's copies may have been freed."""
        self._call("/resume_memory_occupation", {"tags": ["weights"]})
        self.version, self.cached = -1, False

    def check_health(self) -> None:
        self.share.broadcast(self._check_server)

    def _check_server(self) -> None:
        self.own_server.watch()
        if self.cached and not self.paused:  # otherwise it answers, but cannot sample
            self.own_server.call("/health_generate", timeout=_HEALTH_TIMEOUT)

    def close(self) -> None:
        if self.server:
            self.closing()


def name_layers_as_files_do(file: Path) -> None:
    """Give kinds of layers in a configuration the names that files of Nemotron-H have. Transformers writes others,
    which SGLang's class does not know."""
    config = json.loads(file.read_text())
    named = {key: [_KINDS.get(kind, kind) for kind in config[key]] for key in _BLOCKS if config.get(key)}
    if named:
        file.write_text(json.dumps(config | named))


def _on_cpu(config: PretrainedConfig, settings: Generation, dtype: torch.dtype) -> dict[str, object]:
    tokens, _ = cache_on_cpu(config, settings, dtype)
    return {"device": "cpu", "attention-backend": "torch_native", "sampling-backend": "pytorch",
            "grammar-backend": "none", "max-total-tokens": tokens}


def _on_gpu(config: PretrainedConfig, settings: Generation, dtype: torch.dtype) -> dict[str, object]:
    return {"mem-fraction-static": settings.memory_share, "base-gpu-id": torch.cuda.current_device()}
