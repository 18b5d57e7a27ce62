"""Training and inference by Megatron-core, with pipeline, tensor, context and expert parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from distflow.config.dag import Role
from distflow.config.extras import pip_line
from distflow.config.megatron_models import why_unmapped
from distflow.config.run import RoleRun
from distflow.data.batch import Batch, Ragged
from distflow.errors import EngineError
from distflow.plan import Layout
from distflow.telemetry import heartbeat
from workers.engines.devices import as_world, is_half, ranks_of
from workers.engines.routing import Routers, note_no_balance
from workers.engines.trainer import LossOf, Trainer, is_placeholder
from workers.engines.vocabulary import score_cut

try:
    from megatron.core.distributed import finalize_model_grads
except ModuleNotFoundError as error:
    raise EngineError("engine: megatron  needs megatron-core, which is not installed. Install it:  "
                      + pip_line("megatron")) from error
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from workers.engines.megatron.export import Exporter
from workers.engines.megatron.layout import check, groups_of
from workers.engines.megatron.model import Stage, build_stage, config_of
from workers.engines.megatron.optimizer import Adam, distributed
from workers.engines.megatron.packing import Packed, gather_response_tokens, pack
from workers.engines.megatron.weights import entries, stage_weights


class MegatronEngine(Trainer):
    """One role's model over all ranks of `mesh`. Each response is a packed sequence with a prompt of its own."""

    accumulates = False  # gradients are summed over ranks in place, at the end of each pass

    def __init__(self, model: PreTrainedModel, settings: RoleRun, mesh: DeviceMesh, pad_token: int, steps: int,
                 role: Role, layout: Layout):
        _refuse(settings, role.head)
        super().__init__(settings, mesh, pad_token, steps)
        self.layout, trained = layout, role.trained
        if why := why_unmapped(model.config.to_dict()):
            raise EngineError(f"`engine: megatron` cannot compute this model: {why}. Instead:  engine: fsdp")
        check(self.layout, model.config)
        if trained:
            note_no_balance(model, "the Megatron engine has none over all layers. `engine: fsdp` computes it")
        self.groups = groups_of(mesh.mesh, self.layout)
        self.last = self.groups.pp.rank() == self.layout.pp - 1
        self.dp_group, self.vocabulary = self.groups.dp, model.config.vocab_size
        half = is_half(settings, mesh.device_type)
        self.stage = self._build(model, torch.bfloat16 if half else torch.float32)
        first = self.layout.stages(model.config.num_hidden_layers)[self.groups.pp.rank()].start
        self.routers = Routers(model, self.stage, first) if settings.generation.routing_replay and trained else None
        self.model = distributed(self.stage, self.groups) if trained else self.stage.eval().requires_grad_(False)
        with as_world(mesh.mesh):  # all ranks compare their parameters
            self.adam = Adam(self.model, settings, self.groups, self.layout) if trained else None
        self.stages = P2PCommunicator(pp_group=self.groups.pp, config=self.stage.config)
        self.run = get_forward_backward_func(pp_size=self.layout.pp, vp_size=None)

    @staticmethod
    def make_groups(layout: Layout, settings: RoleRun) -> None:
        groups_of(ranks_of(layout), layout)

    def _build(self, model: PreTrainedModel, dtype: torch.dtype) -> Stage:
        weights = model.state_dict()
        placed = entries(model.config, weights, self.layout)
        biased, normed = (f"model.layers.0.self_attn.{name}" in weights for name in ("q_proj.bias", "q_norm.weight"))
        config = config_of(model.config, self.layout, biased, normed, dtype)
        config.finalize_model_grads_func = _summed
        stage = build_stage(model.config, config, self.groups, self.layout).to(self.device, dtype)
        mine = dict(stage.named_parameters())
        ranks = {axis: getattr(self.groups, axis).rank() for axis in ("pp", "tp", "ep")}
        with torch.no_grad():
            for name, tensor, split in stage_weights(placed, weights, self.layout, ranks):
                # Megatron says this only of weights that it draws itself, and of experts only with ep
                vars(mine[name]).update(tensor_model_parallel=split != "", allreduce=split != "ep")
                mine.pop(name).copy_(tensor)
        if mine:
            raise EngineError(f"no weights were found for {sorted(mine)[:4]}: is this all of a "
                              f"{model.config.model_type}?")
        self.exporter = Exporter(placed, dict(stage.named_parameters()),
                                 {name: tensor.shape for name, tensor in weights.items()}, self.layout, self.groups,
                                 dtype, self.device)
        return stage

    def infer(self, prompts: Ragged, responses: Ragged, temperature: float = 1.0, images: Ragged | None = None,
              routed_experts: Ragged | None = None, top: int = 0) -> tuple[Tensor, Tensor]:
        if images is not None:
            raise EngineError("the Megatron engine reads no images. Train this model with  engine: fsdp")
        if top:
            raise EngineError(_OWN_TOKENS)
        routed = {} if routed_experts is None else {"routed_experts": routed_experts}
        batch = Batch(torch.arange(len(prompts)), {"prompts": prompts, "responses": responses, **routed})
        with torch.no_grad():
            found = self._passes(self._micro_batches(batch), temperature, None)
        logprobs, entropies = torch.cat(found, 1).cpu()
        return logprobs, entropies

    def _accumulate(self, micros: list[Batch], loss_of: LossOf, temperature: float) -> None:
        if any("candidates" in micro.columns for micro in micros):
            raise EngineError(_OWN_TOKENS)
        self.zero_grad()
        found = self._passes(micros, temperature, loss_of)
        if not self.last:  # what a loss reports of its rows is to be known on every rank of the share
            for micro, outputs in zip(micros, found):
                if not is_placeholder(micro):
                    loss_of(outputs[0], outputs[1], micro)

    def zero_grad(self) -> None:
        self.optimizer.zero()

    def _step(self, rate: float) -> float:
        return self.optimizer.step(rate)

    def _passes(self, micros: list[Batch], temperature: float, loss_of: LossOf | None) -> list[Tensor]:
        """Run micro-batches through the pipeline, backward too with a loss; return [2, N] log-probs and entropies."""
        cp = self.groups.cp
        packs = [pack(micro["prompts"], micro["responses"], self.pad_token, cp.size(), cp.rank(), self.device)
                 for micro in micros]

        def forward(rows: Iterator[tuple[Batch, Packed]], model: nn.Module) -> tuple[Tensor, Any]:
            micro, packed = next(rows)
            heartbeat.current().tick()
            if self.routers:
                routed: Ragged | None = micro.columns.get("routed_experts")  # pyright: ignore[reportAssignmentType]
                self.routers.replayed = None if routed is None else packed.lay_out(
                    routed, self.routers.routing.unknown).to(self.device)
            hidden = model(packed.tokens, None, None, packed_seq_params=packed.sequences)
            return hidden, partial(self._finish, micro, packed, temperature, loss_of)

        found = self.run(forward_step_func=forward, data_iterator=iter(zip(micros, packs)), model=[self.model],
                         num_microbatches=len(micros), seq_length=1, micro_batch_size=1, forward_only=loss_of is None,
                         p2p_communicator=self.stages, pg_collection=self.groups)
        return self._on_all_stages(found, packs)

    def _finish(self, micro: Batch, packed: Packed, temperature: float, loss_of: LossOf | None, hidden: Tensor,
                ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute on the last stage: loss, token count (unused), log-probabilities and entropies."""
        found = score_cut(hidden[packed.places, 0], self.stage.head, self.vocabulary, packed.targets,
                          temperature or 1.0, self.groups.tp)
        logprobs, entropies = (gather_response_tokens(values, packed, self.groups.cp) for values in found)
        if loss_of is None:
            loss = logprobs.new_zeros(())
        else:
            loss = logprobs.sum() * 0.0 if is_placeholder(micro) else loss_of(logprobs, entropies, micro)
        return loss, torch.zeros((), dtype=torch.int, device=self.device), torch.stack(
            [logprobs.detach(), entropies.detach()])

    def _on_all_stages(self, found: list[Tensor], packs: list[Packed]) -> list[Tensor]:
        if self.layout.pp == 1:
            return found
        counts = [packed.response_count for packed in packs]
        values = torch.cat(found, 1) if self.last else torch.empty(2, sum(counts), device=self.device)
        dist.broadcast(values, group=self.groups.pp, group_src=self.layout.pp - 1)
        return list(values.split(counts, 1))

    def export(self, dtype: torch.dtype | None = None,
               into: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        return self.exporter.export(dtype, into)

    @property
    def optimizer(self) -> Adam:
        if self.adam is None:
            raise ValueError("this role is frozen")
        return self.adam

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)
        self.version += 1

    def resident(self, weights: bool = True) -> Iterable[Tensor]:
        if weights:
            yield from (parameter.detach() for parameter in self.stage.parameters())
        if self.adam is not None:
            yield from self.adam.resident()

    def scratch(self) -> Iterable[Tensor]:
        return () if self.adam is None else self.adam.gradients()


_OWN_TOKENS = ("the Megatron engine gives log-probabilities of the responses' own tokens alone. Give this role  "
               "engine: fsdp")


def _summed(model: list[nn.Module], _: Tensor | None = None, **options: Any) -> None:
    """Finish gradients as sums: without a token count Megatron does not divide by it."""
    finalize_model_grads(model, None, **options)


def _refuse(settings: RoleRun, head: str) -> None:
    if head != "lm":
        raise EngineError(f"the Megatron engine has no  head: {head} . Give this role  engine: fsdp")
    if settings.lora is not None:
        raise EngineError("the Megatron engine trains all weights and no adapters. Remove  lora  or set  engine: fsdp")
