"""Scores batches by a recipe of rewards, and reports the samples whose rewards failed."""

from __future__ import annotations

import inspect
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from distflow.contracts.decorators import REWARDS, RewardMarks, load_module
from distflow.contracts.forms import PER_SAMPLE, RewardContract
from distflow.contracts.read import read_contract
from distflow.contracts.rewards import SHIPPED, KeyPath, Recipe, Term, read_recipe
from distflow.errors import Diagnostic, InvalidInput, RewardsFailed, did_you_mean, shown
from distflow.telemetry.metrics import Metrics, recording
from distflow.telemetry.tracebacks import users_line, users_part
from workers.isolation.rewards_pool import FailedSample, Job, RewardPool
from workers.isolation.rewards_worker import LARGEST, NO_VALUE, call_in_rank
from workers.isolation.user_code import FailureStreak

Columns = dict[str, Sequence[Any]]
CallResults = dict[tuple[int, int], float | FailedSample]  # result by (call, row)
Reported = Sequence[Any]  # [name, sum, count]
CONTRACTS: dict[str, RewardContract] = {}
"""Contracts by which the run's plan was checked, by a reward's name; a rank puts them here as it starts."""
_pools: dict[tuple[float, bool], RewardPool] = {}
"""Pools by memory limit and whether they are quiet; nodes and validation share them."""


@dataclass
class Scores:
    """Rewards of a batch. `rewards` [B] is 0.0 where `keep` [B] is False because a reward of that row failed."""

    rewards: list[float]
    keep: list[bool]
    of_term: dict[str, list[float]] = field(default_factory=dict)  # unweighted, by name, of the rows that have them
    parts: list[dict[str, float]] = field(default_factory=list)
    """[B] unweighted rewards of each row by name, and the means of what they have reported of it by `metric`."""
    failures: list[tuple[str, int, FailedSample]] = field(default_factory=list)  # (reward, row, reason)
    retried: int = 0
    timeouts: int = 0
    seconds: float = 0.0
    metrics: list[Reported] = field(default_factory=list)  # values that rewards have reported by `metric`


@dataclass(frozen=True)
class Reference:
    """Completion that must earn full pay for a record; None if there is none, or none is known. `problem` says why no
    completion of this record can be judged."""

    completion: str | None
    problem: str = ""


class Scorer:
    """Scores batches by one recipe, and counts how many samples in a row have failed. `own_pool`: other threads score
    at the same time, and pools are not thread-safe. `quiet`: with one that does not report slow rewards."""

    def __init__(self, recipe: Any, workers: int | None = None, memory_gib: float = 8.0, limit: float = 300.0,
                 patience: int = 3, own_pool: bool = False, quiet: bool = False):
        self.recipe, problems = read_recipe(recipe)
        for problem in problems:
            raise InvalidInput(Diagnostic(problem.what, None, problem.hint))
        self.functions = {term.name: find_reward(term.name, term.module) for term in self.recipe.terms}
        self.contracts = {name: known if (known := CONTRACTS.get(name)) and known.module == function.__module__ else
                          read_contract("reward", function) for name, function in self.functions.items()}
        self.calls, self.call_of = _distinct_calls(self.recipe.terms)
        size = workers or _default_workers()
        self.pool = RewardPool(size, memory_gib) if own_pool else _pool(size, memory_gib, quiet)
        self.limit, self.patience, self.failures = limit, patience, FailureStreak()

    def score(self, columns: Columns, names: Sequence[int]) -> Scores:
        """Compute the rewards of all rows; raise InvalidInput if a row's source has none. `names` [B] are shown."""
        start = time.perf_counter()
        terms = _terms_of_rows(self.recipe, columns, len(names), names)
        results: CallResults = {}
        jobs: list[Job] = []
        reported: list[Reported] = []
        rows_of_keys: list[tuple[int, int]] = []
        for call, term in enumerate(self.calls):
            rows = [row for row, own in enumerate(terms) if any(self.call_of[each.path] == call for each in own)]
            if rest := self._score_in_rank(call, rows, columns, results, reported):
                keys = list(range(len(rows_of_keys), len(rows_of_keys) + len(rest)))
                jobs.append(_job(term, self.functions[term.name], self.contracts[term.name], columns, rest, keys))
                rows_of_keys += [(call, row) for row in rest]
        done = self.pool.run(jobs, self.limit)
        results |= {rows_of_keys[key]: value for key, value in done.values.items()}
        scores = _combine(terms, self.call_of, results)
        for key, values in done.of_sample.items():
            scores.parts[rows_of_keys[key][1]] |= {name: total / count for name, total, count in values
                                                  if count and not name.startswith("reward/")}
        scores.retried, scores.timeouts, scores.metrics = done.retried, done.timeouts, reported + done.metrics
        scores.seconds = time.perf_counter() - start
        return scores

    def references(self, columns: Columns, rows: Sequence[int],
                   opening: str | None = None) -> dict[str, list[Reference]]:
        """Return the reference completion of each row for each reward that declares one, by the reward's name.

        `opening` is the text with which the chat template begins the answer, "" for none, None where it is not known.
        """
        own: Columns = {name: [column[row] for row in rows] for name, column in columns.items()}
        terms = _terms_of_rows(self.recipe, own, len(rows), rows)
        declared = {name: function for name, function in self.functions.items()
                    if function.__distflow_reward__.reference is not None}
        return {name: [_reference(function, [term for term in terms[row] if term.name == name], own, row, opening)
                       for row in range(len(rows))] for name, function in declared.items()}

    def _score_in_rank(self, call: int, rows: list[int], columns: Columns, results: CallResults,
                 reported: list[Reported]) -> list[int]:
        """Score rows in this process where the reward allows it; return the rest, and those whose shortcut failed."""
        term = self.calls[call]
        function, contract = self.functions[term.name], self.contracts[term.name]
        marks: RewardMarks = function.__distflow_reward__
        shortcut = function if marks.in_rank else marks.shortcut
        if shortcut is None or contract.batched or inspect.iscoroutinefunction(function):
            return rows
        positional, names = _parameters(contract, columns)
        how = {"positional": positional, "names": names, "settings": term.settings}
        rest = []
        for row, arguments in zip(rows, _arguments(contract, columns, rows)):
            own = Metrics()
            with recording(own):
                value = call_in_rank(shortcut, how, arguments)
            if isinstance(value, float):
                results[call, row] = value
                reported += own.means()
            elif marks.in_rank:
                results[call, row] = FailedSample(str(value or NO_VALUE))
            else:
                rest.append(row)
        return rest

    def count(self, scores: Scores, step: int) -> None:
        """Count the failures of a batch; raise RewardsFailed after `patience` failed steps."""
        steps = self.failures.count(step, len(scores.keep), scores.keep.count(False))
        if steps < self.patience:
            return
        name, _, failed = scores.failures[-1]
        where = self.contracts[name].where
        raise RewardsFailed(f"no sample of {steps:.0f} steps in a row has a reward on this rank: there is nothing to "
                            f"learn from. The last: {shown(where.file)}:{where.line}: reward `{name}` "
                            f"{failed.reason}\n{users_part(failed.trace)[0]}".rstrip())


def find_reward(name: str, module: str = "") -> Any:
    """Return the function under `@reward` of that name; `module` has it, where the recipe says so."""
    if module:
        load_module(module)
    if name not in REWARDS:
        for module in SHIPPED:
            load_module(module)
    if name not in REWARDS:
        raise InvalidInput(f"there is no reward `{name}`. {did_you_mean(name, REWARDS)}")
    return REWARDS[name]


def report(scores: Scores, samples: Sequence[int]) -> str:
    """Return one line about the failed rows, of these samples; "" if there are none."""
    if not scores.failures:
        return ""
    lost, every = scores.keep.count(False), "EVERY ONE" if not any(scores.keep) else ""
    parts = []
    for name in dict.fromkeys(name for name, _, _ in scores.failures):
        of_reward = [(row, failed) for other, row, failed in scores.failures if other == name]
        reason, count = Counter(failed.reason for _, failed in of_reward).most_common(1)[0]
        row, failed = next((row, failed) for row, failed in of_reward if failed.reason == reason)
        more = f", and {count - 1} more" if count > 1 else ""
        colon = ":" if reason.startswith("its process") else ""
        line = users_line(failed.trace)
        at = f", at {line}" if line else ""
        parts.append(f"reward `{name}`{colon} {' '.join(reason.split())[:300]} (sample {samples[row]}{more}){at}")
    return f"{every or lost} of {len(scores.keep)} samples left out: {'; '.join(parts)}"


def _pool(size: int, memory_gib: float, quiet: bool) -> RewardPool:
    key = memory_gib, quiet
    pool = _pools[key] if key in _pools else _pools.setdefault(key, RewardPool(size, memory_gib, quiet))
    pool.size = max(pool.size, size)
    return pool


def _default_workers() -> int:
    """Return this rank's share of the cores, at least two so that one hanging process does not block the rest."""
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return min(8, max(2, cores))


def _terms_of_rows(recipe: Recipe, columns: Columns, rows: int, names: Sequence[int]) -> list[tuple[Term, ...]]:
    if not recipe.by:
        return [recipe.branches[""]] * rows
    sources = columns[recipe.by]
    for row, source in enumerate(sources):
        if recipe.of(source) is None:
            raise InvalidInput(f"`{recipe.by}` of row {names[row]} is {source!r}, for which no reward is given. "
                               f"{did_you_mean(source, recipe.branches, 'There are rewards for')}")
    return [recipe.branches[source] for source in sources]


def _reference(reward: Any, terms: list[Term], columns: Columns, row: int, opening: str | None) -> Reference:
    """Return the reference completion of a row by what its reward declares; `terms`: those of the row that name it."""
    if not terms:
        return Reference(None)
    function = reward.__distflow_reward__.reference
    names = inspect.signature(function).parameters
    record = {name: columns[PER_SAMPLE.get(name, name)][row] for name in names if PER_SAMPLE.get(name, name) in columns}
    given = {**record, "opening": opening, **terms[0].settings}
    try:
        return Reference(function(**{name: given[name] for name in names if name in given}))
    except ValueError as error:
        return Reference(None, str(error))


def _distinct_calls(terms: list[Term]) -> tuple[list[Term], dict[KeyPath, int]]:
    """Return the distinct calls, and the call of each term by its path: branches may share calls."""
    calls: list[Term] = []
    call_of: dict[KeyPath, int] = {}
    for term in terms:
        alike = (number for number, call in enumerate(calls) if (call.name, call.timeout, call.retries, call.settings)
                 == (term.name, term.timeout, term.retries, term.settings))
        call_of[term.path] = next(alike, len(calls))
        if call_of[term.path] == len(calls):
            calls.append(term)
    return calls, call_of


def _arguments(contract: RewardContract, columns: Columns, rows: list[int]) -> list[list[Any]]:
    given = [columns[read.name] for read in contract.columns.values() if read.name in columns]
    return [[column[row] for column in given] for row in rows]


def _parameters(contract: RewardContract, columns: Columns) -> tuple[int, list[str]]:
    there = [read.name in columns for read in contract.columns.values()]
    positional = there.index(False) if False in there else len(there)
    return positional, [name for name, read in contract.columns.items() if read.name in columns][positional:]


def _job(term: Term, function: Any, contract: RewardContract, columns: Columns, rows: list[int],
         keys: list[int]) -> Job:
    marks: RewardMarks = function.__distflow_reward__
    positional, names = _parameters(contract, columns)
    arguments = _arguments(contract, columns, rows)
    if contract.batched:
        arguments = [[list(values) for values in zip(*arguments)]]
    where = f"{shown(contract.where.file)}:{contract.where.line}"
    return Job(term.name, function.__module__, arguments, keys, term.settings,
               marks.timeout if term.timeout is None else term.timeout,
               marks.retries if term.retries is None else term.retries, marks.concurrency, contract.batched,
               inspect.iscoroutinefunction(function), positional, names, where)


def _combine(terms: list[tuple[Term, ...]], call_of: dict[KeyPath, int], results: CallResults) -> Scores:
    scores = Scores([0.0] * len(terms), [True] * len(terms), parts=[{} for _ in terms])
    for row, own in enumerate(terms):
        values = [(term, results[call_of[term.path], row]) for term in own]
        is_paid = any(term.weight and not isinstance(found, FailedSample) for term, found in values)
        for term, found in values:
            if isinstance(found, FailedSample) and found.reason == NO_VALUE and is_paid:
                continue  # it is for samples of another kind
            if isinstance(found, FailedSample):
                scores.keep[row] = False
                scores.failures.append((term.name, row, found))
            else:
                scores.rewards[row] += term.weight * found
                scores.of_term.setdefault(term.name, []).append(found)
                scores.parts[row][term.name] = found
        if scores.keep[row] and not abs(scores.rewards[row]) <= LARGEST:
            scores.keep[row] = False
            failed = FailedSample("adds up, with its weight and the others, to more than a float32 holds")
            scores.failures.append((own[0].name, row, failed))
        scores.rewards[row] *= scores.keep[row]
    return scores
