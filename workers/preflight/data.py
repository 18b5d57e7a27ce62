"""Proves that the first records can be learned from: fields that are probably not the ones that were meant.

    answers      are not all the same, not a count of the records, not the question and not behind it, do not end it,
                 and hold no other record's question
    choices      a question that offers letters has one of them as its answer
    pairs        the chosen and the rejected answer of a record differ, and its scores say which is which
    tool calls   have arguments that are JSON, and name a tool of the record
    tools        are shown in the prompts if records have them; so is the text of fields such as `context`

The form of each record, duplicates and what is validated on: `distflow.data.checks`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

from distflow.data.forms import OF_QUESTIONS, SCORES
from distflow.data.problems import (
    Message,
    Record,
    answer_text,
    content_text,
    ends_with_answer,
    messages_of,
    tools_error,
    tools_of,
    with_parsed_arguments,
)
from workers.preflight.proofs import FailedProof, FirstRecords, shortened

_ENOUGH = 8
"""Records from which on it is no accident that all of them have something in common."""
_LONG, _WHOLE = 4, 16
"""Characters of an answer from which on a question hardly ends with it by accident, and of a question from which on it
hardly stands in another record's answer by accident."""
_OFFER = re.compile(r"(?:^|[\s(\[])([A-J]|[a-j])[).:\]]\s", re.MULTILINE)


def prove_data(records: FirstRecords) -> Iterator[FailedProof]:
    for proof in (*(_OF_ANSWERS if records.have_answers else ()), _questions_are_not_in_answers, _pairs_differ,
                  _tool_calls_can_be_read, _tools_are_named, _questions_are_whole):
        yield from proof(records)


def _answers_differ(records: FirstRecords) -> Iterator[FailedProof]:
    same = set(records.answers)
    if len(records) >= _ENOUGH and len(same) == 1 and len(set(records.questions)) > 1:
        yield from records.failed(range(len(records)), f" has the answer {shortened(same.pop())}, whatever its "
                                  "question is", _other_field(records), doubt=True)


def _answers_are_not_counted(records: FirstRecords) -> Iterator[FailedProof]:
    numbers = [int(answer) if re.fullmatch(r"\d{1,9}", answer) else -1 for answer in records.answers]
    counted = [range(first, first + len(numbers)) for first in (0, 1)]
    if len(records) >= _ENOUGH and any(numbers == [*count] for count in counted):
        yield from records.failed(range(len(records)), " has its own number as its answer", _other_field(records),
                                  doubt=True, kind="other_field")


def _answers_are_not_in_questions(records: FirstRecords) -> Iterator[FailedProof]:
    pairs = [(question.strip(), answer.strip()) for question, answer in zip(records.questions, records.answers)]
    same = [index for index, (question, answer) in enumerate(pairs) if question == answer]
    yield from records.failed(same, " has its question as its answer, too", _other_field(records), doubt=True,
                              kind="other_field")
    ends = [index for index, (question, answer) in enumerate(pairs)
            if question != answer and _ends_with(question, answer)]
    if 2 * len(ends) > len(records):
        yield from records.failed(ends, " ends with its answer, which the model then only repeats", "Take the answers "
                                  "out of the questions, or name another field:  --set data.question=FIELD", doubt=True,
                                  kind="answer_in_question")


def _questions_are_not_in_answers(records: FirstRecords) -> Iterator[FailedProof]:
    learned = records.data.answer in records.fields.imitated
    pairs = records.training and "chosen" in records.data.columns
    said = [[answer] * learned + ([answer_text(row["chosen"])] if pairs else [])
            for answer, row in zip(records.answers, records.rows)]
    asked = [question.strip() for question in records.questions]
    begins = [index for index, question in enumerate(asked) if len(question) >= _LONG and
              any(text.strip() != question and text.strip().startswith(question) for text in said[index])]
    if 2 * len(begins) > len(records):
        yield from records.failed(begins, " has an answer that begins with its question, which the model then learns "
                                  "to repeat", "Take the questions out of the answers.", doubt=True,
                                  kind="question_in_answer")
    whole = {question for question in asked if len(question) >= _WHOLE}
    joined = [index for index, texts in enumerate(said)
              if any(text.strip().find(question) > 0 for text in texts for question in whole - {asked[index]})]
    if 2 * len(joined) > len(records):
        yield from records.failed(joined, " has an answer that goes on with another record's question, as joined texts "
                                  "do", "Write each question and its answer as a record of its own.",
                                  doubt=True, kind="question_in_answer")


def _choices_are_offered(records: FirstRecords) -> Iterator[FailedProof]:
    offers = [set(_OFFER.findall(question)) for question in records.questions]
    offered = [index for index, letters in enumerate(offers) if {*"ABC"} <= letters or {*"abc"} <= letters]
    odd = [index for index in offered if re.fullmatch(r"\d|[A-Za-z]", records.answers[index].strip())
           and records.answers[index].strip() not in offers[index]]
    if odd:
        letters, answer = " ".join(sorted(offers[odd[0]])), records.answers[odd[0]].strip()
        yield from records.failed(odd, f" offers the choices {letters}, and its answer is `{answer}`, which is none of "
                                  "them", "If a letter is asked for, write each answer as the question writes it.",
                                  doubt=True)


def _pairs_differ(records: FirstRecords) -> Iterator[FailedProof]:
    if records.training and {"chosen", "rejected"} <= {*records.data.columns}:
        same = [index for index, row in enumerate(records.rows)
                if _said(row["chosen"]) == _said(row["rejected"])]
        yield from records.failed(same, " has the same answer as `chosen` and as `rejected`, of which nothing can be "
                                  "learned", "Take such records out of the data.", kind="pairs_contradict")
        for better, worse in SCORES:
            scores = [(row.get(better), row.get(worse)) for row in records.rows]
            wrong = [index for index, (high, low) in enumerate(scores) if isinstance(high, int | float) and
                     isinstance(low, int | float) and high <= low and index not in same]
            yield from records.failed(wrong, f" has a `{better}` that is not above its `{worse}`", "Take such records "
                                      "out of the data, or exchange the answers.", doubt=True, kind="pairs_contradict")


def _said(answer: Any) -> Any:
    """Return all that an answer says: its text, and of a message its calls and its thoughts, too."""
    more = {key: value for key, value in answer[-1].items() if key not in ("role", "content") and value} \
        if ends_with_answer(answer) else {}
    return answer_text(answer).strip(), more


def _tool_calls_can_be_read(records: FirstRecords) -> Iterator[FailedProof]:
    broken, unknown = {}, {}
    for index, row in enumerate(records.rows):
        tools = {_name(tool.get("function", tool)) for tool in tools_of(row, records.data) or ()}
        for call in _called_functions(row[records.data.question]):
            if wrong := _wrong_arguments(call):
                broken[index] = wrong
            elif tools and _name(call) not in tools:
                unknown[index] = _name(call)
    yield from records.failed([*broken], " has a tool call whose arguments are not a JSON object: "
                              f"{next(iter(broken.values()), '')}", 'Write them as {"x": 1}, or as JSON text of that.')
    yield from records.failed([*unknown], f" calls the tool `{next(iter(unknown.values()), '')}`, which it does not "
                              f"list in `{records.data.tools}`", "Name each tool as the list does.")


def _tools_are_named(records: FirstRecords) -> Iterator[FailedProof]:
    unread = [index for index, row in enumerate(records.rows) if row.get("tools") and not tools_error(row["tools"])]
    if records.data.tools is None:
        yield from records.failed(unread, " has tools in its field `tools`, which no prompt shows",
                                  "Show them:  --set data.tools=tools", doubt=True)


def _questions_are_whole(records: FirstRecords) -> Iterator[FailedProof]:
    asked = [" ".join(content_text(message.get("content")) for message in messages_of(row, records.data))
             for row in records.rows]
    for name in (each for each in OF_QUESTIONS if each not in records.data.columns.values()):
        longest = [max(_texts(row.get(name)), key=len, default="") for row in records.rows]
        unread = [index for index, text in enumerate(longest) if text.strip() not in asked[index]]
        yield from records.failed(unread, f" has a text in its field `{name}`, which its prompt does not show",
                                  "If it belongs to the question, write it there.", doubt=True)


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a value."""
    if isinstance(value, str):
        yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    yield from itertools.chain.from_iterable(map(_texts, inner))


_OF_ANSWERS = (_answers_differ, _answers_are_not_counted, _answers_are_not_in_questions, _choices_are_offered)


def _other_field(records: FirstRecords) -> str:
    taken = {records.data.question, records.data.answer}
    free = [name for name in records.rows[0] if name not in taken and name != "source"]
    return f"Is another field meant?  --set data.answer={free[0] if len(free) == 1 else 'FIELD'}" + \
        (f"   (it has: {', '.join(free)})" if len(free) > 1 else "")


def _ends_with(question: str, answer: str) -> bool:
    return len(answer) >= _LONG and question.endswith(answer)


def _called_functions(asked: str | list[Message]) -> Iterator[dict[str, Any]]:
    for message in asked if isinstance(asked, list) else ():
        for call in message.get("tool_calls") or ():
            if isinstance(call, dict):
                yield call.get("function") or call


def _wrong_arguments(call: Record) -> str:
    """Return the arguments of a call as a message shows them if they are no JSON object; "" if they are one."""
    given = with_parsed_arguments({"name": "", **call}).get("arguments")
    return "" if isinstance(given, dict) else shortened(str(given))


def _name(function: Record) -> str:
    return str(function.get("name", ""))
