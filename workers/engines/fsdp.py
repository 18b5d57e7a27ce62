"""Training and inference by PyTorch FSDP2: weights, gradients and optimizer state are divided between the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from distflow.data.batch import Batch, Ragged
from distflow.schema.errors import EngineError
from distflow.schema.run import RoleRun
from distflow.weights.reshard import gathered
from workers.engines.policy import Policy, SharedPrompt, inputs_of
from workers.engines.trainer import LossOf, Trainer, is_placeholder, schedule
from workers.engines.value import ValueModel
from workers.engines.vision import alike, shown, with_a_glance

_SMALL = 64_000_000
"""Parameters up to which a model is one unit: gathering layer by layer saves no memory worth its messages."""

HEADS: dict[str, type[SharedPrompt]] = {"lm": Policy, "value": ValueModel}


class FSDPEngine(Trainer):
    """One role's model over all ranks of `mesh`."""

    def __init__(self, model: PreTrainedModel, settings: RoleRun, mesh: DeviceMesh, pad_token: int, steps: int,
                 trained: bool, head: str = "lm", whole: Sequence[nn.Parameter] = (), ep: int = 1):
        """`whole`: frozen parameters that stay whole on each rank, where they are."""
        mesh = mesh["dp"] if mesh.ndim > 1 else mesh
        self.settings, self.pad_token, self.steps, self.mesh = settings, pad_token, steps, mesh
        self.device = torch.device(mesh.device_type, torch.cuda.current_device()) if mesh.device_type == "cuda" \
            else torch.device("cpu")
        self.shares = mesh.get_group()
        if not trained:
            model.requires_grad_(False)
        self.policy = self._shard(model, HEADS[head], set(whole))
        self.optimizer = self._optimizer() if trained else None
        self.version = 0

    def _shard(self, model: PreTrainedModel, head: type[SharedPrompt], whole: set[nn.Parameter]) -> SharedPrompt:
        half = self.settings.dtype == "bfloat16" or (self.settings.dtype == "auto" and self.device.type == "cuda")
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
        small = sum(parameter.numel() for parameter in model.parameters() if parameter not in whole) <= _SMALL
        for layer in () if small else model.get_decoder().layers:
            fully_shard(layer, mesh=self.mesh, mp_policy=precision, ignored_params=whole)
        policy = head(model, chunks=4 if small else 1)
        fully_shard(policy, mesh=self.mesh, mp_policy=precision, ignored_params=whole)
        return policy

    def _optimizer(self) -> torch.optim.Optimizer:
        trained = list(self.shards().values())
        groups = [{"params": [p for p in trained if p.ndim > 1], "weight_decay": self.settings.weight_decay},
                  {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0}]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=self.settings.learning_rate,
                                 betas=tuple(self.settings.betas), fused=True)

    def shards(self) -> dict[str, Tensor]:
        """This rank's part of each parameter that training changes, by the model's own names."""
        return {name: shard for name, shard in self.policy.model.named_parameters() if shard.requires_grad}

    def export(self, dtype: torch.dtype | None = None,
               into: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        return gathered(self.shards(), dtype, into)

    def logprobs(self, prompts: Ragged, responses: Ragged, temperature: float, images: Ragged | None = None) -> Ragged:
        return responses.with_values(self._infer(prompts, responses, temperature, images)[0][: len(responses.values)])

    def values(self, prompts: Ragged, responses: Ragged) -> Ragged:
        return responses.with_values(self._infer(prompts, responses)[0][: len(responses.values)])

    def scores(self, prompts: Ragged, responses: Ragged) -> Tensor:
        return self._infer(prompts, responses)[1][: len(responses)]

    @torch.no_grad()
    def _infer(self, prompts: Ragged, responses: Ragged, temperature: float = 1.0,
               images: Ragged | None = None) -> list[Tensor]:
        """What the head gives, on the CPU; that of placeholders comes last."""
        columns = {"prompts": prompts, "responses": responses, "images": images}
        batch = Batch(torch.arange(len(prompts)), {name: column for name, column in columns.items()
                                                   if column is not None})
        pieces = [[part.cpu() for part in self._forward(micro, temperature)] for micro in self._micro_batches(batch)]
        self.policy.reshard()  # the root stays whole after a forward without backward
        return [torch.cat(parts) for parts in zip(*pieces)]

    def update(self, batch: Batch, loss_of: LossOf, temperature: float, step: int,
               together: bool = False) -> dict[str, float]:
        if self.optimizer is None:
            raise ValueError("this role is frozen")
        micros = self._micro_batches(batch, together)
        for index, micro in enumerate(micros):
            self.policy.set_requires_gradient_sync(index == len(micros) - 1)
            outputs = self._forward(micro, temperature)
            loss = sum(output.sum() for output in outputs) * 0.0 if is_placeholder(micro) else loss_of(*outputs, micro)
            (loss * self.mesh.size()).backward()  # FSDP averages gradients over ranks; ours are to be summed
        norm = nn.utils.clip_grad_norm_(self.policy.parameters(), self.settings.max_grad_norm)
        norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not math.isfinite(norm):
            raise EngineError(f"the gradient norm of step {step} is {norm}; the weights are left as they were. Look at "
                              "the rewards and log-probabilities of this step, or lower learning_rate.")
        rate = self._set_rate(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.version += 1
        return {"grad_norm": norm, "learning_rate": rate}

    def _forward(self, micro: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        images = micro.columns.get("images")
        same = True if images is None else alike(images)
        inputs = inputs_of(micro["prompts"], micro["responses"], self.pad_token, self.device, same)
        if images is None:
            return self.policy(*inputs, temperature=temperature)
        first = torch.unique_consecutive(inputs[2].cpu(), return_counts=True)[1].cumsum(0) - 1
        pixels = shown(self.policy.model, images.select(first))
        if not pixels:
            inputs, pixels = with_a_glance(self.policy.model, inputs)
        pixels = {name: values.to(self.device) for name, values in pixels.items()}
        return self.policy(*inputs, temperature=temperature, images=pixels)

    def _set_rate(self, step: int) -> float:
        rate = self.settings.learning_rate * schedule(self.settings, step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.policy, self.optimizer)
        parameters = self.policy.named_parameters(remove_duplicate=False)  # tied ones by each of their names
        frozen = {name for name, parameter in parameters if not parameter.requires_grad}
        return {"model": {name: model[name] for name in model if name not in frozen}, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.policy, self.optimizer, model_state_dict=state["model"],
                       optim_state_dict=state["optimizer"], options=StateDictOptions(strict=False))
        for group, decay in zip(self.optimizer.param_groups, (self.settings.weight_decay, 0.0)):
            group.update(betas=tuple(self.settings.betas), weight_decay=decay)  # a resume may override them
        self.version += 1
