"""Converts Hugging Face weights into Megatron's slices and back, bit for bit.

Megatron holds the query, key and value weights in one tensor, group after group of heads, and the two halves of a gated
feed-forward layer in another; an expert's weights are modules of their own, which Hugging Face stacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig

from distflow.errors import EngineError
from distflow.plan import Layout

Fuse = Callable[[list[Tensor]], list[Tensor]]


def _same(parts: list[Tensor]) -> list[Tensor]:
    return parts


@dataclass(frozen=True)
class WeightEntry:
    """Parameters of one stage that are converted together: `theirs` by Hugging Face's names, `ours` by Megatron's.
    `split`: the ranks with a slice each along `dim` ("": all have the whole); `fuse` makes ours, `part` theirs."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    stage: int
    split: Literal["tp", "ep", ""] = ""
    dim: int = 0
    fuse: Fuse = _same
    part: Fuse = _same
    pads: bool = False  # rows are padded with zeros to a multiple of tp, as the vocabulary is
    copies: bool = False  # another entry has the same source tensors: tied embeddings

    def shapes(self, shapes: Mapping[str, Sequence[int]], layout: Layout) -> list[list[int]]:
        result = []
        for name in self.theirs:
            shape = list(shapes[name])
            if self.split:
                shape[self.dim] = -(-shape[self.dim] // getattr(layout, self.split))
            result.append(shape)
        return result

    def sliced(self, whole: Sequence[Tensor], rank: int, ways: int) -> list[Tensor]:
        if not self.split:
            return self.fuse(list(whole))
        if self.pads:
            whole = [torch.nn.functional.pad(tensor, (0, 0, 0, -len(tensor) % ways)) for tensor in whole]
        return self.fuse([tensor.chunk(ways, self.dim)[rank] for tensor in whole])


def entries(config: PretrainedConfig, names: Mapping[str, Tensor], layout: Layout) -> list[WeightEntry]:
    """Return the entries of a model of the families in `distflow.config.megatron_models`."""
    last = layout.pp - 1
    split: dict = {"split": "tp", "pads": True}
    result = [WeightEntry(("model.embed_tokens.weight",), ("embedding.word_embeddings.weight",), 0, **split)]
    for stage, own in enumerate(layout.stages(config.num_hidden_layers)):
        for local, index in enumerate(own):
            result += _layer(config, names, layout, f"model.layers.{index}.", f"decoder.layers.{local}.", stage)
    result.append(WeightEntry(("model.norm.weight",), ("decoder.final_layernorm.weight",), last))
    if not config.tie_word_embeddings:
        result.append(WeightEntry(("lm_head.weight",), ("output_layer.weight",), last, **split))
    elif last:
        result.append(WeightEntry(result[0].theirs, ("output_layer.weight",), last, **split, copies=True))
    placed = {name for entry in result for name in entry.theirs}
    odd = sorted(set(names) - placed - {"lm_head.weight"})
    if odd:
        shown = ", ".join(odd[:4]) + (" …" if len(odd) > 4 else "")
        raise EngineError(f"the Megatron engine has no place for these parameters of a {config.model_type}: {shown}. "
                          "Train this model with  engine: fsdp  or give them entries in "
                          "workers/engines/megatron/weights.py")
    return result


def _layer(config: PretrainedConfig, names: Mapping[str, Tensor], layout: Layout, theirs: str, ours: str,
           stage: int) -> list[WeightEntry]:
    plain = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "pre_mlp_layernorm",
             "self_attn.q_norm": "self_attention.q_layernorm", "self_attn.k_norm": "self_attention.k_layernorm",
             "mlp.gate": "mlp.router"}
    result = [WeightEntry((f"{theirs}{name}.weight",), (f"{ours}{place}.weight",), stage)
              for name, place in plain.items() if f"{theirs}{name}.weight" in names]
    groups = config.num_key_value_heads // layout.tp
    for kind in ("weight", "bias"):
        qkv = tuple(f"{theirs}self_attn.{letter}_proj.{kind}" for letter in "qkv")
        if qkv[0] in names:
            fuse, part = _by_group(groups, config.num_attention_heads // config.num_key_value_heads)
            result.append(WeightEntry(qkv, (f"{ours}self_attention.linear_qkv.{kind}",), stage, "tp", 0, fuse, part))
    result.append(WeightEntry((f"{theirs}self_attn.o_proj.weight",), (f"{ours}self_attention.linear_proj.weight",),
                              stage,
                              "tp", 1))
    if f"{theirs}mlp.experts.down_proj" in names:
        count = config.num_experts // layout.ep
        for name, place in (("gate_up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
            experts = tuple(f"{ours}mlp.experts.local_experts.{expert}.{place}.weight" for expert in range(count))
            result.append(WeightEntry((f"{theirs}mlp.experts.{name}",), experts, stage, "ep", 0, _unstack, _stack))
    else:
        gated = tuple(f"{theirs}mlp.{name}_proj.weight" for name in ("gate", "up"))
        result.append(WeightEntry(gated, (f"{ours}mlp.linear_fc1.weight",), stage, "tp", 0, _join, _halve))
        result.append(WeightEntry((f"{theirs}mlp.down_proj.weight",), (f"{ours}mlp.linear_fc2.weight",), stage, "tp",
                                  1))
    return result


def _by_group(groups: int, heads: int) -> tuple[Fuse, Fuse]:
    """Return functions that fuse query, key and value rows by group: `heads` query heads, a key and a value head."""

    def fuse(parts: list[Tensor]) -> list[Tensor]:
        return [torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)]

    def part(fused: list[Tensor]) -> list[Tensor]:
        grouped = fused[0].unflatten(0, (groups, -1))
        head = grouped.shape[1] // (heads + 2)
        return [rows.flatten(0, 1) for rows in grouped.split([heads * head, head, head], 1)]

    return fuse, part


def _join(parts: list[Tensor]) -> list[Tensor]:
    return [torch.cat(parts)]


def _halve(fused: list[Tensor]) -> list[Tensor]:
    return list(fused[0].chunk(2))


def _unstack(parts: list[Tensor]) -> list[Tensor]:
    return list(parts[0])


def _stack(experts: list[Tensor]) -> list[Tensor]:
    return [torch.stack(experts)]


def stage_weights(placed: Sequence[WeightEntry], whole: Mapping[str, Tensor], layout: Layout, ranks: Mapping[str, int],
                  ) -> Iterator[tuple[str, Tensor, str]]:
    """Return this rank's slices by Megatron's names, and what splits them; `ranks`: its index in pp, tp, ep."""
    for entry in placed:
        if entry.stage == ranks["pp"]:
            ways = getattr(layout, entry.split) if entry.split else 1
            slices = entry.sliced([whole[name] for name in entry.theirs], ranks.get(entry.split, 0), ways)
            yield from ((name, tensor, entry.split) for name, tensor in zip(entry.ours, slices))
