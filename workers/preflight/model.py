"""Proves that each model of a run computes what its own code computes, on all ranks that have it.

    engine     the engine that trains, as it is: against the model's own eager attention, with the same weights, of each
               row alone and without padding
    loaded     the same: against the model as transformers has loaded it, before anything was done to it; above
               50 million parameters the Megatron engine alone, which does not have the model's own code
    sampling   the engine that samples: against the engine that trains, and once more after the first update

What is wrong by less than rounding (`ROUNDING`) is not found. Weights of a transformers engine that samples beside the
trainer are compared bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distflow.config.spec import Spec
from distflow.contracts.forms import ENGINE_TYPES
from distflow.data.batch import Ragged
from distflow.errors import Diagnostic
from distflow.plan import Plan
from workers.engines.capabilities import attend_by, decoder_layers
from workers.engines.collectives import choose_backend, torch_name
from workers.engines.devices import choose, dtype_of
from workers.engines.fsdp import FSDPEngine
from workers.engines.role_engines import RoleEngines
from workers.engines.rounding import ROUNDING
from workers.engines.sampling import TokenLimits
from workers.engines.saved_model import row_numbers
from workers.preflight.proofs import FailedProof, Preflight
from workers.roles import build_roles

_SHORT = (4, 6)
"""Tokens of a prompt and of a response."""
_PAST = 8  # tokens by which the long row passes a length that the configuration names
_LONGEST, _LEAST = 1100, 24
"""Most and fewest tokens of the long row: eager attention of many takes much memory."""
_TRIED_ON = "on a few rows of plain tokens"
_LOADED = 50_000_000
"""Parameters up to which a model is computed as it was loaded, by a copy on the CPU: a second."""
_ANY_TOKEN = TokenLimits(0, 1.0, 0.0)
_SAMPLED = 8


@dataclass(frozen=True)
class ProofRows:
    """Rows of plain tokens: two of one short prompt, and a long one past each length that the configuration names, as
    far as rows of the run may be."""

    prompts: Ragged
    responses: Ragged

    @classmethod
    def of(cls, spec: Spec, config: Any, tokenizer: PreTrainedTokenizerBase, new_tokens: int) -> ProofRows:
        added: dict[str, int] = cast(Any, tokenizer).get_added_vocab()
        special = {*tokenizer.all_special_ids, *added.values()}
        size = min(len(tokenizer), config.get_text_config().vocab_size)
        usable = torch.tensor([token for token in range(size) if token not in special])
        chosen = torch.Generator().manual_seed(size)
        data = spec.run.data
        limit = data.max_prompt_tokens + max(new_tokens, data.max_target_tokens)
        named = (length + _PAST for length in _named_lengths(config) if length + _PAST <= min(limit, _LONGEST))
        longest = max(max(named, default=0), min(limit, _LEAST), 4)
        sizes = [_SHORT, (_SHORT[0], 1), (longest // 2, (longest + 1) // 2)]
        rows = [usable[torch.randint(len(usable), (sum(each),), generator=chosen)] for each in sizes]
        rows[1][: _SHORT[0]] = rows[0][: _SHORT[0]]
        return cls(*(Ragged.from_rows(part) for part in zip(*(
            (row[:prompt], row[prompt:]) for row, (prompt, _) in zip(rows, sizes)))))


class ModelProofs:
    """Proofs of the models of a rank that trains, in the first worker of a run."""

    def __init__(self, spec: Spec, resumed: bool, device: str = "cpu"):
        self.spec, self.resumed, self.device = spec, resumed, device
        self.rows: dict[str, ProofRows] = {}
        self.loaded: dict[str, Tensor | None] = {}

    def look(self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Keep what a model computes that has just been loaded."""
        settings = self.spec.settings_of(name)
        if self.spec.dag.roles[name].head == "lm" and settings:
            self.rows[name] = ProofRows.of(self.spec, model.config, tokenizer, settings.generation.max_new_tokens)
            self.loaded[name] = None if self.resumed else loaded_numbers(
                model, self.rows[name], self.device if settings.engine == "megatron" else "")

    def at_start(self, roles: Mapping[str, RoleEngines], account: Preflight) -> None:
        """Prove all models of this rank, and add that to the account. Collective. Raises InvalidInput on the rank that
        writes a role's model: a proof has failed."""
        def failed() -> Iterator[FailedProof]:
            for name, role in self._here(roles):
                yield from _on_writer(role, [*prove_engine(role, self.rows[name], self.loaded[name]),
                                             *self._sampling(role, "at its start")])

        account.prove("models", sum(len(rows.prompts) for rows in self.rows.values()), failed)
        account.require(_TRIED_ON)

    def after_update(self, roles: Mapping[str, RoleEngines]) -> None:
        """Prove that engines which sample have the weights of the first update. See `at_start`."""
        account = Preflight()
        account.prove("weights", len(self.rows), lambda: [
            failed for _, role in self._here(roles)
            for failed in _on_writer(role, self._sampling(role, "after the first update"))])
        account.require(_TRIED_ON)

    def _here(self, roles: Mapping[str, RoleEngines]) -> list[tuple[str, RoleEngines]]:
        return [(name, role) for name, role in sorted(roles.items()) if name in self.rows and role.has_engine]

    def _sampling(self, role: RoleEngines, when: str) -> list[FailedProof]:
        beside = role.rollout is not None and not role.rollout.absent and not role.shared_engine
        route = role.engine_swap and role.engine_swap.route
        return prove_sampling(role, self.rows[role.name], when) if beside and not route else []


def prove_alone(account: Preflight, spec: Spec, made: Plan) -> None:
    """Prove the models of a plan for one rank, in this process alone. See `ModelProofs.at_start`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    choose(device)
    dist.init_process_group(torch_name(choose_backend("auto", device), device), rank=0, world_size=1,
                            store=dist.HashStore())  # pyright: ignore[reportPrivateImportUsage]
    proofs, tasks, roles = ModelProofs(spec, False, device), made.chain(0), {}
    try:
        roles = build_roles(spec, made, {task.role for task in tasks if task.type in ENGINE_TYPES},
                            {task.role for task in tasks if task.samples}, device, look=proofs.look)
        proofs.at_start(roles, account)
    finally:
        for role in roles.values():
            if role.rollout:
                role.rollout.close()
        dist.destroy_process_group()


def _on_writer(role: RoleEngines, failed: list[FailedProof]) -> list[FailedProof]:
    return failed if dist.get_rank() == role.writer else []


def loaded_numbers(model: PreTrainedModel, rows: ProofRows, device: str = "") -> Tensor | None:
    """Return the log-probabilities [T] of a model that transformers has just loaded, each row alone, in float32. A
    large one is computed on the `device`, one layer at a time; None without a device."""
    pairs = [*zip(rows.prompts.rows, rows.responses.rows)]
    if sum(parameter.numel() for parameter in model.parameters()) <= _LOADED:
        exact = copy.deepcopy(model).float()
        attend_by(exact, "eager")
        return torch.cat([row_numbers(exact, *row) for row in pairs])
    if not device:
        return None
    attend_by(model, "eager")
    with _layer_by_layer(model, device):
        return torch.cat([row_numbers(model, prompt.to(device), response.to(device)) for prompt, response in pairs]
                         ).cpu()


@contextlib.contextmanager
def _layer_by_layer(model: PreTrainedModel, device: str) -> Iterator[None]:
    """Have the weights of a layer on a device in float32 while it computes, and those of no other."""
    layers = decoder_layers(model)
    inside, held = {*layers.modules()}, dict[Tensor, Tensor]()

    def bring(part: nn.Module, _: Any) -> None:
        for tensor in (*part.parameters(), *part.buffers()):
            held.setdefault(tensor, tensor.data)
            tensor.data = tensor.data.to(device, torch.float32 if isinstance(tensor, nn.Parameter) else None)

    def release(part: nn.Module, *_: Any) -> None:
        for tensor in (*part.parameters(), *part.buffers()):
            tensor.data = held.pop(tensor, tensor.data)

    whole = [*layers, *(part for part in model.modules() if part not in inside and not [*part.children()])]
    hooks = [hook for part in whole
             for hook in (part.register_forward_pre_hook(bring), part.register_forward_hook(release))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _named_lengths(config: Any) -> list[int]:
    """Return the numbers of tokens from which on a model computes otherwise, by its configuration."""
    text = config.get_text_config()
    named = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size", "mamba_chunk_size",
                                                    "chunk_size", "original_max_position_embeddings")]
    rope = getattr(text, "rope_parameters", None) or {}
    named += [each.get("original_max_position_embeddings") for each in (rope, *rope.values()) if isinstance(each, dict)]
    return [int(length) for length in named if isinstance(length, int | float) and length > 0]


def prove_engine(role: RoleEngines, rows: ProofRows, loaded: Tensor | None) -> list[FailedProof]:
    """Prove the engine that trains and infers. Collective over the ranks that have it, which find the same."""
    engine = role.engine
    if not isinstance(engine, FSDPEngine) and loaded is None:
        return []
    found = engine.logprobs(rows.prompts, rows.responses, 1.0).values
    if isinstance(engine, FSDPEngine):
        own = engine.own_logprobs(rows.prompts, rows.responses).values
        if not _all_finite(role, own):
            return [FailedProof(Diagnostic(
                f"role `{role.name}`: the model's own code computes numbers that are not finite{_odd_weight(engine)}",
                None, "A run that diverged has saved it, or its files have larger numbers than the `dtype` of its "
                "config.json holds. Take an earlier checkpoint, or correct `dtype`."))]
        if wrong := _difference(role, found, own):
            alone = torch.cat([engine.logprobs(rows.prompts.select(row), rows.responses.select(row), 1.0).values
                               for row in torch.arange(len(rows.prompts)).split(1)])
            part = "its attention or its head differs" if _difference(role, alone, own) else \
                "rows differ by what lies beside them: packing, padding, or prompts that are read once"
            return _failed(role, "engine", f"other log-probabilities than the model's own code with the same weights: "
                           f"{wrong}; {part}", "It would learn something else.")
    if loaded is not None and (wrong := _difference(role, found, loaded)):
        return _failed(role, "engine", f"other log-probabilities than the model that transformers loads: {wrong}",
                       "A weight, a buffer or a setting has changed on its way into the engine.")
    return []


def prove_sampling(role: RoleEngines, rows: ProofRows, when: str) -> list[FailedProof]:
    """Prove the engine that samples, on ranks that have both. Collective over them, which find the same. `when`: said
    of a failure."""
    prompts = rows.prompts.select(torch.tensor([0, 2]))
    sampled = role.generate(prompts, -1 - torch.arange(4), 2, _SAMPLED, 1.0, limits=_ANY_TOKEN)
    asked = prompts.select(torch.tensor([0, 0, 1, 1]))
    routed = role.routed_experts(sampled.experts, asked.lengths, sampled.tokens.lengths)
    trained = role.engine.logprobs(asked, sampled.tokens, 1.0, None, *routed).values
    if wrong := _difference(role, sampled.logprobs.values, trained):
        return _failed(role, "rollout", f"log-probabilities {when} that the engine which trains does not have: {wrong}",
                       "It samples from another policy than the one that is trained.")
    if stale := _stale_weight(role):
        return _failed(role, "rollout", f"another weight {when} than the engine which trains, {stale}",
                       "It samples from an older or another policy than the one that is trained.")
    return []


def _stale_weight(role: RoleEngines) -> str:
    """Return which weight the engine that samples has otherwise on any rank; "" if none, or none can be looked at.
    Collective."""
    odd = [] if role.settings.swap else role.sampler.differing(role.engine.sums(role.sampler.dtype))
    if not float(_largest(role, torch.tensor([float(len(odd))]))[0]):
        return ""
    return f"`{odd[0]}`" if odd else "on another rank"


def _largest(role: RoleEngines, values: Tensor) -> Tensor:
    """Return the largest of each of the `values` [N] of all ranks that have the role's engine. Collective."""
    mesh, values = role.engine.mesh, values.to(role.engine.device)
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    return values.cpu()


def _all_finite(role: RoleEngines, values: Tensor) -> bool:
    """Return whether values are finite on all ranks. Collective."""
    return not float(_largest(role, values.float().isfinite().logical_not().any()[None].float())[0])


def _odd_weight(engine: FSDPEngine) -> str:
    """Return which weight has such a number on this rank, for a sentence; "" if none."""
    shards = ((name, shard.to_local() if isinstance(shard, DTensor) else shard)
              for name, shard in engine.policy.model.named_parameters())
    name = next((name for name, shard in shards if not shard.isfinite().all()), "")
    return name and f": `{name}` has some"


def _difference(role: RoleEngines, found: Tensor, expected: Tensor) -> str:
    """Return how far log-probabilities are apart on the rank where that is most, in words; "" if that is rounding.
    Collective."""
    apart = (found.float().cpu() - expected.float().cpu()).abs().nan_to_num(torch.inf)
    mean, most = _largest(role, torch.stack([apart.mean(), apart.max()])).tolist() if len(apart) else (0.0, 0.0)
    bounds = ROUNDING[dtype_of(role.settings, role.engine.device.type).itemsize]
    if mean <= bounds.mean and most <= bounds.most:
        return ""
    return f"{mean:.2g} nats on the mean and {most:.2g} at most, where {bounds.mean:g} and {bounds.most:g} are rounding"


def _failed(role: RoleEngines, key: str, what: str, hint: str) -> list[FailedProof]:
    name = getattr(role.settings, key)
    return [FailedProof(Diagnostic(f"role `{role.name}`, `{key}: {name}`: it computes {what}", None, hint))]
