"""The environments that come with distflow."""

from __future__ import annotations

import asyncio
import json

import pytest

from distflow.contracts.decorators import Turn
from workers.isolation.environments.calculator import Calculator
from workers.isolation.environments.lookup import FactFile, Lookup
from workers.isolation.environments.programs import PythonSandbox


@pytest.mark.parametrize(("text", "shown"), [
    ("3 + 4 =", "7"), ("3+4", "7"), ("12 - 20 =", "-8"), ("-3 * 4 =", "-12"), ("12 / 4 =", "3"),
    ("1 + 1 = 2, 2 + 5 =", "7"), ("12 / 5 =", "not a whole number"), ("12 / 0", "not a whole number")])
def test_the_calculator_answers_the_last_operation(text, shown):
    assert Calculator("#### 7").step(text) == Turn(shown)


@pytest.mark.parametrize(("text", "reward"), [
    ("#### 7", 1.0), ("so #### 7.", 1.0), ("#### 8", 0.0), ("", 0.0), ("seven", 0.0), ("3 + 4 = #### 7", 1.0),
    ("<think>#### 7", 0.0), ("<think>#### 7</think>#### 8", 0.0), ("<think>#### 8</think>#### 7", 1.0),
    ("9" * 200 + " * 3 =", 0.0), ("3 ** 4", 0.0)])
def test_the_calculators_last_turn_is_judged(text, reward):
    assert Calculator("3 + 4 = 7 #### 7").step(text) == Turn("", True, reward)


def test_the_lookup():
    facts = json.dumps({"Capital of Peru": "Lima", "Capital of Chad": "N'Djamena"})
    lookup = Lookup(facts, "It is #### Lima")
    assert lookup.step("I ask\nlookup: capital of peru ") == Turn("Lima")
    assert lookup.step("lookup: capital of Mars") == Turn("nothing is known of 'capital of Mars'")
    assert lookup.step("It is lima.") == Turn("", True, 1.0)
    assert lookup.step("It is N'Djamena.") == Turn("", True, 0.0)
    assert lookup.step("<think>Lima or N'Djamena?</think>N'Djamena") == Turn("", True, 0.0)
    assert lookup.step("<think>Lima or") == Turn("", True, 0.0)


@pytest.mark.parametrize("facts", ["[]", '{"a": 1}', "{"])
def test_facts_that_are_none_are_refused(facts, tmp_path):
    with pytest.raises(ValueError, match=r"JSON object of texts|Expecting"):
        Lookup(facts, "a")
    (tmp_path / "facts.json").write_text(facts)
    with pytest.raises(ValueError, match=r"JSON object of texts|Expecting"):
        FactFile("a", file=str(tmp_path / "facts.json"))


def test_facts_from_a_file(tmp_path):
    (tmp_path / "facts.json").write_text('{"a": "b"}')
    assert FactFile("b", file=str(tmp_path / "facts.json")).step("lookup: A") == Turn("b")


def test_programs_run_in_the_sandbox():
    sandbox = PythonSandbox("#### 42", seconds=20.0, output=50)

    def step(text: str) -> Turn:
        return asyncio.run(sandbox.step(text))

    assert step("<think>#### 42") == step("<think>#### 42</think>#### 41") == Turn("", True, 0.0)
    assert step("<think>#### 41</think>#### 42") == Turn("", True, 1.0)
    assert step("<think>I try\n```python\nprint(7)\n```") == Turn("7\n")
    assert step("I try\n```python\nprint(6 * 7)\n```\n") == Turn("42\n")
    for program in ("```Python\nprint(7)\n```", "~~~python3\nprint(7)\n~~~", "  ```py title=x\n  print(7)\n  ```",
                    "I try: ```python\nprint(7)\n```", "So:```\nprint(7)\n```\nand then", "```py\nprint(7)```"):
        assert step(program) == Turn("7\n")
    assert step("```py\nprint('```')\n```\n```bash\nls\n```") == Turn("```\n")
    assert step("<think>I try\n```python\nprint(7)\n```\n</think>I know nothing") == Turn("", True, 0.0)  # verl#6424
    assert "ZeroDivisionError" in asyncio.run(PythonSandbox("1").step("```\n1 / 0\n```")).observation
    assert step("```python\nprint('x' * 1000)\n```").observation == "x" * 50 + "…"
    assert "Error" in asyncio.run(PythonSandbox("1").step(
        "```python\nimport socket\nsocket.create_connection(('127.0.0.1', 22))\n```")).observation
    assert step("#### 42") == Turn("", True, 1.0)
    assert step("I give up") == Turn("", True, 0.0)
