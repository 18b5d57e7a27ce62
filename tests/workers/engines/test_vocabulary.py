"""Log-probabilities over a vocabulary, piece by piece, are those of all logits at once, and take less memory."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from logit_cases import drawn, results, several
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from planners.memory import LOGITS
from workers.engines import vocabulary
from workers.engines.vocabulary import score, score_cut, score_logits, top_logprobs


def at_once(hidden, head, tokens, temperature):
    return score_logits(head(hidden).float() / temperature, tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [10, 50])
def test_an_entropy_bonus_takes_no_more_memory_than_the_planner_counts(monkeypatch, dtype, rows):
    """With `rows` of 50 tokens at a time. A narrow head, beside which logits count."""
    size, narrow = 20_000, 4
    monkeypatch.setattr(vocabulary, "PIECE", rows * size)
    head, hidden = nn.Linear(narrow, size, bias=False).to(dtype), torch.randn(50, narrow, dtype=dtype).requires_grad_()
    tokens = torch.randint(size, (50,))

    def most(entropy: float) -> int:
        return _most_bytes(lambda: results(hidden, head, tokens, torch.linspace(-1, 1, 50), entropy=entropy))

    assert most(0.5) <= most(0.0) * 1.01
    of_head = (4 + 4) * size * narrow  # its gradient, and that of a piece
    assert most(0.5) <= LOGITS * rows * size + of_head + 2**16


def _most_bytes(work) -> int:
    """The most bytes that tensors have at a time which are made meanwhile."""
    work()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.parametrize("entropy", [0.0, 0.5])
@pytest.mark.parametrize("piece", [1, 300 * 7, 300 * 50 - 1])
def test_pieces_change_nothing(monkeypatch, piece, entropy):
    expected = results(*drawn(300), of=at_once, entropy=entropy)
    monkeypatch.setattr(vocabulary, "PIECE", piece)
    for one, other in zip(results(*drawn(300), entropy=entropy), expected):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("piece", [300 * 7, vocabulary.PIECE])
def test_entropies_and_their_gradients_are_those_of_torch(monkeypatch, piece):
    monkeypatch.setattr(vocabulary, "PIECE", piece)
    hidden, head, tokens, counts = drawn(300)
    entropies = score(hidden, head, tokens, 0.7)[1]
    found = torch.autograd.grad((entropies * counts).sum(), [hidden, head.weight])
    expected = torch.distributions.Categorical(logits=head.double()(hidden.double()) / 0.7).entropy()
    wanted = torch.autograd.grad((expected * counts).sum(), [hidden, head.weight])
    for one, other in zip([entropies, *found], [expected, *wanted]):
        assert torch.allclose(one.double(), other.double(), atol=1e-5)


@pytest.mark.parametrize("piece", [300 * 7, vocabulary.PIECE])
def test_several_tokens_at_each_place(monkeypatch, piece):
    monkeypatch.setattr(vocabulary, "PIECE", piece)
    hidden, head, tokens, counts = several(*drawn(300))
    logprobs, entropies, *gradients = results(hidden, head, tokens, counts)
    wanted = torch.log_softmax(head.double()(hidden.double()) / 0.7, -1).gather(1, tokens)
    expected = torch.autograd.grad((wanted * counts).sum(), [hidden, head.weight])
    assert logprobs.shape == tokens.shape
    assert entropies.shape == tokens.shape[:1]
    for one, other in zip([logprobs, *gradients], [wanted, *expected]):
        assert torch.allclose(one.double(), other.double(), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece", [300 * 7, vocabulary.PIECE])
def test_top_logprobs_are_float32_and_those_of_all_logits(monkeypatch, piece, dtype):
    monkeypatch.setattr(vocabulary, "PIECE", piece)
    hidden, head, *_ = drawn(300, dtype)
    tokens, logprobs = top_logprobs(hidden, head, 9, 0.7)
    expected = torch.log_softmax(head(hidden).float() / 0.7, -1).topk(9)
    assert dtype == torch.bfloat16 or torch.equal(tokens.long(), expected.indices)
    assert logprobs.dtype == torch.float32
    assert torch.allclose(logprobs, expected.values, atol=1e-5)


def test_gradients_of_pieces_are_summed_in_float32(monkeypatch):
    exact = results(*drawn(300), of=at_once)[3]
    monkeypatch.setattr(vocabulary, "PIECE", 300)
    gradient = results(*drawn(300, torch.bfloat16))[3]
    assert gradient.dtype == torch.bfloat16
    assert (gradient.float() - exact).norm() < 0.02 * exact.norm()


@contextlib.contextmanager
def pieces_of(size: int) -> Iterator[None]:
    """In a rank's process, which goes on to other tests."""
    before, vocabulary.PIECE = vocabulary.PIECE, size
    try:
        yield
    finally:
        vocabulary.PIECE = before


def over_ranks(size: int) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    hidden, head, tokens, counts = drawn(size)
    head.weight = nn.Parameter(distribute_tensor(head.weight.detach(), mesh, [Shard(0)], src_data_rank=None))
    with pieces_of(10 * (size // 2)):  # several pieces, and more of 64 rows than of 63
        *found, gradient = results(hidden, head, tokens, counts, entropy=0.5)
        *of_several, other = results(*several(hidden, head, tokens, counts))
        best = top_logprobs(hidden, head, 64, 0.7)[1]
    return [*(part.numpy() for part in (*found, *of_several, best)), *(part.full_tensor().numpy()
                                                                       for part in (gradient, other))]


@pytest.mark.parametrize("size", [300, 127])
def test_a_vocabulary_that_is_cut_over_ranks_gives_the_same(size):
    hidden, head, tokens, counts = drawn(size)
    *expected, gradient = results(hidden, head, tokens, counts, of=at_once, entropy=0.5)
    *of_several, other = results(*several(hidden, head, tokens, counts), of=at_once)
    expected += [*of_several, torch.log_softmax(head(hidden) / 0.7, -1).topk(64).values, gradient, other]
    for found in run_ranks(2, over_ranks, size):
        assert len(found) == len(expected)
        for one, other in zip(found, expected):
            assert torch.allclose(torch.from_numpy(one), other, atol=1e-5)


def padded_over_ranks(size: int) -> list[np.ndarray]:
    """The head is made of as many rows on each rank; those behind the vocabulary would win if they counted."""
    ways = dist.get_world_size()
    part = -(-size // ways)
    hidden, head, tokens, counts = drawn(size)
    whole = nn.functional.pad(head.weight.detach(), (0, 0, 0, part * ways - size), value=100.0)
    weight = whole.split(part)[dist.get_rank()].clone().requires_grad_()
    with pieces_of(10 * max(1, part - 1)):
        logprobs, entropies = score_cut(hidden, weight, size, tokens, 0.7, dist.group.WORLD)
        gradients = torch.autograd.grad((logprobs * counts).sum(), [hidden, weight])
    return [tensor.detach().numpy() for tensor in (logprobs, entropies, *gradients)]


@pytest.mark.parametrize(("ranks", "size"), [(2, 127), (4, 5)])
def test_padding_of_the_last_ranks_counts_for_nothing(ranks, size):
    """Of 5 words on 4 ranks the last one has none at all."""
    *expected, of_weight = results(*drawn(size), of=at_once)
    found = run_ranks(ranks, padded_over_ranks, size)
    for *same, _ in found:
        for one, other in zip(same, expected):
            assert torch.allclose(torch.from_numpy(one), other, atol=1e-5)
    gradient = torch.from_numpy(np.concatenate([parts[-1] for parts in found]))
    assert torch.allclose(gradient[:size], of_weight, atol=1e-5)
    assert not gradient[size:].any()
