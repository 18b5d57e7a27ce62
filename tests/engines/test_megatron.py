"""The Megatron engine computes what one rank of FSDP does, in every layout, and gives weights back bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron.core")

import torch
from engines import megatron_ranks as ranks
from ranks import run_ranks

from distflow.errors import EngineError

LAYOUTS = [{}, {"tp": 2}, {"pp": 2}, {"dp": 2}, {"tp": 2, "pp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2},
           {"dp": 2, "pp": 2, "order": "tp-dp-pp"}]


def count(ways: dict[str, Any]) -> int:
    return int(np.prod([number for axis, number in ways.items() if axis not in ("ep", "order", "layers")]))


@functools.cache
def reference(architecture: str, tied: bool, layers: int = 2, replays: bool = False) -> dict[str, Any]:
    return run_ranks(1, ranks.with_fsdp, architecture, tied, layers, replays)[0]


def agree(results: list[dict], expected: dict, weights: float = 1e-4) -> None:
    """All ranks of a share say the same, all shares together what one rank says."""
    by_share = {result["share"]: result for result in results}
    for result in results:
        assert result["back"], "weights changed on their way in and out"
        assert result["version"] == expected["version"]
        assert np.array_equal(result["logprobs"], by_share[result["share"]]["logprobs"])
        assert result["losses"] == pytest.approx(by_share[result["share"]]["losses"], rel=1e-6)
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-4)
        assert result["weights"].keys() == expected["weights"].keys()
        worst = max(float(np.abs(tensor - expected["weights"][name]).max())
                    for name, tensor in result["weights"].items())
        assert worst < weights
    for kind in ("logprobs", "entropies"):
        values = np.concatenate([by_share[index][kind] for index in sorted(by_share)])
        assert np.abs(values - expected[kind]).max() < 1e-5, kind
    shares = by_share.values()
    assert np.sum([result["losses"] for result in shares], 0) == pytest.approx(expected["losses"], abs=1e-4)
    assert sum(result["entropy"] for result in shares) == pytest.approx(expected["entropy"], rel=1e-5)


@pytest.mark.parametrize("ways", LAYOUTS, ids=str)
def test_every_layout_trains_like_one_rank(ways):
    agree(run_ranks(count(ways), ranks.with_megatron, ways, "qwen3", False), reference("qwen3", False))


@pytest.mark.parametrize(("architecture", "tied", "ways"), [
    ("llama", False, {"tp": 2, "pp": 2}), ("qwen2", True, {"tp": 2, "pp": 2}), ("qwen3", True, {"dp": 2, "pp": 2})])
def test_every_family_trains_like_one_rank(architecture, tied, ways):
    """With tied embeddings the first and the last stage have a copy each, which have to stay alike."""
    agree(run_ranks(4, ranks.with_megatron, ways, architecture, tied), reference(architecture, tied))


@pytest.mark.parametrize("ways", [{"pp": 4}, {"dp": 2, "pp": 2, "layers": (1, 3)},
                                  {"dp": 2, "pp": 2, "order": "tp-dp-pp", "layers": (3, 1)}], ids=str)
def test_stages_of_several_layers(ways):
    """Those between have no embeddings; some have more layers than others."""
    agree(run_ranks(4, ranks.with_megatron, ways, "qwen3", True, 4), reference("qwen3", True, 4))


@pytest.mark.parametrize("ways", [{"cp": 2}, {"cp": 2, "tp": 2}, {"cp": 2, "pp": 2}, {"dp": 2, "cp": 2}], ids=str)
def test_sequences_may_be_split_along_their_tokens(ways):
    agree(run_ranks(count(ways), ranks.with_megatron, ways, "qwen3", False), reference("qwen3", False))


@pytest.mark.parametrize("ways", [{}, {"dp": 2}, {"dp": 2, "ep": 2}, {"cp": 2, "ep": 2}, {"dp": 2, "pp": 2, "ep": 2},
                                  {"dp": 4, "ep": 2}, {"dp": 2, "cp": 2, "ep": 4}, {"tp": 2}, {"tp": 2, "ep": 2},
                                  {"dp": 2, "tp": 2, "ep": 2}, {"dp": 2, "tp": 2, "ep": 4}, {"tp": 2, "pp": 2, "ep": 2},
                                  {"tp": 2, "cp": 2, "ep": 2}], ids=str)
def test_experts_may_be_split(ways):
    agree(run_ranks(count(ways), ranks.with_megatron, ways, "qwen3_moe", False), reference("qwen3_moe", False))


@pytest.mark.parametrize("ways", [{"tp": 2, "ep": 2}, {"cp": 2}, {"pp": 2}], ids=str)
def test_experts_are_replayed(ways):
    """As FSDP replays them: what counts is that the choices are others than those of the routers."""
    expected = reference("qwen3_moe", False, replays=True)
    agree(run_ranks(2, ranks.with_megatron, ways, "qwen3_moe", False, 2, "auto", True), expected)
    assert np.abs(expected["logprobs"] - reference("qwen3_moe", False)["logprobs"]).max() > 1e-2


def by_buckets(ways: dict[str, int], architecture: str) -> dict[str, bool]:
    """Weights in another type and in small buckets, into places that are given."""
    model = ranks.tiny(architecture)
    engine, whole = ranks.megatron(model, ways), model.state_dict()
    places = {name: torch.zeros(tensor.shape, dtype=torch.bfloat16) for name, tensor in whole.items()}
    came = [(name, tensor.clone(), tensor.data_ptr() == places[name].data_ptr())
            for name, tensor in engine.exporter.export(torch.bfloat16, places, bucket_bytes=20_000)]
    wrong = {"model.norm.weight": torch.zeros(3)}
    with pytest.raises(EngineError, match=r"`model.norm.weight` has shape \[64\] in training and \[3\]"):
        next(engine.export(into=wrong))
    return {"equal": all(torch.equal(tensor, whole[name].bfloat16()) for name, tensor, _ in came),
            "all": sorted(name for name, *_ in came) == sorted(whole),
            "placed": all(placed for name, _, placed in came if name.endswith(("o_proj.weight", "down_proj")))}


@pytest.mark.parametrize(("ways", "architecture"), [({"tp": 2, "pp": 2}, "qwen2"),
                                                    ({"dp": 2, "pp": 2, "ep": 2}, "qwen3_moe")])
def test_weights_come_whole_in_small_buckets(ways, architecture):
    """And straight to where they are wanted, those that have to be joined."""
    for result in run_ranks(4, by_buckets, ways, architecture):
        assert result["equal"]
        assert result["all"]
    assert architecture == "qwen3_moe" or result["placed"]


def test_half_precision_is_near():
    """Weights, forward and backward in bfloat16; Adam's own weights, and sums of gradients, in float32."""
    expected = reference("qwen3", False)
    for result in run_ranks(4, ranks.with_megatron, {"tp": 2, "pp": 2}, "qwen3", False, 2, "bfloat16"):
        difference = np.abs(result["logprobs"] - expected["logprobs"])
        assert 1e-4 < difference.max() < 0.1
        assert result["norms"] == pytest.approx(expected["norms"], rel=0.05)
