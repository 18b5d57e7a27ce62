"""Contracts: what functions and classes under distflow's decorators read, accept and return, as data.

Each kind has a method `of`, which gives a signature the meaning of its decorator, or says why it cannot have it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self, get_args

from distflow.config.dag import Head
from distflow.contracts.decorators import NodeMarks
from distflow.contracts.settings import Setting
from distflow.errors import Diagnostic, InvalidInput, Location, listing
from distflow.plan import KEEP

ENGINE_TYPES = ("MODEL_INFERENCE", "MODEL_TRAIN")
TYPES = (*ENGINE_TYPES, "COMPUTE")
HEADS = get_args(Head)
GROUP = "group"  # column with the prompt that a row stems from. A step's rows are always moved by it.
_OF_DATA = {"question": "questions", "answer": "answers"}
"""Parameter of one row → the column of the dataset that it is from."""
_RESERVED = ("mean", "std", "min", "max", "zero_std_groups", "seconds", "failed", "retried", "timeouts")
"""Names that metrics `reward/NAME` use for figures of all rewards together."""
PER_SAMPLE = {name: f"{name}s" for name in ("completion", "answer", "question", "response")}
"""Parameter of one sample → the column of which it is a row."""
OTHER_NAMES = {"prompt": "question", "prompts": "questions", "solution_str": "completion", "ground_truth": "answer"}
"""Names that TRL and verl have for parameters of rewards, and those of here."""
_KINDS = {"completions": "list[str]", "answers": "list[str]", "questions": "list[str]", "responses": "Ragged"}
_SAMPLE_FORMS = {"str": "list[str]", "int": "Tensor", "float": "Tensor", "bool": "Tensor", "list[int]": "Ragged",
                  "list[float]": "Ragged"}
_BATCH_FORMS = {f"list[{kind}]": form for kind, form in _SAMPLE_FORMS.items()}


def plain_form(annotation: str) -> str:
    """Return `Ragged` of `Ragged | None`."""
    return " | ".join(part for part in annotation.split(" | ") if part != "None")


@dataclass(frozen=True)
class Read:
    """Positional parameter: the column of its name, in the form of its annotation ("" if it has none)."""

    name: str
    form: str = ""
    optional: bool = False
    reader: str = ""  # description of the reader, where that is not the function itself
    of_one: bool = False  # it takes one row of the column, as `answer` of `answers`

    def called(self, columns: Iterable[str]) -> list[str]:
        """Return the names by which parameters of this one's kind read columns."""
        singular = {column: name for name, column in PER_SAMPLE.items()} if self.of_one else {}
        return [singular.get(column, column) for column in columns]


@dataclass(frozen=True)
class Signature:
    """Parameters of a user's function or class, before its decorator gives them a meaning."""

    name: str
    module: str
    where: Location
    reads: tuple[Read, ...] = ()
    settings: dict[str, Setting] = field(default_factory=dict)
    results: tuple[str, ...] = ()  # form of what it returns; of a tuple, of each part
    summary: str = ""

    @property
    def key(self) -> str:
        return f"{self.module}:{self.name.rpartition(':')[2]}"

    @classmethod
    def of(cls, signature: Signature, thing: Any) -> Self:
        """Return the contract of a function or class, or of its stub. Raises InvalidInput if it cannot be one."""
        return cls(**vars(signature))


@dataclass(frozen=True)
class Contract(Signature):
    """What a node function reads, writes and accepts. `name` is its name in YAML."""

    marks: NodeMarks = NodeMarks()
    returns: tuple[str, ...] = ()  # form of each column that it writes, if annotated

    @classmethod
    def of(cls, signature: Signature, thing: Any) -> Self:
        marks: NodeMarks = thing.__distflow_node__
        settings = {name: setting.at_least(1) if name in (marks.repeats, marks.refills) else setting
                    for name, setting in signature.settings.items()}
        reads = signature.reads[1:] if marks.type in ENGINE_TYPES else signature.reads
        returns = tuple(signature.results) if len(signature.results) == len(marks.writes) else ()
        contract = cls(**{**vars(signature), "reads": reads, "settings": settings}, marks=marks, returns=returns)
        if wrong := [*_wrong_marks(contract, bool(signature.reads))]:
            raise InvalidInput([Diagnostic(f"@node of `{contract.name}`: {what}", contract.where, hint)
                                for what, hint in wrong])
        return contract

    @property
    def samples(self) -> bool:
        """Whether the engine of the node's role must be ready to sample."""
        repeats = self.marks.repeats is not None if self.marks.samples is None else self.marks.samples
        return repeats and self.marks.type in ENGINE_TYPES

    def reading(self, more: Iterable[Read]) -> Contract:
        """Return the contract with further columns. One that it reads already keeps its form; if any of both needs it,
        it is needed."""
        reads = {read.name: read for read in self.reads}
        for read in more:
            own = reads.setdefault(read.name, read)
            if own.optional and not read.optional:
                reads[read.name] = dataclasses.replace(read, form=own.form)
        return dataclasses.replace(self, reads=tuple(reads.values()))

    def writing(self, column: str, form: str) -> Contract:
        """Return the contract with one more column at the end of those that it writes."""
        marks = dataclasses.replace(self.marks, writes=(*self.marks.writes, column))
        return dataclasses.replace(self, marks=marks, returns=(*self.returns, form) if self.returns else ())


@dataclass(frozen=True)
class RewardContract(Signature):
    """What a reward reads and accepts. `columns`: by parameter, in order; `batched`: it gets all samples at once."""

    columns: dict[str, Read] = field(default_factory=dict)
    batched: bool = False
    checked: bool = False  # whether its decorator has a `check`

    @classmethod
    def of(cls, signature: Signature, thing: Any) -> Self:
        names = [read.name for read in signature.reads]
        batched = any(name in PER_SAMPLE.values() for name in names)
        if mixed := [name for name in names if name in PER_SAMPLE] if batched else []:
            what = f"reward `{signature.name}` has parameter `{mixed[0]}`, of one sample, beside those of all samples"
            raise InvalidInput(Diagnostic(what, signature.where,
                                          f"Write `{PER_SAMPLE[mixed[0]]}`, or all of them in the singular."))
        if signature.name in _RESERVED:
            what = (f"a reward cannot be called `{signature.name}`: the metric `reward/{signature.name}` is about all "
                    "rewards")
            raise InvalidInput(Diagnostic(what, signature.where, "Give it another name."))
        forms, who = _BATCH_FORMS if batched else _SAMPLE_FORMS, f"reward `{signature.name}`"
        if any(read.name == "prompts" and not read.form for read in signature.reads):
            raise InvalidInput(Diagnostic(f"{who} takes `prompts`, which are tokens", signature.where,
                                          "Write  questions  for their texts, or  prompts: list[list[int]]  for the "
                                          "tokens."))
        for read in signature.reads:
            _check_sample_form(signature, read.name, read.form)
            kind = _KINDS.get(PER_SAMPLE.get(read.name, read.name))
            if kind and forms.get(read.form, kind) != kind:
                right = "text" if kind == "list[str]" else "tokens"
                what = f"{who} takes `{read.name}` as {read.form}, but it is {right}"
                raise InvalidInput(Diagnostic(what, signature.where, "Leave its annotation out, or correct it."))
        if batched and signature.results in (("float",), ("int",), ("bool",)):
            what = f"{who} takes all samples and returns one {signature.results[0]}"
            raise InvalidInput(Diagnostic(what, signature.where, "Return a number for each sample:  -> list[float]"))
        columns = {read.name: Read(PER_SAMPLE.get(read.name, read.name), forms.get(read.form, ""), read.optional, who,
                                   not batched) for read in signature.reads}
        marks = getattr(thing, "__distflow_reward__", None)
        return cls(**vars(signature), columns=columns, batched=batched, checked=bool(marks and marks.check))


@dataclass(frozen=True)
class EnvironmentContract(Signature):
    """What `__init__` of an environment takes. `steps`: it has a method `step`; `coroutine`: that is one; `starts`: it
    has a method `start`."""

    steps: bool = True
    starts: bool = False
    safe: bool = False
    coroutine: bool = False

    @classmethod
    def of(cls, signature: Signature, thing: Any) -> Self:
        step = getattr(thing, "step", None)
        return cls(**vars(signature), steps=step is not None, starts=hasattr(thing, "start"),
                   safe=thing.__distflow_safe__, coroutine=inspect.iscoroutinefunction(step))

    @property
    def columns(self) -> dict[str, str]:
        return {read.name: _OF_DATA.get(read.name, read.name) for read in self.reads}


def _wrong_marks(contract: Contract, positional: bool) -> Iterator[tuple[str, str]]:
    """Yield (mistake, hint) for each argument of `@node` that does not fit the function's signature."""
    marks, reads = contract.marks, [read.name for read in contract.reads]
    if marks.type not in TYPES:
        yield f"`type` is {marks.type!r}", listing(TYPES, "It is one of")
    elif marks.type in ENGINE_TYPES and not positional:
        yield f"a {marks.type} function gets its role's engine as its first parameter, and this one has none", ""
    for mark, setting in _named_settings(marks):
        if setting not in contract.settings:
            yield (f"`{mark}` names `{setting}`, which is not a keyword-only parameter of it",
                   listing(contract.settings, "Keyword-only parameters"))
    if marks.refills and KEEP not in marks.writes:
        yield (f"`refills` is for a function that says which rows stay, and it does not write `{KEEP}`",
               f'Instead:  writes="{KEEP}", or take `refills` away')
    for column in marks.requires.values():
        if column not in reads:
            yield (f"`requires` names column `{column}`, which is not a parameter of it", listing(reads, "Parameters"))
    if marks.head not in (None, *HEADS):
        yield f"`head` is {marks.head!r}", listing(HEADS, "It is one of")
    if marks.keep_together not in (None, GROUP):
        yield (f"`keep_together` is {marks.keep_together!r}",
               f"Rows are kept together by prompt:  keep_together={GROUP!r}")
    others = contract.samples or marks.repeats or marks.keep_together or KEEP in marks.writes
    if marks.row_wise and (others or marks.type != "MODEL_INFERENCE"):
        yield ("`row_wise` is for a MODEL_INFERENCE function that looks at each row by itself; this one has another "
               "type, or samples, repeats, drops or keeps together rows", "Take `row_wise` away")
    yield from _wrong_forms(marks)


def _named_settings(marks: NodeMarks) -> Iterator[tuple[str, str]]:
    yield from ((name, setting) for name in ("repeats", "refills") if (setting := getattr(marks, name)) is not None)
    for name in ("requires", "belongs_to", "only_with", "refuses"):
        for setting, value in getattr(marks, name).items():
            yield name, setting
            if name in ("belongs_to", "only_with") and _is_pair(value):
                yield name, value[0]


def _wrong_forms(marks: NodeMarks) -> Iterator[tuple[str, str]]:
    for name, pair in marks.belongs_to.items():
        if not _is_pair(pair):
            yield (f"`belongs_to` of `{name}` is {pair!r}, not another setting and its value",
                   'As in  belongs_to={"fixed_length": ("aggregate", "fixed_length_sum")}')
    for name, pair in marks.only_with.items():
        if not _is_pair(pair) or not isinstance(pair[1], tuple):
            yield (f"`only_with` of `{name}` is {pair!r}, not another setting and a tuple of its values",
                   'As in  only_with={"clip": ("loss", ("ppo", "gspo"))}')
    for name, reasons in marks.refuses.items():
        if not isinstance(reasons, dict):
            yield (f"`refuses` of `{name}` is {reasons!r}, not a reason for each value",
                   'As in  refuses={"kl_kind": {"k1": "its gradient is zero on average"}}')


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2


def _check_sample_form(signature: Signature, name: str, form: str) -> None:
    """Raise InvalidInput if a parameter is of one sample by its name and of all by its annotation, or vice versa."""
    one = next((one for one, column in PER_SAMPLE.items() if name in (one, column)), None)
    if one is None or form not in (_BATCH_FORMS if name == one else _SAMPLE_FORMS) or form == "list[int]":
        return
    conflict = "one sample, by its name, and of all, by its annotation" if name == one else \
        "all samples, by its name, and of one, by its annotation"
    kinds = ("str", "list[str]") if _KINDS[PER_SAMPLE[one]] == "list[str]" else ("list[int]", "list[list[int]]")
    raise InvalidInput(Diagnostic(f"reward `{signature.name}` has the parameter `{name}: {form}`, of {conflict}",
                                  signature.where, f"Write  {one}: {kinds[0]}  for one sample, or  "
                                  f"{PER_SAMPLE[one]}: {kinds[1]}  for all."))
