"""Text that is not YAML: the mistake, its place and a correction that works, for each usual mistake."""

import re

import pytest

from distflow.config.dag import Dag
from distflow.config.yaml_source import check, parse
from distflow.errors import InvalidInput

CASES = {
    "tab": ("name: grpo\nroles:\n\tactor: {trained: true}\n", "3:1", "a tab stands here"),
    "tab after spaces": ("roles:\n  actor:\n  \tmodel: x\n", "3:3", "a tab stands here"),
    "too deep": ("name: grpo\nsteps: 5\n  seed: 1\n", "3:3", "this line is indented deeper than"),
    "too deep below a mapping": ("nodes:\n  a: {x: 1}\n    b: {x: 2}\n  c: 3\n", "3:5", "indented deeper"),
    "less deep": ("data:\n  train: x\n batch: 4\n", "3:2", "this line is indented less than"),
    "open quote": ('name: "grpo\nroles: {a: "x"}\n', "1:7", 'the quote " is opened here and not closed'),
    "open quote in braces": ("a: {b: 'generate, c: actor}\nd: {e: 1}\n", "1:8", "the quote ' is opened here"),
    "open brace": ("nodes:\n  a: {b: 1, c: X\n  d: {e: 1}\n", "2:6", "`{` is opened here and never closed"),
    "open brace of two lines": ("nodes:\n  a: {b: 1,\n      c: {d: 1}\n  e: {f: 1}\n", "2:6", "`{` is opened here"),
    "open bracket": ("nodes:\n  a: {b: [c, d\n  e: 1\n", "2:10", "`[` is opened here and never closed"),
    "wrong bracket": ("a: {b: [c}\nd: 1\n", "1:10", "`[` is opened in column 8, and closed by another sign here"),
    "no comma": ("a: {role: actor type: X}\n", "1:17", "a comma is missing before this"),
    "no comma after a list": ("a: {b: [c] type: X}\n", "1:12", "a comma is missing before this"),
    "second colon": ("name: grpo: mine\nsteps: 5\n", "1:11", "a second colon stands in this value"),
    "quotes in quotes": ('a: {b: "Say "yes" or no"}\nc: 1\n', "1:13", "a quote stands within these quotes"),
    "tab below a value": ("a: 1\n\tb: 2\n", "2:1", "a tab stands here"),
    "no colon": ("name: grpo\nsteps 5\nseed: 1\n", "2:6", "this line has no colon"),
    "no space": ("name: grpo\nsteps:5\nseed: 1\n", "2:7", "a space is missing after the colon"),
    "at": ("name: @grpo\n", "1:7", "a value cannot begin with `@`"),
    "star": ("reward: *best\n", "1:9", "a value cannot begin with `*`"),
    "backslash": ('path: "C:\\data"\n', "1:10", "a backslash in double quotes begins an escape"),
    "dash": ("imports: - a\nsteps: 1\n", "1:10", "a list with `-` cannot begin on the line of its key"),
    "too many braces": ("a: {b: 1}}\nc: 1\n", "1:10", "`}` closes nothing"),
    "two commas": ("a: {b: 1,, c: 1}\n", "1:10", "nothing stands before this comma"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_place_the_mistake_and_a_correction_that_works(name):
    text, place, what = CASES[name]
    with pytest.raises(InvalidInput) as caught:
        parse(text, "my.yaml")
    said = str(caught.value)
    assert said.startswith(f"my.yaml:{place}: ")
    assert what in said
    assert "<" not in said, "a token of PyYAML's scanner"
    line, column = map(int, place.split(":"))
    lines = said.splitlines()
    under = next(index for index, each in enumerate(lines) if each.strip() and set(each.strip()) == {"^"})
    assert lines[under - 1] == f"    {line} |  " + text.splitlines()[line - 1].replace("\t", "→")
    assert lines[under].index("^") == len(f"    {line} |  ") + column - 1
    corrected = text.splitlines()
    for each in lines[lines.index("Instead:") + 1 :]:
        number, fixed = re.fullmatch(r"    (\d+) \|  (.*)", each).groups()
        corrected[int(number) - 1] = fixed
    assert parse("\n".join(corrected), "my.yaml").data


def test_what_no_rule_knows_is_said_in_the_parsers_words():
    with pytest.raises(InvalidInput, match=r"(?s)my\.yaml:2:1: YAML cannot read this.*Its parser says: .*document"):
        parse("--- a\n--- b\n", "my.yaml")


def test_a_colon_without_a_space_in_braces_is_named():
    _, mistakes = check(Dag, parse("name: a\nroles: {actor: {trained:true}}\nnodes: {}\n", "my.yaml"))
    assert "my.yaml:2: a space is missing after the colon" in str(mistakes[0])
    assert mistakes[0].hint == "Instead:  trained: true"
