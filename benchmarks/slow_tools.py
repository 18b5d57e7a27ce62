"""The calculator, with the latency of a tool far away: most answers come soon, a few take very long."""

from __future__ import annotations

import asyncio
import math
import zlib
from statistics import NormalDist

from distflow import Turn, environment
from workers.isolation.environments.calculator import Calculator

_PLACES = 1 << 16


@environment(safe=True)
class SlowCalculator:
    """Answers as `Calculator` does, after seconds that are distributed lognormally over calls.

    They depend on the question and on all that the model has said about it, and on nothing else: so they are the same
    in every mode. To judge the last turn takes no time.
    """

    def __init__(self, question: str, answer: str, *, median: float = 0.1, sigma: float = 1.2):
        """`median` in seconds; `sigma` of its logarithm."""
        self.calculator, self.said = Calculator(answer), question
        self.median, self.sigma = median, sigma

    async def step(self, text: str) -> Turn:
        self.said += text
        turn = self.calculator.step(text)
        if not turn.done:
            await asyncio.sleep(latency(self.said, self.median, self.sigma))
        return turn


def latency(said: str, median: float, sigma: float) -> float:
    """Return the seconds of a call: the quantile of a lognormal distribution at a place that is drawn by what was
    said."""
    place = (zlib.crc32(said.encode(errors="surrogatepass")) % _PLACES + 0.5) / _PLACES
    return median * math.exp(sigma * NormalDist().inv_cdf(place))
