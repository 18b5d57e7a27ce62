"""Metrics of a step's rows that no single node has: what rewards, advantages and preferences go with, and what
repeats."""

from __future__ import annotations

import json
from collections import Counter

import torch
from torch import Tensor

from distflow.data.batch import ColumnData, Ragged, to_list
from distflow.data.databuffer import Databuffer
from distflow.telemetry.metrics import current
from workers.isolation.rewards.texts import marked_answer

_COLUMNS = ("group", "rewards", "environment_rewards", "reward_parts", "responses", "completions", "preference",
            "advantages", "questions", "answers")
_LOOKED_AT = 256  # rows whose tokens are searched for repetition
_RUN = 4  # tokens of a run that may repeat
_PRIMES = (1_000_003, 2_654_435_761)
_TELLING = 4  # characters of an answer that is in a question by no accident


def report_rows(buffer: Databuffer) -> None:
    """Report what the step's rows of this rank have in common. Columns that it lacks are left out."""
    for columns in buffer.all_rows(_COLUMNS).values():
        group, responses = columns.get("group"), columns.get("responses")
        if not isinstance(group, Tensor) or not len(group):
            continue
        rewards = columns.get("rewards", columns.get("environment_rewards"))
        if isinstance(rewards, Tensor):
            _report_rewards(rewards.double(), group, responses, columns.get("advantages"))
            _report_parts(rewards.double(), group, columns.get("reward_parts"))
        preference = columns.get("preference")
        if isinstance(preference, Tensor) and isinstance(responses, Ragged):
            _report_correlation("preference/length_correlation", preference.double(), responses.lengths.double(), group)
        if "completions" in columns and "answers" in columns:
            _report_right(columns, group, rewards)
        if isinstance(responses, Ragged) and isinstance(responses.values, Tensor):
            alike_B = _report_responses(responses, responses.values, group)
            if isinstance(rewards, Tensor):
                _report_verdicts(rewards.double(), alike_B)
        if "questions" in columns:
            _report_questions(columns, group)


def _report_rewards(rewards_B: Tensor, group: Tensor, responses: ColumnData | None,
                    advantages: ColumnData | None) -> None:
    """Report how rewards go with lengths and with advantages, among the rows of a prompt."""
    if isinstance(responses, Ragged) and len(responses) == len(group):
        _report_correlation("reward/length_correlation", rewards_B, responses.lengths.double(), group)
    place_B = torch.arange(len(group), dtype=torch.float64)
    _report_correlation("reward/place_correlation", rewards_B, place_B, group)
    of_rows_B = _of_rows(advantages)
    if of_rows_B is not None and len(of_rows_B) == len(group):
        _report_correlation("advantages/reward_correlation", rewards_B, of_rows_B, group)
    if isinstance(advantages, Tensor) and len(advantages) == len(group):  # those of tokens may be centred otherwise
        _report_baseline(advantages.double(), group)


def _report_correlation(name: str, a_B: Tensor, b_B: Tensor, group: Tensor) -> None:
    """Report how two values of each row go together among the rows of a prompt."""
    current().correlation_of(name, _centred(a_B, group), _centred(b_B, group))


def _report_parts(rewards_B: Tensor, group: Tensor, parts: ColumnData | None) -> None:
    """Report how each of several parts of a reward goes with the whole of it, as nodes after the reward left it."""
    values = [json.loads(text) for text in to_list(parts)] if parts is not None else []
    for part in values[0] if values and len(values[0]) > 1 else ():
        if all(isinstance(row.get(part), float | int) for row in values):
            part_B = rewards_B.new_tensor([row[part] for row in values])
            _report_correlation(f"reward/correlation/{part}", rewards_B, part_B, group)


def _report_right(columns: dict[str, ColumnData], group: Tensor, rewards: ColumnData | None) -> None:
    """Report how many completions give their record's final answer, both marked, and whether these earn more, and are
    preferred."""
    wanted = [marked_answer(text) for text in to_list(columns["answers"])]
    marked_B = torch.tensor([answer is not None for answer in wanted])
    if not marked_B.any():
        return
    right_B = torch.tensor([marked_answer(text) == answer for text, answer in zip(to_list(columns["completions"]),
                                                                                  wanted)], dtype=torch.float64)
    current().mean_of("response/has_answer", right_B[marked_B])
    if isinstance(rewards, Tensor):
        _, index_B, sizes = torch.unique(group, return_inverse=True, return_counts=True)
        compares_B = sizes[index_B] > 1
        above_B = _centred(rewards.double(), group) if compares_B.any() else rewards - rewards.min()
        lost_B = ~marked_B & (above_B.abs() < 1e-9) & (compares_B | ~compares_B.any())
        current().mean_of("reward/unanswerable", lost_B)
        right, wrong = rewards.double()[right_B > 0], rewards.double()[marked_B & (right_B == 0)]
        current().mean_of("earned/right", right)
        current().extremes_of("earned/right", right)
        current().mean_of("earned/wrong", wrong)
        current().extremes_of("earned/wrong", wrong)
    if not marked_B.all():
        return
    if isinstance(rewards, Tensor):
        _report_correlation("reward/answer_correlation", rewards.double(), right_B, group)
    preference = columns.get("preference")
    if isinstance(preference, Tensor):
        _, index = torch.unique(group, return_inverse=True)
        ahead_P = torch.zeros(int(index.max()) + 1, dtype=torch.float64)
        current().mean_of("preference/worse_has_answer", ahead_P.index_add(0, index, right_B * preference.double()) < 0)


def _report_baseline(advantages_B: Tensor, group: Tensor) -> None:
    """Report how much of the advantages is common to all rows of a prompt: of its baseline, not of its rows."""
    total = advantages_B.square().sum()
    if total > 1e-9:
        within = _centred(advantages_B, group).square().sum()
        current().mean("advantages/of_prompts", total - within, total)


def _of_rows(advantages: ColumnData | None) -> Tensor | None:
    """Return the mean advantage of each row's tokens."""
    if isinstance(advantages, Ragged) and isinstance(advantages.values, Tensor):
        sums_B = torch.zeros(len(advantages), dtype=torch.float64)
        return sums_B.index_add(0, advantages.row_of, advantages.values.double()) / advantages.lengths.clamp(min=1)
    return advantages.double() if isinstance(advantages, Tensor) else None


def _centred(values_B: Tensor, group: Tensor) -> Tensor:
    """Return the values less the mean of their group."""
    _, index = torch.unique(group, return_inverse=True)
    counts, sums = torch.bincount(index), torch.zeros(int(index.max()) + 1, dtype=torch.float64)
    return values_B - (sums.index_add(0, index, values_B) / counts)[index]


def _report_verdicts(rewards_B: Tensor, alike_B: Tensor) -> None:
    """Report how many of the responses that others of their prompt equal earn something else than these, by more than
    the rewards of the step deviate, as no judge's rounding does."""
    counts = torch.bincount(alike_B)
    low, high = (torch.zeros(len(counts), dtype=torch.float64).scatter_reduce(0, alike_B, rewards_B, how,
                                                                              include_self=False)
                 for how in ("amin", "amax"))
    several = counts > 1
    differ = several & (high - low > rewards_B.std(correction=0).clamp(min=1e-6))
    current().mean("reward/inconsistent", counts[differ].sum(), counts[several].sum())


def _report_responses(responses: Ragged, tokens_T: Tensor, group: Tensor) -> Tensor:
    """Report what repeats in responses and among them; return a number of each that equal ones of a prompt share."""
    row_of = responses.row_of
    position_T = torch.arange(len(tokens_T)) - responses.offsets[:-1][row_of]
    mixed_T = (tokens_T.long() + 1) * _PRIMES[1] % (position_T * 2 + _PRIMES[0])
    hashes_B = torch.zeros(len(responses), dtype=torch.int64).index_add(0, row_of, mixed_T)
    different, alike_B = torch.unique(torch.stack([group.long(), hashes_B]), dim=1, return_inverse=True)
    current().mean("response/alike", len(group) - different.shape[1], len(group))
    end = int(responses.offsets[min(len(responses), _LOOKED_AT)])
    if end < _RUN:
        return alike_B
    key_T = row_of[: end - _RUN + 1].clone()
    for place in range(_RUN):
        key_T = key_T * _PRIMES[0] + tokens_T[place : end - _RUN + 1 + place].long()
    whole_T = row_of[: end - _RUN + 1] == row_of[_RUN - 1 : end]
    runs = int(whole_T.sum())
    if runs:
        current().mean("response/repetition", runs - len(torch.unique(key_T[whole_T])), runs)
    return alike_B


def _report_questions(columns: dict[str, ColumnData], group: Tensor) -> None:
    """Report how many prompts are the same as another of the step, or hold their own answer, and how many others have
    the most common one, too."""
    questions = dict(zip(group.tolist(), to_list(columns["questions"])))
    current().mean("prompt/marked", sum(marked_answer(each) is not None for each in questions.values()), len(questions))
    current().mean("prompt/repeated", len(questions) - len(set(questions.values())), len(questions))
    if "answers" in columns:
        answers = dict(zip(group.tolist(), to_list(columns["answers"])))
        current().mean("prompt/has_answer", sum(_holds(questions[each], answers[each]) for each in questions),
                       len(questions))
        current().mean("prompt/unmarked", sum(marked_answer(each) is None for each in answers.values()), len(answers))
        if any(answers.values()):
            most = Counter(map(_short, answers.values())).most_common(1)[0][1]
            current().mean("prompt/same_answer", most - 1, len(answers) - 1)  # a rank may have one prompt


def _short(answer: str) -> str:
    return answer.rpartition("####")[2].strip()


def _holds(question: str, answer: str) -> bool:
    whole, short = answer.strip(), _short(answer)
    return any(len(text) >= _TELLING and text in question for text in (whole, short))
