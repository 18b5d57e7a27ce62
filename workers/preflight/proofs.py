"""Vocabulary of preflight: the records that it looks at, a proof that has failed, and the account of all of them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from distflow.config.run import Data
from distflow.config.spec import Spec
from distflow.data.checks import open_validation_sets, training_fields, validated_fields
from distflow.data.dataset import Records, RequiredFields, open_training_sets, read_blocks
from distflow.data.problems import Record, answer_text, asked_and_answered, mended_record, question_text
from distflow.errors import Diagnostic, InvalidInput, Location
from distflow.telemetry import events
from distflow.telemetry.learning_series import Doubt

FIRST = 64
"""Records of each data set that are looked at."""
_QUOTED = 60  # characters of a text in a message


@dataclass(frozen=True)
class FailedProof:
    """A proof that has failed. A run with one starts only if it is a doubt. kind, share: of the `Doubt`."""

    mistake: Diagnostic
    is_doubt: bool = False
    kind: str = ""
    share: float = 1.0

    @property
    def note(self) -> Doubt:
        """Its text in one line."""
        where = f"{self.mistake.where}: " if self.mistake.where else ""
        what, change = (" ".join(text.split()) for text in (f"{where}{self.mistake.what}.", self.mistake.hint))
        return Doubt(f"{what} {change}".rstrip(), self.kind, self.share, change)


@dataclass(frozen=True)
class FirstRecords:
    """The first usable records of a data set: `rows` are those at `indices`. `training`: not held out."""

    records: Records
    indices: Sequence[int]
    rows: Sequence[Record]
    data: Data
    fields: RequiredFields
    training: bool
    only_where: tuple[str, str] | None = None
    """Field and value that its records have, where a recipe of rewards chooses by that field."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def questions(self) -> list[str]:
        return [question_text(asked_and_answered(row, self.data)[0]) for row in self.rows]

    @property
    def answers(self) -> list[str]:
        return [answer_text(asked_and_answered(row, self.data)[1]) for row in self.rows]

    @property
    def have_answers(self) -> bool:
        return all(self.answers)

    def only(self, chosen: Sequence[int]) -> FirstRecords:
        """Return these of the records, by their positions in `rows`."""
        return replace(self, indices=[self.indices[each] for each in chosen], rows=[self.rows[each] for each in chosen])

    def whole_set(self) -> Iterator[tuple[int, Record]]:
        """Yield each usable record of the whole set with its index."""
        return ((index, mended_record(record)) for index, record in read_blocks(self.records)
                if _is_usable(record, self.fields) and self.holds(record))

    def holds(self, record: Record) -> bool:
        return self.only_where is None or answer_text(record[self.only_where[0]]) == self.only_where[1]

    def of_pairs(self, pairs: Sequence[tuple[int, Record]]) -> FirstRecords:
        """Return these of the set's records, each with its index."""
        return replace(self, indices=[index for index, _ in pairs], rows=[record for _, record in pairs])

    def location(self, position: int) -> Location:
        return self.records.location(self.indices[position])

    def failed(self, bad: Sequence[int], what: str = "", hint: str = "", doubt: bool | None = None,
               before: str = "", kind: str = "") -> Iterator[FailedProof]:
        """Yield the failed proof if there are `bad` records, by their positions. Unless `doubt` says so, it is a doubt
        where some records are good. `before` and `what` stand around how many they are, in a sentence."""
        if not bad:
            return
        count, whole = len(bad), len(self)
        some = f"each of {count} of" if count > 1 else "one of"
        who = "the first record" if whole == 1 else f"{'each of' if count == whole else some} the first {whole} records"
        mistake = Diagnostic(f"{before}{who}{what}", self.location(bad[0]), hint)
        yield FailedProof(mistake, count < whole if doubt is None else doubt, kind if self.training else "",
                          count / whole)


def first_records(spec: Spec) -> list[FirstRecords]:
    """Return the first usable records of each set that a run trains or validates on."""
    data = spec.run.data
    sets = [(records, training_fields(spec), True) for records in open_training_sets(data, spec.data_path).values()]
    sets += [(records, validated_fields(spec), False) for records in open_validation_sets(spec).values()]
    found = []
    for records, fields, training in sets:
        first = FirstRecords(records, [], [], data, fields, training)
        found.append(first.of_pairs([*itertools.islice(first.whole_set(), FIRST)]))
    return [each for each in found if len(each)]


def _is_usable(record: Record, fields: RequiredFields) -> bool:
    return all(name in record for name in fields.all) and not fields.empty(record)


def shortened(text: str) -> str:
    """Return a text as a message quotes it, in one line."""
    line = " ".join(text.split())
    return f"`{line if len(line) <= _QUOTED else f'{line[: _QUOTED - 1]}…'}`"


@dataclass
class Preflight:
    """Account of what a run has proved: numbers of records and seconds by family of proofs, and what has failed."""

    proved: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    doubts: list[Doubt] = field(default_factory=list)
    mistakes: list[Diagnostic] = field(default_factory=list)

    def prove(self, family: str, records: int, failed: Callable[[], Iterable[FailedProof]]) -> None:
        """Run the proofs of a family, and print the doubts."""
        began = time.perf_counter()
        found = [*dict.fromkeys(failed())]
        self.proved[family], self.seconds[family] = records, round(time.perf_counter() - began, 3)
        self.mistakes += [each.mistake for each in found if not each.is_doubt]
        self.note(each.note for each in found if each.is_doubt)

    def note(self, doubts: Iterable[str]) -> None:
        """Add doubts to the account, and print them."""
        for doubt in doubts:
            self.doubts.append(doubt if isinstance(doubt, Doubt) else Doubt(doubt))
            events.show(f"note: {doubt}")

    def require(self, on: str = "on the first records") -> None:
        """Raise InvalidInput if a proof has failed that is no doubt. `on`: what it was tried on."""
        if self.mistakes:
            error = InvalidInput(self.mistakes)
            error.add_note(f"Preflight has found this {on}. If it is meant:  --set preflight=false")
            raise error

    def describe(self) -> str:
        return ", ".join(f"{family} ({count} {'rows' if family == 'models' else 'records'}, "
                         f"{self.seconds[family]:.1f} s)" for family, count in self.proved.items())

    def record(self) -> None:
        """Record the account as an event of the run."""
        events.record("preflight", proved=self.proved, seconds=self.seconds,
                      doubts=[{"text": each, **vars(each)} for each in self.doubts])
