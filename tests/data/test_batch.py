"""Ragged columns and batches: views where promised, copies of the rows asked for, and errors instead of nonsense."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distflow.data.batch import Batch, Ragged, decode_text, encode_text
from distflow.errors import ColumnError

QUIET = settings(max_examples=60)
LENGTHS = st.lists(st.integers(0, 5), max_size=7)
TRAILING = st.sampled_from([(), (3,), (2, 2)])


def ragged(lengths: list[int], trailing: tuple[int, ...] = ()) -> Ragged:
    """Every element different from all others."""
    total = sum(lengths) * torch.Size(trailing).numel()
    return Ragged(torch.arange(total).reshape(-1, *trailing), torch.tensor(lengths, dtype=torch.int64))


def batch(lengths: list[int]) -> Batch:
    rows = len(lengths)
    image = torch.arange(rows * 6).reshape(rows, 2, 3)
    return Batch(torch.arange(rows) + 10, {"tokens": ragged(lengths), "image": image})


def same(one: Ragged, other: Ragged) -> bool:
    return torch.equal(one.lengths, other.lengths) and torch.equal(one.values, other.values)


@QUIET
@given(LENGTHS, TRAILING)
def test_rows_make_the_column_that_they_came_from(lengths, trailing):
    column = ragged(lengths, trailing)
    assert [len(row) for row in column.rows] == lengths
    assert len(column) == len(lengths)
    assert column.offsets.tolist() == [sum(lengths[:row]) for row in range(len(lengths) + 1)]
    if lengths:
        assert same(Ragged.from_rows(column.rows), column)


@QUIET
@given(LENGTHS, TRAILING, st.sampled_from(["left", "right"]))
def test_padding_puts_each_row_at_its_end(lengths, trailing, side):
    column = ragged(lengths, trailing)
    padded = column.padded(-1, side)
    assert padded.shape == (len(lengths), max(lengths, default=0), *trailing)
    for row, elements in enumerate(column.rows):
        start = padded.shape[1] - len(elements) if side == "left" else 0
        assert torch.equal(padded[row, start : start + len(elements)], elements)
        assert (padded[row] == -1).sum() == (padded.shape[1] - len(elements)) * torch.Size(trailing).numel()
    if side == "right":
        assert same(Ragged.from_padded(padded, column.lengths), column)


@QUIET
@given(LENGTHS, TRAILING, st.data())
def test_a_slice_is_a_view(lengths, trailing, data):
    column = ragged(lengths, trailing)
    start = data.draw(st.integers(0, len(lengths)))
    stop = data.draw(st.integers(start, len(lengths)))
    part = column.slice(start, stop)
    assert part.lengths.tolist() == lengths[start:stop]
    assert all(torch.equal(a, b) for a, b in zip(part.rows, column.rows[start:stop]))
    if len(part.values):
        offset = int(column.offsets[start]) * column.values.stride(0) * column.values.element_size()
        assert part.values.data_ptr() == column.values.data_ptr() + offset


@QUIET
@given(LENGTHS.filter(len), TRAILING, st.data())
def test_selected_rows_come_in_the_order_asked_for(lengths, trailing, data):
    column = ragged(lengths, trailing)
    index = torch.tensor(data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=9)), dtype=torch.int64)
    part = Batch(torch.arange(len(lengths)) + 10, {"tokens": column}).select(index)
    assert part.ids.tolist() == (index + 10).tolist()
    assert part["tokens"].lengths.tolist() == [lengths[row] for row in index]
    assert all(torch.equal(row, column.rows[chosen]) for row, chosen in zip(part["tokens"].rows, index))


def test_an_empty_row_does_not_change_the_type_of_tokens():
    """`torch.tensor([])` is float32, and cat would make floats of all token ids."""
    column = Ragged.from_rows([torch.tensor([5, 6]), torch.tensor([]), torch.tensor([7])])
    assert column.values.dtype == torch.int64
    assert column.lengths.tolist() == [2, 0, 1]
    assert Ragged.from_rows([], torch.bool).values.dtype == torch.bool


@pytest.mark.parametrize(("lengths", "what"), [(torch.tensor([1, 1]), "add up to 2, but it has 3 values"),
                                               (torch.tensor([1.0, 2.0]), "float32"),
                                               (torch.tensor([[3]]), r"\[1, 1\]")])
def test_lengths_that_do_not_fit_are_refused(lengths, what):
    with pytest.raises(ColumnError, match=what):
        Ragged(torch.arange(3), lengths)


@QUIET
@given(st.lists(st.text(st.characters(codec=None), max_size=6), max_size=6))
@example(["half \ud83d a pair", "", "\x00"])
def test_text_comes_back(texts):
    """Every character, half surrogates included, and empty strings."""
    assert decode_text(encode_text(texts)) == texts


@pytest.mark.parametrize("column", [Ragged.from_rows([torch.tensor([1, 2])]),
                                    Ragged.from_rows([torch.tensor([0xC3, 0x28], dtype=torch.uint8)])])
def test_what_is_not_text_is_not_read_as_text(column):
    with pytest.raises(ColumnError, match="Is another column meant"):
        decode_text(column)


@QUIET
@given(LENGTHS, st.data())
def test_slices_of_a_batch_are_views_and_concat_undoes_them(lengths, data):
    whole = batch(lengths)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(lengths)), max_size=4)))
    parts = [whole.slice(start, stop) for start, stop in zip([0, *cuts], [*cuts, len(lengths)])]
    storage = whole["image"].untyped_storage().data_ptr()
    assert all(part["image"].untyped_storage().data_ptr() == storage for part in parts)
    joined = Batch.concat(parts)
    assert torch.equal(joined.ids, whole.ids)
    assert same(joined["tokens"], whole["tokens"])


@QUIET
@given(LENGTHS, st.integers(1, 4), st.integers(1, 3))
def test_repeated_rows_know_their_origin(lengths, times, again):
    """Through two repetitions too: dividing gives the origin back, and ids stay unique and ascending."""
    whole = batch(lengths)
    twice = whole.repeat(times).repeat(again)
    assert torch.equal(twice.ids // (times * again), whole.ids.repeat_interleave(times * again))
    assert len(torch.unique(twice.ids)) == len(twice)
    assert bool((twice.ids.diff() > 0).all())
    assert [row.tolist() for row in twice["tokens"].rows] == [
        row.tolist() for row in whole["tokens"].rows for _ in range(times * again)]


def test_a_part_without_rows_has_no_say_in_form_or_type():
    """A rank that never saw a row can only guess what a column is."""
    guess = Batch(torch.empty(0, dtype=torch.int64), {"a": torch.empty(0), "b": torch.empty(0)})
    real = Batch(torch.tensor([4]), {"a": ragged([2], (3,)), "b": torch.tensor([7])})
    for parts in ([guess, real], [real, guess]):
        joined = Batch.concat(parts)
        assert same(joined["a"], real["a"])
        assert joined["b"].tolist() == [7]
        assert joined["b"].dtype == torch.int64


@pytest.mark.parametrize(("columns", "what"), [({"b": torch.zeros(1)}, "not all of them have a, b"),
                                               ({"a": ragged([1])}, "`a` do not fit together: Ragged and Tensor"),
                                               ({"a": torch.zeros(1, 4)}, r"\[\] and \[4\]")])
def test_batches_that_do_not_fit_are_not_joined(columns, what):
    one = Batch(torch.tensor([0]), {"a": torch.zeros(1)})
    with pytest.raises(ColumnError, match=what):
        Batch.concat([one, Batch(torch.tensor([1]), columns)])


def test_a_batch_says_what_is_wrong_with_its_columns():
    with pytest.raises(ColumnError, match="column `a` has 2 rows, the batch has 1"):
        Batch(torch.tensor([0]), {"a": torch.zeros(2)})
    with pytest.raises(ColumnError, match="no column `rewards`; there are image, tokens"):
        batch([1])["rewards"]
    with pytest.raises(ColumnError, match="there are none"):
        Batch(torch.tensor([0]))["rewards"]


def nested(rows: list[list[int]]) -> Ragged:
    """For each row the lengths of its turns; every element different."""
    inner = ragged([turn for row in rows for turn in row])
    return Ragged(inner, torch.tensor([len(row) for row in rows], dtype=torch.int64))


NESTED = st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=6)


@QUIET
@given(NESTED, st.data())
def test_turns_stay_within_their_rows(rows, data):
    """Slices, selections and joins of a column whose elements are ragged are those of its list of lists."""
    column = nested(rows)
    plain = [[turn.tolist() for turn in row.rows] for row in column.rows]
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6)) if rows else []
    parts = [column.slice(start, stop), column.select(torch.tensor(index, dtype=torch.int64))]
    assert [[turn.tolist() for turn in row.rows] for row in parts[0].rows] == plain[start:stop]
    assert [[turn.tolist() for turn in row.rows] for row in parts[1].rows] == [plain[row] for row in index]
    joined = Batch.concat([Batch(torch.arange(len(part)), {"turns": part}) for part in parts])["turns"]
    assert [[turn.tolist() for turn in row.rows] for row in joined.rows] == \
        plain[start:stop] + [plain[row] for row in index]


def test_a_nested_column_has_no_padded_form_and_is_no_text():
    with pytest.raises(ColumnError, match="one level at a time"):
        nested([[1, 2]]).padded()
    with pytest.raises(ColumnError, match="rows of rows"):
        decode_text(nested([[1, 2]]))


@pytest.mark.parametrize("trailing", [(), (3,)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int64])
def test_long_rows_of_several_batches_come_in_any_order(dtype, trailing):
    random = torch.Generator().manual_seed(1)
    lengths = [torch.randint(0, 400, (rows,), generator=random) for rows in (5, 0, 7)]
    parts = [Ragged(torch.randn((int(part.sum()), *trailing), generator=random).to(dtype), part) for part in lengths]
    batches = [Batch(torch.arange(len(part)), {"tokens": part, "size": part.lengths}) for part in parts]
    rows = [row for part in parts for row in part.rows]
    for index in (torch.randperm(12, generator=random), torch.arange(3, 9), torch.tensor([7, 7, 0, 8]),
                  torch.tensor([-1, 0, -12]), torch.arange(12) % 3 == 1):
        found = Batch.gather(batches, index)
        index = torch.arange(12)[index]
        assert found["size"].tolist() == found["tokens"].lengths.tolist()
        assert found["tokens"].values.dtype == dtype
        assert all(map(torch.equal, found["tokens"].rows, (rows[row] for row in index.tolist())))


@pytest.mark.parametrize(("columns", "what"), [({}, "not all of them have x"),
                                               ({"x": torch.zeros(1, dtype=torch.float64)}, "`x` do not fit together")])
def test_gather_refuses_batches_that_do_not_fit(columns, what):
    one, two = Batch(torch.arange(1), columns), Batch(torch.arange(1), {"x": torch.zeros(1)})
    for batches in ([one, two], [two, one]):
        with pytest.raises(ColumnError, match=what):
            Batch.gather(batches, torch.arange(2))


def test_a_gradient_reaches_the_rows_that_were_selected():
    values = torch.ones(300, requires_grad=True)
    Ragged(values, torch.tensor([100, 200])).select(torch.tensor([1])).values.sum().backward()
    assert values.grad is not None
    assert values.grad.sum() == 200
