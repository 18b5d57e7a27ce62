"""Settings that fit: the lines that are printed, planned as any run, keep to the memory; less memory costs seconds."""

from __future__ import annotations

import itertools

import pytest
import yaml

from distflow.config.load import load
from distflow.config.spec import Spec
from distflow.errors import InvalidInput
from planners import plan
from planners.heterogeneous.fit import Fit, fit, lines
from planners.memory import GIB, needed

MODEL = "{architecture: qwen3, layers: 36, hidden: 4096, heads: 32, kv_heads: 8}"
SIZES = [f"roles.actor.model={MODEL}", "roles.actor.dtype=bfloat16", "data.batch=64", "data.max_prompt_tokens=512",
         "roles.actor.generation.max_new_tokens=1024"]


@pytest.fixture
def spec_with(tmp_path):
    def make(memory_gib: float, *more: str, devices: int = 8) -> Spec:
        said = {"name": "mine", "devices": {"big": {"tflops": {"bfloat16": 900}, "memory_gib": memory_gib,
                                                    "memory_gb_s": 4000}},
                "machines": {"node": {"device": "big", "devices": devices,
                                      "inside": {"gb_s": 400, "latency_us": 3}}}}
        (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(said))
        return load("grpo", None, [*SIZES, *more], str(tmp_path / "cluster.yaml"))
    return make


def planned_again(found: Fit, memory_gib: float, *more: str) -> float:
    """Bytes of the fullest rank of a run with the lines that are written, on 8 ranks that are alike."""
    said = [f"{key}.{inner}.{last}={yaml.safe_dump(value, default_flow_style=True).splitlines()[0]}"
            for key, inside in lines(load("grpo", None, [*SIZES, *more]), found.settings).items() if key != "groups"
            for inner, values in inside.items() for last, value in values.items() if last != "generation"]
    said += [f"roles.actor.generation.batch_rows={found.settings.rows}"] if found.settings.rows < 512 else []
    said += [f"groups.rollout={found.settings.rollout}"] if found.settings.rollout else []
    made = plan(load("grpo", None, [*SIZES, *more, *said]), 8)
    return max(needed(each.memory) for each in [group.plan for group in made.groups] or [made])


@pytest.mark.parametrize("mode", ["sync", "async", "semi_sync"])
def test_what_is_written_fits_as_it_is_planned(spec_with, mode):
    first, second = itertools.islice(fit(spec_with(141, f"mode={mode}")), 2)
    for found in (first, second):
        assert found.need <= found.limit == pytest.approx(0.9 * 141 * GIB)
        assert planned_again(found, 141, f"mode={mode}") == found.need
    assert first.settings.seconds <= second.settings.seconds
    assert (first.settings.rollout > 0) == (mode != "sync")


def test_less_memory_costs_seconds_and_offload_is_the_last_resort(spec_with):
    best = {size: next(fit(spec_with(size))).settings for size in (141, 80, 48)}
    assert best[141].seconds <= best[80].seconds <= best[48].seconds
    assert not best[141].recompute or best[141].micro_batch_tokens > best[48].micro_batch_tokens
    assert [best[size].offload for size in (141, 80, 48)] == [False] * 3
    assert next(fit(spec_with(32, devices=2))).settings.offload


def test_margin_and_what_a_run_has_taken_count(spec_with):
    spec = spec_with(141)
    usual, wide = next(fit(spec)), next(fit(spec, margin=0.5))
    assert wide.limit == pytest.approx(0.5 * 141 * GIB)
    assert wide.need <= wide.limit < usual.need
    doubled = next(fit(spec, factor=2.0))
    assert doubled.need <= usual.limit < 2 * usual.need
    assert doubled.need == 2 * planned_again(doubled, 141)
    assert doubled.settings.seconds > usual.settings.seconds


def test_what_cannot_be_is_refused_with_what_is_needed(spec_with):
    with pytest.raises(InvalidInput, match=r"nothing fits into 9.00 GiB a device. .*: a rank needs .* and has 10 GiB"):
        next(fit(spec_with(10, devices=2)))
    with pytest.raises(InvalidInput, match="has devices of 2 kinds, a100, h200, and settings are chosen for one"):
        next(fit(load("grpo", None, SIZES, "h200_a100")))
    with pytest.raises(InvalidInput, match="no cluster file with `machines` says which they are"):
        next(fit(load("grpo", None, SIZES)))
