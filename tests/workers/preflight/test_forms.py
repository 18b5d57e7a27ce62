"""Completions that are made of a pattern, and patterns that say nothing."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from preflight_tasks import SUMS, Task, proved

from distflow.errors import InvalidInput
from workers.preflight.forms import completions_of, is_open


def test_completions_of_a_long_repetition_are_made_within_a_second():
    pattern, began = r"(?:\S+\s+){50,}\S+", time.perf_counter()
    assert not is_open(pattern)
    made = [*completions_of(pattern, ["7", "word"])]
    assert time.perf_counter() - began < 1
    assert made
    assert all(re.fullmatch(pattern, text) for text in made)


def test_a_pattern_that_is_longer_than_what_is_made_gets_no_note(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert proved(Task(SUMS, {"format": {"pattern": "<think>.{400,}</think>.*"}}), tmp_path, "long").doubts == []
    assert proved(Task(SUMS, {"format": {"pattern": "((a{100}){100}){100}"}}), tmp_path, "longer").doubts == []


def test_without_pythons_parser_no_pattern_is_understood():
    script = ("import re, sys\nfor name in ('re._parser', 're._compiler'): sys.modules[name] = None\n"
              "from workers.preflight.forms import is_open\nsys.exit(not is_open('a+'))")
    done = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[3], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr


def test_a_pattern_nested_too_deeply_to_be_read_is_no_refusal(tmp_path, monkeypatch):
    """The deepest one that the check of settings compiles is too deep for the proof, whose stack is higher."""
    monkeypatch.chdir(tmp_path)
    for depth in range(500, 400, -1):
        pattern = r"(?:.|\n)*" + "(" * depth + r"\\boxed\{[^{}]*\}" + ")" * depth + ".?"
        task = Task(SUMS, {"math": 1.0, "format": {"weight": 0.1, "pattern": pattern}})
        try:
            assert proved(task, tmp_path, "deep").doubts == []
            return
        except InvalidInput as error:
            said = str(error)
        if "is not a regular expression: maximum recursion depth" not in said:
            break
    pytest.fail(said)


def test_mistakes_of_rewards_are_told_though_a_match_before_them_does_not_end(tmp_path, monkeypatch):
    """The expression backtracks for longer than there is time, on an answer of many words that it does not match."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("workers.preflight.rewards._MATCH_LIMIT", 0.1)
    records = [{**each, "answer": "so many words that it never ends " * 3 + each["answer"] + "!"} for each in SUMS]
    pattern = {"format": {"weight": 0.1, "pattern": r"(\w+\s?)*\."}}
    task = Task(records, {**pattern, "stuck:paid": 1.0},
                "@reward\ndef paid(completion: str, answer: str):\n    return completion.score\n")
    with pytest.raises(InvalidInput, match="raised AttributeError: 'str' object has no attribute 'score'"):
        proved(task, tmp_path, "stuck")
    doubts = proved(Task(records, pattern), tmp_path, "alone").doubts
    assert ["as a `pattern` takes longer than 0.1 s to match an answer" in str(each) for each in doubts] == [True]
