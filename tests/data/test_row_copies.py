"""Rows are copied to where they belong, whatever their lengths."""

import numpy as np
import pytest

from distflow.data import row_copies
from distflow.data.row_copies import RowRuns, ScatteredRuns, copy_rows, runs_of


def scattered(rows: int, lengths: tuple[int, int], width: int) -> tuple[np.ndarray, ...]:
    """Return source and target, and of each row where it begins in them and its number of elements; every other row of
    the source goes to the target, in another order, and some stay together."""
    random = np.random.default_rng(rows + width)
    counts = random.integers(*lengths, 2 * rows)
    source = random.integers(0, 256, int(counts.sum()) * width + 3).astype(np.uint8)  # and something behind the rows
    begin, taken = counts.cumsum() - counts, np.sort(random.permutation(2 * rows)[:rows])
    counts, order = counts[taken], np.roll(random.permutation(rows // 4)[:, None] * 4 + np.arange(4), 1).ravel()
    at = np.empty(rows, np.int64)
    at[order] = counts[order].cumsum() - counts[order]
    return source, np.zeros(int(counts.sum()) * width, np.uint8), begin[taken], at, counts, taken, order.argsort()


@pytest.mark.parametrize("width", [1, 3, 8, 40])
@pytest.mark.parametrize(("rows", "lengths"), [(16, (0, 9)), (4096, (0, 40)), (4096, (1, 2)), (2048, (0, 600)),
                                               (4096, (128, 129)), (4096, (0, 1))])
def test_every_row_arrives_and_nothing_else_changes(rows, lengths, width):
    source, target, begin, at, counts, here, there = scattered(rows, lengths, width)
    expected = np.zeros_like(target)
    for start, to, count in zip(begin * width, at * width, counts * width):
        expected[to : to + count] = source[start : start + count]
    around = np.full(len(target) + 64, 7, np.uint8)
    copy_rows(source, around[32:-32], begin, at, counts, width, runs_of(here, there))
    np.testing.assert_array_equal(around[32:-32], expected)
    assert (around[:32] == 7).all()
    assert (around[-32:] == 7).all()


def test_elements_without_bytes_are_nothing():
    source, target, begin, at, counts, here, there = scattered(4096, (1, 9), 1)
    copy_rows(source[:0], target[:0], begin, at, counts, 0, runs_of(here, there))


@pytest.mark.parametrize(("rows", "one_by_one"), [(4096, False), (64, True)])
def test_many_short_runs_are_copied_at_once(monkeypatch, rows, one_by_one):
    source, target, begin, at, counts, here, there = scattered(rows, (4, 8), 8)
    copied, copy = [], row_copies._copy_singly
    monkeypatch.setattr(row_copies, "_copy_singly", lambda *given: (copied.append(len(given[2])), copy(*given)))
    copy_rows(source, target, begin, at, counts, 8, RowRuns(np.arange(rows), np.arange(rows)))
    assert bool(sum(copied)) == one_by_one


@pytest.mark.parametrize("width", [1, 8, 40])
def test_scattered_runs_are_one_part_of_a_message(width):
    source, target, begin, _, counts, *_ = scattered(512, (0, 600), width)
    part = ScatteredRuns(source, begin, begin + counts, width)
    assert len(part) == len(target)
    part.copy_to(target.data)
    assert target.tobytes() == b"".join(source[start : start + size].tobytes()
                                        for start, size in zip(begin * width, counts * width))
