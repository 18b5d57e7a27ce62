"""Layout of a Megatron model over ranks, and its process groups.

The groups are made from our mesh and handed to Megatron, so that nothing of its global parallel state is used and each
role may have a layout of its own.
"""

from __future__ import annotations

from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from transformers import PretrainedConfig

from distflow.errors import EngineError
from distflow.plan import SHARES_OUTERMOST, Layout
from workers.engines.devices import NAMES, group_along


def describe(layout: Layout) -> str:
    order = "" if layout.order == SHARES_OUTERMOST else f" order={layout.order}"
    layers = f" layers={','.join(map(str, layout.layers))}" if layout.layers else ""
    return " ".join(f"{size}={getattr(layout, size)}" for size in (*NAMES, "ep")) + order + layers


def check(layout: Layout, config: PretrainedConfig) -> None:
    experts = getattr(config, "num_experts", None) or 0
    _divides("tp", layout.tp, {"attention heads": config.num_attention_heads,
                               "key-value heads": config.num_key_value_heads,
                               "units of the feed-forward layer": config.intermediate_size})
    if not layout.layers:
        _divides("pp", layout.pp, {"layers": config.num_hidden_layers})
    if layout.ep > 1 and not experts:
        raise EngineError(f"ep: {layout.ep} splits experts, and this model ({config.model_type}) has none. Remove ep")
    if layout.ep > 1:
        _divides("ep", layout.ep, {"experts": experts, "ranks of dp × cp × tp": layout.dp * layout.cp * layout.tp})


def _divides(axis: str, ways: int, counts: dict[str, int]) -> None:
    odd = [f"{count} {what}" for what, count in counts.items() if count % ways]
    if odd:
        good = [str(number) for number in range(1, max(counts.values()) + 1)
                if all(count % number == 0 for count in counts.values())]
        raise EngineError(f"{axis}: {ways} does not divide the model's {' and '.join(odd)}. {axis} may be "
                          f"{', '.join(good)}")


def groups_of(ranks: Tensor, layout: Layout) -> ProcessGroupCollection:
    """Return this rank's groups for Megatron; None for each on a rank that is not of `ranks`, those of the layout.
    Collective over all ranks the first time."""
    ranks, group = ranks.reshape([getattr(layout, name) for name in NAMES]), group_along
    dp, pp, cp, tp = range(4)
    experts = ranks.permute(pp, dp, cp, tp).reshape(layout.pp, 1, -1, layout.ep)  # [pp, tp of an expert, dp of it, ep]
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
