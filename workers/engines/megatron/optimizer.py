"""Megatron's distributed Adam as this project uses it: a step that refuses gradients which are not finite, and a state
for checkpoints.

Of Megatron's own ways to restore it none is used: without TransformerEngine they lose Adam's step, or let all
parameters share one, which is wrong Adam in silence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, ParamGroupOverride, ParamKey, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer_config import ParamPredicate
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from distflow.config.run import RoleRun
from distflow.errors import EngineError
from distflow.plan import Layout
from workers.engines.megatron.layout import describe


def distributed(model: MegatronModule, groups: ProcessGroupCollection) -> DistributedDataParallel:
    """Wrap the model with buffers in which gradients are summed over the ranks with the same weights."""
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return DistributedDataParallel(model.config, settings, model, pg_collection=groups)


def _is_flat(parameter: Tensor) -> bool:
    return parameter.ndim <= 1


class Adam:
    def __init__(self, model: DistributedDataParallel, settings: RoleRun, groups: ProcessGroupCollection,
                 layout: Layout):
        self.model, self.settings = model, settings
        half = model.config.bf16
        config = OptimizerConfig(optimizer="adam", lr=settings.learning_rate, weight_decay=settings.weight_decay,
                                 adam_beta1=settings.betas[0], adam_beta2=settings.betas[1], adam_eps=1e-8,
                                 clip_grad=settings.max_grad_norm, bf16=half, params_dtype=model.config.params_dtype,
                                 use_distributed_optimizer=True)
        flat = ParamKey(predicate=ParamPredicate(name="flat", fn=_is_flat))
        self.optimizer = get_megatron_optimizer(config, [model], {flat: ParamGroupOverride(wd_mult=0.0)},
                                                use_gloo_process_groups=False, pg_collection=groups)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]
        self._allocate()
        self.key = f"{describe(layout)} rank={torch.distributed.get_rank()}"

    def _allocate(self) -> None:
        for part in self.optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                for shard in group["params"]:
                    part.optimizer.state[shard] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(shard),
                                                   "exp_avg_sq": torch.zeros_like(shard)}

    def zero(self) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self, rate: float) -> float:
        """Apply the gradients in the buffers if their norm over all ranks is finite; return it as before clipping."""
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            return norm
        for part in self.optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                group["lr"] = rate
            clip_grad_by_total_norm_fp32(part.get_parameters(), self.settings.max_grad_norm, norm)
        self.optimizer.step_with_ready_grads()
        return norm

    def _shards(self) -> dict[str, dict[str, Tensor]]:
        shards = {}
        for part in self.optimizer.chained_optimizers:
            places = part.model_param_group_index_map
            for name, parameter in self.model.module.named_parameters():
                if parameter in places:
                    group, number = places[parameter]
                    shard = part.optimizer.param_groups[group]["params"][number]
                    shards[name] = {"weight": shard.detach(), **part.optimizer.state[shard]}
        return shards

    def resident(self) -> Iterator[Tensor]:
        """Yield Adam's moments and the float32 copies of bfloat16 weights; not the weights themselves."""
        for state in self._shards().values():
            yield from (state["exp_avg"], state["exp_avg_sq"], *((state["weight"],) if self.model.config.bf16 else ()))

    def gradients(self) -> list[Tensor]:
        """Return the gradient buffers. Their contents are not needed between two steps: `zero` comes before use."""
        return [buffer.grad_data for buffer in (*self.model.buffers, *self.model.expert_parallel_buffers)]

    def state_dict(self) -> dict[str, Any]:
        """Return the state under a key of its own: checkpoints take plain tensors of one key for copies."""
        return {self.key: {f"{name}.{kind}": tensor for name, state in self._shards().items()
                           for kind, tensor in state.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.key not in state:
            raise EngineError(f"this checkpoint was written by `{', '.join(state)}` and is to be read by `{self.key}`. "
                              "Megatron's optimizer state cannot be divided anew: resume with the layout that wrote "
                              "it, or start from its weights, exported as a model folder")
        for name, shard in self._shards().items():
            for kind, tensor in shard.items():
                tensor.copy_(state[self.key][f"{name}.{kind}"])
        for part in self.optimizer.chained_optimizers:
            part._copy_main_params_to_model_params()
        self.model.start_param_sync(force_sync=True)


