"""Shares of a batch are loaded apart, and together they are the same samples for any number of ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.data.dataloader import Dataloader, Mixture
from distflow.plan import Layout

QUIET = settings(max_examples=60)


class Numbers:
    """Record `i` is the number `i`; remembers what was read."""

    def __init__(self, size: int):
        self.size, self.read = size, []

    def __len__(self) -> int:
        return self.size

    def get(self, indices):
        self.read += indices
        return [{"number": index} for index in indices]

    def where(self, index: int) -> str:
        return str(index)


def encode(records):
    return {"number": torch.tensor([record["number"] for record in records])}


def loader(size: int, batch: int, share: int | None = 0, shares: int = 1, seed: int = 0) -> Dataloader:
    return Dataloader(Numbers(size), encode, batch, seed, share, Layout(shares))


def mixed(sizes: list[int], turns: list[int], batch: int = 1, seed: int = 0, **share: object) -> Dataloader:
    return Dataloader(Mixture([Numbers(size) for size in sizes], turns), encode, batch, seed, **{"share": 0, **share})


@QUIET
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=2, max_size=4), st.integers(0, 3))
def test_each_of_several_sets_comes_by_its_weight_and_whole_in_each_pass(sets, seed):
    sizes, turns = zip(*sets)
    one = mixed(sizes, turns, seed=seed)
    rounds = [[one._index(position) for position in range(start, start + sum(turns))]
              for start in range(0, 20 * sum(turns), sum(turns))]
    found = [[] for _ in sizes]
    for indices in rounds:
        for index in indices:
            number = next(number for number, end in enumerate(one.records.starts[1:]) if index < end)
            found[number].append(index - one.records.starts[number])
    for size, count, indices in zip(sizes, turns, found):
        assert len(indices) == 20 * count
        for start in range(0, len(indices) - size + 1, size):
            assert sorted(indices[start : start + size]) == list(range(size)), "a pass has each record once"
    assert len({tuple(indices) for indices in rounds}) > 1 or max(sizes) == 1


def test_a_mixture_goes_on_where_it_stood_and_does_not_depend_on_ranks():
    whole, later = mixed([5, 7], [2, 1], batch=6), mixed([5, 7], [2, 1], batch=6)
    steps = [step_of([whole]) for _ in range(6)]
    later.load_state_dict({"position": 18})
    assert [step_of([later]) for _ in range(3)] == steps[3:]
    shares = [mixed([5, 7], [2, 1], 6, share=share, layout=Layout(4)) for share in range(4)]
    assert [step_of(shares) for _ in range(6)] == steps
    assert step_of([mixed([5, 7], [2, 1], 6, seed=1)]) != steps[0]


def step_of(loaders: list[Dataloader]) -> tuple[list[int], list[int]]:
    """A step of all shares together: ids and numbers."""
    parts = [one.next() for one in loaders]
    return ([row for part in parts for row in part.ids.tolist()],
            [number for part in parts if len(part) for number in part["number"].tolist()])


@QUIET
@given(st.integers(1, 12), st.integers(1, 15), st.integers(1, 4), st.integers(0, 3))
def test_any_number_of_ranks_draws_the_same_samples(size, batch, shares, seed):
    one = [loader(size, batch, seed=seed)]
    many = [loader(size, batch, share, shares, seed) for share in range(shares)]
    for step in range(4):
        ids, numbers = step_of(one)
        assert (ids, numbers) == step_of(many)
        assert ids == list(range(step * batch, (step + 1) * batch))


@QUIET
@given(st.integers(1, 40), st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any))
def test_unlike_shares_draw_the_same_samples_in_their_proportion(batch, rows):
    layout = Layout(len(rows), rows=tuple(rows))
    many = [Dataloader(Numbers(7), encode, batch, 0, share, layout) for share in range(len(rows))]
    for step in range(3):
        ids, _ = step_of(many)
        assert ids == list(range(step * batch, (step + 1) * batch))
    for share, part in enumerate(rows):
        assert abs(len(layout.cut(batch, share)) - batch * part / sum(rows)) < 1


def test_unlike_shares_are_cut_to_the_nearest_row():
    layout = Layout(2, rows=(157, 35))  # 19.6 and 4.4 of 24
    assert [layout.cut(24, share) for share in range(2)] == [range(20), range(20, 24)]


@QUIET
@given(st.integers(1, 12), st.integers(1, 15))
def test_every_record_comes_once_an_epoch_in_a_new_order(size, batch):
    one, numbers = [loader(size, batch)], []
    while len(numbers) < 3 * size:
        numbers += step_of(one)[1]
    epochs = [numbers[epoch * size : (epoch + 1) * size] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert one[0].epoch == one[0].position / size


def test_epochs_and_seeds_differ():
    one = loader(50, 50)
    first, second = one.next()["number"].tolist(), one.next()["number"].tolist()
    assert first != second
    assert first != list(range(50))
    assert first != loader(50, 50, seed=1).next()["number"].tolist()
    assert first == loader(50, 50).next()["number"].tolist()


@QUIET
@given(st.integers(1, 10), st.integers(1, 9), st.integers(0, 5), st.integers(1, 3))
def test_a_restored_loader_goes_on_where_it_stood(size, batch, done, shares):
    """With another number of ranks too."""
    one = loader(size, batch)
    for _ in range(done):
        one.next()
    others = [loader(size, batch, share, shares) for share in range(shares)]
    for other in others:
        other.load_state_dict(one.state_dict())
    assert step_of([one]) == step_of(others)


def test_shares_differ_by_at_most_one_row():
    sizes = [len(loader(20, 7, share, 3).next()) for share in range(3)]
    assert sum(sizes) == 7
    assert max(sizes) - min(sizes) == 1


def test_a_rank_reads_its_own_share_only():
    one = loader(100, 8, 1, 4)
    batch = one.next()
    assert batch.ids.tolist() == [2, 3]
    assert len(one.records.read) == 2
    assert batch["group"].tolist() == [2, 3]


@pytest.mark.parametrize("share", [None, 0])
def test_a_rank_without_rows_reads_nothing_and_moves_on(share):
    """Outside the layout, or with more ranks than rows."""
    one = loader(10, 2, share, 5)
    assert len(one.next()) == 0
    assert one.records.read == []
    assert one.position == 2
