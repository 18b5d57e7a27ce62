"""Shares of a batch are loaded apart, and together they are the same samples for any number of ranks."""

import itertools
import json
import threading

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import hosted

from distflow.data.dataloader import SOURCE_WEIGHT, Dataloader, Mixture
from distflow.errors import InvalidInput
from distflow.plan import Layout
from distflow.telemetry.metrics import Metrics, current, recording
from workers.rollout_channel import RolloutChannel

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


@pytest.mark.parametrize(("before", "now"), [
    ({"a": 1, "b": 1}, {"a": 1, "b": 1}), ({"a": 1, "b": 1}, {"a": 3, "b": 1}), ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({"a": 1, "b": 1}, {"a": 1, "b": 1, "c": 2}), ({"a": 1, "b": 2}, {"b": 1}), ({"a": 1}, {"b": 1, "a": 1}),
    ({"a": 1, "b": 1}, {"c": 1, "b": 1}), ({"a": 1}, {"b": 1})])
def test_a_mixture_of_other_sets_or_weights_continues_each_set_where_it_stood(before, now, capsys):
    """accelerate#4195, ms-swift#10050: no record of a pass comes twice, and none is left out."""
    first, drawn = resumable(before), {name: [] for name in SIZES}
    for _ in range(5):
        count(first, drawn)
    state = json.loads(json.dumps(first.state_dict()))
    for _ in range(2):
        later = resumable(now)
        later.load_state_dict(state)
        assert ("other training sets or weights" in capsys.readouterr().out) == ([*before.items()] != [*now.items()])
        begun = {name: len(records) for name, records in drawn.items()}
        for _ in range(20):
            count(later, drawn)
        state = json.loads(json.dumps(later.state_dict()))
        taken = {name: len(records) - begun[name] for name, records in drawn.items()}
        assert all(abs(taken[name] - 60 * now.get(name, 0) / sum(now.values())) <= 4 for name in SIZES)
        for name, size in SIZES.items():
            for start in range(0, len(drawn[name]) - size + 1, size):
                assert sorted(drawn[name][start : start + size]) == list(range(size)), "a pass has each record once"
        before = now


@pytest.mark.parametrize(("before", "now"), [({"a": 1, "b": 1}, {"a": 1, "b": 3}), ({"a": 1}, {"b": 1, "a": 1})])
def test_loaders_of_other_groups_find_the_trainers_records(before, now):
    """Rollouts have no state: they would sample other prompts than those that the trainer has beside them."""
    trainer, rollout = resumable(now), resumable(now)
    trainer.load_state_dict(json.loads(json.dumps(_stepped(resumable(before)).state_dict())))
    channel = RolloutChannel(hosted(), bytes(32), [], "127.0.0.1", 1, 1, 2)
    channel.announce_start(4, trainer.records.state_dict())
    assert channel.follow_start(rollout) == 4
    ids = torch.arange(trainer.position, trainer.position + 20)
    assert trainer.at(ids)["number"].tolist() == rollout.at(ids)["number"].tolist()


@pytest.mark.parametrize(("before", "now", "mixture", "taken"), [
    ({"a": 1}, {"a": 1, "b": 1}, None, [12, 0]), ({"a": 1, "b": 1, "c": 1}, {"a": 1, "c": 1}, None, None),
    ({"a": 1, "b": 1}, {"a": 1, "b": 1, "c": 1}, None, None),
    ({"a": 1, "b": 1}, {"a": 1, "b": 1, "c": 1}, {"turns": [3, 1]}, [9, 3, 0])])
def test_a_state_of_an_older_version_has_no_weights(before, now, mixture, taken):
    """They had `turns` of sets that a node has reweighed, and of others nothing: they continue by positions."""
    first, later = resumable(before), resumable(now)
    state = {"position": 12, "files": first.state_dict()["files"], **({"mixture": mixture} if mixture else {})}
    later.load_state_dict(json.loads(json.dumps(state)))
    assert (later.position, later.records.since) == (12, 12 if taken else 0)
    assert taken is None or sum(later.records.taken) == sum(taken) and later.records.taken[-1] == 0


def _stepped(loader: Dataloader) -> Dataloader:
    for _ in range(4):
        loader.next()
    return loader


def test_one_set_of_several_that_has_grown_continues_behind_what_it_has_given(capsys):
    first, drawn = resumable({"a": 1, "b": 1}), {name: [] for name in SIZES}
    for _ in range(4):
        count(first, drawn)
    size = SIZES["a"] + 9
    later = Dataloader(Mixture([Numbers(size)], [1], ["a"]), encode, 3, 5, 0, files={"a": [size, "a"]})
    later.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert later.position == first.position
    assert "Training continues at the position that it had in the old one." in capsys.readouterr().out


def test_a_set_in_another_folder_continues_where_it_stood(capsys):
    first, later = resumable({"a": 1, "b": 1}), resumable({"a": 1, "b": 1})
    steps = [first.next().ids.tolist() for _ in range(4)]
    later.files = {f"/moved/{name}": file for name, file in later.files.items()}
    later.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [later._index(12 + row) for row in range(9)] == [first._index(12 + row) for row in range(9)]
    assert len(steps) == 4
    assert not capsys.readouterr().out


SIZES = {"a": 7, "b": 11, "c": 5}


def resumable(weights: dict[str, int]) -> Dataloader:
    sets = [Numbers(SIZES[name]) for name in weights]
    return Dataloader(Mixture(sets, [*weights.values()], [*weights]), encode, 3, 5, 0,
                      files={name: [SIZES[name], name] for name in weights})


def count(loader: Dataloader, drawn: dict[str, list[int]]) -> None:
    """Take a step's records, by the set that each is of."""
    starts = loader.records.starts
    for number in map(loader._index, loader.next().ids.tolist()):
        place = max(place for place in range(len(loader.files)) if starts[place] <= number)
        drawn[[*loader.files][place]].append(number - starts[place])


def test_weights_may_change_after_each_step():
    """Records of a set go on where they stood, whole in each pass, and a restored loader goes on bit for bit."""
    sizes, batch = [7, 9, 5], 10
    one, made, states = named(sizes, batch), [], []
    changes = {2: {"a": 8.0, "c": 2.0}, 3: {"b": 0.0, "a": 1.0}, 5: {"c": 1.0, "b": 3.0, "a": 0.0}, 7: {"b": 2.0}}
    for step in range(12):
        states.append(json.loads(json.dumps(one.state_dict())))
        made.append(step_of([one])[1])
        one.reweigh([{f"{SOURCE_WEIGHT}{name}": (2 * weight, 2.0) for name, weight in changes.get(step, {}).items()}])
    starts = one.records.starts
    drawn = [[number - start for numbers in made for number in numbers if start <= number < end]
             for start, end in itertools.pairwise(starts)]
    counts = [[sum(start <= number < end for number in numbers) for start, end in itertools.pairwise(starts)]
              for numbers in made]
    assert counts[3] == [6, 3, 1]  # a and c have had two thirds together, b keeps its third
    assert counts[4] == [8, 0, 2]  # 8.7 and 1.3, of which the step before has rounded a up and c down
    assert counts[6] == counts[8] == [0, 8, 2]
    for size, indices in zip(sizes, drawn):
        for start in range(0, len(indices) - size + 1, size):
            assert sorted(indices[start : start + size]) == list(range(size)), "a pass has each record once"
    for step in (2, 5, 9):
        shares = [named(sizes, batch, share=share, layout=Layout(3)) for share in range(3)]
        for share in shares:
            share.load_state_dict(states[step])
        assert step_of(shares)[1] == made[step]


@pytest.mark.parametrize("kept", [("position", "mixture"), ("position", "mixture", "files")])
def test_a_state_of_an_older_version_continues_by_the_weights_that_nodes_have_set(kept):
    first, later = resumable({"a": 1, "b": 1}), resumable({"a": 1, "b": 1})
    first.next()
    first.reweigh([{f"{SOURCE_WEIGHT}a": (7.0, 1.0), f"{SOURCE_WEIGHT}b": (1.0, 1.0)}])
    state = {name: value for name, value in first.state_dict().items() if name in kept}
    state["mixture"] = {name: state["mixture"][name] for name in ("since", "taken", "turns", "shares", "owed")}
    later.load_state_dict(json.loads(json.dumps(state)))
    for _ in range(6):
        assert later._indices(later.next().ids) == first._indices(first.next().ids)
        first.reweigh([])
        later.reweigh([])


def test_a_set_of_less_than_a_prompt_a_step_has_its_share():
    """Sets report weights only in steps in which they have prompts; a weight of 0 for all changes nothing."""
    one, drawn = named([5, 5, 5], 8), [0, 0, 0]
    for step in range(131):
        own = [number // 5 for number in step_of([one])[1]]
        if step:
            drawn = [count + own.count(number) for number, count in enumerate(drawn)]
        weights = [0.0] * 3 if step % 5 == 4 else [0.3, 0.3, 0.05]
        one.reweigh([{f"{SOURCE_WEIGHT}{name}": (weight, 1.0) for number, (name, weight)
                      in enumerate(zip("abc", weights)) if number in own}])
    assert drawn == pytest.approx([130 * 8 * weight / 0.65 for weight in (0.3, 0.3, 0.05)], abs=1.5)


def named(sizes: list[int], batch: int, **share: object) -> Dataloader:
    whole = Numbers(sum(sizes))
    starts = [0, *itertools.accumulate(sizes)]
    mixture = Mixture([Part(whole, start, size) for start, size in zip(starts, sizes)], [1] * len(sizes), "abc")
    return Dataloader(mixture, encode, batch, 3, **{"share": 0, **share})


class Part(Numbers):
    def __init__(self, whole: Numbers, start: int, size: int):
        super().__init__(size)
        self.whole, self.start = whole, start

    def get(self, indices):
        return self.whole.get([index + self.start for index in indices])


def test_weights_that_cannot_be():
    for reported, match in (({"d": 1.0}, "`d` is given a weight, and is no training set"), ({"a": -1.0}, "at least 0"),
                            ({"a": float("nan")}, "at least 0")):
        with pytest.raises(InvalidInput, match=match):
            named([3, 3, 3], 4).reweigh([{f"{SOURCE_WEIGHT}{name}": (each, 1.0) for name, each in reported.items()}])
    with pytest.raises(InvalidInput, match="there is one training set"):
        loader(5, 2).reweigh([{f"{SOURCE_WEIGHT}a": (1.0, 1.0)}])


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


@QUIET
@given(st.integers(1, 12), st.integers(1, 15))
def test_every_record_comes_once_an_epoch(size, batch):
    one, numbers = [loader(size, batch)], []
    while len(numbers) < 3 * size:
        numbers += step_of(one)[1]
    for epoch in range(3):
        assert sorted(numbers[epoch * size : (epoch + 1) * size]) == list(range(size))
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


@pytest.mark.parametrize(("share", "ids"), [(None, []), (0, []), (4, [1])])
def test_a_rank_reads_its_own_share_only(share, ids):
    """Nothing outside the layout, or with more ranks than rows."""
    one = loader(10, 2, share, 5)
    assert [one.next().ids.tolist() for _ in range(3)] == [ids, [each + 2 for each in ids], [each + 4 for each in ids]]
    one.pool.shutdown()
    assert len(one.records.parts[0].read) == 4 * len(ids), "of three steps and the one after them"
    assert one.position == 6


class Gated(Numbers):
    """Records that are read only up to a gate."""

    def __init__(self, size: int, allowed: int):
        super().__init__(size)
        self.reads, self.closed, self.gate = itertools.count(), threading.Event(), threading.Event()
        self.allowed = allowed

    def get(self, indices):
        if next(self.reads) == self.allowed:
            self.closed.set()
            assert self.gate.wait(60)
        current().add("data/read", len(indices))
        return super().get(indices)


def test_dataloader_reads_the_next_step_while_one_computes():
    """Its metrics are those of the step that takes the rows."""
    records, plain = Gated(9, 1), loader(9, 4)
    one = Dataloader(records, encode, 4, 0, 0)
    with recording(metrics := Metrics()):
        assert step_of([one]) == step_of([plain])
        assert records.closed.wait(60), "the second step's rows are not being read"
        assert msgpack.unpackb(metrics.take()) == {"data/read": ["sum", 4, 0]}
        records.gate.set()
        assert step_of([one]) == step_of([plain])
        assert msgpack.unpackb(metrics.take()) == {"data/read": ["sum", 4, 0]}
    one.pool.shutdown()
    assert len(records.read) == 12, "each record is read once for a step"


def test_dataloader_that_returns_to_an_earlier_step_reads_its_rows():
    one, plain = loader(9, 4), loader(9, 4)
    steps, state = [step_of([plain]) for _ in range(3)], one.state_dict()
    assert [step_of([one]) for _ in range(2)] == steps[:2]
    one.load_state_dict(state)
    assert [step_of([one]) for _ in range(3)] == steps


def test_dataloader_refuses_a_record_in_the_step_that_it_belongs_to():
    class Broken(Numbers):
        def get(self, indices):
            if self.read:
                raise InvalidInput("this record cannot be read")
            return super().get(indices)

    one = Dataloader(Broken(9), encode, 4, 0, 0)
    assert len(one.next()) == 4
    with pytest.raises(InvalidInput, match="cannot be read"):
        one.next()
