"""Metrics of a step's rows that no single node has: how rewards go with lengths and advantages, and what repeats."""

from __future__ import annotations

import torch
from torch import Tensor

from distflow.data.batch import ColumnData, Ragged, to_list
from distflow.data.databuffer import Databuffer
from distflow.telemetry.metrics import current

_COLUMNS = ("group", "rewards", "environment_rewards", "responses", "advantages", "questions", "answers")
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
        if isinstance(responses, Ragged) and isinstance(responses.values, Tensor):
            alike_B = _report_responses(responses, responses.values, group)
            if isinstance(rewards, Tensor):
                _report_verdicts(rewards.double(), alike_B)
        if "questions" in columns:
            _report_questions(columns, group)


def _report_rewards(rewards_B: Tensor, group: Tensor, responses: ColumnData | None,
                    advantages: ColumnData | None) -> None:
    """Report how rewards go with lengths and with advantages, among the rows of a prompt."""
    found = {"reward/length_correlation": responses.lengths.double() if isinstance(responses, Ragged) else None,
             "advantages/reward_correlation": _of_rows(advantages)}
    for name, values_B in found.items():
        if values_B is not None and len(values_B) == len(rewards_B):
            a_B, b_B = _centred(rewards_B, group), _centred(values_B, group)
            spread = (a_B.square().sum() * b_B.square().sum()).sqrt()
            if spread > 1e-9:
                current().mean(name, (a_B * b_B).sum() / spread * len(group), len(group))
    if isinstance(advantages, Tensor) and len(advantages) == len(group):  # those of tokens may be centred otherwise
        _report_baseline(advantages.double(), group)


def _report_baseline(advantages_B: Tensor, group: Tensor) -> None:
    """Report how much of the advantages is common to all rows of a prompt: of its baseline, not of its rows."""
    total = advantages_B.square().sum()
    if total > 1e-9:
        within = _centred(advantages_B, group).square().sum()
        current().mean("advantages/of_prompts", (1 - within / total) * len(group), len(group))


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
    """Report how many of the responses that others of their prompt equal earn something else than these."""
    counts = torch.bincount(alike_B)
    low, high = (torch.zeros(len(counts), dtype=torch.float64).scatter_reduce(0, alike_B, rewards_B, how,
                                                                              include_self=False)
                 for how in ("amin", "amax"))
    several = counts > 1
    differ = several & (high - low > 1e-3 * high.abs().clamp(min=1e-3))
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
    """Report how many prompts are the same as another of the step, and how many hold their own answer."""
    questions = dict(zip(group.tolist(), to_list(columns["questions"])))
    current().mean("prompt/repeated", len(questions) - len(set(questions.values())), len(questions))
    if "answers" in columns:
        answers = dict(zip(group.tolist(), to_list(columns["answers"])))
        current().mean("prompt/has_answer", sum(_holds(questions[each], answers[each]) for each in questions),
                       len(questions))


def _holds(question: str, answer: str) -> bool:
    whole, short = answer.strip(), answer.rpartition("####")[2].strip()
    return any(len(text) >= _TELLING and text in question for text in (whole, short))
