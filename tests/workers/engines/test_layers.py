"""A model that is gathered layer by layer, as large ones are, computes what the whole model does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from columns import uneven_rows
from ranks import run_ranks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from distflow.config.run import RoleRun
from distflow.data.batch import Batch
from workers.engines import fsdp
from workers.engines.embedded import build_model

STEPS = 3
SETTINGS = {"learning_rate": 1e-3, "weight_decay": 0.1}


def losses(small: int, first: int, last: int,
           kept: int = fsdp.KEPT_WHOLE) -> tuple[list[float], list[float], int, list[float]]:
    """Summed losses over all ranks and gradient norms of some steps on rows `first` to `last`; units of sharding;
    and the log-probabilities after them. `kept`: parameters up to which a model stays gathered."""
    limits = fsdp._SMALL, fsdp.KEPT_WHOLE
    fsdp._SMALL, fsdp.KEPT_WHOLE = small, kept
    try:
        model = build_model(270, 0, layers=3, hidden=64, heads=2, kv_heads=1, head_dim=32)
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        settings = RoleRun(**SETTINGS, micro_batch_tokens=20)
        engine = fsdp.FSDPEngine(model, settings, mesh, pad_token=0, steps=10, trained=True)
    finally:
        fsdp._SMALL, fsdp.KEPT_WHOLE = limits
    units = sum(isinstance(module, torch.distributed.fsdp.FSDPModule) for module in engine.policy.modules())
    mine, sums, norms = uneven_rows().slice(first, last), [], []
    for step in range(STEPS):
        seen = []

        def loss_of(logprobs, entropy, micro, seen=seen):
            seen.append(-logprobs.sum() / 22)
            return seen[-1]

        norms.append(engine.update(mine, loss_of, 1.0, step)["grad_norm"])
        total = torch.stack([torch.zeros(()), *(loss.detach() for loss in seen)]).sum()
        dist.all_reduce(total)
        sums.append(float(total))
    logprobs = engine.logprobs(mine["prompts"], mine["responses"], 1.0).values
    return sums, norms, units, logprobs.tolist()


def split(small: int, cut: int, kept: int = fsdp.KEPT_WHOLE):
    return losses(small, *((0, cut) if dist.get_rank() == 0 else (cut, 7)), kept)


class GatherCount(TorchDispatchMode):

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        self.count += operator is torch.ops.c10d._allgather_base_.default
        return operator(*arguments, **(named or {}))


def gathers(kept: int) -> int:
    """How often the steps of `losses` gather parameters, and their last forward passes."""
    with GatherCount() as gathered:
        split(0, 5, kept)
    return gathered.count


def test_a_model_that_fits_is_gathered_once_a_step():
    """Each of the four units; else layers for each pass over each micro-batch, and the root once for both."""
    kept, freed = run_ranks(2, gathers, fsdp.KEPT_WHOLE)[0], run_ranks(2, gathers, 0)[0]
    assert kept == (STEPS + 1) * 4
    assert freed == 73


def interrupted() -> list[bool]:
    """Whether each weight is a shard after a loss has failed."""
    model = build_model(270, 0, layers=3, hidden=64, heads=2, kv_heads=1, head_dim=32)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    engine = fsdp.FSDPEngine(model, RoleRun(**SETTINGS), mesh, pad_token=0, steps=10, trained=True)
    with pytest.raises(ZeroDivisionError):
        engine.accumulate(uneven_rows(), lambda *outputs: 1 / 0, 1.0)
    return [isinstance(shard, DTensor) for shard in engine.shards().values()]


def test_weights_are_shards_again_after_a_loss_that_fails():
    assert all(run_ranks(1, interrupted)[0])


@pytest.mark.run
@pytest.mark.parametrize("cut", [5, 7])
@pytest.mark.parametrize("kept", [fsdp.KEPT_WHOLE, 0])
def test_layer_by_layer_on_two_ranks_equals_the_unsharded_model(cut, kept):
    expected_losses, expected_norms, expected_logprobs = plain_training()
    results = run_ranks(2, split, 0, cut, kept)
    for sums, norms, units, _ in results:
        assert units == 3 + 1
        assert sums == pytest.approx(expected_losses, abs=1e-5)
        assert norms == pytest.approx(expected_norms, rel=1e-4)
    assert results[0][3] + results[1][3] == pytest.approx(expected_logprobs, abs=1e-4)


def test_a_small_model_is_one_unit():
    assert [units for *_, units, _ in run_ranks(2, split, 64_000_000, 5)] == [1, 1]


def plain_training() -> tuple[list[float], list[float], list[float]]:
    """The same by a plain model and optimizer: no sharding, no micro-batches, no shared prompts."""
    model = build_model(270, 0, layers=3, hidden=64, heads=2, kv_heads=1, head_dim=32)
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": SETTINGS["weight_decay"]},
                                   {"params": vectors, "weight_decay": 0.0}],
                                  lr=SETTINGS["learning_rate"], betas=(0.9, 0.95))
    batch, sums, norms = uneven_rows(), [], []
    for _ in range(STEPS):
        loss = -_logprobs(model, batch).sum() / 22
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        sums.append(loss.item())
    with torch.no_grad():
        return sums, norms, _logprobs(model, batch).tolist()


def _logprobs(model, batch: Batch) -> torch.Tensor:
    found = []
    for prompt, response in zip(batch["prompts"].rows, batch["responses"].rows):
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        found.append(torch.log_softmax(logits, -1).gather(1, response[:, None]).squeeze(1))
    return torch.cat(found)
