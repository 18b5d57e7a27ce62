"""The shared prompt changes how much is computed, not what."""

import pytest
import torch
from columns import random_rows
from training import plain_logprobs

from distflow.data.batch import Batch
from workers.engines.policy import Policy, inputs_of


@pytest.mark.parametrize(("temperature", "chunks", "lengths"), [
    (1.0, 1, (4, 1, 7, 3, 0, 6)), (0.7, 1, (4, 1, 7, 3, 0, 6)), (1.0, 4, (4, 1, 7, 3, 0, 6)),
    (1.0, 99, (4, 1, 7, 3, 0, 6)), (1.0, 1, (150, 1, 1, 2, 1, 90)), (1.0, 4, (150, 1, 1, 2, 1, 90))], ids=str)
def test_log_probabilities_and_gradients_equal_plain_forwards(model, temperature, chunks, lengths):
    """Rows are packed if they are computed at once, else padded."""
    prompts = random_rows(5, 90, 2).select(torch.tensor([0, 0, 0, 1, 2, 2]))
    responses = random_rows(*lengths, seed=1)
    weights = torch.linspace(-1, 1, len(responses.values))
    logprobs, entropy = Policy(model, chunks)(*inputs_of(prompts, responses, 0, torch.device("cpu")), temperature)
    (logprobs * weights).sum().backward()
    shared = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    batch = Batch(torch.arange(6), {"prompts": prompts, "responses": responses})
    plain = plain_logprobs(model, batch, temperature)
    (plain * weights).sum().backward()
    assert torch.allclose(logprobs, plain, atol=1e-5)
    scores = [(model(torch.cat(row)[None]).logits[0, len(row[0]) - 1 : -1] / temperature).log_softmax(-1)
              for row in zip(prompts.rows, responses.rows)]
    entropies = [-(each.exp() * each).sum(-1) for each in scores]
    assert torch.allclose(entropy, torch.cat(entropies), atol=1e-4)
    for name, parameter in model.named_parameters():
        assert torch.allclose(shared[name], parameter.grad, atol=1e-5), name


@pytest.mark.parametrize(("chunks", "packs"), [(4, False), (1, True)])
def test_the_likeliest_tokens_and_their_log_probabilities_stand_where_those_of_responses_do(model, chunks, packs):
    prompts, responses = random_rows(5, 9, 2).select(torch.tensor([0, 0, 1, 2])), random_rows(4, 1, 0, 6, seed=1)
    policy, inputs = Policy(model, chunks), inputs_of(prompts, responses, 0, torch.device("cpu"))
    policy.packs = packs
    tokens, expected = policy(*inputs, 0.7, top=5)
    column = responses.with_values(tokens).padded().long()
    found, entropies = policy(*inputs, 0.7, candidates=column)
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(entropies, policy(*inputs, 0.7)[1])
    own = torch.nn.functional.pad(responses.padded()[..., None], (0, 2))  # the responses' own among three
    assert torch.allclose(policy(*inputs, 0.7, candidates=own)[0][:, 0], policy(*inputs, 0.7)[0], atol=1e-6)
