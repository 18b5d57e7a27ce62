"""Training and inference by PyTorch FSDP2: weights, gradients and optimizer state are sharded over the ranks.

Also gradient clipping over several meshes, and what happens to each layer before sharding: activation checkpointing and
compilation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from distflow.config.dag import Role
from distflow.config.freeze import frozen_names
from distflow.config.models import TRAINERS
from distflow.config.run import RoleRun
from distflow.data.batch import Batch, Ragged
from distflow.errors import EngineError
from distflow.plan import Layout
from distflow.telemetry import heartbeat
from distflow.telemetry.metrics import current
from distflow.weights.fingerprint import Sums
from distflow.weights.reshard import gather_tensors, sums_of_shards
from workers.engines import tensor_parallel
from workers.engines.capabilities import Capabilities, attend_by, decoder_layers, token_mixers
from workers.engines.context_parallel import ContextParallelCache, has_windows
from workers.engines.devices import convert, dimension, is_half, make_sharding_groups, on_device, sharding_mesh
from workers.engines.policy import Policy, SharedPrompt, first_rows, inputs_of
from workers.engines.routing import Routers, alike_before, balance_of, packed_choices
from workers.engines.trainer import LossOf, Trainer, is_placeholder
from workers.engines.value import ValueModel
from workers.engines.vision import image_inputs, same_as_previous, with_dummy_image


@torch.no_grad()
def clip_gradients(parameters: Mapping[str, Tensor], mesh: DeviceMesh, most: float,
                   device: torch.device) -> dict[str, float]:
    """Scale the gradients to a norm of at most `most`; return the squared norm before, by layer. Collective over
    `mesh`. torch's own function refuses parameters of different meshes, as FSDP with tensor parallelism has them."""
    gradients = {name: each.grad for name, each in parameters.items() if each.grad is not None}
    layers = {layer: index for index, layer in enumerate(dict.fromkeys(map(layer_of, parameters)))}
    squares = torch.zeros(len(layers), device=device)
    if gradients:
        locals_ = [_local(each) for each in gradients.values()]
        norms = torch.stack(torch._foreach_norm(locals_)).float()  # pyright: ignore[reportPrivateImportUsage]
        copies = torch.tensor([mesh.size() // _pieces(each) for each in gradients.values()])
        places = torch.tensor([layers[layer_of(name)] for name in gradients])
        squares.index_add_(0, places.to(device), (norms.square() / copies.to(norms.device)).to(device))
    found = dict(zip(layers, _sum(squares, mesh).tolist()))
    norm = math.sqrt(sum(found.values()))
    if gradients and norm > most:
        torch._foreach_mul_(locals_, most / (norm + 1e-6))  # pyright: ignore[reportPrivateImportUsage]
    return found


def _sum(values: Tensor, mesh: DeviceMesh) -> Tensor:
    """Add up values of all ranks of a mesh, in place."""
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            dist.all_reduce(values, group=mesh.get_group(axis))
    return values


def layer_of(name: str) -> str:
    """Return the number of a parameter's layer, or its module's name if it is in none."""
    *parts, module, _ = ["", *name.split(".")]
    return next((part for part in parts if part.isdigit()), module)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _some_places(shard: Tensor) -> tuple[slice, ...]:
    """Return the places of a shard that are evenly spread over the whole parameter, whatever it is cut into."""
    start = compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, shard.placements)[1] \
        if isinstance(shard, DTensor) else [0] * shard.ndim
    steps = [size // _LOOKED_AT + 1 for size in shard.shape]
    return tuple(slice(-first % step, None, step) for first, step in zip(start, steps))


def _pieces(gradient: Tensor) -> int:
    if not isinstance(gradient, DTensor):
        return 1
    return math.prod(gradient.device_mesh.size(dimension) for dimension, placement in enumerate(gradient.placements)
                     if not placement.is_replicate())


def decays(name: str, weight: Tensor) -> bool:
    """Return whether `weight_decay` is applied to a parameter: to matrices, routers' and embeddings' too, but not to
    biases, norms and decay rates (`A_log`), which may be stacked by expert, head or channel."""
    *owners, last = name.split(".")
    return weight.ndim > 1 and not last.endswith("bias") and last != "A_log" and not (owners and "norm" in owners[-1])


def recompute_layer(layer: nn.Module) -> None:
    """Recompute all but the layer's input (Chen et al. 2016); unlike transformers' own, it keeps the cache."""
    number: Any = next((getattr(mixer, "layer_idx", 0) for mixer in token_mixers(layer)), 0)
    layer.forward = functools.partial(_checkpoint, layer.forward, number)


def _checkpoint(forward: Callable, number: int, *inputs: Any, **more: Any) -> Any:
    past = getattr(more.get("past_key_values"), "layers", None)
    before = dict(vars(past[number])) if past else {}

    def from_start(*inputs: Any, **more: Any) -> Any:
        if past:  # the first pass has appended this layer's keys and values
            vars(past[number]).clear()
            vars(past[number]).update(before)
        return forward(*inputs, **more)

    return checkpoint(from_start, *inputs, use_reentrant=False, **more)


_LOOKED_AT = 16  # places along each dimension of a parameter whose weights tell whether it moves
_MOVED = 0.01  # of the learning rate: less is no movement
_SMALL = 64_000_000
"""Parameters up to which a model is gathered at once, and its gradients are summed over ranks once a step: to do so by
layer and micro-batch saves too little memory for its messages."""
KEPT_WHOLE = 1_000_000_000
"""Parameters up to which layers stay gathered from the first forward pass of a step to its last backward pass: to free
them in between saves 2 GB at most (float32: 4), and takes longer than a short pass computes."""
HEADS: dict[str, type[SharedPrompt]] = {"lm": Policy, "value": ValueModel}


class FSDPEngine(Trainer):
    """One role's model on a mesh: parameters are sharded over `dp` and `cp`, layers split by `tp`, tokens by `cp`."""

    has_long_rows = False  # in the batch under way, see `Capabilities.own_length`

    def __init__(self, model: PreTrainedModel, settings: RoleRun, mesh: DeviceMesh, pad_token: int, steps: int,
                 role: Role, whole: Sequence[nn.Parameter] = ()):
        """`whole` are frozen parameters that are not sharded. The weights of a role that is to `follow` are state."""
        if (stages := dimension(mesh, "pp")) > 1:
            raise EngineError(f"the engine `fsdp` cannot split a model by pp (here {stages}): "
                              f"{TRAINERS['fsdp'].cannot['pp']}")
        super().__init__(settings, mesh, pad_token, steps)
        self.dp_group = mesh.get_group("dp" if mesh.mesh_dim_names else 0)
        sharding = sharding_mesh(mesh, settings.replicas)
        self.shard_mesh = sharding["shard"] if settings.replicas == 1 else sharding["replica", "shard"]
        self.tp_mesh = sharding["tp"]  # FSDP wants it to be of the same mesh
        own = sum(parameter.numel() for parameter in {*model.parameters()} - {*whole})
        layers, self.small = decoder_layers(model), own <= _SMALL
        self.keeps = own <= KEPT_WHOLE and not settings.offload
        recomputes = settings.recomputes(sum(parameter.numel() for parameter in model.parameters()))
        half = is_half(self.settings, self.device.type)
        trained, head, self.follows = role.trained, role.head, role.follow is not None
        self.partial = trained and bool(settings.freeze)
        # FSDP rounds to the forward dtype what it gathers; who only reads a model needs no more of it. A mean of
        # weights does: bfloat16 has 8 bits, and would lose each step that is below 1/256 of a weight.
        self.held = torch.bfloat16 if half and not (trained or self.follows) else torch.float32
        self._split(model)
        parameters = dict(model.named_parameters())  # not of before: styles of tensor parallelism make new ones
        for name in frozen_names(settings.freeze if trained else ["*"], parameters):
            parameters[name].requires_grad_(False)
        context = ContextParallelCache(self.mesh.get_group("cp")) if dimension(self.mesh, "cp") > 1 else None
        self.routers = Routers(model) if settings.generation.routing_replay and trained and head == "lm" else None
        # Choices are replayed in the order of packed tokens, and one chunk is always packed.
        self.policy = HEADS[head](model, chunks=4 if self.small and not self.routers else 1, context=context)
        self.pads = not self.policy.packs
        if trained and head == "lm":
            self.policy.balance = balance_of(model, context.join if context else None)
            self.balances = self.policy.balance is not None
        if self.routers and self.pads:
            raise EngineError("`routing_replay` wants rows that are packed: no cp, images or layers with windows. Take "
                              "it out of `generation`")
        self.sharded = self._shard(layers, recomputes, set(whole))
        self.optimizer = self._optimizer() if trained else None
        shards = [shard for group in self.optimizer.param_groups for shard in group["params"]] if self.optimizer else []
        self.looked_at = [(shard, _some_places(shard), _pieces(shard) / self.mesh.size()) for shard in shards]
        self.kept = False  # whether a gradient is left behind an update, which the next one adds to
        self.moved: float | None = None  # share of these weights that the last update has moved

    @staticmethod
    def make_groups(layout: Layout, settings: RoleRun) -> None:
        make_sharding_groups(layout, settings.replicas)

    def _shard(self, layers: nn.ModuleList, recomputes: bool, whole: set[nn.Parameter]) -> FSDPModule:
        half = is_half(self.settings, self.device.type)
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
        offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if self.settings.offload else OffloadPolicy()
        rule = {"mesh": self.shard_mesh, "mp_policy": precision, "offload_policy": offload, "ignored_params": whole,
                "reshard_after_forward": False if self.keeps else None}  # None: but for the root
        for layer in layers if recomputes else ():
            recompute_layer(layer)
        for module in (self.policy,) if self.small else (*layers, self.policy):  # one at a time is there as a whole
            convert((each for each in module.parameters() if each not in whole and not isinstance(each, DTensor)),
                    self.held, self.device)
            fully_shard(module, **rule)
        sharded = cast(FSDPModule, self.policy)
        sharded.set_reshard_after_backward(not self.keeps)
        return sharded

    def _split(self, model: PreTrainedModel) -> None:
        tp, cp = dimension(self.mesh, "tp"), dimension(self.mesh, "cp")
        if tp > 1 and any(".lora_" in name for name, _ in model.named_parameters()):
            raise EngineError(f"tp: {tp} and `lora` cannot be had together: there is no plan of how adapters are cut. "
                              "Set  tp: 1 , the base is sharded over dp, or train without `lora`")
        if cp > 1 and getattr(model, "image_processor", None):
            raise EngineError(f"cp: {cp} cannot divide rows with images, whose tokens stand at rows and columns. "
                              "Set  cp: 1")
        if cp > 1 and has_windows(model.config.get_text_config()):
            raise EngineError(f"cp: {cp} cannot divide rows of a model with sliding windows. Set  cp: 1")
        if cp > 1 and (why := Capabilities.of(model).plain):
            raise EngineError(f"cp: {cp} cannot divide rows of a model that {why}. Set  cp: 1")
        if tp > 1:
            convert(model.parameters(), self.held)
            tensor_parallel.split(model, self.tp_mesh)

    def _optimizer(self) -> torch.optim.Optimizer:
        groups: dict[tuple, list[Tensor]] = {}  # fused kernels take the tensors of one mesh
        for name, shard in self._changing().items():
            groups.setdefault((decays(name, shard), getattr(shard, "device_mesh", None)), []).append(shard)
        return torch.optim.AdamW([{"params": shards, "decays": decaying} for (decaying, _), shards in groups.items()],
                                 lr=self.settings.learning_rate, fused=True)

    def shards(self) -> dict[str, Tensor]:
        """Return what `export` gathers: the trained weights, and frozen ones that a rollout may have given back."""
        return {name: shard for name, shard in self.policy.model.named_parameters()
                if shard.requires_grad or self.follows or self.partial}

    def _changing(self) -> dict[str, Tensor]:
        """Return the weights that are state; all others are those of the model's folder."""
        return {name: shard for name, shard in self.shards().items() if shard.requires_grad or self.follows}

    @torch.no_grad()
    def follow(self, other: FSDPEngine, mix: float) -> None:
        """Move the weights towards those of a model of the same layout: `mix` times these, and the rest of its own."""
        theirs = other.shards()
        for name, shard in self.shards().items():
            own, aim = (_local(each) for each in (shard, theirs[name]))
            own.lerp_(aim.to(own.device), mix)
        self.version += 1

    def export(self, dtype: torch.dtype | None = None,
               into: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        shards = self.shards()
        if self.settings.offload:  # collectives need them on the mesh's device
            shards = {name: shard.to(self.device) for name, shard in shards.items()}
        return gather_tensors(shards, dtype, into)

    def sums(self, dtype: torch.dtype) -> Sums:
        return sums_of_shards(self.shards(), dtype, self.device)

    def resident(self, weights: bool = True) -> Iterator[Tensor]:
        states = self.optimizer.state.values() if self.optimizer else ()
        shards = self.shards().values() if self.optimizer else self.policy.model.parameters()
        for tensor in (*(shards if weights else ()), *(t for state in states for t in state.values())):
            local = _local(tensor)
            if local.device.type == self.device.type:
                yield local

    def own_logprobs(self, prompts: Ragged, responses: Ragged) -> Ragged:
        """Return the log-probabilities by the model's own code with these weights, of each row alone: by its eager
        attention, and by its own head where that is not cut by tp."""
        model, head_alone = self.policy.model, vars(self.policy).get("head_alone", False)
        used = str(model.config._attn_implementation)
        attend_by(model, "eager")
        vars(self.policy).update(head_alone=head_alone and dimension(self.mesh, "tp") > 1)
        try:
            with torch.no_grad():
                micros = (Batch(row, {"prompts": prompts.select(row), "responses": responses.select(row)})
                          for row in torch.arange(len(prompts)).split(1))
                rows = [self._forward(micro, 1.0, plain=True)[0].cpu() for micro in micros]
        finally:
            self._reshard()
            vars(self.policy).update(head_alone=head_alone)
            attend_by(model, used)
        return responses.with_values(torch.cat(rows))

    @torch.no_grad()
    def infer(self, prompts: Ragged, responses: Ragged, temperature: float = 1.0, images: Ragged | None = None,
              routed_experts: Ragged | None = None, top: int = 0) -> tuple[Tensor, Tensor]:
        given = {name: column for name, column in (("images", images), ("routed_experts", routed_experts))
                 if column is not None}
        batch = Batch(torch.arange(len(prompts)), {"prompts": prompts, "responses": responses, **given})
        try:
            pieces = [[part.cpu() for part in self._forward(micro, temperature, top)]
                      for micro in self._micro_batches(batch)]
        finally:
            self._reshard()
        first, second = (torch.cat(parts) for parts in zip(*pieces))
        return first, second

    def _accumulate(self, micros: list[Batch], loss_of: LossOf, temperature: float) -> None:
        if self.optimizer is None:
            raise ValueError("this role is frozen")
        try:
            shares = self._token_shares(micros) if self.policy.balance else [0.0] * len(micros)
            for index, (micro, share) in enumerate(zip(micros, shares)):
                self._add_gradient(micro, loss_of, temperature, share, index == len(micros) - 1)
        finally:
            self._reshard()

    def _token_shares(self, micros: list[Batch]) -> list[float]:
        """Return the share that each micro-batch has of the tokens of all ranks' rows."""
        counts = torch.tensor([0.0 if is_placeholder(micro) else float(micro["prompts"].lengths.sum() +
                                                                       micro["responses"].lengths.sum())
                               for micro in micros], dtype=torch.float64)
        return (counts / self.total(counts.sum()).clamp(min=1.0)).tolist()

    def _add_gradient(self, micro: Batch, loss_of: LossOf, temperature: float, share: float, last: bool) -> None:
        self.sharded.set_requires_gradient_sync(last or not self.small)  # else each rank adds up whole gradients
        self.sharded.set_requires_all_reduce(last)  # between `replicas`
        outputs = self._forward(micro, temperature)
        loss = torch.cat(outputs).sum() * 0.0 if is_placeholder(micro) else loss_of(*outputs, micro)
        if self.policy.balance:
            balance = self.policy.balance.take()
            loss = loss + self.policy.balance.coefficient * share * balance
            current().mean("router/aux_loss", balance.detach() * share, share)
        (loss * self.shard_mesh.size()).backward()  # FSDP averages gradients over ranks; these are sums

    def _reshard(self) -> None:
        """Free what stays gathered: layers of a model that `keeps` them, and the root after an inference."""
        for module in self.policy.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _step(self, rate: float) -> float:
        layers = clip_gradients(self.shards(), self.mesh, self.settings.max_grad_norm, self.device)
        norm = self.note_layers(layers)
        if self.optimizer and math.isfinite(norm):
            for group in self.optimizer.param_groups:  # the run's settings may differ from those in the checkpoint
                group.update(lr=rate, betas=tuple(self.settings.betas),
                             weight_decay=self.settings.weight_decay if group["decays"] else 0.0)
            before = self._some_weights()
            self.optimizer.step()
            self.moved = self._moved(before, rate) if rate else None
        self.zero_grad()
        self.kept = any(shard.grad is not None for shard in self.shards().values())
        return norm

    def remembered(self) -> dict[str, float]:
        state = next(iter(self.optimizer.state.values()), {}) if self.optimizer else {}
        moved = {"gradient/kept": float(self.kept)} | ({} if self.moved is None else {"gradient/moved": self.moved})
        return moved | ({"gradient/remembered": float(state["step"])} if "step" in state else {})

    def _some_weights(self) -> Tensor:
        """Return a few of the weights of each parameter that is trained, as far as this rank has them."""
        return torch.cat([_local(shard.detach())[places].flatten() for shard, places, _ in self.looked_at])

    def _moved(self, before: Tensor, rate: float) -> float:
        """Return the share of weights that differ from those before an update. Collective; counts copies once."""
        moved = (self._some_weights() - before).abs() > _MOVED * rate
        counted = torch.stack([self._shares[moved].sum(), self._shares.sum()])
        some, of = _sum(counted.to(self.device), self.mesh).tolist()
        return some / of

    @functools.cached_property
    def _shares(self) -> Tensor:
        """How much each of these weights counts: less if other ranks have it, too."""
        return torch.cat([torch.full_like(_local(shard.detach())[places].flatten(), share, dtype=torch.float32)
                          for shard, places, share in self.looked_at])

    def zero_grad(self) -> None:
        self.policy.zero_grad()

    def _forward(self, micro: Batch, temperature: float, top: int = 0,
                 plain: bool = False) -> tuple[Tensor, Tensor]:
        """Compute a micro-batch; `plain`: by the model's own code, as rows that are too long are in any case."""
        heartbeat.current().tick()
        plain = plain or self.has_long_rows
        images: Ragged | None = micro.columns.get("images")  # pyright: ignore[reportAssignmentType]
        same = True if images is None else same_as_previous(images)
        routed: Ragged | None = micro.columns.get("routed_experts")  # pyright: ignore[reportAssignmentType]
        if routed is not None and self.routers:
            same = alike_before(routed, micro["prompts"].lengths)
        inputs = inputs_of(micro["prompts"], micro["responses"], self.pad_token, torch.device("cpu"), same)
        if self.routers:
            self.routers.replayed = None if routed is None else packed_choices(
                routed, micro["prompts"].lengths, first_rows(inputs[2]).tolist(), self.policy.rest_of(inputs[4]),
                self.routers.routing.unknown).to(self.device)
        more = {"temperature": temperature, "top": top, "candidates": self._candidates(micro, inputs[3].shape[1]),
                "plain": plain}
        if images is None:
            on_gpu = self.device.type == "cuda" and self.policy.packs and not plain
            packed = self.policy.pack(*inputs, device=self.device) if on_gpu else None
            return self.policy(*(on_device(part, self.device) for part in inputs), packed=packed, **more)
        pixels = image_inputs(self.policy.model, images.select(first_rows(inputs[2])))
        inputs = tuple(part.to(self.device) for part in inputs)
        if not pixels:
            inputs, pixels = with_dummy_image(self.policy.model, inputs)
        pixels = {name: values.to(self.device) for name, values in pixels.items()}
        return self.policy(*inputs, images=pixels, **more)

    def _micro_batches(self, batch: Batch, together: bool = False) -> list[Batch]:
        """Cut rows, and note whether any rank's are too long for rotary frequencies that all rows share."""
        if limit := self.policy.capabilities.own_length:
            lengths = (batch["prompts"].lengths + batch["responses"].lengths).tolist()
            longest = torch.tensor(max(lengths, default=0), device=self.device)
            dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.dp_group)
            self.has_long_rows = int(longest) > limit
        return super()._micro_batches(batch, together)

    def _candidates(self, micro: Batch, width: int) -> Tensor | None:
        """Return [B, width, K]: the tokens whose log-probabilities a loss wants in place of the responses' own."""
        if "candidates" not in micro.columns:
            return None
        padded = micro["candidates"].padded().long()
        return nn.functional.pad(padded, (0, 0, 0, width - padded.shape[1])).to(self.device)

    def state_dict(self) -> dict[str, Any]:
        shards = self._changing()
        weights = {"model": {name: shard.detach() for name, shard in shards.items()}}
        if not self.optimizer:
            return weights
        return {**weights, "optimizer": {name: self._state_of(shard) for name, shard in shards.items()}}

    def _state_of(self, shard: Tensor) -> dict[str, Tensor]:
        """Return the optimizer state of one parameter; groups would depend on the layout."""
        return (self.optimizer and self.optimizer.state[shard]) or {
            "step": torch.zeros((), device=shard.device), "exp_avg": torch.zeros_like(shard).detach(),
            "exp_avg_sq": torch.zeros_like(shard).detach()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, shard in self._changing().items():
            shard.copy_(state["model"][name])
            if self.optimizer:
                self.optimizer.state[shard] = dict(state["optimizer"][name])
        self.version += 1
