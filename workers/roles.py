"""Roles of a rank: their models loaded and sharded as the plan says."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from distflow.config.freeze import check_loaded
from distflow.config.models import TRAINERS, base_of, odd_token
from distflow.config.run import RoleRun
from distflow.config.spec import Spec
from distflow.errors import EngineError
from distflow.plan import Plan
from distflow.telemetry import events, timeline
from workers.engines import engine_class
from workers.engines.devices import group_along, mesh_of, ranks_of, renumber_groups
from workers.engines.fsdp import FSDPEngine
from workers.engines.loading import load_model, load_tokenizer
from workers.engines.role_engines import Meshes, RoleEngines
from workers.engines.weight_route import WeightRoute


def build_roles(spec: Spec, plan: Plan, names: set[str], sampling: set[str], device: str, training: bool = True,
                look: Callable[..., None] | None = None) -> dict[str, RoleEngines]:
    """Load and shard the models of this rank's roles. `training`: whether those that sample train and infer here too.
    `look`: is given each role's name, model and tokenizer before anything is done to them."""
    roles, streams = {}, {name: number for number, name in enumerate(sorted(sampling))}
    sharing = {name: base_of(spec, name) for name in sorted(names - sampling) if base_of(spec, name) in names}
    for name in sorted(names - sharing.keys()):
        model_of, settings = spec.model_of(name), spec.settings_of(name)
        assert model_of, "the planner refuses roles without a model"
        assert settings
        model, tokenizer = load_model(spec, model_of, spec.dag.roles[name].head)
        if spec.dag.roles[name].trained:
            check_loaded(spec, name, [parameter for parameter, _ in model.named_parameters()])
        if look:
            look(name, model, tokenizer)
        meshes = _meshes(plan, name, settings, device, training or name not in sampling, name in sampling)
        roles[name] = RoleEngines(name, model, tokenizer, settings, meshes, spec, streams.get(name))
        renumber_groups()
    for name, owner in sharing.items():
        roles[name] = _base_role(name, roles[owner])
    _require_one_vocabulary({name: role.tokenizer for name, role in roles.items()})
    return roles


def follow(spec: Spec, roles: Mapping[str, RoleEngines], done: int) -> None:
    """Move the roles that follow another one, if it is time after `done` steps."""
    for name, role in roles.items():
        settings, copied = spec.dag.roles[name].follow, spec.dag.roles[name].copy_of
        if settings and copied and done % settings.every == 0:
            if not dist.get_rank():
                events.record("reference_followed", role=name, followed=copied, of_step=done)
            if not role.has_engine:
                continue
            engine, other = role.engine, roles[copied].engine
            assert isinstance(engine, FSDPEngine)
            assert isinstance(other, FSDPEngine), "the planner refuses other engines"
            with timeline.current().span(timeline.WEIGHTS, "follow", done, role=name):
                engine.follow(other, settings.mix)


def tokenizer_of(spec: Spec, name: str, role: RoleEngines) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a role whose model is on other ranks, for prompts that `role` is to read."""
    model = spec.model_of(name)
    if model is None or model == role.source:
        return role.tokenizer
    tokenizer = load_tokenizer(spec, model)
    _require_one_vocabulary({name: tokenizer, role.name: role.tokenizer})
    return tokenizer


def _meshes(plan: Plan, role: str, settings: RoleRun, device: str, training: bool, sampling: bool) -> Meshes:
    """Return this rank's part of a role's meshes. Collective over all ranks."""
    layouts = [plan.layout_of(role, samples) for samples in (False, True)]
    if training:
        engine_class(TRAINERS[settings.engine]).make_groups(layouts[0], settings)
    if sampling and settings.rollout == "vllm":  # which starts in this group
        group_along(ranks_of(layouts[1]).flatten(), 0)
    trainer, rollout = (mesh_of(replace(layout, ep=1, layers=()), device) for layout in layouts)
    ranks = [layout.active_ranks for layout in layouts]
    route = WeightRoute(*ranks) if training and sampling and ranks[0] != ranks[1] else None
    return Meshes(trainer if training else None, rollout, layouts[0], layouts[1].ep, route)


def _require_one_vocabulary(tokenizers: dict[str, PreTrainedTokenizerBase]) -> None:
    """Check that a token means the same to all roles, which pass tokens to each other."""
    (name, first), *others = tokenizers.items()
    for other, tokenizer in others:
        if odd := odd_token(first.get_vocab(), tokenizer.get_vocab()):
            raise EngineError(f"roles `{name}` and `{other}` have different tokenizers, so that the tokens "
                              f"of one mean nothing to the other (first difference: {odd!r}). Give them models of one "
                              "family")


def _base_role(name: str, owner: RoleEngines) -> RoleEngines:
    from workers.engines.adapters import BaseEngine

    role = copy.copy(owner)
    role.name, role.rollout = name, None
    if owner.has_engine:
        role._trainer = BaseEngine(owner.engine)  # pyright: ignore[reportArgumentType]
    return role
