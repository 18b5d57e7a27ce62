"""The Megatron engine computes what one rank of FSDP does, in every layout, and gives weights back bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron.core")

from engines import megatron_ranks as ranks
from ranks import run_ranks

LAYOUTS = [{}, {"tp": 2}, {"pp": 2}, {"dp": 2}, {"tp": 2, "pp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}]


def count(ways: dict[str, int]) -> int:
    return int(np.prod([number for axis, number in ways.items() if axis != "ep"]))


@functools.cache
def reference(architecture: str, tied: bool, updates: int = 3) -> dict[str, Any]:
    return run_ranks(1, ranks.with_fsdp, architecture, tied, updates)[0]


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
    logprobs = np.concatenate([by_share[index]["logprobs"] for index in sorted(by_share)])
    assert np.abs(logprobs - expected["logprobs"]).max() < 1e-5
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


@pytest.mark.parametrize("ways", [{"cp": 2}, {"cp": 2, "tp": 2}, {"cp": 2, "pp": 2}, {"dp": 2, "cp": 2}], ids=str)
def test_sequences_may_be_split_along_their_tokens(ways):
    agree(run_ranks(count(ways), ranks.with_megatron, ways, "qwen3", False), reference("qwen3", False))


@pytest.mark.parametrize("ways", [{}, {"dp": 2}, {"dp": 2, "ep": 2}, {"cp": 2, "ep": 2}, {"dp": 2, "pp": 2, "ep": 2},
                                  {"dp": 4, "ep": 2}, {"dp": 2, "cp": 2, "ep": 4}], ids=str)
def test_experts_may_be_split(ways):
    agree(run_ranks(count(ways), ranks.with_megatron, ways, "qwen3_moe", False), reference("qwen3_moe", False))
