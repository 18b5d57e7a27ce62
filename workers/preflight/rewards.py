"""Proves that rewards pay for right answers alone, on the first records, before torch is loaded.

    calls        a reward returns a finite number for ordinary text, in time; else its line is shown
    matched      each record has an answer that the reward can pay, in as much of the data as is read in `_SCAN` seconds
    reference    the record's own answer, in the form that the reward asks for, earns full pay
    others       another record's answer, an empty one and the question repeated do not
    form         some right answer has the form that a `pattern` of `format` asks for
    spread       a reward that does not say what it asks for does not pay the same for all of these

A fork of this process proves all of it: users' modules are imported there, and the calls are made by a pool of its own,
with the limits that they have in a run. What is not proved within `_LIMIT` seconds, or `_MATCH_LIMIT`, is a doubt.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import json
import os
import re
import signal
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TextIO

from distflow.config.spec import Spec
from distflow.contracts.forms import RewardContract
from distflow.contracts.rewards import SHIPPED, RewardSetting, Term, read_recipe, reward_settings
from distflow.data.problems import answer_text
from distflow.errors import Diagnostic, DistflowError, InvalidInput, Location, shown
from distflow.plan import CUT_THOUGHTS, FINISHED
from distflow.telemetry.processes import spawn
from distflow.telemetry.tracebacks import users_line
from workers.isolation.rewards_pool import FailedSample
from workers.isolation.rewards_worker import NO_VALUE
from workers.isolation.scoring import Columns, Reference, Scorer
from workers.preflight.forms import completions_of, is_open
from workers.preflight.proofs import FailedProof, FirstRecords, shortened

_LIMIT, _CALLS_LIMIT, _CALL_LIMIT, _SCAN = 20.0, 10.0, 3.0, 1.5
"""Seconds for all rewards of a run, for the calls of one of them with the import of its module, for one call of a
user's own, and for the look of all rewards at references of the whole data."""
_MATCH_LIMIT = 3.0
"""Seconds of the processor for all matches of patterns."""
_FEW, _SEVERAL = 3, 16
"""Records on which a reward is called; several, where the rank computes it itself in microseconds."""
_BLOCK = 64
_ONE_CALL = 1.0
"""Seconds of a call from which on a user's reward gets no further one."""
_OF_FORM = re.compile(r"raised (?:ValueError|\w*DecodeError|IndexError|KeyError|StopIteration|ZeroDivisionError"
                      r"|(?:AttributeError|TypeError): .*(?:NoneType|not subscriptable|not iterable|indices must))")
"""Failures that may come from the form of a completion alone, where no reference is declared."""
_OF_MESSAGES = re.compile(r"""\[["'](?:content|role)["']\]""")
"""What a line has that reads completions as messages, as TRL gives them."""
_NETWORK = re.compile(r"raised \w*(?:Connect|Timeout|HTTP|URL|SSL|API|gaierror)")
_SLOW = ("took longer", "was not done", "its module")
_FORMS = ("{}", r"\boxed{{{}}}", "#### {}", "<think>\n?\n</think>\n<answer>{}</answer>", "```python\n{}\n```")
"""Forms in which a reward that does not say so may ask for an answer."""
_FEW_TRIES = 2
"""Tries on a record by such a reward: the answer itself and an empty one. The others come if it earns no more."""
_NAME_IT = "If it asks for another form, name the function that writes it:  @reward(reference=FUNCTION)"
_OWN, _SWAPPED, _EMPTY, _QUESTION, _OTHER = "own", "swapped", "an empty answer", "the repeated question", \
    "another record's answer"
_MODULES_HINT = "The module of a reward must not end the process that imports it. What it printed stands above."


def prove_rewards(spec: Spec, sets: Sequence[FirstRecords]) -> list[FailedProof]:
    """Prove the rewards of a run, in a fork."""
    settings = [*reward_settings(spec)]
    if not settings:
        return []
    with os.fdopen(os.memfd_create(__name__), "w+", encoding="utf-8", errors="surrogatepass") as lines:
        process = spawn(partial(_write, spec, settings, sets, lines), session=True)
        status = process.poll(_LIMIT)
        if status is None:
            process.end()
        lines.seek(0)
        found = [_read(line) for line in lines if line.endswith("\n")]
    users = [spec.rewards[name] for name in _names(settings) if spec.rewards[name].module not in SHIPPED]
    where = users[0].where if users else settings[0].location(())
    untried = {None: f"within {_LIMIT:g} s: their modules or calls are slow",
               -signal.SIGVTALRM: f"as a `pattern` takes longer than {_MATCH_LIMIT:g} s to match an answer",
               -signal.SIGKILL: "since the process that did so was killed"}  # from outside, or as memory has run out
    if status in untried:
        found.append(FailedProof(Diagnostic(f"the rewards were not all tried {untried[status]}", where,
                                            "The run starts without that proof."), is_doubt=True))
    elif status:
        code = f"by signal {-status}" if status < 0 else f"with code {status}"
        found.append(FailedProof(Diagnostic(f"a process that tried the rewards ended {code}", where, _MODULES_HINT)))
    return found


def _names(settings: Sequence[RewardSetting]) -> list[str]:
    """Return the names of all rewards of these recipes."""
    return [term.name for setting in settings for term in read_recipe(setting.value)[0].terms]


def _write(spec: Spec, settings: Sequence[RewardSetting], sets: Sequence[FirstRecords], lines: TextIO) -> None:
    """Write each failed proof as a line of JSON, and a DistflowError as such."""
    try:
        for failed in _failed(spec, settings, sets):
            print(json.dumps(asdict(failed)), file=lines, flush=True)
    except DistflowError as error:
        mistakes = error.mistakes if isinstance(error, InvalidInput) else [Diagnostic(str(error))]
        print(*(json.dumps(asdict(FailedProof(each))) for each in mistakes), sep="\n", file=lines, flush=True)


def _failed(spec: Spec, settings: Sequence[RewardSetting], sets: Sequence[FirstRecords]) -> Iterator[FailedProof]:
    """Yield what fails. Forms come last: a match may not end, and then SIGVTALRM ends this process."""
    until, called, made = time.monotonic() + _SCAN, set[str](), list[list[_RewardTrial]]()
    for setting in settings:
        for records in (each for each in sets if each.training != (setting.source is spec.run_source)):
            made.append([*_trials(spec, setting, records)])
            for trial in made[-1]:
                yield from trial.proofs(until, called)
    signal.setitimer(signal.ITIMER_VIRTUAL, _MATCH_LIMIT)
    for trials in made:
        for trial in trials:
            with contextlib.suppress(RecursionError, OverflowError):  # of an expression that is nested deeply
                yield from trial.unformed(trials)


def _read(line: str) -> FailedProof:
    fields = json.loads(line)
    mistake = fields["mistake"]
    where = Location(**mistake["where"]) if mistake["where"] else None
    lines = tuple(Location(**each) for each in mistake["lines"])
    return FailedProof(**{**fields, "mistake": Diagnostic(**{**mistake, "where": where, "lines": lines})})


def prove_behind(spec: Spec, records: FirstRecords, opening: str) -> Iterator[FailedProof]:
    """Prove that records have answers which the shipped rewards pay behind the `opening` that the chat template has
    written."""
    until = time.monotonic() + _SCAN
    for setting in reward_settings(spec):
        if records.training != (setting.source is spec.run_source):
            for trial in _trials(spec, setting, records, opening):
                yield from trial.unmatched(until) if trial.shipped and trial.reads_opening else ()


def _trials(spec: Spec, setting: RewardSetting, records: FirstRecords, opening: str = "") -> Iterator[_RewardTrial]:
    """Yield each reward of a recipe whose columns the data has, with the records that it is for."""
    recipe, _ = read_recipe(setting.value)
    known = {"completions", "answers", "questions", "responses", "row", FINISHED, CUT_THOUGHTS,
             *records.data.columns}
    if recipe.by and recipe.by not in records.data.columns:
        return
    for value, terms in recipe.branches.items():
        own = replace(records, only_where=(recipe.by, value) if recipe.by else None)
        chosen = own.only([index for index, row in enumerate(own.rows) if own.holds(row)])
        for term in terms if len(chosen) else ():
            contract = spec.rewards[term.name]
            if all(read.optional or read.name in known for read in contract.columns.values()):
                yield _RewardTrial(term, contract, chosen, opening, "wrong_paid" if len(terms) == 1 else "")


@dataclass(frozen=True)
class _Try:
    """A completion that is judged as an answer to the record `judge`, to see what the reward makes of `record`."""

    record: int
    kind: str
    completion: str
    judge: int


@dataclass
class _Paid:
    """What a reward has paid for the tries on one record, by their kind."""

    values: dict[str, list[float | FailedSample]] = field(default_factory=dict)

    def most(self, kind: str) -> float | None:
        return max((each for each in self.values.get(kind, ()) if isinstance(each, float)), default=None)

    def pays(self, kind: str, enough: float) -> bool:
        most = self.most(kind)
        return most is not None and most >= enough


class _RewardTrial:
    """One reward of a recipe, tried on some records with answers that are right and others that are not."""

    def __init__(self, term: Term, contract: RewardContract, records: FirstRecords, opening: str, kind: str):
        """kind: of the doubt that it pays wrong answers, which another term of its recipe may outweigh."""
        self.kind = kind
        self.name, self.contract, self.whole, self.opening = f"reward `{term.name}`", contract, records, opening
        self.shipped = contract.module in SHIPPED
        limits = {} if self.shipped else {"timeout": min(term.timeout or _CALL_LIMIT, _CALL_LIMIT), "retries": 0}
        name = term.name if self.shipped else f"{contract.module}:{term.name}"
        self.scorer = Scorer({name: {**term.settings, **limits}}, workers=2, limit=_CALLS_LIMIT, quiet=True)
        self.key = json.dumps([contract.module, term.name, term.settings], default=str)
        self.pattern = term.settings.get("pattern") if self.shipped and term.name == "format" else None
        self.doubt = True if term.weight == 0 else None  # it is watched, and nothing is learned from it
        self.function = self.scorer.functions[term.name]
        marks = self.function.__distflow_reward__
        several = self.shipped and (marks.shortcut or marks.in_rank)
        self.records = records.only(range(min(_SEVERAL if several else _FEW, len(records))))
        self.declared = marks.reference is not None
        self.reads_opening = self.declared and "opening" in inspect.signature(marks.reference).parameters
        self.references = self._references(self.records)
        self.slow = False  # so that it was not called any further
        self.reads_answer = any(read.name in ("answers", *records.data.columns) for read in contract.columns.values())

    def proofs(self, until: float, called: set[str]) -> Iterator[FailedProof]:
        """Yield what fails. References are read until `until`. `called` has the rewards without a reference that were
        called for another set or branch: one trial is enough of what may cost money."""
        if not self.declared and (self.shipped or self.key in called):
            return  # a judge, or a form that has no one right answer
        called.add(self.key)
        yield from self.unmatched(until)
        tries, few = [[*self._tries(row)] for row in range(len(self.records))], None if self.declared else _FEW_TRIES
        paid = [_Paid() for _ in tries]
        done = self._pay([each for some in tries for each in some[:few]], paid)
        if done and few and all(each.pays(_EMPTY, each.most(_OWN) or 0.0) for each in paid):
            done = self._pay([each for some in tries for each in some[few:]], paid)
        yield from self._calls(paid)
        if not done:
            return
        yield from self._right_and_wrong(paid) if self.declared else self._spread(paid)

    def _references(self, records: FirstRecords) -> list[Reference]:
        if not self.declared:
            return [Reference(None)] * len(records)
        found = self.scorer.references(_columns(records), range(len(records)), self.opening)
        return next(iter(found.values()))

    def unmatched(self, until: float) -> Iterator[FailedProof]:
        """Yield the records of which no completion can be paid, of those that are read until then."""
        read, problems = [*zip(self.whole.indices, self.whole.rows)], []
        more = (pair for pair in self.whole.whole_set() if pair[0] > read[-1][0]) if self.declared else iter(())
        block = replace(self.whole)
        while len(block):
            problems += [each.problem for each in self._references(block)]
            block = self.whole.of_pairs([*itertools.islice(more, _BLOCK)] if time.monotonic() < until else [])
            read += zip(block.indices, block.rows)
        bad = [row for row, problem in enumerate(problems) if problem]
        what, _, hint = problems[bad[0]].partition("\n") if bad else ("", "", "")
        yield from self.whole.of_pairs(read).failed(bad, f": {what}", hint, self.doubt,
                                                    before=f"{self.name} cannot judge answers to ",
                                                    kind="unanswerable")

    def _tries(self, row: int) -> Iterator[_Try]:
        own, answers = self.references[row].completion, self.records.answers
        texts = [own] if own is not None else [] if self.declared else [form.format(answers[row]) for form in _FORMS]
        yield from (_Try(row, _OWN, text, row) for text in texts[:1])
        yield _Try(row, _EMPTY, "", row)
        yield from (_Try(row, _OWN, text, row) for text in texts[1:])
        yield _Try(row, _QUESTION, self.records.questions[row], row)
        count = len(self.records)
        other = next((each for each in ((row + step) % count for step in range(1, count))
                      if answers[each].strip() != answers[row].strip()), None)
        if other is None or not self.reads_answer:
            return
        theirs = self.references[other].completion if self.declared else answers[other]
        if theirs is not None:
            yield _Try(row, _OTHER, theirs, row)
            yield from (_Try(row, _SWAPPED, text, other) for text in texts[:1])

    def _pay(self, tries: Sequence[_Try], paid: Sequence[_Paid]) -> bool:
        """Add what is paid for each record; return whether all was tried. A slow reward gets no further call: the first
        one may import its module, and the second one shows how long a call takes."""
        for number, some in enumerate(filter(None, (tries[:1], tries[1:2], tries[2:]))):
            began, texts = time.monotonic(), [each.completion for each in some]
            columns = _columns(self.records.only([each.judge for each in some]))
            columns |= {"completions": texts, "responses": [[*text.encode(errors="replace")] for text in texts]}
            scores = self.scorer.score(columns, range(len(some)))
            failed = {row: reason for _, row, reason in scores.failures}
            for row, (each, parts) in enumerate(zip(some, scores.parts)):
                value = failed[row] if row in failed else next(iter(parts.values()))
                paid[each.record].values.setdefault(each.kind, []).append(value)
            self.slow = not self.shipped and number == 1 and time.monotonic() > began + _ONE_CALL
            if self.slow or any(each.reason.startswith(_SLOW) for each in failed.values()):
                return False
        return True

    def _calls(self, paid: Sequence[_Paid]) -> Iterator[FailedProof]:
        """Yield what keeps the reward from returning a number. It is a doubt if the reward has returned one for the
        answer of a record, or if the form of the answers, time or the network may be why."""
        values = [(row, value) for row, each in enumerate(paid) for some in each.values.values() for value in some]
        failures = [(row, value) for row, value in values if isinstance(value, FailedSample)]
        where = Location(shown(self.contract.where.file), self.contract.where.line)
        if not failures and self.slow:
            what = f"{self.name} takes over {_ONE_CALL:g} s for a call, so that it was tried on the first record only"
            yield FailedProof(Diagnostic(what, where, "The run starts without that proof."), is_doubt=True)
        if not failures:
            return
        own = [value for each in paid for value in each.values.get(_OWN, ())] or [value for _, value in values]
        never = all(isinstance(value, FailedSample) for value in own)
        reason = Counter(each.reason for each in own if isinstance(each, FailedSample)).most_common(1)[0][0] if never \
            else Counter(each.reason for _, each in failures).most_common(1)[0][0]
        row, failed = next((row, each) for row, each in failures if each.reason == reason)
        slow, line = reason.startswith(_SLOW), users_line(failed.trace)
        which = f"{len(failures)} of {len(values)} calls on the first {len(self.records)} records"
        call = "is slow: its first call " * slow
        what = f"{self.name} {call}{reason}{line and f', at {line}'} (in {which}, such as {self.records.location(row)})"
        messages = "string indices must" in reason and "completion" in line and _OF_MESSAGES.search(line) is not None
        of_form = not (self.declared or messages) and _OF_FORM.match(reason) is not None
        others = not self.kind and reason == NO_VALUE and _may_return(self.function)
        doubt = bool(self.doubt or slow or of_form or others or not never or _NETWORK.match(reason))
        hint = "The run starts without that proof." if slow else "Where it does so, the sample's other rewards count " \
            "alone." if others else "Completions are texts, not lists of messages as in " \
            'TRL. Write  completion  in place of  completion[0]["content"]' if messages else \
            "Samples without a reward leave the step."
        yield FailedProof(Diagnostic(what, where, f"{hint} {_NAME_IT}" if of_form and not slow else hint), doubt)

    def _right_and_wrong(self, paid: Sequence[_Paid]) -> Iterator[FailedProof]:
        own = [each.most(_OWN) for each in paid]
        full = [1.0 if self.shipped else value or 0.0 for value in own]
        unpaid = [row for row, value in enumerate(own) if value is not None and value < full[row]]
        if unpaid:
            text = shortened(self.references[unpaid[0]].completion or "")
            yield from self.records.failed(unpaid, f": {text} earns {own[unpaid[0]]:g}", doubt=self.doubt,
                                           before=f"{self.name} does not pay in full for the answer of ",
                                           kind="right_unpaid")
        for kind in (_EMPTY, _QUESTION, _OTHER):
            wrong = [row for row, each in enumerate(paid) if (own[row] is not None or self.shipped)
                     and each.pays(kind, full[row])
                     and not (kind == _OTHER and each.pays(_SWAPPED, full[row]))]  # answers that are equal in value
            yield from self.records.failed(wrong, doubt=self.doubt, kind=self.kind,
                                           before=f"{self.name} pays {kind} as much as the answer of ")

    def unformed(self, trials: Sequence[_RewardTrial]) -> Iterator[FailedProof]:
        """Yield a doubt if no completion was found that the pattern matches, or none of these is right by the other
        rewards of the same records."""
        if not isinstance(self.pattern, str) or is_open(self.pattern):
            return
        judges = [each for each in trials
                  if each.shipped and each.reads_answer and each.whole is self.whole and each.references[0].completion]
        records, made = self.records.only(range(min(_FEW, len(self.records)))), list[str]()
        for row, answer in enumerate(records.answers):
            last = (answer.split() or [""])[-1]
            right = [text for each in judges if (text := each.references[row].completion)]
            texts = [*right, answer, last, *(form.format(last) for form in _FORMS), ""]
            made = [text for text in completions_of(self.pattern, texts) if r"\\" not in text]  # as no model writes
            paid = [_Paid() for _ in records.answers]
            if made and (not judges or any(judge._pay([_Try(row, _OWN, text, row) for text in made], paid) and
                                           paid[row].pays(_OWN, 1.0) for judge in judges)):
                return
        form = _escaped(right[0]).replace(_escaped(last), ".+") if right and last else ""
        hint = f"reward: {{format: {{pattern: '.*{form}.*'}}}}" if form else "reward: {format: {tags: [think, answer]}}"
        who = " and ".join(each.name for each in judges)
        yield from records.failed(
            range(len(records)), f": {shortened(made[0])} has the form, and earns 0 by {who}" if made else
            f", such as {shortened(right[0])}" if right else "", f"Instead:  {hint}", doubt=True,
            before=f"{self.name} has a `pattern`, {shortened(self.pattern)}, that matches no right answer to ",
            kind="right_unpaid")

    def _spread(self, paid: Sequence[_Paid]) -> Iterator[FailedProof]:
        values = [value for each in paid for some in each.values.values() for value in some]
        numbers = {value for value in values if isinstance(value, float)}
        silent = [(own, empty) for own, empty in ((each.most(_OWN), each.most(_EMPTY)) for each in paid)
                  if own is not None and empty is not None and empty >= own]
        if len(values) > 1 and len(numbers) == 1 and all(isinstance(value, float) for value in values):
            yield from self.records.failed(
                range(len(paid)), ": its answer in several forms, another record's, an empty one and its question",
                _NAME_IT, doubt=True, before=f"{self.name} pays {numbers.pop():g} for all that was tried on ",
                kind="paid_alike")
        elif self.reads_answer and len(silent) == len(paid):
            yield from self.records.failed(
                range(len(paid)), f": {silent[0][1]:g}, and {silent[0][0]:g}", "A model learns from it to say nothing.",
                doubt=True, before=f"{self.name} pays an empty answer no less than the answer of ",
                kind=self.kind if silent[0][1] > min(numbers) else "")


def _escaped(text: str) -> str:
    """Return a regular expression for a text, as a person would write it."""
    return re.sub(r"([][\\.^$*+?{}|()])", r"\\\1", text)


def _columns(records: FirstRecords) -> Columns:
    """Return the columns that rewards read of these records, one row for each."""
    own = {name: [answer_text(row[name]) if name in row else "" for row in records.rows]
           for name in records.data.columns}
    return {"answers": records.answers, "questions": records.questions, "row": [*range(len(records))],
            FINISHED: [True] * len(records), CUT_THOUGHTS: [False] * len(records), **own}


def _may_return(function: Callable[..., Any]) -> bool:
    """Return whether a function has a `return` with a value at all, as far as its source is there."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return True
    return any(isinstance(each, ast.Return) and each.value is not None and
               not (isinstance(each.value, ast.Constant) and each.value.value is None) for each in ast.walk(tree))
