"""Fused norms compute what transformers' own do."""

from __future__ import annotations

import copy
import datetime

import torch
import torch.distributed as dist
from ranks import run_ranks
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from distflow.plan import STAGES_OUTERMOST, Layout
from workers.engines.devices import fuse_norms, is_rms_norm, mesh_of


def test_a_model_with_fused_norms_gives_the_same_logits_and_gradients(model):
    tokens = torch.arange(5, 25)[None]
    fused = copy.deepcopy(model)
    for norm in (module for name, module in [*model.named_modules(), *fused.named_modules()] if name.endswith("norm")):
        norm.weight.data.copy_(torch.linspace(0.5, 2, len(norm.weight)))
    assert fuse_norms(fused) == 4 * len(model.base_model.layers) + 1
    found = []
    for each in (model, copy.deepcopy(fused)):  # a copy, as a rollout has one
        logits = each(tokens).logits
        logits.square().sum().backward()
        found.append((logits, *(parameter.grad for parameter in each.parameters())))
    for one, other in zip(*found):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)
    assert list(fused.state_dict()) == list(model.state_dict())


def test_only_norms_that_scale_by_their_weight_are_fused():
    assert is_rms_norm(Qwen3RMSNorm)
    assert not is_rms_norm(GemmaRMSNorm)  # scales by 1 + weight
    assert not is_rms_norm(torch.nn.LayerNorm)


def groups_of_layouts() -> tuple[list[list[int]], int, list[int]]:
    """Return the ranks of this rank's groups by layout and dimension, the number of its groups, and a sum by each."""
    layouts = [Layout(4), Layout(2, tp=2), Layout(2, pp=2), Layout(2, cp=2, order=STAGES_OUTERMOST),
               Layout(2, pp=2, order=STAGES_OUTERMOST)]
    meshes = [mesh_of(layout, "cpu") for layout in layouts]
    groups = [mesh.get_group(axis) for mesh in meshes for axis in range(4)]
    sums = []
    for group in groups:
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total, group=group)
        sums.append(int(total))
    return [dist.get_process_group_ranks(group) for group in groups], len({*groups, dist.group.WORLD}), sums


def test_meshes_share_the_groups_of_the_same_ranks():
    """Of four ranks: alone, two pairs and all of them, however many layouts and dimensions there are."""
    for rank, (ranks, count, sums) in enumerate(run_ranks(4, groups_of_layouts)):
        alone, near, far, everyone = [rank], [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2], [0, 1, 2, 3]
        assert ranks == [everyone, alone, alone, alone,
                         far, alone, alone, near,
                         far, near, alone, alone,
                         far, alone, near, alone,
                         near, far, alone, alone]
        assert sums == [sum(each) for each in ranks]
        assert count == 4


def limits_of_groups() -> set[datetime.timedelta]:
    """Return the time limits of all groups, and of that of all ranks."""
    mesh = mesh_of(Layout(2), "cpu")
    groups = [dist.group.WORLD, *(mesh.get_group(axis) for axis in range(4))]
    return {group._get_backend(torch.device("cpu")).options._timeout for group in groups}


def test_groups_have_the_time_limit_of_that_of_all_ranks():
    for limits in run_ranks(2, limits_of_groups):
        assert len(limits) == 1
