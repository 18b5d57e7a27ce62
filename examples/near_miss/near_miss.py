"""A reward of your own: part of the reward for a number that is nearly right."""

import re

from distflow import metric, reward


@reward
def near_miss(completion: str, answer: str, *, reach: float = 10.0) -> float:
    """Return 1 for the right number, less the further it is off, and 0 for one that is off by `reach` or for none."""
    said, right = (re.findall(r"-?\d+", text.replace(",", ""))[-1:] for text in (completion, answer))
    metric("near_miss/answered", bool(said))
    if not said:
        return 0.0
    return max(0.0, 1 - abs(int(said[0]) - int(right[0])) / reach)
