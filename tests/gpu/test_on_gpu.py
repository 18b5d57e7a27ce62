"""What only a GPU can show. Skipped without one."""

import math

import pytest
import torch
import torch.nn.functional as F
from harness import metrics_of
from logit_cases import drawn, results, several

from distflow.config.run import Generation
from distflow.data.batch import Ragged
from distflow.weights.host_copy import STAGE, HostCopy
from workers.engines import attention, sampling, vocabulary
from workers.engines.attention import has_flash
from workers.engines.devices import choose
from workers.engines.embedded import build_model
from workers.engines.hf import HFRollout
from workers.engines.packing import Packing
from workers.engines.sampling import sample_tokens
from workers.engines.vocabulary import kernels_for

pytestmark = [pytest.mark.gpu,
              pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-3), ("bfloat16", 0.5)])
def test_a_whole_run_on_a_gpu(launch, workspace, dtype, bound):
    launch(1, "--dag", "grpo.yaml", "--run-file", "tiny.yaml", "--name", dtype, "--set",
           f"roles.actor.dtype={dtype}", torchrun=True)  # CUDA does not survive a fork
    for step, values in metrics_of(workspace / "runs" / dtype).items():
        assert values["mismatch/logprob_max"] < bound, step
        assert values["grad_norm"] > 0


def test_groups_share_a_gpu(launch, workspace):
    launch(2, "--dag", "grpo.yaml", "--run-file", "tiny.yaml", "--name", "shared", "--set", "mode=async",
           torchrun=True)
    assert len(metrics_of(workspace / "runs" / "shared")) == 4


def test_cudnn_attention_still_gives_no_gradients_with_a_mask():
    """As in pytorch #196678. Where this fails, `workers.engines.devices.choose` need not turn it off any more."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, 704, 64, device="cuda", dtype=torch.bfloat16) * scale
                         for scale in (0.1, 0.1, 1.0))
    query[..., 0], key[..., 0] = 1.0, -120 * math.sqrt(64)
    query.requires_grad_()
    mask = torch.ones(704, 704, dtype=torch.bool, device="cuda").tril()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        F.scaled_dot_product_attention(query, key, value, attn_mask=mask).backward(torch.randn_like(value))
    assert not torch.isfinite(query.grad).all()


def test_packed_rows_attend_as_padded_ones_do():
    torch.manual_seed(0)
    packings = [Packing([40, 9], [0, 0, 1], [300, 1, 70], torch.device(kind)) for kind in ("cuda", "cpu")]
    query, key, value = (torch.randn(1, heads, 420, 64) for heads in (8, 2, 2))
    found, expected = [], []
    for packing, dtype, outcome in zip(packings, (torch.bfloat16, torch.float32), (found, expected)):
        inputs = [part.to(packing.device, dtype).requires_grad_() for part in (query, key, value)]
        output = packing.attend(*inputs, None)
        output.float().square().sum().backward()
        outcome += [part.float().cpu() for part in (output, *(each.grad for each in inputs))]
    for one, other in zip(found, expected):
        assert torch.allclose(one, other, atol=0.05, rtol=0.05)


def test_tensors_of_a_gpu_arrive_as_they_were_at_the_moment():
    source = torch.arange(STAGE // 2 + 3, device="cuda")  # 4 stages and some bytes
    expected, copier = source.cpu(), HostCopy()
    moment = copier.record_event([source])
    target = torch.empty(source.nbytes, dtype=torch.uint8)
    for _ in copier.copy([(target, source)], moment):
        source.zero_()
    assert torch.equal(target.view(torch.int64), expected)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_captured_steps_sample_as_computed_ones_do(dtype, bound):
    """In half precision by FlashAttention, which rounds otherwise."""
    choose("cuda")
    model = build_model(270, 0, layers=2, hidden=64, heads=4, kv_heads=2, head_dim=32).to("cuda", dtype)
    assert has_flash(model) == (dtype == torch.bfloat16)
    model.set_attn_implementation(attention.NAME)
    prompts = Ragged.from_rows([torch.arange(5, 5 + length) for length in (6, 2, 40, 9)])
    found = []
    for captures in (True, False):
        rollout = HFRollout(model, Generation(max_new_tokens=60, batch_rows=6, cuda_graphs=captures), 0, [2, 7])
        assert rollout.captures == captures
        found.append(rollout.generate(prompts, 4, torch.arange(16), key=5))
        weights = {name: weight.clone() for name, weight in rollout.weight_buffers().items()}
        rollout.sleep()
        rollout.wake()  # perhaps elsewhere
        rollout.load(weights.items(), 1)
        found.append(rollout.generate(prompts, 4, torch.arange(16), key=5))
    for other in found[1:]:
        same = [row.equal(like) for row, like in zip(found[0].tokens.rows, other.tokens.rows)]
        assert sum(same) >= (16 if dtype == torch.float32 else 12)  # rounding chooses another token now and then
        for equal, row, like in zip(same, found[0].logprobs.rows, other.logprobs.rows):
            assert not equal or torch.allclose(row, like, atol=bound)


@pytest.mark.parametrize("noise", [0.0, 0.3, 1 - 2.0**-53])
def test_tokens_that_are_excluded_are_never_drawn(noise):
    """Sums are added up in another order there."""
    logits = torch.full((64, 151_936), -torch.inf, device="cuda")
    logits[:, 1000:9000] = torch.randn(64, 8000, device="cuda")
    tokens, logprobs = sample_tokens(logits, torch.full((64,), noise, dtype=torch.float64, device="cuda"), 1.0)
    assert ((tokens >= 1000) & (tokens < 9000)).all()
    assert logprobs.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("many", [False, True])
def test_kernels_of_logits_score_as_plain_passes_do(monkeypatch, dtype, many):
    """Of a vocabulary of several tiles, and twice with the same bits."""
    hidden, head, tokens, counts = drawn(50_257, dtype)
    case = (hidden.detach().cuda().requires_grad_(), head.cuda(), tokens.cuda(), counts.cuda())
    monkeypatch.setattr(vocabulary, "PIECE", 50_257)  # pieces of 8 tokens
    found, again = (results(*(several(*case) if many else case), entropy=0.5) for _ in range(2))
    assert kernels_for(found[0].device) is not None
    monkeypatch.setattr(vocabulary, "kernels_for", lambda device: None)
    expected = results(*(several(*case) if many else case), entropy=0.5)
    for one, other, repeated in zip(found, expected, again):
        assert torch.equal(one, repeated)
        assert (one - other).abs().max() <= (1e-5 if dtype == torch.float32 else 0.01) * (1 + other.abs().max())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_kernels_draw_the_tokens_of_plain_passes(monkeypatch, temperature):
    logits = torch.randn(64, 151_936, device="cuda").mul_(3).bfloat16()
    noise = torch.linspace(0, 1 - 2.0**-53, 64, dtype=torch.float64, device="cuda")
    tokens, logprobs = sample_tokens(logits, noise, temperature)
    monkeypatch.setattr(sampling, "kernels_for", lambda device: None)
    expected, wanted = sample_tokens(logits, noise, temperature)
    assert (tokens == expected).sum() >= 62  # rounding chooses a neighbour now and then
    assert torch.allclose(logprobs[tokens == expected], wanted[tokens == expected], atol=1e-4)
