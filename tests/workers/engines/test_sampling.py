import pytest
import torch

from workers.engines import sampling
from workers.engines.sampling import key_of, sample_tokens, uniform


@pytest.mark.parametrize("change", [{"key": 6}, {"position": 3}, {"ids": torch.arange(1, 1001)}])
def test_key_position_and_id_all_matter(change):
    arguments = {"key": 5, "ids": torch.arange(1000), "position": 2}
    same = (uniform(**arguments) == uniform(**{**arguments, **change})).sum()
    assert same == 0


def test_draws_are_uniform_and_uncorrelated():
    draws = torch.stack([uniform(key_of(1, 2), torch.arange(20_000), position) for position in range(4)])
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = torch.histc(draws.float(), bins=50, min=0, max=1)
    expected = draws.numel() / 50
    assert ((counts - expected) ** 2 / expected).sum() < 90  # chi-square, 49 degrees of freedom: p < 0.0003 beyond
    correlation = torch.corrcoef(torch.cat([draws, draws.roll(1, 1)]))
    assert correlation.fill_diagonal_(0).abs().max() < 0.03


def test_tokens_come_as_often_as_they_are_likely():
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0])
    for temperature in (1.0, 0.5):
        tokens, logprobs = sample_tokens(logits.expand(40_000, 4), uniform(1, torch.arange(40_000), 0), temperature)
        expected = torch.softmax(logits / temperature, 0)
        frequency = torch.bincount(tokens, minlength=4) / len(tokens)
        assert (frequency - expected).abs().max() < 0.01
        assert torch.allclose(logprobs, expected.log()[tokens], atol=1e-6)


@pytest.mark.parametrize(("limits", "allowed"), [
    ({"top_k": 2}, {0, 3}), ({"top_p": 0.6}, {0}), ({"top_p": 0.8}, {0, 3}), ({"top_k": 3, "top_p": 0.999}, {0, 1, 3}),
    ({"top_k": 99}, {0, 1, 2, 3}), ({"min_p": 0.3}, {0, 3}), ({"min_p": 0.1}, {0, 1, 3}),
    ({"min_p": 0.1, "top_p": 0.8}, {0, 3}), ({"min_p": 1e-9}, {0, 1, 2, 3})])
def test_top_k_top_p_and_min_p_restrict_the_choice_but_not_the_log_probability(limits, allowed):
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0])  # probabilities 0.64, 0.09, 0.03, 0.24
    tokens, logprobs = sample_tokens(logits.expand(5000, 4), uniform(2, torch.arange(5000), 0), 1.0, **limits)
    assert set(tokens.tolist()) == allowed
    assert torch.allclose(logprobs, torch.log_softmax(logits, 0)[tokens], atol=1e-6)


@pytest.mark.parametrize("width", [sampling._BLOCK * 3, 700, 9000])
@pytest.mark.parametrize("limits", [{}, {"top_k": 5}])
def test_wide_vocabularies_draw_by_blocks_what_a_running_sum_draws(width, limits, monkeypatch):
    logits, noise = torch.randn(300, width) * 4, uniform(3, torch.arange(300), 0)
    noise[:2] = torch.tensor([0.0, 1 - 2.0**-53])
    monkeypatch.setattr(sampling, "_WIDE", width)
    expected, logprobs = sample_tokens(logits, noise, 1.0, **limits)
    monkeypatch.setattr(sampling, "_WIDE", width - 1)
    found, same = sample_tokens(logits, noise, 1.0, **limits)
    assert torch.equal(found, expected)
    assert torch.equal(same, logprobs)
    assert len(found.unique()) > 50


@pytest.mark.parametrize("wide", [0, 4096])
def test_extreme_noise_draws_nothing_that_is_excluded(wide, monkeypatch):
    monkeypatch.setattr(sampling, "_WIDE", wide)
    logits = torch.full((64, 500), -torch.inf)
    logits[:, 100:300] = torch.randn(64, 200)
    for noise in (0.0, 1 - 2.0**-53):
        tokens, logprobs = sample_tokens(logits, torch.full((64,), noise, dtype=torch.float64), 1.0)
        assert ((tokens >= 100) & (tokens < 300)).all()
        assert logprobs.isfinite().all()


@pytest.mark.parametrize("width", [100, 9000])
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_no_numbers_draw_a_token_of_the_vocabulary(width, odd):
    """Its log-probability is none either, by which the row is noticed."""
    logits = torch.randn(3, width)
    logits[1] = odd
    tokens, logprobs = sample_tokens(logits, torch.full((3,), 0.5, dtype=torch.float64), 1.0)
    assert ((tokens >= 0) & (tokens < width)).all()
    assert logprobs.isfinite().tolist() == [True, False, True]
