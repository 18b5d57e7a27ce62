"""What runs on a GPU never mixes its tensors with those of the CPU, shown on a made-up device."""

from __future__ import annotations

import copy

import pytest
import torch
from two_devices import CUDA, READS, Cuda, TwoDevices, to_cuda

from distflow.config.run import Generation
from distflow.data.batch import Batch, Ragged
from distflow.telemetry.metrics import Metrics, recording
from workers.engines import attention
from workers.engines.embedded import build_model
from workers.engines.hf import HFRollout
from workers.engines.policy import Policy, inputs_of
from workers.functions.losses import surrogate
from workers.functions.updates import PolicyLoss


@pytest.fixture
def model():
    built = build_model(270, 0, layers=2, hidden=64, heads=4, kv_heads=2, head_dim=32)
    built.set_attn_implementation(attention.NAME)
    return built


def rows(*lengths: int) -> Ragged:
    generator = torch.Generator().manual_seed(len(lengths))
    return Ragged.from_rows([torch.randint(5, 260, (length,), generator=generator) for length in lengths])


def test_the_made_up_device_refuses_to_mix():
    with TwoDevices():
        there = torch.ones(2, device="cuda")
        assert there.is_cuda
        assert (there + torch.tensor(1.0)).cpu().tolist() == [2, 2]
        with pytest.raises(RuntimeError, match="two devices in aten"):
            there + torch.ones(2)


def test_log_probabilities_are_those_of_the_cpu(model):
    prompts, responses = rows(5, 9, 2).select(torch.tensor([0, 0, 1, 2])), rows(4, 1, 7, 0)
    with torch.no_grad():
        expected, _ = Policy(model)(*inputs_of(prompts, responses, 0, torch.device("cpu")))
        with TwoDevices():
            found, _ = Policy(to_cuda(model))(*inputs_of(prompts, responses, 0, CUDA))
    assert isinstance(found, Cuda)
    assert torch.allclose(found.inner, expected, atol=1e-6)


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="its inference mode knows no wrapped tensors")
def test_samples_are_those_of_the_cpu(model):
    prompts, settings = rows(6, 2, 9), Generation(max_new_tokens=20, batch_rows=4)
    here = HFRollout(copy.deepcopy(model), settings, 0, [2]).generate(prompts, 2, torch.arange(6), key=5)
    with TwoDevices():
        there = HFRollout(to_cuda(model), settings, 0, [2])
        there.end_tokens = torch.tensor([2], device="cuda")
        found = there.generate(prompts, 2, torch.arange(6), key=5)
    assert found.tokens.values.tolist() == here.tokens.values.tolist()
    assert torch.allclose(found.logprobs.values, here.logprobs.values, atol=1e-6)


def reported(logprobs, loss: str, read: bool) -> tuple[dict[str, float], list[str]]:
    """What three micro-batches report, and the operations by which the device was waited for."""
    tokens = rows(5, 3, 4)
    draw = torch.Generator().manual_seed(3)
    columns = {name: tokens.with_values(torch.randn(12, generator=draw)) for name in (
        "old", "behaviour", "advantages", "weights", "reference")}
    mask = tokens.with_values(torch.arange(12) % 3 > 0)
    micro, objective, metrics = Batch(torch.arange(3), {**columns, "mask": mask}), PolicyLoss(
        surrogate(loss, None, None, None), 0.1, "k3", 0.5), Metrics()
    READS.clear()
    with recording(metrics):
        for _ in range(3):
            objective(logprobs, logprobs.abs(), micro)
        metrics.spread_of("spread", logprobs)
        before = list(READS)
        return metrics.collect(lambda own: [own]), before if read else READS[len(before) :]


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
def test_the_metrics_of_a_step_are_read_from_a_gpu_at_once(loss):
    values = torch.randn(12, generator=torch.Generator().manual_seed(1))
    expected, _ = reported(values, loss, False)
    with TwoDevices():
        found, of_losses = reported(values.to("cuda"), loss, True)
        _, at_the_end = reported(values.to("cuda"), loss, False)
    assert (of_losses, at_the_end) == ([], ["tolist"])
    assert found == pytest.approx(expected, rel=1e-6)
