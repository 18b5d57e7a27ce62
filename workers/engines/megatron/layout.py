"""How a Megatron model is split over ranks, and the process groups that follow from it.

The groups are made from our mesh and handed to Megatron, so that nothing of its global parallel state is used and each
role may have a layout of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig

from distflow.schema.errors import EngineError

AXES = ("dp", "pp", "cp", "tp")


@dataclass(frozen=True)
class Layout:
    """How many ways a role is split. `ep` ways by experts, over the ranks of dp and cp."""

    dp: int
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @classmethod
    def of(cls, mesh: DeviceMesh, ep: int = 1) -> Layout:
        """An unnamed mesh of one dimension splits the rows alone."""
        names = mesh.mesh_dim_names or ("dp",)
        return cls(**{axis: mesh.size(names.index(axis)) if axis in names else 1 for axis in AXES}, ep=ep)

    def __str__(self) -> str:
        return " ".join(f"{axis}={getattr(self, axis)}" for axis in (*AXES, "ep"))

    def check(self, config: PretrainedConfig) -> None:
        """
        Raises:
            EngineError: the layout does not divide the model; says what would.
        """
        experts = getattr(config, "num_experts", None) or 0
        _divides("tp", self.tp, {"attention heads": config.num_attention_heads,
                                 "key-value heads": config.num_key_value_heads,
                                 "units of the feed-forward layer": config.intermediate_size})
        _divides("pp", self.pp, {"layers": config.num_hidden_layers})
        if experts and self.tp > 1:
            raise EngineError(f"Megatron trains mixtures of experts with tp only together with sequence parallelism, "
                              f"which its layers without TransformerEngine lack. Instead of tp: {self.tp} take  "
                              f"layouts: {{…: {{tp: 1, ep: {self.tp}}}}}")
        if self.ep > 1 and not experts:
            raise EngineError(f"ep: {self.ep} splits experts, and this model ({config.model_type}) has none. Remove ep")
        if self.ep > 1:
            _divides("ep", self.ep, {"experts": experts, "ranks of dp × cp": self.dp * self.cp})


def _divides(axis: str, ways: int, counts: dict[str, int]) -> None:
    odd = [f"{count} {what}" for what, count in counts.items() if count % ways]
    if odd:
        good = [str(number) for number in range(1, max(counts.values()) + 1)
                if all(count % number == 0 for count in counts.values())]
        raise EngineError(f"{axis}: {ways} does not divide the model's {' and '.join(odd)}. {axis} may be "
                          f"{', '.join(good)}")


def groups_of(mesh: DeviceMesh, layout: Layout) -> ProcessGroupCollection:
    """The groups of this rank that Megatron asks for. Collective over all ranks."""
    ranks = mesh.mesh.reshape([getattr(layout, axis) for axis in AXES])
    made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}

    def group(ranks: Tensor, *axes: int) -> dist.ProcessGroup:
        rest = [axis for axis in range(ranks.ndim) if axis not in axes]
        lists = ranks.permute(*rest, *axes).flatten(len(rest)).reshape(-1, _count(ranks, axes)).tolist()
        key = tuple(map(tuple, lists))
        if key not in made:
            made[key], _ = dist.new_subgroups_by_enumeration(lists)
        return made[key]

    dp, pp, cp, tp = range(4)
    experts = ranks.permute(pp, tp, dp, cp).reshape(layout.pp, layout.tp, -1, layout.ep)  # [pp, tp, expert dp, ep]
    groups = ProcessGroupCollection(
        tp=group(ranks, tp), pp=group(ranks, pp), cp=group(ranks, cp), dp=group(ranks, dp), mp=group(ranks, pp, tp),
        dp_cp=group(ranks, dp, cp), tp_cp=group(ranks, cp, tp), tp_dp_cp=group(ranks, dp, cp, tp),
        ep=group(experts, 3), expt_dp=group(experts, 2), tp_ep=group(experts, 1, 3), tp_ep_pp=group(experts, 0, 1, 3),
        expt_tp=group(experts, 1), intra_dist_opt=group(ranks, dp, pp, cp, tp))
    ends = ranks[:, [0, -1]] if layout.pp > 1 else ranks  # of the pipeline: they share the word embeddings
    groups.embd = group(ends, pp)
    groups.pos_embd = group(ranks[:, :1], pp)
    groups.intra_dp_cp, groups.intra_expt_dp = groups.dp_cp, groups.expt_dp
    return groups


def _count(ranks: Tensor, axes: Sequence[int]) -> int:
    count = 1
    for axis in axes:
        count *= ranks.shape[axis]
    return count
