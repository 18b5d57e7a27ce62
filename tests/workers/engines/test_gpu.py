"""On a GPU the trainer and the rollout still agree. Skipped without one."""

import pytest
import torch
from harness import metrics_of

pytestmark = [pytest.mark.gpu,
              pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-3), ("bfloat16", 0.5)])
def test_a_whole_run_on_a_gpu(launch, workspace, dtype, bound):
    launch(1, "--dag", "grpo.yaml", "--run-file", "tiny.yaml", "--name", dtype, "--set",
           f"roles.actor.dtype={dtype}", torchrun=True)  # CUDA does not survive a fork
    for step, values in metrics_of(workspace / "runs" / dtype).items():
        assert values["mismatch/logprob_max"] < bound, step
        assert values["grad_norm"] > 0
