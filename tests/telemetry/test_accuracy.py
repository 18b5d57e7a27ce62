"""pass@k against all ways of drawing, and intervals against what they promise."""

import itertools
import random

import pytest

from distflow.telemetry.accuracy import interval, interval_of_mean, pass_at


@pytest.mark.parametrize("answers", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(answers):
    for right, k in itertools.product(range(answers + 1), range(1, answers + 1)):
        draws = list(itertools.combinations([index < right for index in range(answers)], k))
        assert pass_at(k, answers, right) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_single_answers_have_wilsons_interval():
    """The example of Wilson's interval for 8 of 10, computed by hand: (0.4901, 0.9433)."""
    assert interval(0.8, 0.8, 10) == pytest.approx((0.4902, 0.9433), abs=2e-3)


def test_all_right_is_not_certain():
    low, high = interval(1.0, 1.0, 20)
    assert high == 1.0
    assert low == pytest.approx(1 / (1 + 1.959964**2 / 20), abs=1e-9)


def test_it_covers_the_truth_about_as_often_as_it_says():
    generator, hits = random.Random(0), 0
    for _ in range(1000):
        chances = [generator.betavariate(0.5, 0.5) for _ in range(60)]
        values = [sum(generator.random() < chance for _ in range(4)) / 4 for chance in chances]
        low, high = interval(sum(values) / 60, sum(value * value for value in values) / 60, 60)
        hits += low <= 0.5 <= high
    assert 0.92 <= hits / 1000 <= 0.98


def test_rewards_that_are_no_shares_have_an_interval_by_standard_errors():
    rewards = [-1.0, 0.5, 2.0, 3.5]  # mean 1.25, deviation 1.9365
    low, high = interval_of_mean(1.25, sum(reward * reward for reward in rewards) / 4, 4)
    assert (low, high) == pytest.approx((1.25 - 1.959964 * 1.9365 / 2, 1.25 + 1.959964 * 1.9365 / 2), abs=1e-3)
    assert interval_of_mean(0.8, 0.8, 10) == interval(0.8, 0.8, 10)
