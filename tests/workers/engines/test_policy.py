"""The shared prompt changes how much is computed, not what."""

import pytest
import torch

from distflow.data.batch import Ragged
from workers.engines.policy import Policy, inputs_of


def rows(*lengths: int, seed: int = 0) -> Ragged:
    generator = torch.Generator().manual_seed(seed)
    return Ragged.from_rows([torch.randint(5, 260, (length,), generator=generator) for length in lengths])


def plain_logprobs(model, prompt, response, temperature):
    """One row at a time, the whole sequence in one forward, no cache and no padding."""
    logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(1, response[:, None]).squeeze(1)


@pytest.mark.parametrize(("temperature", "chunks"), [(1.0, 1), (0.7, 1), (1.0, 4), (1.0, 99)])
def test_log_probabilities_and_gradients_equal_plain_forwards(model, temperature, chunks):
    prompts = rows(5, 9, 2).select(torch.tensor([0, 0, 0, 1, 2, 2]))
    responses = rows(4, 1, 7, 3, 0, 6, seed=1)
    weights = torch.linspace(-1, 1, len(responses.values))
    logprobs, entropy = Policy(model, chunks)(*inputs_of(prompts, responses, 0, torch.device("cpu")), temperature)
    (logprobs * weights).sum().backward()
    shared = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    plain = torch.cat([plain_logprobs(model, prompt, response, temperature)
                       for prompt, response in zip(prompts.rows, responses.rows)])
    (plain * weights).sum().backward()
    assert torch.allclose(logprobs, plain, atol=1e-5)
    assert (entropy > 0).all()
    for name, parameter in model.named_parameters():
        assert torch.allclose(shared[name], parameter.grad, atol=1e-5), name


def test_only_neighbours_with_equal_prompts_share():
    prompts = Ragged.from_rows([torch.tensor(row) for row in ([7, 8], [7, 8], [9], [7, 8], [0, 9])])
    unique, lengths, prompt_of, *_ = inputs_of(prompts, rows(1, 1, 1, 1, 1), 0, torch.device("cpu"))
    assert prompt_of.tolist() == [0, 0, 1, 2, 3]
    assert lengths.tolist() == [2, 1, 2, 2]
    assert unique.tolist() == [[7, 8], [0, 9], [7, 8], [0, 9]]


@pytest.mark.parametrize(("chunks", "packs"), [(4, False), (1, True)])
def test_the_likeliest_tokens_and_their_log_probabilities_stand_where_those_of_responses_do(model, chunks, packs):
    prompts, responses = rows(5, 9, 2).select(torch.tensor([0, 0, 1, 2])), rows(4, 1, 0, 6, seed=1)
    policy, inputs = Policy(model, chunks), inputs_of(prompts, responses, 0, torch.device("cpu"))
    policy.packs = packs
    tokens, expected = policy(*inputs, 0.7, top=5)
    column = responses.with_values(tokens).padded().long()
    found, entropies = policy(*inputs, 0.7, candidates=column)
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(entropies, policy(*inputs, 0.7)[1])
    own = torch.nn.functional.pad(responses.padded()[..., None], (0, 2))  # the responses' own among three
    assert torch.allclose(policy(*inputs, 0.7, candidates=own)[0][:, 0], policy(*inputs, 0.7)[0], atol=1e-6)
