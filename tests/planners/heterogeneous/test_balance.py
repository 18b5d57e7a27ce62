"""Uneven shares and stages against going through all of them."""

from itertools import product

import numpy as np
import pytest

from planners.heterogeneous.cost import layers_of_stages, rows_of_shares


@pytest.mark.parametrize("seed", range(20))
def test_layers_make_the_slowest_stage_as_fast_as_can_be(seed):
    random = np.random.default_rng(seed)
    layers, stages = int(random.integers(4, 11)), int(random.integers(1, 4))
    seconds, most = random.uniform(1, 5, stages).tolist(), random.integers(2, 9, stages).tolist()
    allowed = [counts for counts in product(range(1, layers + 1), repeat=stages)
               if sum(counts) == layers and all(count <= limit for count, limit in zip(counts, most))]
    found = layers_of_stages(layers, seconds, most)
    if not allowed:
        assert found is None
        return
    assert found in allowed
    slowest = [max(count * each for count, each in zip(counts, seconds)) for counts in (found, *allowed)]
    assert slowest[0] == pytest.approx(min(slowest))


def test_even_stages_differ_by_one_layer_at_most():
    assert layers_of_stages(10, [1.0, 9.0, 1.0], [10, 10, 10], even=True) == (4, 3, 3)
    assert layers_of_stages(10, [1.0, 9.0, 1.0], [3, 10, 10], even=True) is None


def test_a_stage_has_a_layer_however_slow_it_is():
    assert layers_of_stages(4, [1.0, 100.0], [9, 9]) == (3, 1)
    assert layers_of_stages(2, [1.0, 1.0, 1.0], [9, 9, 9]) is None


@pytest.mark.parametrize("seed", range(20))
def test_rows_make_the_slowest_share_as_fast_as_can_be(seed):
    random = np.random.default_rng(seed)
    total, counts = int(random.integers(1, 25)), random.integers(1, 4, int(random.integers(2, 4))).tolist()
    times = [np.concatenate([[0.0], np.cumsum(random.uniform(0.1, 3, total))]) for _ in counts]
    found = rows_of_shares(total, counts, times)
    assert sum(count * rows for count, rows in zip(counts, found)) >= total
    best = min(max(table[rows] for table, rows in zip(times, chosen))
               for chosen in product(range(total + 1), repeat=len(counts))
               if sum(count * rows for count, rows in zip(counts, chosen)) >= total)
    assert max(table[rows] for table, rows in zip(times, found)) == pytest.approx(best)


def test_a_share_that_is_too_slow_has_no_rows():
    assert rows_of_shares(4, [1, 1], [np.arange(5.0), np.array([0.0, 9, 9, 9, 9])]) == (4, 0)
