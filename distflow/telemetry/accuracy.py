"""Estimates accuracy on a validation set: pass@k and confidence intervals."""

from __future__ import annotations

import math

_Z = 1.959964  # the normal distribution's quantile for an interval of 95%


def pass_at(k: int, answers: int, right: int) -> float:
    """Return the unbiased estimate of pass@k (Chen et al. 2021, Eq. 1) from `answers` answers of which `right` are
    right. Raises ValueError: there are fewer than `k` answers, or more right ones than answers."""
    if not 1 <= k <= answers or not 0 <= right <= answers:
        raise ValueError(f"pass@{k} of {answers} answers of which {right} are right: k is 1 to the number of answers")
    return 1.0 - math.comb(answers - right, k) / math.comb(answers, k)


def interval(mean: float, mean_of_squares: float, problems: int) -> tuple[float, float]:
    """Return the 95% confidence interval of a mean over problems, of values from 0 to 1.

    Wilson's score interval (1927) at the effective sample size (Korn and Graubard 1998), the number of single
    right-or-wrong answers with the same variance of the mean. The sample is the problems: answers to one problem are
    not independent. Unlike mean ± 1.96 standard errors the interval stays within 0 to 1, and does not shrink to a point
    when all problems are right. Raises ValueError: there is no problem, or a value was outside of 0 to 1.
    """
    if problems < 1 or not 0 <= mean_of_squares <= mean + 1e-9 or mean > 1 + 1e-9:
        raise ValueError(f"an interval wants the mean of at least one value from 0 to 1, not {mean} of {problems}")
    mean = min(mean, 1.0)
    size = float(problems)
    spread = (mean_of_squares - mean * mean) * problems / max(problems - 1, 1)
    if spread > 1e-12:
        size *= max(1.0, mean * (1.0 - mean) / spread)
    centre = (mean + _Z * _Z / (2 * size)) / (1 + _Z * _Z / size)
    half = _Z / (1 + _Z * _Z / size) * math.sqrt(mean * (1 - mean) / size + (_Z / (2 * size)) ** 2)
    return max(0.0, centre - half), min(1.0, centre + half)


def interval_of_mean(mean: float, mean_of_squares: float, problems: int) -> tuple[float, float]:
    """Return the 95% confidence interval of a mean reward over problems: `interval` if it can be one of values from 0
    to 1, and else mean ± 1.96 standard errors."""
    if 0 <= mean_of_squares <= mean <= 1:
        return interval(mean, mean_of_squares, problems)
    half = _Z * math.sqrt(max(0.0, mean_of_squares - mean * mean) / max(problems - 1, 1))
    return mean - half, mean + half
