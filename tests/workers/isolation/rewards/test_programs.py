"""Programs and their tests, in the real sandbox."""

import json
import re
import time

import pytest

from distflow.telemetry.metrics import Metrics, recording
from workers.isolation.rewards.programs import code, program_of
from workers.isolation.sandbox import runner

ADD = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
TESTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"
DOUBLE = "```\nfor line in open(0):\n    print(2 * int(line))\n```"
CASES = json.dumps([{"input": "1\n2\n", "output": "2\n4"}, {"input": "5", "output": "10  \n\n"}])


@pytest.mark.parametrize(("completion", "program"), [
    ("```python\na\n```\ntext\n```py\nb\n```", "b\n"),
    ("```python\nnever closed", "never closed"),
    ("print(1)", "print(1)"),
    ("```python\na\n```\nIt prints:\n```\n7\n```\n", "a\n"),
    ("```python\na\n```\nIt prints:\n```text\n7\n```\nDone.", "a\n"),
    ("```python\na\n```\nRun it:\n```bash\npython main.py\n```\nThat is all.", "a\n"),
    ("Input:\n```\n3 4\n```\nSo:\n```Python\na\n```\n", "a\n"),
    ("```python3\na\n```", "a\n"),
    ("```Python 3\na\n```", "a\n"),
    ("```{.python .numberLines}\na\n```", "a\n"),
    ("``` py title='x'\r\na\r\n```\r\n", "a\n"),
    ("~~~python\na\n```\n~~~", "a\n```\n"),
    ("````python\na = '```'\n````\n", "a = '```'\n"),
    ("1. First\n   ```python\n   if a:\n       b\n   ```\n", "if a:\n    b\n"),
    ("    ```python\n    a\n    ```", "a\n"),
    ("So: ```python\na\n```", "a\n"),
    ("```cpp\nint a;\n```\n```\nb\n```", "b\n"),
    ("```pythonic\na\n```\n```\nb\n```", "b\n"),
    ("```code\na\n```", "a\n"),
    ("<think>\n```python\ndraft\n```\n</think>\n```python\na\n```", "a\n"),
    ("<think>\n```python\ndraft\n```\n</think>\n```\na\n```", "a\n"),
    ("<think>\n```python\ndraft\n```\nLet me check ag", ""),
    ("<think>It is\n```python\na\n```\n</think>\nSee above.", "a\n"),
    ("<think>it adds</think>print(1)", "print(1)"),
    ("<answer>```python\na\n```</answer>", "a\n"),
    ("<think>it adds</think>\n<answer>\nprint(1)\n</answer>\n", "\nprint(1)\n"),
    ("print('<answer>')\nprint('</answer>')", "print('<answer>')\nprint('</answer>')"),
    ("```python\n```\nprint(1)", "```python\n```\nprint(1)"),
    ("a = 1\n```", "a = 1\n"), ("a = 1\n```\nThis sets a.", "a = 1\n"), ("a = 1\n```\nOutput:\n```\n3\n```", "a = 1\n"),
    ("import a\n```\nTest:\n```text\n3\n```", "import a\n"), ("Solution\n```\na\n```", "a\n"),
    ("```python\nprint(1)```", "print(1)"), ("```python\nprint(1)```\nOutput:\n```\n1\n```", "print(1)"),
    ("```python print(1)```", "print(1)\n"), ("```python\ns = 'a```'\nt = s\n```", "s = 'a```'\nt = s\n"),
    ("[PYTHON]\na\n[/PYTHON]", "\na\n"), ("[BEGIN]\na\n[DONE]", "\na\n"), ("<code>\na\n</code>", "\na\n"),
])
def test_the_last_block_in_python_is_the_program(completion, program):
    assert program_of(completion) == program


RIGHT, WRONG = "def add(a, b):\n    return a + b\n", "def add(a, b):\n    return a - b\n"


@pytest.mark.parametrize("example", [
    "print(add(1, 2))", "assert add(1, 2) == 3", "# 3", ">>> add(1, 2)\n3", "for i in [1]:\n    add(i, i)",
    "from solution import add\nprint(add(1, 2))", "if __name__ == '__main__':\n    print(add(1, 2))"])
def test_an_example_of_using_the_program_is_not_the_program(example):
    assert program_of(f"```python\n{RIGHT}```\nSo:\n```python\n{example}\n```") == RIGHT


@pytest.mark.parametrize("better", [
    RIGHT, "add = lambda a, b: a + b\n", "print(sum(map(int, input().split())))\n", "def add(:\n",
    "from operator import add\nprint(add(1, 2))\n", "add = 0\nadd += 1\nprint(add)\n"])
def test_a_program_that_stands_alone_replaces_an_earlier_one(better):
    assert program_of(f"```python\n{WRONG}```\nNo:\n```python\n{better}```") == better


def test_programs_import_packages_and_a_missing_one_is_told(capsys):
    total = "import numpy\nprint(int(numpy.sum([int(line) * 2 for line in open(0)])))"
    tests = json.dumps([{"input": "1\n2\n", "output": "6"}])
    metrics = Metrics()
    with recording(metrics):
        assert code(total, tests) == 1.0
        assert code(total.replace("import numpy", "import numpy_of_another_place as numpy"), tests) == 0.0
        assert code("import time\nprint(6, flush=True)\ntime.sleep(60)", tests, seconds=1.0) == 0.0
    assert [*map(list, metrics.means())] == [["code/missing_module", 1.0, 3.0], ["code/timed_out", 1.0, 3.0]]
    assert "imports `numpy_of_another_place`, which this environment does not have" in capsys.readouterr().out


def test_packages_cannot_be_changed():
    outcome = runner.run_python("import numpy\nopen(numpy.__file__, 'a')")
    assert not outcome.ok
    assert re.search("Permission denied|Read-only file system", outcome.stderr)


@pytest.mark.parametrize(("completion", "expected"), [
    (ADD, 1.0),
    (ADD.replace("a + b", "a - b"), 0.0),
    ("no program at all", 0.0),
    ("```python\ndef add(a, b): return a + b\nraise SystemExit(0)\n```", 1.0),
    ("```python\ndef add(a, b): return a + b\nexit()\n```", 1.0),
    ("```python\ndef add(a, b): return a + b\nsys.exit()\n```", 0.0),
    ("```python\nimport os\nos._exit(0)\n```", 0.0),
    ("```python\nprint('0' * 32)\nraise SystemExit(0)\n```", 0.0),
    ("```python\ndef add(a, b):\n    while True: pass\n```", 0.0),
    ("```python\nadd = lambda a, b: open('/etc/passwd') and a + b\n```", 0.0),
    ("```python\nimport socket\nsocket.socket()\nadd = lambda a, b: a + b\n```", 0.0),
])
def test_python_tests(completion, expected):
    assert code(completion, TESTS, seconds=2.0) == expected


def test_inputs_and_outputs():
    assert code(DOUBLE, CASES, seconds=10.0) == 1.0
    half = "```\nprint(10)\n```"
    assert (code(half, CASES), code(half, CASES, partial=True)) == (0.0, 0.5)


@pytest.mark.parametrize(("share", "printed"), [
    (1.0, {"2.5": ["2.500", "2.5000001", "+2.5", "25e-1"], "0.3 yes": ["0.30000000000000004 yes"],
           "1.0\n-0.5": ["1\n-.5"], "1000000007.0": ["1000000007"], "123456789.12": ["123456789.120000001"]}),
    (0.0, {"2.5": ["2.51", "2.5 0", "2,5", "nan"], "0.3 yes": ["0.3 no", "0.3"], "3": ["3.0"], "7 8": ["7  8"],
           "1000000007.0": ["1000000008"], "123456789.12": ["123456700.00"], "0.0": ["1e-9"], "0.0000001": ["0"]})])
def test_decimals_are_compared_as_numbers(share, printed):
    """Judges of contests allow for rounding; whole numbers are exact."""
    cases = [{"input": text, "output": wanted} for wanted, texts in printed.items() for text in texts]
    assert code("```python\nprint(open(0).read())\n```", json.dumps(cases), partial=True) == share


TEXTS = {"fn_name": "f", "inputs": ["[1, 2]\n3", "[]\n4"], "outputs": ["[3, 6]", "[]"]}  # as in LiveCodeBench
LISTS = {"fn_name": "f", "inputs": [[[1, 2], 3], [[4], 4]], "outputs": [[3, 6], [16]]}  # as in APPS
WRAPPED = {"fn_name": "f", "inputs": [[[1, 2], 3], [[], 4]], "outputs": [[[3, 6]], [[]]]}  # each in a list of its own
CASE = [{"input": "[1, 2]\n3", "output": "[3, 6]", "testtype": "functional", "metadata": {"func_name": "f"}}]
MULTIPLES = "return [value * by for value in values]"
METHOD = f"class Solution:\n    def f(self, values: List[int], by: int) -> List[int]:\n        {MULTIPLES}\n"


@pytest.mark.parametrize("tests", [TEXTS, LISTS, WRAPPED, CASE])
@pytest.mark.parametrize(("body", "right"), [
    (MULTIPLES, 1.0), ("return tuple(value * by for value in values)", 1.0),
    ("import numpy\n    return numpy.array(values, int) * by", 1.0),
    (f"print(values)\n    {MULTIPLES}\nexit()", 1.0),
    ("return [value + by for value in values]", 0.0), ("print([value * by for value in values])", 0.0),
    ("return {value * by for value in values}", 0.0), ("return str([value * by for value in values])", 0.0)])
def test_a_function_is_called_by_its_name(tests, body, right):
    assert code(f"```python\ndef f(values, by):\n    {body}\n```", json.dumps(tests)) == right


@pytest.mark.parametrize(("program", "result", "right"), [
    (METHOD + "if __name__ == '__main__':\n    print(Solution().f([int(input())], 2))", "[3, 6]", 1.0),
    (METHOD.replace("f(self", "g(self"), "[3, 6]", 0.0),
    ("class Solution: pass\ndef f(values, by): return heappop(values) + pow(2, 5, by)", "3", 1.0),
    ("def f(values, by): return 1 / by", "0.3333333", 1.0), ("def f(values, by): return 1 / by", "0.33333", 0.0),
    ("def f(values, by): return 3.0", "3", 1.0), ("def f(values, by): return [3]", "3", 0.0),
    ("def f(values, by): return 3", "[3]", 0.0), ("def f(values, by): return '3'", "3", 0.0),
    ("def f(values, by): return 1", "true", 0.0), ("def f(values, by): return [False]", "[0]", 0.0),
    ("def f(values, by): return by == 3", "true", 1.0),
    ("def f(values, by): pass", "0", 0.0), ("def f(values, by): return float('nan')", "3", 0.0),
    ("def f(values, by): return 0 if by > 20000 else f(values, by + 1)", "0", 1.0),
    ("class Equal:\n    def __eq__(self, other): return True\ndef f(values, by): return Equal()", "3", 0.0),
    ("import json\njson.dumps = lambda *_, **__: '{'\ndef f(values, by): return 3", "3", 0.0)])
def test_what_a_function_returns_is_compared(program, result, right):
    tests = [{"fn_name": "f", "input": "[1, 2]\n3", "output": result}]
    assert code(f"```python\n{program}\n```", json.dumps(tests)) == right


@pytest.mark.parametrize(("body", "right", "share"), [
    ("return [by]", 1.0, 1.0), ("return by", 1.0, 1.0), ("return by if by == 3 else [by]", 0.0, 0.5),
    ("return [by] if by == 3 else by", 0.0, 0.5), ("return [[by]]", 0.0, 0.0), ("return by, by", 0.0, 0.0),
    ("raise ValueError", 0.0, 0.0)])
def test_lists_of_one_result_mean_the_same_in_all_tests(body, right, share):
    """The harness of APPS takes a list's item for the list, in each test by itself."""
    tests = json.dumps({"fn_name": "f", "inputs": [[3], [4]], "outputs": [[3], [4]]})
    assert (code(f"def f(by): {body}", tests), code(f"def f(by): {body}", tests, partial=True)) == (right, share)


def test_a_program_that_fails_does_not_return_none():
    tests = json.dumps([{"fn_name": "f", "input": "3", "output": "null"}])
    assert (code("def f(by): pass", tests), code("def f(by): raise ValueError", tests)) == (1.0, 0.0)


def test_tests_together_end_before_the_reward_does():
    """Or a program that never ends would be left out instead of earning 0."""
    tests = json.dumps([{"input": "", "output": "1"}, *[{"input": "x", "output": "2"}] * 60])
    began = time.monotonic()
    assert code("if not open(0).read(): print(1)\nelse:\n    while True: pass", tests, seconds=0.3,
                partial=True) == 1 / 61
    assert time.monotonic() - began < 15


def test_marks_that_are_opened_again_and_again_are_read_in_linear_time():
    began = time.monotonic()
    assert program_of("<answer>\n" * 50_000 + "x").endswith("x")
    assert time.monotonic() - began < 20


def test_keys_that_json_has_made_texts_are_numbers_again():
    tests = {"fn_name": "f", "inputs": [[{"1": "x"}]], "outputs": [{"x": 1}]}
    assert code("def f(values): return {values[key]: key for key in (1,)}", json.dumps(tests)) == 1.0


@pytest.mark.parametrize(("program", "right"), [(RIGHT, 1.0), (WRONG, 0.0), ("def test_add(): pass\n" + WRONG, 0.0)])
def test_functions_for_pytest_are_called(program, right):
    """As KodCode has its tests."""
    tests = "from solution import add\n\ndef test_add():\n    assert add(0, 0) == 0\n\ndef test_more():\n    " \
            "assert add(1, 2) == 3"
    assert code(f"```python\n{program}```", tests) == right


def test_functions_for_pytest_are_called_beside_other_calls():
    tests = "import sys\nsys.path.append('.')\n\ndef test_add():\n    assert add(1, 2) == 3"
    assert code(f"```python\n{WRONG}```", tests) == 0.0


def test_a_program_may_print_as_much_as_is_wanted():
    numbers = [*range(50_000)]
    tests = json.dumps([{"input": "", "output": "\n".join(map(str, numbers))}])
    assert code("print(*range(50_000), sep='\\n')", tests) == 1.0


@pytest.mark.parametrize("tests", [
    "", " \n", "[]", "{}", '[{"input": "1"}]', "[1]", "3", "null",
    '[{"input": "1", "output": "1", "testtype": "functional"}]',
    '[{"input": "1", "output": "1", "type": "function_call"}]',
    '[{"input": "1", "output": "1"}, {"input": "1", "output": "1", "fn_name": "add"}]',
    '[{"input": "one two", "output": "1", "fn_name": "add"}]', "eJxrYJmqz8gAAAtE", "gASVEQAAAAAAAABdlC4=",
    "def check(candidate):\n    assert candidate(1, 2) == 3", "class Test:\n    def test(self): assert add(1, 2) == 3",
    "def test(): pass\nclass TestAdd:\n    def test(self): assert add(1, 2) == 3",
    "X = int('3')\nasync def test_add(): assert add(1, 2) == X",
    "def test_add(sums):\n    assert add(1, 2) == 3", "@mark\ndef test_add():\n    assert add(1, 2) == 3"])
def test_tests_of_another_form_are_no_reason_for_a_zero(tests):
    with pytest.raises(ValueError, match="tests in JSON must be a list|there are no tests|so that whatever runs would "
                                         "pass|neither JSON nor Python|is not JSON in each line|pytest alone"):
        code(ADD, tests)


@pytest.mark.parametrize("known", [False, True])
def test_a_sandbox_that_does_not_come_up_in_time_costs_a_sample_and_not_the_run(monkeypatch, known):
    kind = runner.isolation()
    runner.isolation.cache_clear()
    if known:
        monkeypatch.setattr(runner, "isolation", lambda *_: kind)
    monkeypatch.setattr(runner, "_START_TIMEOUT", 0.0)
    with pytest.raises(OSError, match="a sandbox has not come up within 0 s"):
        code("print(1)", "assert True")


def test_tests_may_be_a_list_of_asserts_or_lists_of_inputs_and_outputs():
    asserts = json.dumps(TESTS.splitlines())
    assert code(ADD, asserts) == 1.0
    half = json.dumps([*TESTS.splitlines()[:1], "assert add(1, 1) == 3"])
    assert (code(ADD, half), code(ADD, half, partial=True)) == (0.0, 0.5)
    streams = json.dumps({"inputs": ["1\n", ["2", ""]], "outputs": ["2\n", ["4"]]})
    assert code("```\nprint(2 * int(input()))\n```", streams) == 1.0
