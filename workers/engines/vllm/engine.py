"""Generation by vLLM in the training process: continuous batching, paged caches, weights replaced in place."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from distflow.config.run import Generation, RoleRun
from distflow.errors import EngineError
from distflow.telemetry import heartbeat
from workers.engines.precision import is_half
from workers.engines.rollout import SampledRow, SeparateWeights, Session
from workers.engines.vllm.start import shut, start, translated, untied
from workers.engines.vllm.weights import WeightLoader

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.core_client import EngineCoreClient


class VLLMRollout(SeparateWeights):
    """A vLLM engine beside the trainer's model. With tp > 1 the ranks of a share run one engine together.

    Raises:
        EngineError: vLLM does not know the architecture, or cannot start.
    """

    library = "vLLM"

    def __init__(self, model: PreTrainedModel, settings: RoleRun, mesh: DeviceMesh, seed: int, end_tokens: list[int]):
        self.generation: Generation = settings.generation
        self.end_tokens = torch.tensor(end_tokens)
        # vLLM refuses tokens outside the vocabulary.
        self.ends = [token for token in end_tokens if token < model.config.get_text_config().vocab_size]
        self.dtype = torch.bfloat16 if is_half(settings, mesh.device_type) else torch.float32
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        if mesh.device_type == "cpu" and any(".experts." in name for name in self.shapes):
            raise EngineError("vLLM on CPU computes with other experts than it was given once their weights are "
                              "replaced. Instead:  rollout: hf")
        self.cached, self.failure, self.numbers = True, "", itertools.count()
        self.sessions: weakref.WeakSet[VLLMSession] = weakref.WeakSet()
        tp = mesh["tp"].size() if "tp" in (mesh.mesh_dim_names or ()) else 1
        self.copies = untied(model, mesh.device_type)
        self.llm = start(model, self.generation, self.dtype, mesh.device_type, tp, seed)
        self.core = self.llm.engine_core
        """vLLM's engine core: the layers around it detokenize, which takes as long as a small model."""
        self.core._finalizer.detach()  # it would destroy the default process group, which is not vLLM's
        self.closing = weakref.finalize(self, shut, self.core.engine_core)
        self.tasks = self.core.get_supported_tasks()
        worker = self.core.engine_core.model_executor.driver_worker
        self.fused = getattr(worker.get_model(), "packed_modules_mapping", {})

    def session(self, key: int, temperature: float | None = None, keep_cache: bool = False) -> VLLMSession:
        """Open a session. vLLM's prefix cache keeps sequences in any case, as long as there is memory."""
        session = VLLMSession(self, key, self.generation.temperature if temperature is None else temperature)
        self.sessions.add(session)
        return session

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> int:
        """Load weights; rows under way are prefilled again, since their caches belong to the old weights."""
        self.check_health()
        device = self.llm.vllm_config.device_config.device
        loader = WeightLoader(weights, self.shapes, self.fused, self.copies, self.dtype, device)
        with translated("take new weights"):
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(loader)})
            if not self.cached:
                self.llm.wake_up(tags=["kv_cache"])
                self.cached = True
            self.llm.reset_prefix_cache(reset_running_requests=True)
        loader.check()
        self.version = version
        return loader.size

    def sleep(self) -> None:
        """Free all memory of weights and caches on a GPU; on a CPU vLLM keeps it."""
        if any(session.turns for session in self.sessions):
            raise EngineError("vLLM cannot sleep while rows are under way: end their turns first, or  abort()")
        with translated("sleep"):
            self.llm.sleep(level=2)
        self.cached = False

    def wake(self) -> None:
        """Allocate the weights; caches come back in `load`, when the trainer's copies may have been freed."""
        with translated("wake"):
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
        """Run one step of vLLM for the rows of all sessions."""
        self.check_health()
        try:
            with translated("sample"):
                outputs = self.core.get_output().outputs
        except EngineError as error:
            self.failure = str(error)
            raise
        sessions = list(self.sessions)
        for output in outputs:
            for session in sessions:
                if output.request_id in session.turns:
                    session.receive(output)


class VLLMSession(Session):
    """Session of vLLM: each turn of a row is a request."""

    def __init__(self, engine: VLLMRollout, key: int, temperature: float):
        self.engine, self.key, self.temperature = engine, key, temperature
        self.turns: dict[str, _Turn] = {}
        """Turns under way, by request."""
        self.ended: list[SampledRow] = []
        """Rows whose turns ended since the last step."""
        weakref.finalize(self, _abandon, engine.core, self.turns).atexit = False

    @property
    def busy(self) -> bool:
        return bool(self.turns or self.ended)

    def add(self, rows: list[SampledRow]) -> None:
        from workers.engines.vllm.sampling import parameters

        self.engine.check_health()
        if not self.engine.cached:
            raise EngineError("vLLM has no weights since it slept:  wake()  and  load(…)  come before rows")
        for row in rows:
            if row.images is not None and len(row.images.values):
                raise EngineError("vLLM is not given images here; transformers is. Instead:  rollout: hf")
            settings, first = self.engine.generation, len(row.sequence) - row.prompt
            params = parameters(self.key_of(row), self.temperature, settings.top_k, settings.top_p, row.id, first,
                                row.limit, self.engine.ends)
            request = str(next(self.engine.numbers))
            with translated(f"take a row of {len(row.sequence)} tokens"):
                self.engine.core.add_request(self.engine.llm.input_processor.process_inputs(
                    request, {"prompt_token_ids": row.sequence.tolist()}, params, self.engine.tasks))
            self.turns[request] = _Turn(row)

    def step(self) -> list[SampledRow]:
        if self.engine.paused:
            return []
        if self.turns:
            self.engine.advance()
        ended, self.ended = self.ended, []
        return ended

    def receive(self, output: EngineCoreOutput) -> None:
        """Append the tokens that vLLM has sampled for a turn in this step."""
        turn = self.turns[output.request_id]
        turn.tokens += output.new_token_ids
        heartbeat.current().tick()
        turn.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
        turn.versions += [self.engine.version] * len(output.new_token_ids)
        stopped = self.engine.stop is not None and self.engine.stop.reached(turn.row, turn.tokens)
        if stopped and not output.finished:
            with translated("end a row"):
                self.engine.core.abort_requests([output.request_id])
        if stopped or output.finished:
            ended = stopped or turn.tokens[-1] in self.engine.ends
            self.ended.append(self.turns.pop(output.request_id).end(ended))

    def abort(self, rows: Sequence[SampledRow] | None = None) -> list[SampledRow]:
        chosen = None if rows is None else set(rows)
        wanted = [request for request, turn in self.turns.items() if chosen is None or turn.row in chosen]
        with translated("abort"):
            self.engine.core.abort_requests(wanted)
        return [self.turns.pop(request).end(False) for request in wanted]


class _Turn:
    """Tokens of a turn under way."""

    def __init__(self, row: SampledRow):
        self.row = row
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []

    def end(self, finished: bool) -> SampledRow:
        self.row.end(torch.tensor(self.tokens, dtype=torch.int64), torch.tensor(self.logprobs, dtype=torch.float32),
                     torch.tensor(self.versions, dtype=torch.int32), finished)
        return self.row


def _abandon(core: EngineCoreClient, turns: dict[str, _Turn]) -> None:
    """Abort the requests of a session that nobody uses any more."""
    core.abort_requests(list(turns))
