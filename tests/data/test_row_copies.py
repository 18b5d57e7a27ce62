"""Rows are copied to where they belong, whatever their lengths, by C and in Python alike; nothing else is touched."""

import sys
import threading

import numpy as np
import pytest

from distflow.data import row_copies
from distflow.data.row_copies import ScatteredRuns, copy_runs
from distflow.errors import ColumnError


@pytest.fixture(params=["compiled", "python"])
def copy(request, monkeypatch):
    """The implementation of `copy_runs`, which is the one in use."""
    if request.param == "python":
        monkeypatch.setattr(row_copies, "_copy_compiled", None)
        return row_copies._copy_in_python
    if row_copies._copy_compiled is None:
        pytest.skip("copies are not compiled: install with a C compiler, or  python setup.py build_ext --inplace")
    return row_copies._copy_compiled


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
    return source, np.zeros(int(counts.sum()) * width, np.uint8), begin[taken], at, counts


def row_by_row(source, target, begin, at, counts, width):
    """Return what is to become of `target`."""
    expected = target.copy()
    for start, to, count in zip(begin * width, at * width, counts * width):
        expected[to : to + count] = source[start : start + count]
    return expected


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 40])
@pytest.mark.parametrize(("rows", "lengths"), [(16, (0, 9)), (4096, (0, 40)), (4096, (1, 2)), (2048, (0, 600)),
                                               (4096, (128, 129)), (4096, (0, 1))])
def test_every_row_arrives_and_nothing_else_changes(copy, rows, lengths, width):
    source, target, *runs = scattered(rows, lengths, width)
    expected = row_by_row(source, target, *runs, width)
    around = np.full(len(target) + 64, 7, np.uint8)
    assert copy(source, around[32:-32], *runs, width) == -1
    np.testing.assert_array_equal(around[32:-32], expected)
    assert (around[:32] == 7).all()
    assert (around[-32:] == 7).all()


def test_no_rows_are_nothing_to_copy(copy):
    source, target, *runs = scattered(4096, (1, 9), 1)
    copy_runs(source[:0], target[:0], *runs, 0)
    copy_runs(source, target, *(run[:0] for run in runs), 1)
    assert not target.any()


_LAST = np.iinfo(np.int64)


@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize(("number", "begin", "at", "size"), [
    (0, 101, 0, 0), (0, 100, 0, 1), (0, 0, 50, 1), (0, 0, 51, 0), (0, 0, 0, 51), (1, -1, 0, 1), (2, 0, -1, 1),
    (3, 0, 0, -1), (120, _LAST.max, 0, 1), (120, 0, _LAST.max, 1), (7, 1, 0, _LAST.max), (7, 0, 1, _LAST.max),
    (7, _LAST.max, _LAST.max, _LAST.max), (7, _LAST.min, 0, 1), (7, 0, _LAST.min, _LAST.max), (7, 5, 5, _LAST.min),
    (7, 1 << 61, 0, 1), (7, 0, 0, 1 << 61)])
def test_a_row_outside_of_a_buffer_is_named_before_any_is_copied(copy, width, number, begin, at, size):
    source, target = np.ones(100 * width + 7, np.uint8)[: 100 * width], np.zeros(50 * width, np.uint8)
    runs = [np.arange(128) % 50, np.arange(128) % 50, np.full(128, 1)]
    for values, value in zip(runs, (begin, at, size)):
        values[number] = value
    assert copy(source, target, *runs, width) == number
    with pytest.raises(ColumnError, match=f"a row of {size} elements of {width} bytes, from element {begin} of 100"):
        copy_runs(source, target, *runs, width)
    assert not target.any()


def test_a_target_that_cannot_be_written_is_refused(copy):
    source, target = np.ones(64, np.uint8), np.zeros(64, np.uint8)
    runs = [np.zeros(1, np.int64)] * 2 + [np.full(1, 4)]
    target.flags.writeable = False
    for wrong in ((source, target), (source[::2], np.zeros(64, np.uint8)), (source, np.zeros(64, np.uint8)[::2])):
        with pytest.raises(ValueError, match=r"side by side|read-only|contiguous"):
            copy(*wrong, *runs, 1)
    assert not target.any()


@pytest.mark.parametrize("wrong", [
    np.zeros(4, np.int32), np.zeros(4, np.uint64), np.zeros(4), np.zeros((2, 2), np.int64), np.zeros(8, np.int64)[::2],
    np.zeros(33, np.uint8)[1:].view(np.int64), np.zeros(3, np.int64)])
@pytest.mark.parametrize("place", [2, 3, 4])
@pytest.mark.parametrize("copy", ["compiled"], indirect=True)
def test_numbers_of_another_form_are_refused(copy, wrong, place):
    given = [np.ones(64, np.uint8), np.zeros(64, np.uint8), *[np.zeros(4, np.int64)] * 3, 1]
    given[place] = wrong
    with pytest.raises(ValueError, match=r"int64|one number in each|contiguous"):
        copy(*given)


@pytest.mark.parametrize("copy", ["compiled"], indirect=True)
@pytest.mark.parametrize("width", [0, -8])
def test_elements_without_bytes_are_refused(copy, width):
    with pytest.raises(ValueError, match="a byte or more"):
        copy(np.ones(64, np.uint8), np.zeros(64, np.uint8), *[np.zeros(4, np.int64)] * 3, width)


@pytest.mark.parametrize("copy", ["compiled"], indirect=True)
def test_numbers_that_change_meanwhile_lead_nowhere_else(copy):
    """Another process may write them at any time: then rows may be refused half-way, but no other byte is touched."""
    rows, width = 2048, 4096
    source, around = np.ones(rows * width, np.uint8), np.zeros(3 * rows * width, np.uint8)
    before, target, behind = around.reshape(3, -1)
    begin, at, sizes = np.arange(rows), np.arange(rows)[::-1].copy(), np.full(rows, 1)
    ended = threading.Event()

    def change():
        while not ended.is_set():
            for values in (begin, at, sizes):
                right = values[::7].copy()
                values[::7] = rows + 1
                values[::7] = right

    writer, interval = threading.Thread(target=change, daemon=True), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # or all calls find the numbers as one of them did
    writer.start()
    try:
        for _ in range(1000):
            copy(source, target, begin, at, sizes, width)
    finally:
        ended.set()
        writer.join()
        sys.setswitchinterval(interval)
    assert not before.any()
    assert not behind.any()


@pytest.mark.parametrize("width", [1, 8, 40])
def test_scattered_runs_are_one_part_of_a_message(copy, width):
    source, target, begin, _, counts = scattered(512, (0, 600), width)
    part = ScatteredRuns(source, begin, begin + counts, width)
    assert len(part) == len(target)
    part.copy_to(target.data)
    assert target.tobytes() == b"".join(source[start : start + size].tobytes()
                                        for start, size in zip(begin * width, counts * width))
