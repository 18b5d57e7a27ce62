"""The shipped rewards about texts."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from distflow.errors import InvalidInput
from workers.isolation.rewards import ends_in_thoughts
from workers.isolation.rewards.answers import same
from workers.isolation.rewards.reader import parse_whole
from workers.isolation.rewards.texts import (  # noqa: A004
    _boxed,
    _formed,
    _without_a_process,
    format,
    length,
    math,
)
from workers.isolation.scoring import Scorer

GRADERS, *ANSWERS = map(json.loads, Path(__file__).with_name("answers.jsonl").read_text().splitlines())
REFERENCES = [*map(json.loads, Path(__file__).with_name("references.jsonl").read_text().splitlines())]
REPORTS = [*map(json.loads, Path(__file__).with_name("reports.jsonl").read_text().splitlines())]
"""Answers in the manner of public reports of other graders' users. `before`: a wrong verdict, once given here."""
SUBJECTS = sorted({row["subject"] for row in REFERENCES})
TOWER = "\\boxed{9^{9^{9^{9^{9}}}}}"


def test_math_reads_answers_of_thousands_of_digits():
    nines = "#### " + "9" * 5000
    assert (math(nines, nines), math(nines, "#### 9")) == (1.0, 0.0)


@pytest.mark.parametrize("row", ANSWERS, ids=lambda row: row["completion"])
def test_math_judges_each_row_of_the_table_as_it_says(row):
    for strict in (True, False):
        settings = {"completion": row["completion"], "answer": row["reference"], "strict": strict}
        assert math(**settings) == row["strict" if strict else "lenient"]
        assert _without_a_process(**settings) in (None, math(**settings))
    others = {row[grader] for grader in GRADERS["graders"]} - {None}
    assert row["why"] or others <= {row["strict"]}, "it must be said why the verdict differs from another grader's"


@pytest.mark.parametrize("row", REPORTS, ids=lambda row: f"{row['source']}: {row['completion']}")
def test_math_judges_answers_of_public_reports(row):
    assert math(row["completion"], row["reference"]) == row["right"]
    assert _without_a_process(row["completion"], row["reference"]) in (None, row["right"])


@pytest.mark.parametrize("answer", [
    "(" * 5000 + "1", "{" * 5000, "9" * 200_000, r"\frac{" * 3000 + "5", "x+1" + "+0" * 50_000, "7 " * 50_000,
    "10**10**10", "7+0*10**10**10", "7^{1e999999999}", "1:" * 400 + "7", r"7\text{ " * 400, "7, " * 400, "7 or " * 300])
def test_math_pays_no_hostile_answer_and_ends(answer):
    start = time.process_time()
    for completion in (f"\\boxed{{{answer}}}", f"#### {answer}", f"The answer is {answer}",
                       "\\boxed{1}" + "\n" * 5000 + "x\\boxed{2}"):
        for reference in ("7", "x+1", "(1,7)", "7 m", r"\{7\}", "7:7", "A"):
            assert math(completion, reference) == 0.0
    assert time.process_time() - start < 20


def spellings(reference: str) -> Iterator[str]:
    """Yield a reference as completions may spell it."""
    yield from (reference, reference.replace(r"\frac{", r"\dfrac{"), f"${reference}$", f"{reference}.")
    if "text" not in reference:
        yield re.sub(r"(?<![\\a-z]) (?![a-z0-9])", "", reference)
    if not re.search(r"left|text\{\(|[\[\]]", reference) and reference.count("(") == reference.count(")"):
        yield reference.replace("(", r"\left(").replace(")", r"\right)")


def misses(reference: str) -> Iterator[str]:
    """Yield answers that differ from a reference in one digit or sign."""
    for match in re.finditer(r"(?<![\^])[0-9]", reference) if reference[0] != "0" else ():
        yield f"{reference[:match.start()]}{(int(match[0]) + 1) % 10}{reference[match.end():]}"
    for match in re.finditer(r"(?<=.)[+-]", reference) if "pm" not in reference else ():
        yield f"{reference[:match.start()]}{'-' if match[0] == '+' else '+'}{reference[match.end():]}"
    if not re.match(r"\\text|[A-Za-z(\[\\{|0]", reference):
        yield reference[1:] if reference[0] == "-" else f"-{reference}"


@pytest.mark.parametrize("subject", SUBJECTS)
def test_an_answer_is_judged_whole(subject):
    wrong = []
    for row in (row for row in REFERENCES if row["subject"] == subject):
        reference = row["reference"]
        verdicts = {**dict.fromkeys([*row["wrong"], *misses(reference)], 0.0),
                    **dict.fromkeys([*spellings(reference), *row["right"]], 1.0)}
        wrong += [(reference, answer) for answer, right in verdicts.items()
                  if math(f"\\boxed{{{answer}}}", reference) != right]
    assert wrong == []


def test_answers_that_speak_are_read_in_their_last_sentence():
    reference = r"\frac{1}{2}x"
    assert math("First 2.\n\nSo the final answer is $\\frac{x}{2}$.", reference) == 1.0
    assert math("✅ Final Answer: **\\frac{1}{2}x**\n\n---", reference) == 1.0
    assert math("It is \\(\\frac{x}{2}\\).", reference) == 1.0
    assert math("The answer is $\\frac{x}{2}$ or $x$", reference) == 0.0
    assert math("x is what we want; $x$", reference) == 0.0


@pytest.mark.parametrize(("left", "right", "equal"), [
    ("10^{100000}", "10^{100000}+1", False), ("100!", "100!+1", False), ("20000!", "20000!", True),
    (r"\sqrt{100!}", r"\sqrt{100!+1}", False), ("e^{-1000}", "e^{-1001}", False),
    (TOWER[7:-1], TOWER[7:-1] + "!", False),
    (r"\sin(10^{100000})", r"\sin(10^{100000})+1", False), ("x^{1000}" * 50, "y^{1000}" * 50, False),
    ("(20000!)^{50}", "1", False), ("(" * 400 + "1" + ")" * 400, "1", False), ("1+" * 450 + "1", "451", False),
    ("x" + "!" * 500, "x", False), (r"\ln" * 200 + "x", "x", False), (r"\frac{" * 100, "x", False),
    (",".join(map(str, range(200))), "1", False), (r"\pm\sqrt{2}" * 9, "1", False)])
def test_huge_answers_are_judged_exactly_or_refused_in_bounded_time(left, right, equal):
    start = time.monotonic()
    answers = parse_whole(left), parse_whole(right)
    assert (None not in answers and same(*answers)) == equal
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(("prompt", "said", "cut"), [
    ("user\n<think>\n", "it may be \\boxed{5}, but", True),
    ("user\n<think>\n", "so</think>It is \\boxed{5}, as", False),
    ("user\n<think>\n\n</think>\n\n", "It is \\boxed{5}, as", False),
    ("Use <think>.\nassistant\n", "It is \\boxed{5}", False),
    ("", "<think>it may be \\boxed{5}, but", True), ("", "Well. <think>it may be \\boxed{5}", True),
    ("<think>", "a</think>call\nuser\n12\nassistant\n<think>\nso \\boxed{5}", True),  # a later turn of a conversation
    ("", "The `<think>` tag comes first. It is \\boxed{5}, as", False),
    ("", "It has <think> tags: \\boxed{5}, as", False),
    ("", "<think>'a' is \\boxed{5}, but", True), ("", "<think> tags are \\boxed{5}", True),
    ("<think>", "the '</think>' is \\boxed{5}", True), ("<think>", "'so it is'</think>It is \\boxed{5}", False),
    ("<think>", "it is `5`</think>`5`: \\boxed{5}", False), ("", "(\"<think>\") It is \\boxed{5}", False),
    ("[THINK]", "\\boxed{5}", True), ("", "[THINK]a[/THINK]\\boxed{5}", False), ("<seed:think>", "\\boxed{5}", True),
    ("<|start|>assistant", "<|channel|>analysis<|message|>\\boxed{5}", True),
    ("", "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>\\boxed{5}", False)])
def test_an_answer_within_thoughts_that_are_cut_off_is_none(prompt, said, cut):
    """verifiers#213: tags by DeepSeek-R1's, Qwen3's, Magistral's, Seed-OSS's and gpt-oss's templates."""
    assert ends_in_thoughts(prompt, said) == cut
    for answer, strict in itertools.product(("5", "#### 5", "\\frac{10}{2}", "x + 5"), (True, False)):
        assert math(said, answer, True, strict=strict) == 0
        assert not _without_a_process(said, answer, True, strict=strict)
    assert cut or math(said, "5") == 1.0


@pytest.mark.parametrize("reference", [r"\sum_{k=1}^{n} k^2", TOWER[7:-1], r"x \mapsto x^2"])
def test_a_reference_that_nobody_can_match_is_named(reference):
    with pytest.raises(ValueError, match=f"`{re.escape(reference)}` is not understood whole"):
        _boxed(reference)


def test_a_record_has_a_completion_that_must_pay_full():
    understood = 0
    for reference in (row["reference"] for row in REFERENCES):
        with contextlib.suppress(ValueError):
            completion = _boxed(reference)
            understood += 1
            assert math(completion, reference) == 1.0
    assert understood > 500
    for reference in ("1 hour 30 minutes", "B. 24", "SO_4^{2-}"):
        assert math(_boxed(reference), reference) == 1.0
    assert _boxed("work #### 7") == "#### 7"
    with pytest.raises(ValueError, match="it has no final answer"):
        _boxed("")


def test_a_recipe_may_ask_for_less():
    columns = {"completions": ["#### 13-7", "so it is 6"], "answers": ["#### 6"] * 2}
    assert Scorer("math").score(columns, range(2)).rewards == [0.0, 0.0]
    assert Scorer({"math": {"strict": False}}).score(columns, range(2)).rewards == [1.0, 1.0]


def test_plain_numbers_need_no_process():
    assert _without_a_process("#### 7", "#### 7") == 1.0
    assert _without_a_process("no answer", "#### 7") == 0.0
    assert _without_a_process(TOWER, "#### 7") == 0.0
    assert _without_a_process(TOWER, "#### 7", strict=False) is None
    assert _without_a_process(r"\boxed{(x+1)^2}", "x^2 + 2x + 1") is None
    scorer = Scorer("math")
    before = [worker.pid for worker in scorer.pool.children]
    assert scorer.score({"completions": ["#### 1"] * 3, "answers": ["#### 1"] * 3}, range(3)).rewards == [1.0] * 3
    assert [worker.pid for worker in scorer.pool.children] == before


@pytest.mark.parametrize("text", ["#### x" + " " * 900 + "y", "a" + " " * 100_000 + "b", "#### 24" + "\n" * 900 + "x",
                                  "so\n" + "\n" * 100_000 + "no", "#### " + "\u00a0 " * 450 + "y", "#### " + "- " * 490,
                                  "#### " + "( " * 490, "#### " + "1 " * 490, "#### " + "1," * 490])
def test_long_texts_are_read_in_the_rank(text):
    """Where reading takes more than linear time this does not end: nothing bounds a shortcut."""
    for answer in ("#### 24", "24"):
        for strict in (True, False):
            assert _without_a_process(text, answer, strict=strict) in (None, 0.0, 1.0)


def test_math_reads_many_backslashes_in_linear_time():
    start = time.monotonic()
    assert math("\\" * 400_000 + "x", "B. Monday") == 0.0
    assert time.monotonic() - start < 20


def test_latex_that_no_computer_finishes_is_bounded():
    scorer = Scorer({"math": {"timeout": 15.0, "retries": 0}})  # which loads what it compares by
    start = time.monotonic()
    scores = scorer.score({"completions": [TOWER, "\\boxed{7}", TOWER + "!", "\\boxed{x + x}"],
                           "answers": ["9^{9^{9^{9^{8}}}}", "7", "5", "2x"]}, range(4))
    assert time.monotonic() - start < 120
    assert [scores.rewards[row] for row in (1, 3)] == [1.0, 1.0]
    assert [scores.keep[row] for row in (1, 3)] == [True, True]
    assert scores.rewards[0] == scores.rewards[2] == 0.0


@pytest.mark.parametrize(("completion", "expected"), [
    ("<think>a\nb</think>\n<answer>c</answer>\n", 1.0),
    ("<think></think><answer></answer>", 1.0),
    ("<answer>c</answer><think>a</think>", 0.0),
    ("<think>a</think>", 0.0),
    ("so: <think>a</think><answer>c</answer>", 0.0),
    ("<think>a</think> then <answer>c</answer>", 0.0),
    ("<think>a</think><think>a</think><answer>c</answer>", 0.0),
])
def test_format_by_tags(completion, expected):
    assert format(completion) == expected


def test_format_by_other_tags_and_by_pattern():
    assert format("<a.b>x</a.b>", tags=["a.b"]) == 1.0
    assert format("<axb>x</axb>", tags=["a.b"]) == 0.0
    assert format("one\ntwo", pattern=r"one.two") == 1.0
    assert format("one\ntwo!", pattern=r"one.two") == 0.0
    with pytest.raises(InvalidInput, match="not both"):
        format("x", pattern="x", tags=["x"])


def test_format_where_the_template_opens_the_first_tag():
    assert format("a</think>\n<answer>c</answer>", opened=True) == 1.0
    assert format("a</think>\n<answer>c</answer>") == format("<think>a</think><answer>c</answer>", opened=True) == 0.0
    for opened in (False, True):
        assert format(_formed("7", "<think>\n" * opened, opened=opened), opened=opened) == 1.0
    assert _formed("7", tags=["answer"]) == "<answer>7</answer>"
    assert _formed("7", pattern="x") is None
    with pytest.raises(ValueError, match=r"begins each answer with <think>\nreward: {format: {opened: true}}"):
        _formed("7", "<think>\n")
    with pytest.raises(ValueError, match=r"does not begin each answer with <think>"):
        _formed("7", "", opened=True)


def test_a_pattern_that_never_ends_is_bounded():
    scorer = Scorer({"format": {"pattern": "(a+)+$", "timeout": 2.0, "retries": 0}})
    scores = scorer.score({"completions": ["a" * 50 + "b", "aaa"]}, range(2))
    assert (scores.keep, scores.rewards, scores.timeouts) == ([False, True], [0.0, 1.0], 1)


@pytest.mark.parametrize(("tokens", "expected"), [
    (0, 0.0), (96, 0.0), (97, -1 / 32), (112, -0.5), (128, -1.0), (500, -1.0)])
def test_length_falls_softly_to_its_cap(tokens, expected):
    """DAPO eq. 13 with L_max 128 and L_cache 32."""
    assert length([1] * tokens, cap=128, margin=32) == pytest.approx(expected, abs=1e-6)


def test_length_with_a_hard_cap_and_with_a_target():
    assert [length([1] * count, cap=4) for count in (4, 5)] == [0.0, -1.0]
    assert [length([1] * count, target=10) for count in (10, 5, 15, 30)] == [0.0, -0.5, -0.5, -1.0]
    for wrong in ({}, {"cap": 1, "target": 1}):
        with pytest.raises(InvalidInput, match="needs a `cap` or a `target`"):
            length([1], **wrong)
