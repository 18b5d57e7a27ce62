"""Checkpoints of the Megatron engine, and what it refuses to compute with."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron.core")

import torch
from engines import megatron_ranks as ranks
from ranks import run_ranks

from distflow.config.dag import Role
from distflow.errors import CheckpointError, EngineError
from distflow.recovery.checkpoint import Checkpoints
from distflow.weights.offload import HostOffload


def interrupted(ways: dict[str, int], folder: str) -> dict[str, object]:
    """Two updates, a checkpoint, a third update; then the third one again by an engine that loads the checkpoint."""
    engine = ranks.megatron(ranks.tiny(), ways)
    rows = ranks.share(ranks.rows(), engine.dp_group.rank(), engine.dp_group.size())
    for step in range(2):
        engine.update(rows, ranks.policy_gradient, 1.0, step)
    saved = ranks.exported(engine)
    Checkpoints(Path(folder), 1).save(2, {"actor": engine}, {})
    first = engine.update(rows, ranks.policy_gradient, 1.0, 2)
    other = ranks.megatron(ranks.tiny(), ways)
    Checkpoints(Path(folder), 1).load({"actor": other})
    loaded = ranks.exported(other)
    second = other.update(rows, ranks.policy_gradient, 1.0, 2)
    steps = {float(state["step"]) for state in other.optimizer._shards().values()}
    return {"reports": (first, second), "steps": steps, "moved": alike(saved, ranks.exported(engine)),
            "loaded": alike(saved, loaded), "same": alike(ranks.exported(engine), ranks.exported(other))}


def alike(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("ways", [{"tp": 2, "pp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_a_restored_engine_goes_on_bit_for_bit(ways, tmp_path):
    for result in run_ranks(4, interrupted, ways, str(tmp_path)):
        assert result["loaded"]
        assert result["same"]
        assert not result["moved"]
        assert result["steps"] == {3.0}
        assert result["reports"][0] == result["reports"][1]


def of_another_layout(folder: str, *both: dict[str, Any]) -> list[str]:
    one, other = (ranks.megatron(ranks.tiny(), ways) for ways in both)
    said = []
    Checkpoints(Path(folder), 1).save(1, {"actor": one}, {})
    for load in (lambda: other.load_state_dict(one.state_dict()),
                 lambda: Checkpoints(Path(folder), 1).load({"actor": other})):
        try:
            load()
        except (EngineError, CheckpointError) as error:
            said.append(str(error))
    return said


def test_a_checkpoint_of_another_layout_is_refused(tmp_path):
    for direct, by_file in run_ranks(2, of_another_layout, str(tmp_path), {"tp": 2}, {"dp": 2}):
        assert "resume with the layout that wrote it" in direct
        assert "tp=2" in direct
        assert "written as `actor.dp=1 pp=1 cp=1 tp=2 ep=1 rank=0`" in by_file
        assert "this rank reads `actor.dp=2 pp=1 cp=1 tp=1 ep=1" in by_file
        assert "Set `engine:` and `layouts:` as they were" in by_file


@pytest.mark.parametrize(("more", "words"), [({"order": "tp-dp-pp"}, "ep=1 order=tp-dp-pp rank="),
                                              ({"layers": (1, 1)}, "ep=1 layers=1,1 rank=")], ids=str)
def test_a_checkpoint_of_another_order_of_ranks_is_refused(tmp_path, more, words):
    """Ranks 1 and 2 of four have each other's parts, or stages other layers."""
    both = {"dp": 2, "pp": 2}, {"dp": 2, "pp": 2, **more}
    for direct, by_file in run_ranks(4, of_another_layout, str(tmp_path), *both):
        assert "resume with the layout that wrote it" in direct
        assert words in by_file


def of_another_depth(folder: str) -> str:
    one, other = (ranks.megatron(ranks.tiny(layers=layers), {"tp": 2}) for layers in (2, 1))
    Checkpoints(Path(folder), 1).save(1, {"actor": one}, {})
    with pytest.raises(CheckpointError) as error:
        Checkpoints(Path(folder), 1).load({"actor": other})
    return str(error.value)


def test_a_checkpoint_of_a_deeper_model_is_refused(tmp_path):
    for said in run_ranks(2, of_another_depth, str(tmp_path)):
        assert "only the checkpoint has `actor.dp=1" in said
        assert "layers.1." in said


def not_finite(ways: dict[str, int]) -> tuple[str, bool, int]:
    engine = ranks.megatron(ranks.tiny(), ways)
    before = ranks.exported(engine)
    rows, said = ranks.share(ranks.rows(), engine.dp_group.rank(), engine.dp_group.size()), ""
    try:
        engine.update(rows, lambda logprobs, entropies, micro: logprobs.sum() * torch.inf, 1.0, 0)
    except EngineError as error:
        said = str(error)
    kept = alike(before, ranks.exported(engine))
    norm = engine.update(rows, ranks.policy_gradient, 1.0, 0)["grad_norm"]
    return said, kept and np.isfinite(norm), engine.version


def test_a_gradient_that_is_not_finite_changes_nothing():
    for said, kept, version in run_ranks(4, not_finite, {"dp": 2, "pp": 2}):
        assert "left as they were" in said
        assert kept
        assert version == 1


def empty(ways: dict[str, int]) -> tuple[float, bool]:
    engine = ranks.megatron(ranks.tiny(), ways, weight_decay=0.0)
    before, rows = ranks.exported(engine), ranks.rows().slice(0, 0)
    report = engine.update(rows, ranks.policy_gradient, 1.0, 0)
    found = engine.logprobs(rows["prompts"], rows["responses"], 1.0)
    return report["grad_norm"], len(found.values) == 0 and alike(before, ranks.exported(engine))


def test_no_rows_change_nothing():
    assert run_ranks(2, empty, {"pp": 2}) == [(0.0, True)] * 2


def frozen(ways: dict[str, int]) -> bool:
    model = ranks.tiny()
    engine = ranks.megatron(model, ways, trained=False)
    rows = ranks.rows()
    expected = ranks.FSDPEngine(ranks.tiny(), ranks.settings(), ranks.init_device_mesh("cpu", (4,)), 0, 1, Role())
    wanted = expected.logprobs(rows["prompts"], rows["responses"], 1.0)
    found = engine.logprobs(rows["prompts"], rows["responses"], 1.0)
    with pytest.raises(ValueError, match="frozen"):
        engine.update(rows, ranks.policy_gradient, 1.0, 0)
    return bool((found.values - wanted.values).abs().max() < 1e-5) and not any(
        parameter.requires_grad for parameter in engine.stage.parameters())


def test_a_frozen_role_infers_and_refuses_to_train():
    assert run_ranks(4, frozen, {"tp": 2, "pp": 2}) == [True] * 4


def swapped(ways: dict[str, int], dtype: str) -> bool:
    """Two updates, the second one by an engine whose tensors were all in host memory between them."""
    one, other = (ranks.megatron(ranks.tiny(), ways, dtype=dtype) for _ in range(2))
    rows = ranks.share(ranks.rows(), one.dp_group.rank(), one.dp_group.size())
    for engine in (one, other):
        engine.update(rows, ranks.policy_gradient, 1.0, 0)
    optimizer = HostOffload(lambda: other.resident(weights=False), other.scratch)
    everything = HostOffload(other.resident)
    moments = sum(state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes for state in other.optimizer._shards().values())
    optimizer.offload()
    lean = optimizer.bytes == moments * (1.5 if dtype == "bfloat16" else 1)  # with float32 weights; no gradients
    readable = alike(ranks.exported(one), ranks.exported(other))
    everything.offload()
    left = sum(tensor.untyped_storage().nbytes() for tensor in (*other.resident(), *other.scratch()))
    everything.reload()
    optimizer.reload()
    optimizer.wait()
    everything.wait()
    reports = [engine.update(rows, ranks.policy_gradient, 1.0, 1) for engine in (one, other)]
    same = reports[0] == reports[1] and alike(ranks.exported(one), ranks.exported(other))
    return readable and lean and left == 0 and same


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_its_memory_can_leave_between_two_steps(dtype):
    """Weights can still be exported while the optimizer's state is away."""
    assert run_ranks(4, swapped, {"dp": 2, "pp": 2}, dtype) == [True] * 4


def losses_of(engine: object, steps: int) -> list[float]:
    """Of supervised learning, of three batches in turn."""
    losses = [0.0] * steps

    def supervised(step: int, logprobs: torch.Tensor, entropies: torch.Tensor, micro: object) -> torch.Tensor:
        loss = -logprobs.sum() / 36
        losses[step] += float(loss)
        return loss

    for step in range(steps):
        engine.update(ranks.rows(seed=step % 3), functools.partial(supervised, step), 1.0, step)
    return losses


def learning(ways: dict[str, int]) -> list[float]:
    engine = ranks.megatron(ranks.tiny(), ways, learning_rate=2e-3, schedule="cosine")
    engine.steps = 20
    return losses_of(engine, 20)


def learning_by_fsdp() -> list[float]:
    engine = ranks.FSDPEngine(ranks.tiny(), ranks.settings(learning_rate=2e-3, schedule="cosine"),
                              ranks.init_device_mesh("cpu", (1,)), 0, 20, Role(trained=True))
    return losses_of(engine, 20)


def test_twenty_steps_learn_what_fsdp_learns():
    expected = run_ranks(1, learning_by_fsdp)[0]
    for losses in run_ranks(4, learning, {"tp": 2, "pp": 2}):
        assert losses == pytest.approx(expected, abs=1e-4)
    assert expected[-1] < expected[0] - 0.5
