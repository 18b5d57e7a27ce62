"""Dataloader: each rank loads its own share of every batch (DistFlow §6.1).

The stream of samples is the dataset shuffled again each epoch, by (seed, epoch) alone; several datasets take turns in
it. Step `s` takes the next `batch` positions of it, over the end of an epoch too, and each share a contiguous part of
those, as its layout says. So the samples of a step do not depend on the number of ranks, and the only state is the
position, and where each dataset stood when the datasets or their weights changed.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy
import torch

from distflow.data.batch import Batch, ColumnData
from distflow.data.data_files import BASE, BESIDE, HELD_OUT, MODEL, DataFiles, changes
from distflow.data.dataset import JoinedRecords, Record, Records, RequiredFields
from distflow.errors import Diagnostic, InvalidInput, Location, did_you_mean
from distflow.plan import Layout
from distflow.telemetry import events
from distflow.telemetry.metrics import Metrics, current, recording

ONE = Layout(1)
REPEATS = 1 << 30
"""Prompts that are sampled again have other ids: their position plus so much for each time."""
_BEFORE = 1 << 40  # more records than a run takes of a dataset
_TOO_LONG = "is too long a prompt"
SOURCE_WEIGHT = "source_weight/"  # begins the names under which nodes report weights of training sets
Encode = Callable[[list[Record]], dict[str, ColumnData]]


def source_weight(source: str, values: torch.Tensor | float) -> None:
    """Report the weight of a training set from the next step on: the mean of all values of the step, on all ranks. Call
    it in a node function that runs once a step (mode sync). Sets without a value keep their share of prompts."""
    values_B = torch.as_tensor(values, dtype=torch.float64).flatten()
    total = float(values_B.sum())
    if not math.isfinite(total):
        raise InvalidInput(f"the weight of training set `{source}` is no number: {values_B.tolist()[:8]}")
    current().per_rank(f"{SOURCE_WEIGHT}{source}", total, len(values_B))


class UsableRecords:
    """Records of which unusable ones, with an empty field or too long a prompt, are replaced by usable ones, found by
    steps of one length. Keeps no index, so that opening is quick, but judges no record twice."""

    def __init__(self, records: Records, fields: RequiredFields, too_long: Callable[[Record], bool] | None = None):
        self.records, self.fields, self.too_long = records, fields, too_long
        self.unusable: dict[int, tuple[str, str]] = {}  # field, and why: of the records that were seen so far
        self.usable = bytearray(len(records))  # 1 for each that was seen
        self.stride = _stride(len(records))

    def __len__(self) -> int:
        return len(self.records)

    def location(self, index: int) -> Location:
        return self.records.location(index)

    def get(self, indices: Sequence[int]) -> list[Record]:
        wanted = [index for index in indices if index not in self.unusable]
        found = {index: record for index, record in zip(wanted, self.records.get(wanted))
                 if not self._unusable_field(index, record)}
        return [found[index] if index in found else self._replacement(index) for index in indices]

    def _replacement(self, index: int) -> Record:
        """Return the first usable record by steps from one that is not: those of a block are not all the same."""
        for step in range(len(self.records)):
            number = (index + step * self.stride) % len(self.records)
            if number not in self.unusable:
                record = self.records.get([number])[0]
                if not self._unusable_field(number, record):
                    return record
            current().add("data/records_skipped", 1)
        field, reason = self.unusable[index]
        remedy = "Raise data.max_prompt_tokens. Without images prompts can be cut:  data: {long_prompts: cut}" \
            if reason == _TOO_LONG else ""
        what = f"no record can be used: field `{field}` of this one {reason}"
        raise InvalidInput(Diagnostic(what, self.records.location(index), remedy))

    def _unusable_field(self, index: int, record: Record) -> tuple[str, str] | None:
        """Return the field by which a record cannot be used, and why; None if it can."""
        if self.usable[index] or index in self.unusable:
            return self.unusable.get(index)
        if missing := self.fields.missing(record):
            self.unusable[index] = missing, "is missing"
        elif empty := self.fields.empty(record):
            self.unusable[index] = empty, "is empty"
        elif self.too_long is not None and self.too_long(record):
            self.unusable[index] = self.fields.question, _TOO_LONG
        else:
            self.usable[index] = 1
            return None
        field, reason = self.unusable[index]
        events.record("record_skipped", field=field, reason=reason, where=str(self.records.location(index)))
        return field, reason


def _stride(size: int) -> int:
    """Return the length of steps that come to each of `size` records: near the golden section, which spreads them."""
    return next(step for step in range(max(1, round(0.618 * size)), size + 2) if math.gcd(step, size) == 1)


class Mixture(JoinedRecords):
    """Datasets as one, from which a stream takes in proportion to their turns. Each round has its own order, by
    (seed, round) alone; each dataset is shuffled again when it is through. Turns may change at a position; what the
    stream has before it is then known no more."""

    def __init__(self, sets: Sequence[Records], turns: Sequence[int], names: Sequence[str] = ()):
        """`turns`: of each dataset in a round."""
        super().__init__(sets)
        self.turns, self.names = tuple(turns), tuple(names)
        self.weights = self.turns
        self.numbers = [*range(len(sets))]  # by which the order of each dataset is drawn
        self.shares = [count / sum(turns) for count in turns]  # of prompts, before they are rounded to turns
        self.since, self.taken = 0, [0] * len(sets)  # position of the first round; of each dataset before it
        self.reweighed = False
        self.owed = [0.0] * len(sets)  # turns that each has had too few, since they are whole numbers

    def index(self, position: int, seed: int) -> int:
        """Return which record the stream has at a position. One from before the last change of datasets has another
        record than it had."""
        number = int(self._turn(position, seed)[-1])
        taken = self.taken_before(position, seed)[number] % _BEFORE
        return self.starts[number] + _shuffled_index(len(self.parts[number]), seed, taken, self.numbers[number])

    def taken_before(self, position: int, seed: int) -> list[int]:
        """Return how many records of each dataset the stream has before a position."""
        order, rounds = self._turn(position, seed)[:-1], (position - self.since) // sum(self.turns)
        return [taken + rounds * turns + int((order == number).sum())
                for number, (taken, turns) in enumerate(zip(self.taken, self.turns))]

    def _turn(self, position: int, seed: int) -> numpy.ndarray:
        """Return the datasets of a position's round up to it."""
        round_, turn = divmod(position - self.since, sum(self.turns))
        return _order_of_turns(tuple(self.turns), seed, round_ + self.since)[: turn + 1]

    def reweigh(self, weights: Mapping[str, float], position: int, seed: int, batch: int) -> None:
        """Take by other weights from `position` on, in rounds of `batch`. The datasets that are named divide what they
        have had together, as before if all weights are 0; the others keep their shares. Raises InvalidInput: there is
        no such dataset, or a weight is no number of at least 0."""
        if unknown := [name for name in weights if name not in self.names]:
            raise InvalidInput(f"`{unknown[0]}` is given a weight, and is no training set. "
                               f"{did_you_mean(unknown[0], self.names, 'There are')}")
        if any(not (math.isfinite(weight) and weight >= 0) for weight in weights.values()):
            raise InvalidInput(f"weights of training sets must be numbers of at least 0: {weights}")
        self.taken, self.reweighed = self.taken_before(position, seed), True
        if any(weights.values()):
            both = [(share, weights.get(name)) for name, share in zip(self.names, self.shares)]
            free = sum(share for share, weight in both if weight is not None) / sum(weights.values())
            self.shares = [share if weight is None else free * weight for share, weight in both]
        due = [share * batch + owed for share, owed in zip(self.shares, self.owed)]
        self.since, self.turns = position, _whole_turns(self.shares, due, batch)
        self.owed = [each - turns for each, turns in zip(due, self.turns)]

    def state_dict(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in _MIXED}, "weights": self.weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a mixture of the same datasets by the same weights."""
        self.reweighed = bool(state.get("since"))  # of older states, which say no more
        for name in _MIXED & state.keys():
            setattr(self, name, state[name])

    def follow(self, other: Mixture, places: Sequence[int | None], position: int, seed: int) -> None:
        """Take each dataset from `position` on where another mixture's stream stands there. `places`: its place in the
        other mixture; None for a new one."""
        taken, new = other.taken_before(position, seed), itertools.count(max(other.numbers) + 1)
        self.taken = [0 if place is None else taken[place] for place in places]
        self.numbers = [next(new) if place is None else other.numbers[place] for place in places]
        self.since = position


_MIXED = {"since", "taken", "turns", "shares", "owed", "numbers", "reweighed"}


def _whole_turns(shares: Sequence[float], due: Sequence[float], total: int) -> tuple[int, ...]:
    """Return how many of `total` turns each dataset has: the whole ones of its share, and of those that are left one
    after the other to the dataset to which most are due. A share of 0 has none."""
    turns = [int(share * total + 1e-9) for share in shares]
    shared = [number for number, share in enumerate(shares) if share]
    for _ in range(total - sum(turns)):
        turns[max(shared, key=lambda number: round(due[number] - turns[number], 9))] += 1
    return tuple(turns)


class Dataloader:
    """Loads this share's rows of each step; their ids are positions in the stream, unique over the whole run."""

    def __init__(self, records: Records, encode: Encode, batch: int, seed: int, share: int | None = None,
                 layout: Layout = ONE, files: DataFiles | None = None):
        """`files`: identity of the data and of frozen weights, by which a state of others is known."""
        self.records = records if isinstance(records, Mixture) else Mixture([records], [1])
        self.encode, self.batch, self.seed = encode, batch, seed
        self.share, self.layout, self.files = share, layout, files or {}
        self.position = self.left_over = 0
        """Prompts before the next step's, and those of them that the state's run had not trained on."""
        self.pool = ThreadPoolExecutor(1, "dataloader")
        self.ahead: tuple[list[int], Future[tuple[dict[str, ColumnData], bytes]]] | None = None
        """Records that are expected for the next step, and their columns and metrics."""

    def next(self) -> Batch:
        """Return the next step's rows of this share: none without a share, or perhaps if ranks outnumber rows. While
        the step computes, a thread reads and encodes those of the step after it."""
        start, self.position = self.position, self.position + self.batch
        for name, turns in zip(self.records.names, self.records.turns):
            current().maximum(f"data/share/{name}", turns / sum(self.records.turns))
        if self.share is None or not (mine := self.layout.cut(self.batch, self.share)):
            return Batch(torch.empty(0, dtype=torch.int64))
        ids = torch.arange(mine.start, mine.stop) + start
        columns = self._take_ahead(self._indices(ids))
        if not self.records.reweighed:  # nodes choose what comes next
            indices = self._indices(ids + self.batch)
            self.ahead = indices, self.pool.submit(self._read_ahead, indices)
        return Batch(ids, {**columns, "group": ids})

    def at(self, ids: torch.Tensor) -> Batch:
        """Return the prompts with these ids [B], in their order."""
        return Batch(ids, {**self._read(self._indices(ids)), "group": ids})

    def _indices(self, ids: torch.Tensor) -> list[int]:
        return [self._index(prompt % REPEATS) for prompt in ids.tolist()]

    def _read(self, indices: list[int]) -> dict[str, ColumnData]:
        return self.encode(self.records.get(indices))

    def _read_ahead(self, indices: list[int]) -> tuple[dict[str, ColumnData], bytes]:
        with recording(metrics := Metrics()):
            return self._read(indices), metrics.take()

    def _take_ahead(self, indices: list[int]) -> dict[str, ColumnData]:
        """Return the columns of records, read by now if they are those that were expected."""
        (expected, job), self.ahead = self.ahead or ([], None), None
        if job is not None:
            wait([job])  # records are read by one thread at a time
        if job is None or expected != indices:
            return self._read(indices)
        columns, metrics = job.result()
        current().add_all(metrics)
        return columns

    def reweigh(self, reported: Sequence[Mapping[str, tuple[float, float]]]) -> None:
        """Take from the next step on by the weights that nodes have reported in this one, on all ranks; by the same if
        they report none, each set the turns that it is still owed."""
        sums: dict[str, list[tuple[float, float]]] = {}
        for name, pair in ((name, pair) for rank in reported for name, pair in rank.items()):
            if name.startswith(SOURCE_WEIGHT):
                sums.setdefault(name.removeprefix(SOURCE_WEIGHT), []).append(pair)
        if sums and self._is_one:
            raise InvalidInput(f"a node sets weights of {', '.join(sums)}, and there is one training set. Name "
                               "several:  data: {train: {easy.jsonl: 1, hard.jsonl: 1}}")
        means = {name: sum(total for total, _ in pairs) / max(sum(count for _, count in pairs), 1)
                 for name, pairs in sums.items()}
        if sums or self.records.reweighed:
            self.records.reweigh(means, self.position, self.seed, self.batch)

    def start_at(self, step: int) -> None:
        """Begin to train after `step` steps. Raises InvalidInput: prompts were left over, which are all before these.
        """
        if self.left_over:
            raise InvalidInput(f"the run left {self.left_over} prompts over that later steps were to train on, since "
                               "it took those first that were done first. Resume it in its own mode and with its own "
                               "on_stale (drop or keep):  distflow resume RUN  without  --set mode=… and --set "
                               "on_stale=…")

    def take_results(self) -> tuple[()]:
        return ()

    def reconcile(self) -> None:
        """Make what other groups hold agree with this state: there are none."""

    def finish(self) -> None:
        """End the step."""

    def release_before(self, state: dict[str, Any]) -> None:
        """Release what only states before this one need: nothing."""

    def close(self) -> None:
        """End the run."""
        self.pool.shutdown(wait=False)

    @property
    def drawn_before(self) -> int:
        return self.position // self.batch

    @property
    def _is_one(self) -> bool:
        """Whether there is one training set."""
        return len(self.records.parts) == 1

    @property
    def epoch(self) -> float:
        return self.position / len(self.records)

    def _index(self, position: int) -> int:
        return self.records.index(position, self.seed)

    def state_dict(self) -> dict[str, Any]:
        files = {"files": self.files} if self.files else {}
        return {"position": self.position, "mixture": self.records.state_dict(), **files}

    def load_state_dict(self, state: dict[str, Any], ahead: bool = False) -> None:
        """Load a state. `ahead`: prompts beyond its position may be under way."""
        self.position, self.left_over = int(state["position"]), len(state.get("open", ()))
        self._load_mixture(state)
        self._compare_files(state.get("files", {}), ahead)

    def _load_mixture(self, state: dict[str, Any]) -> None:
        """Load where each training set stands. Of other sets or weights than the state's, each set that stays continues
        where it stood. Says so."""
        before, now = ({name: file for name, file in files.items() if not name.startswith(BESIDE)}
                       for files in (state.get("files", {}), self.files))
        homes, order = {str(file): name for name, file in before.items()}, [*before]
        olds = [name if name in before else homes.get(str(file)) for name, file in now.items()]  # it may have moved
        places = [None if old is None else order.index(old) for old in olds]
        mixed, mixture = state.get("mixture", {"turns": [1]} if len(before) == 1 else {}), self.records
        weights = mixed.get("weights") or mixed.get("turns")  # older states have turns, or neither
        alike = "weights" not in mixed or [*mixed["weights"]] == [*mixture.weights]
        if not before or not weights or alike and places == [*range(len(before))]:
            mixture.load_state_dict(mixed)
            return
        other = Mixture([mixture.parts[0] for _ in before], weights)
        other.load_state_dict(mixed)
        mixture.follow(other, places, self.position, self.seed)
        if events.current().rank == 0:
            shares = ", ".join(f"{name} (weight {weight})" for name, weight in zip(before, weights))
            events.show(f"note: the run began with other training sets or weights: {shares}. Each set that stays "
                        "continues where it stood.")

    def _compare_files(self, before: DataFiles, ahead: bool) -> None:
        """Say which files are others than those of the state, and where training continues. A single training set with
        another number of records begins a new pass, unless prompts `ahead` of the position are under way. Raises
        InvalidInput: frozen weights are others than those that the state was trained on."""
        single = self._is_one and not self.records.since  # since the run began
        for name, resized, how in changes(before, self.files):
            if name.startswith(BASE):
                what = f"the {name} are not those that the run began with, and what it has learned belongs to those"
                raise InvalidInput(Diagnostic(what, None, "Put the model back as it was, and the `seed`, by which one "
                                              "without a folder is drawn. To train on another one begin a new run:  "
                                              "distflow run"))
            how = "other weights" if name.startswith(MODEL) else how
            held_out = name.startswith(HELD_OUT)
            if resized and not held_out and single and not ahead:
                self.position += -self.position % len(self.records)
            where = f"Training continues at record {self.position % len(self.records) + 1:,} of pass " \
                    f"{self.position // len(self.records) + 1:,} over it, in its shuffled order."
            if not single:
                where = "Training continues at the position that it had in the old one."
            what = f"{name} is not the file that the run began with: it has {how}. " + (
                "Rewards before and after cannot be compared." if held_out else where)
            if name.startswith(MODEL):
                what = f"the {name} has other weights than the run began with. What it says before and after cannot " \
                       "be compared."
            if events.current().rank == 0:
                events.record("data_changed", data=name, how=how, position=self.position)
                events.show(f"note: {what}")


def _shuffled_index(size: int, seed: int, taken: int, number: int = 0) -> int:
    """Return the next record of a dataset after so many that were taken of it."""
    epoch, offset = divmod(taken, size)
    return int(_shuffles(number)(size, (seed, epoch, number) if number else (seed, epoch))[offset])


@functools.cache
def _shuffles(number: int) -> Callable[[int, Sequence[int]], numpy.ndarray]:
    """Return what shuffles a dataset, and keeps its last two orders."""
    return functools.lru_cache(maxsize=2)(lambda size, seed: numpy.random.default_rng(seed).permutation(size))


@functools.lru_cache(maxsize=2)
def _order_of_turns(turns: tuple[int, ...], seed: int, round_: int) -> numpy.ndarray:
    order = numpy.repeat(numpy.arange(len(turns)), turns)
    return order if len(turns) == 1 else numpy.random.default_rng([seed, round_, len(turns)]).permutation(order)
