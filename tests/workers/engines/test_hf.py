"""Our decoding against transformers' own, and against the trainer's log-probabilities."""

import pytest
import torch

from distflow.config.run import Generation
from distflow.data.batch import Ragged
from workers.engines.hf import HFRollout
from workers.engines.policy import Policy, inputs_of


def rollout(model, **generation) -> HFRollout:
    return HFRollout(model, Generation(max_new_tokens=12, **generation), pad_token=0, end_tokens=[2])


@pytest.fixture
def prompts() -> Ragged:
    generator = torch.Generator().manual_seed(3)
    return Ragged.from_rows([torch.randint(5, 260, (length,), generator=generator) for length in (6, 2, 9, 4)])


def test_greedy_equals_transformers_generate(model, prompts):
    ours = rollout(model).generate(prompts, 1, torch.arange(4), 0, temperature=0.0).tokens.rows
    for prompt, row in zip(prompts.rows, ours):
        theirs = model.generate(prompt[None], max_new_tokens=12, do_sample=False, eos_token_id=2, pad_token_id=0)[0]
        assert row.tolist() == theirs[len(prompt) :].tolist()


def test_samples_do_not_depend_on_what_is_generated_together(model, prompts):
    ids = torch.arange(40, 52)
    whole = rollout(model).generate(prompts, 3, ids, key=9)
    pieces = rollout(model, batch_rows=3).generate(prompts, 3, ids, key=9)
    assert whole.tokens.values.tolist() == pieces.tokens.values.tolist()
    assert torch.allclose(whole.logprobs.values, pieces.logprobs.values, atol=1e-5)
    other = rollout(model).generate(prompts, 3, ids, key=10)
    assert whole.tokens.values.tolist() != other.tokens.values.tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_trainer_agrees_with_the_rollout(model, prompts, temperature):
    samples = rollout(model, temperature=temperature).generate(prompts, 3, torch.arange(12), key=1)
    repeated = prompts.select(torch.arange(4).repeat_interleave(3))
    with torch.no_grad():
        logprobs, _ = Policy(model)(*inputs_of(repeated, samples.tokens, 0, torch.device("cpu")), temperature)
    assert torch.allclose(logprobs, samples.logprobs.values, atol=1e-5)


def test_a_row_ends_with_its_end_token_and_not_before(model, prompts):
    """With a third of the vocabulary as end tokens most rows end early, at different steps."""
    ends = list(range(0, 270, 3))
    engine = HFRollout(model, Generation(max_new_tokens=12), pad_token=0, end_tokens=ends)
    samples = engine.generate(prompts, 8, torch.arange(32), key=4)
    for row, finished in zip(samples.tokens.rows, samples.finished.tolist()):
        assert not set(row[:-1].tolist()) & set(ends)
        assert finished == (row[-1].item() in ends)
        assert finished or len(row) == 12
    assert 1 < samples.tokens.lengths.float().mean() < 6


def test_the_head_gets_whole_tensors(model, prompts):
    """Given a view torch multiplies row by row, and copies the vocabulary's matrix for each (bfloat16 on a CPU)."""
    whole = []
    handle = model.get_output_embeddings().register_forward_pre_hook(
        lambda _, given: whole.append((tuple(given[0].shape), given[0].is_contiguous())))
    rollout(model).generate(prompts, 1, torch.arange(4), 0)
    handle.remove()
    assert whole[0] == ((4, 1, model.config.hidden_size), True)
    assert all(contiguous for _, contiguous in whole)


def test_no_prompts_give_no_samples(model):
    samples = rollout(model).generate(Ragged.from_rows([]), 4, torch.empty(0, dtype=torch.int64), key=0)
    assert len(samples.tokens) == len(samples.logprobs) == len(samples.finished) == 0
