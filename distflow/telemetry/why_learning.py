"""Explains what is wrong with a run's learning, as a person would: what, since when, why, and rows that show it."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distflow.telemetry.learning import LearningFault, actions_of, faults_of, main_fault, with_start
from distflow.telemetry.learning_series import NO_PARTS, Rows
from distflow.telemetry.run_reader import Row, RunReader, numbers

_ROWS = 3  # samples that are shown
_QUOTED = 100  # characters of a prompt or an answer
_SOURCES, _EACH, _PROMPTS = 20, 2, 3  # most values of a column that are compared, fewest samples of one, prompts named
_MOVED = 0.05  # least change of a mean reward that is said
_TYPICAL = (("reward/mean", "reward"), ("environment/reward", "reward"), ("policy/entropy", "entropy"),
            ("policy/kl_reference", "KL to the reference"), ("response/length", "tokens of a completion"),
            ("response/truncated", "share cut off"), ("reward/zero_std_groups", "share of groups without signal"),
            ("grad_norm", "gradient norm"))
_LINKS = (
    ("prompts are whole", "data/prompts_cut", 0.0, 0.0),
    ("no prompt holds its answer", "prompt/has_answer", 0.0, 0.0),
    ("each sample has a reward", "reward/failed", 0.0, 0.0),
    ("equal completions earn the same", "reward/inconsistent", 0.0, 0.0),
    ("right answers earn more", "reward/answer_correlation", 0.5, 1.01),
    ("advantages follow rewards", "advantages/reward_correlation", 0.6, 1.01),
    ("the baseline is the prompt's mean", "advantages/of_prompts", -1e-6, 1e-6),
    ("only sampled tokens are trained", "mismatch/unsampled", 0.0, 0.0),
    ("completions are trained to their end", "response/end_untrained", 0.0, 0.0),
    ("the sampler has the trained weights and their numbers", "mismatch/logprob_mean", 0.0, 1e-4),
    ("a teacher's log-probabilities are in their places", "distillation/misplaced", -math.inf, 0.0),
    ("gradients are set to zero", "gradient/kept", 0.0, 0.0),
    ("updates move the weights", "gradient/moved", 0.5, 1.01),
)
"""Links of a step, in its order, each with what holds in every step of a run in which it is right."""
_EVENTS = ("failure", "settings_changed", "state_restored", "reward_failed", "environment_failed",
           "reference_followed", "data_changed")


def learning(reader: RunReader) -> Iterator[str]:
    """Say what went wrong with the learning of a run, or that nothing did, with its typical step."""
    steps = [*with_start(reader.steps())]
    faults = faults_of(steps, reader.settings(), actions_of(reader.settings()), reader.doubts())
    main = main_fault(faults)
    if main is None:
        yield f"Nothing is wrong with its learning in {len(steps)} step{'s' * (len(steps) != 1)}. {_typical(steps)}"
        yield from _doubts(reader)
        return
    seen = main.evidence
    guess = main.rule.symptom and not seen.sure
    cause = "No reading confirms a cause. Usual ones" if guess else "The probable cause"
    yield (f"{seen.what}, since step {seen.since}; detector `{main.detector}` was sure of it at step {main.step}. "
           f"{cause}: {seen.cause}. To change: {seen.remedy}")
    proved = [*_proved(steps, main.step)]
    if proved:
        yield f"  Not the cause, as it is right in all steps until then: {'; '.join(proved)}"
    yield f"  {_curve(steps, main)}"
    rewarded = [row for row in map(_rewarded, reader.rows("samples")) if "rewards" in numbers(row)]
    if main.rows:
        yield from _changed_metrics(steps, seen.since)
        yield from _changed_by_source(reader, rewarded, seen.since)
    yield from _shown(rewarded, main)
    for event in reader.rows("events"):
        if event["event"] in _EVENTS and seen.since - 2 <= event["step"] <= main.step:
            changed = ", ".join(f"{key}: {old} → {new}" for key, (old, new) in event.get("settings", {}).items())
            facts = event.get("what") or event.get("why") or event.get("reason") or changed
            yield f"  step {event['step']}: {event['event'].replace('_', ' ')} {facts}".rstrip()
    yield from _doubts(reader)
    others = [fault for fault in faults if fault is not main]
    if others:
        yield "With it, or after it:"
        yield from (f"  step {fault.step}  {fault.sentence} (`{fault.detector}`)" for fault in others)


def _proved(steps: Sequence[Mapping[str, float]], last: int) -> Iterator[str]:
    """Yield the links of a step that have been right in all steps, of those that are measured."""
    for words, name, least, most in _LINKS:
        values = [line[name] for line in steps if name in line and line["step"] <= last]
        if values and all(least <= value <= most for value in values):
            yield words


def _doubts(reader: RunReader) -> Iterator[str]:
    """Yield what was doubted of the run's inputs before it started, which may be the cause."""
    doubts = dict.fromkeys(reader.doubts())
    if doubts:
        yield "Noted before its start:"
        yield from (f"  {doubt}" for doubt in doubts)


def _typical(steps: Sequence[Mapping[str, float]]) -> str:
    """Return what a typical step is like, and where the reward began."""
    said = []
    for name, words in _TYPICAL:
        values = [line[name] for line in steps if name in line]
        if values:
            said.append(f"{words} {statistics.median(values):.3g}")
    sets = sorted({name for line in steps for name in line if name.startswith("validation/")})
    held_out = [line[sets[0]] for line in steps if sets[0] in line] if sets else []
    learned = f"; held-out {held_out[0]:.3f} → {held_out[-1]:.3f}" if len(held_out) > 1 else ""
    return f"A typical step: {', '.join(said)}{learned}." if said else ""


def _curve(steps: Sequence[Mapping[str, float]], fault: LearningFault) -> str:
    """Return a few values of the metric that shows a fault, before and since it began."""
    name = fault.evidence.metric
    known = [(int(line["step"]), line[name]) for line in steps if name in line]
    chosen = known[:: max(1, len(known) // 8)]
    return f"{name} by step: {', '.join(f'{step}: {value:.3g}' for step, value in chosen)}"


def _changed_metrics(steps: Sequence[Mapping[str, float]], since: int) -> Iterator[str]:
    """Yield which parts of the reward, and lengths, are others since a step."""
    names = sorted({name for line in steps for name in line if name.startswith("reward/") and name not in NO_PARTS})
    for name in (*names, "response/length"):
        before, after = ([line[name] for line in steps if name in line and (line["step"] >= since) == late]
                         for late in (False, True))
        if before and after:
            old, new = statistics.mean(before), statistics.mean(after)
            if abs(new - old) > max(_MOVED, 0.1 * abs(old)):
                yield f"  {name}: {old:.3g} → {new:.3g}"


def _rewarded(row: Row) -> Row:
    return {"rewards": row.get("environment_rewards"), **row}


def _shown(rows: Sequence[Row], fault: LearningFault) -> Iterator[str]:
    """Yield the samples that show a fault best, of the steps since it began."""
    since = [row for row in rows if fault.evidence.since <= row["step"] <= fault.step] or list(rows[-_ROWS:])
    chosen = _best_rows(since, fault.rows)
    if chosen:
        yield f"Of the samples of steps {fault.evidence.since} to {fault.step}:"
    for row in chosen:
        parts = numbers(row["reward_parts"]) if isinstance(row.get("reward_parts"), dict) else {}
        paid = f" ({', '.join(f'{name} {value:.3g}' for name, value in parts.items())})" if len(parts) > 1 else ""
        wanted = f", answer {quoted_text(row['answers'])}" if isinstance(row.get("answers"), str) else ""
        yield (f"  step {row['step']}, row {row.get('row', '?')}, reward {row['rewards']:.3g}{paid}: "
               f"{quoted_text(row.get('questions'))}{wanted}")
        yield f"    {quoted_text(row.get('completions'), 2 * _QUOTED)}"


def _best_rows(rows: Sequence[Row], kind: Rows) -> list[Row]:
    """Return three samples: of the highest or lowest reward, the longest, or the last ones."""
    if kind == "long":
        return sorted(rows, key=lambda row: -len(row.get("completions") or ""))[:_ROWS]
    if kind:
        return sorted(rows, key=lambda row: row["rewards"], reverse=kind == "high")[:_ROWS]
    return list(rows[-_ROWS:])


_Changed = tuple[Any, float, float, int, int]
"""A value of a column; the mean reward of its samples before and since a step, and their numbers."""


def _changed(samples: Sequence[Row], step: int, column: str, least: int) -> list[_Changed]:
    """Return the values of a column whose samples earn otherwise since `step`, those that fell most first; at least so
    many samples on each side."""
    found: dict[Any, tuple[list[float], list[float]]] = {}
    for row in samples:
        if isinstance(row.get(column), str):
            found.setdefault(row[column], ([], []))[row["step"] >= step].append(row["rewards"])
    pairs = ((value, statistics.mean(before), statistics.mean(after), len(before), len(after))
             for value, (before, after) in found.items() if min(len(before), len(after)) >= least)
    return sorted((each for each in pairs if abs(each[2] - each[1]) > _MOVED), key=lambda each: each[2] - each[1])


def _changed_by_source(reader: RunReader, samples: Sequence[Row], step: int) -> Iterator[str]:
    """Compare the samples by the run's own columns of the dataset, as where a record comes from, and by prompt."""
    for column in json.loads(reader.settings().get("data.columns", "[]")):
        values = {row[column] for row in samples if isinstance(row.get(column), str)}
        if 1 < len(values) <= _SOURCES:
            for value, before, after, n, m in _changed(samples, step, column, _EACH):
                yield f"  {column} `{value}`: {before:.3f} → {after:.3f} ({n} samples before, {m} since)"
    for prompt, before, after, n, m in _changed(samples, step, "questions", 1)[:_PROMPTS]:
        yield f"  prompt {quoted_text(prompt)}: {before:.3f} → {after:.3f} ({n} samples before, {m} since)"


def quoted_text(text: Any, most: int = _QUOTED) -> str:
    return json.dumps(text, ensure_ascii=False)[:most]
