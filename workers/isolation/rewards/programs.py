"""Reward `code`: runs a program against its tests in a sandbox; see `workers.isolation.sandbox.runner`."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import math
import re
import secrets
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple

from markdown_it import MarkdownIt
from pydantic import Field, PositiveFloat

from distflow.contracts.decorators import reward
from distflow.telemetry.metrics import metric
from workers.isolation.rewards import behind_thoughts
from workers.isolation.sandbox.runner import Outcome, run_python

_MARKDOWN = MarkdownIt("commonmark").disable(["html_block", "code", "inline"])
"""Finds blocks alone: tags of models, as `<think>`, begin no HTML, and an indented fence is one, too."""
_PYTHON = re.compile(r"\{?\s*\.?(?:python|py)[0-9.]*(?![\w-]).*", re.IGNORECASE | re.DOTALL)
_NO_LANGUAGE = re.compile(r"(?:\{\s*\})?")
_INLINE = re.compile(r"^(.*[^\s`])[ \t]*(```(?:python|py)?[0-9]?[ \t]*)$", re.MULTILINE | re.IGNORECASE)
_ONE_LINE = re.compile(r"^[ \t]*```(?:python|py)[0-9]?[ \t]+(.*\S)```[ \t]*$", re.MULTILINE | re.IGNORECASE)
_GLUED = re.compile(r"(?<=[^\s`])```[ \t]*(?:\n|\Z)")
_CLOSED = re.compile(r"^[ \t]*```[ \t]*$", re.MULTILINE)
_AROUND = [(re.compile(rf"^[ \t]*{re.escape(begin)}", re.MULTILINE), end) for begin, end in (
    ("<answer>", "</answer>"), ("<code>", "</code>"), ("<python>", "</python>"), ("[PYTHON]", "[/PYTHON]"),
    ("[CODE]", "[/CODE]"), ("[BEGIN]", "[DONE]"))]
"""Marks that begin a line before an answer, and those that end the completion behind it."""
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")
_DECIMAL = re.compile(rf"(?=[^.]*\.){_NUMBER.pattern}")
_MISSING = re.compile(r"^ModuleNotFoundError: No module named '([\w.]{1,100})'", re.MULTILINE)
_STATEMENTS = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Assign | ast.Call
_MODULES = ("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics",
            "itertools", "functools", "operator", "io", "sys", "json", "typing")
"""Modules whose names a function has without importing them, as on the sites that its task is from."""
_HARNESS = """\
import sys
_program, _tests, _token = {program!r}, {tests!r}, sys.stdin.readline()
_names = vars(sys.modules.setdefault("solution", type(sys)("solution")))  # from which some tests import
_names["__name__"] = "__main__"
try:
    exec(compile(_program, "program.py", "exec"), _names)
except SystemExit:
    pass
exec(compile(_tests, "tests.py", "exec"), _names)
sys.__stdout__.write("\\n" + _token)
"""  # the token comes by standard input, so that a program that exits early or prints much does not pass
_CALLER = """\
import builtins, json, sys
_token = sys.stdin.readline().strip()
_arguments = eval(sys.stdin.readline(), {{"inf": float("inf"), "nan": float("nan")}})
_module = sys.modules["program"] = type(sys)("program")
_names = vars(_module)
for _line in {imports!r}:
    exec(_line, _names)
for _name in {{*vars(builtins)}} - {{"__name__", "__doc__", "__loader__", "__package__", "__spec__"}}:
    _names.pop(_name, None)
sys.setrecursionlimit(50_000)
try:
    exec(compile({program!r}, "program.py", "exec"), _names)
except SystemExit:
    pass
_owner = _names.get("Solution")
_called = getattr(_owner(), {name!r}) if hasattr(_owner, {name!r}) else _names[{name!r}]
_result = json.dumps(_called(*_arguments), default=lambda value: value.tolist())
sys.__stdout__.write(f"\\n{{_token}}{{_result}}")
"""  # the result is compared by the caller, so that the program never has what is wanted
_RUNS = 9
"""All tests of a program have as many times the seconds of one, so that the reward's own time is not over first."""
_WIDEST = 256
"""Kibibytes that a program may print, unless more is wanted."""


class _Streams(NamedTuple):
    """Test of a program by its standard input and output."""

    input: str
    output: str


class _Call(NamedTuple):
    """Test of a function by its name. Any of `results` may be meant."""

    name: str
    arguments: list[Any]
    results: list[Any]


def _solution(answer: str = "") -> str | None:
    """Return a record's answer if it is a program, which must pass the record's tests."""
    return answer if any(isinstance(part, ast.FunctionDef | ast.ClassDef | ast.Import | ast.Call)
                         for part in _parts(program_of(answer))) else None


def _parts(program: str) -> list[ast.AST]:
    """Return the parts of a program's syntax tree; none if it does not compile."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd escapes
        try:
            return [*ast.walk(ast.parse(program))]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return []


@reward(timeout=120.0, reference=_solution)
def code(completion: str, tests: str, cut_thoughts: bool = False, *, seconds: PositiveFloat = 10.0,
         memory_mib: Annotated[int, Field(ge=32)] = 512,  # below it no interpreter starts
         partial: bool = False, network: Literal["deny", "allow"] = "deny",
         files: Literal["deny", "allow"] = "deny") -> float:
    """Return 1.0 if the program of the completion passes all its tests, else 0.0; with `partial`, the share it passes.

    The program is the completion's last Python block that is no example of using an earlier one (see `program_of`). It
    runs with the packages of this environment. The metric `code/missing_module` is the share of programs that import
    one that is not there, `code/timed_out` that of programs that a machine with other work may have ended too soon.

    The data's column `tests` holds either Python that raises on failure, such as `assert add(1, 2) == 3`, or a list of
    such texts, which run after the program with its names, each text as one test (functions for pytest that take no
    arguments are called); or JSON, a list of {"input": text, "output": text} or {"inputs": texts, "outputs": texts} for
    the standard streams, where space at the ends of lines and of the text does not count, a wanted number with a
    decimal point may be written otherwise, and one with a fraction may differ by 1e-6, or if it is below 1 by a
    millionth of it. With `fn_name`, as in APPS and LiveCodeBench, that function, or method of the class `Solution`, is
    called with JSON, an argument in each line or a list of all. A program that does not compile, raises or exceeds a
    limit fails, and so do thoughts that are cut off.

    A cheating program can find Python tests in its own process; it never sees the outputs of JSON tests.

    Args:
        seconds: limit of each run; all tests of a program have nine times as long.
        memory_mib: address space of each process.
        network: `allow` gives access to the network.
        files: `allow` runs even if the kernel cannot keep programs from reading and changing this user's files.

    Raises:
        EngineError: programs cannot be isolated here. Ends the run.
        ValueError: there are no tests, none that checks, or JSON of another form. The sample is left out.
        OSError: a sandbox could not be created or ended. The sample is retried, then left out.
    """
    run = functools.partial(run_python, seconds=seconds, memory_mib=memory_mib, network=network, files=files)
    return _graded("" if cut_thoughts else program_of(completion), tests, run, partial, _RUNS * seconds)


def _graded(program: str, tests: str, run: Callable[..., Outcome], partial: bool, seconds: float) -> float:
    """Return the share of tests that a program passes, or without `partial` whether it passes all; report modules that
    it imports and that are missing, and whether its time was over. Once it has run for `seconds`, the others fail."""
    missing, ends = set[str](), set[str]()

    def watched(program: str, stdin: str, **more: int) -> Outcome:
        nonlocal seconds
        outcome = run(program, stdin, **more) if seconds > 0 else Outcome("time", 0, "", "", 0.0)
        seconds -= outcome.seconds
        ends.add(outcome.ended)
        missing.update(() if outcome.ok else _MISSING.findall(outcome.stderr)[-1:])
        return outcome

    results: list[bool] = []
    for right in _run_tests(program, tests, watched, partial):
        results.append(right)
        if not (right or partial):
            break
    metric("code/missing_module", float(bool(missing)))
    metric("code/timed_out", float("time" in ends))
    for name in missing:
        _tell_missing(name)
    return sum(results) / len(results) if partial or all(results) else 0.0


@functools.lru_cache(maxsize=64)
def _tell_missing(name: str) -> None:
    """Say once in each process that a module is missing."""
    print(f"a program imports `{name}`, which this environment does not have, and earns 0. If programs may use it, "
          "install it.", flush=True)


def program_of(completion: str) -> str:
    """Return the program of a completion: the last Python block, else the last without a language, else the last one;
    of those behind `</think>`, if there are any. Without a block it is the whole completion, or what `<answer>` or
    `[PYTHON]` has; thoughts that are cut off have none. A block that calls what only an earlier one defines, or shows a
    session of the interpreter, is an example."""
    if (answer := behind_thoughts(completion)) is None:
        return ""
    whole = answer.rstrip()
    answer = next((whole[begun.end() : -len(end)] for begin, end in _AROUND
                   if whole.endswith(end) and (begun := begin.search(whole))), answer)
    if (closed := _CLOSED.search(answer)) and any(isinstance(part, _STATEMENTS) for part in _parts(
            answer[: closed.start()])):
        answer = f"```python\n{answer}"  # the prompt has opened the block
    apart = _INLINE.sub(r"\1\n\2", _ONE_LINE.sub(r"```python\n\1\n```", completion))
    blocks = _blocks(answer) or _blocks(completion) or _blocks(apart)
    if own := _python(blocks):
        return _without_examples(own)
    return blocks[-1][1] if blocks else answer


def python_blocks(text: str) -> list[str]:
    """Return the Python blocks of a text, or those without a language where it has none; fences may stand behind text.
    """
    return _python(_blocks(_INLINE.sub(r"\1\n\2", text)))


def _python(blocks: list[tuple[str, str]]) -> list[str]:
    found = ([text for info, text in blocks if language.fullmatch(info)] for language in (_PYTHON, _NO_LANGUAGE))
    return next(filter(None, found), [])


def _without_examples(blocks: list[str]) -> str:
    """Return the last block that is no example of using an earlier one."""
    earlier: set[str] = set()
    program = blocks[0]
    for text in blocks:
        parts = _parts(text)
        defined = {part.name for part in parts if isinstance(part, ast.FunctionDef | ast.ClassDef)}
        if not (_used(parts) & (earlier - defined) or len(parts) == 1 or text.lstrip().startswith(">>>")):
            program = text
        earlier |= defined
    return program


def _used(parts: list[ast.AST]) -> set[str]:
    """Return the names that a program uses and does not bind itself, or imports from a module that may be its own."""
    names = [part for part in parts if isinstance(part, ast.Name)]
    imports = [part for part in parts if isinstance(part, ast.Import | ast.ImportFrom)]
    own = [part for part in imports if isinstance(part, ast.ImportFrom) and
           str(part.module).partition(".")[0] not in sys.stdlib_module_names]
    bound = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    bound |= {part.arg for part in parts if isinstance(part, ast.arg)}
    bound |= {name.asname or name.name for part in imports for name in part.names}
    return ({name.id for name in names} - bound) | {name.name for part in own for name in part.names}


def _blocks(text: str) -> list[tuple[str, str]]:
    """Return the language and the text of each fenced block that is not empty."""
    return [(token.info.strip(), _unglued(token.content)) for token in _MARKDOWN.parse(text)
            if token.type == "fence" and token.content.strip()]


def _unglued(content: str) -> str:
    """Return what stands before a fence behind the last line of a program, as in `print(1)```."""
    glued = None if _parts(content) else _GLUED.search(content)
    return content[: glued.start()] if glued and _parts(content[: glued.start()]) else content


def _run_tests(program: str, tests: str, run: Callable[..., Outcome], separately: bool) -> Iterator[bool]:
    """Yield the result of each test. Python tests run together in one process, unless `separately`."""
    cases = _cases(tests)
    readings = {*range(max((len(case.results) for case in cases if isinstance(case, _Call)), default=0))}
    python = [case for case in cases if isinstance(case, str)]
    for text in python if separately else filter(None, ["\n".join(python)]):
        token = secrets.token_hex(16)
        outcome = run(_HARNESS.format(program=program, tests=text), f"{token}\n")
        yield outcome.ok and outcome.stdout.splitlines()[-1:] == [token]
    for case in cases:
        if isinstance(case, _Streams):
            outcome = run(program, case.input, output_kib=_room(case.output))
            lines, wanted = _lines(outcome.stdout), _lines(case.output)
            yield outcome.ok and len(lines) == len(wanted) and all(map(_is_line, lines, wanted))
        elif isinstance(case, _Call):
            right = readings & _returned(program, case, run)
            readings = right or readings  # which of its results is meant is the same in all tests
            yield bool(right)


def _room(wanted: str) -> int:
    return max(_WIDEST, len(wanted.encode(errors="replace")) // 512)


def _returned(program: str, case: _Call, run: Callable[..., Outcome]) -> set[int]:
    """Return which of the results a function of a program, or a method of its class `Solution`, returns."""
    token = secrets.token_hex(16)
    imports = [f"from {name} import *" for name in _MODULES] + [f"import {name}" for name in _MODULES]
    source = _CALLER.format(program=program, name=case.name, imports=imports)
    outcome = run(source, f"{token}\n{case.arguments!r}\n",
                  output_kib=_room(json.dumps(case.results[0])))
    printed = outcome.stdout.rpartition("\n")[2]
    if not outcome.ok or not printed.startswith(token):
        return set()
    with contextlib.suppress(ValueError, RecursionError):
        result = json.loads(printed.removeprefix(token))
        return {index for index, wanted in enumerate(case.results) if _is_result(result, wanted)}
    return set()


def _is_result(result: Any, wanted: Any) -> bool:
    """Compare values of JSON; a number with a fraction may be rounded."""
    if isinstance(result, list) and isinstance(wanted, list):
        return len(result) == len(wanted) and all(map(_is_result, result, wanted))
    if isinstance(result, dict) and isinstance(wanted, dict):
        return result.keys() == wanted.keys() and all(_is_result(result[key], wanted[key]) for key in wanted)
    near = isinstance(wanted, float) and isinstance(result, int | float) and _is_near(repr(result), repr(wanted))
    return (result == wanted or near) and isinstance(result, bool) is isinstance(wanted, bool)


def _cases(tests: str) -> Sequence[str | _Streams | _Call]:
    """Return the tests, all of one kind: texts in Python, of streams, or calls."""
    if not tests.strip():
        raise ValueError("there are no tests: whatever runs would pass")
    try:
        found: Any = json.loads(tests)
    except json.JSONDecodeError:
        return _checking([tests])
    if isinstance(found, list) and found and all(isinstance(each, str) for each in found) and "".join(found).strip():
        return _checking(found)
    if isinstance(found, dict) and isinstance(found.get("inputs"), list) and isinstance(found.get("outputs"), list) \
            and len(found["inputs"]) == len(found["outputs"]):
        found = [{"input": given, "output": wanted, "fn_name": found.get("fn_name")}
                 for given, wanted in zip(found["inputs"], found["outputs"])]
    cases = [_case(each) for each in found] if isinstance(found, list) else []
    if not cases or None in cases or len({*map(type, cases)}) > 1:
        raise ValueError("tests in JSON must be a list of texts in Python, or of {\"input\": text, \"output\": text}, "
                         "with \"fn_name\" where a function is called (LiveCodeBench has it in `metadata`), not "
                         f"{tests[:100]!r}")
    fewest = min((len(case.results) for case in cases if isinstance(case, _Call)), default=1)
    return [case._replace(results=case.results[:fewest]) if isinstance(case, _Call) else case for case in cases if case]


def _checking(texts: list[str]) -> list[str]:
    """Return tests in Python, which call the functions `test_…` of tests for pytest. Raises ValueError: they are none,
    or what they define is never called."""
    try:
        texts = [*map(_calling, texts)]
        whole = ast.parse("\n".join(texts))
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"the tests are neither JSON nor Python ({error}): {texts[0][:100]!r}") from None
    if not _checks(whole):
        name = next((part.name for part in whole.body if isinstance(part, ast.FunctionDef)), "")
        why = f"define `{name}` and never call it" if name else "assert and call nothing"
        raise ValueError(f"the tests {why}, so that whatever runs would pass: {texts[0][:100]!r}")
    return texts


def _calling(text: str) -> str:
    """Return a test that calls the functions that it defines for pytest and does not name otherwise."""
    whole = ast.parse(text)
    named = {part.id for part in ast.walk(whole) if isinstance(part, ast.Name)}
    tests = [part for part in whole.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
             and part.name.lower().startswith("test") and part.name not in named]
    plain = [part for part in tests if isinstance(part, ast.FunctionDef)
             and not (ast.unparse(part.args) or part.decorator_list)]
    odd = next((part.name for part in tests if part not in plain), "")
    if odd and not _checks(whole, ast.Assert):
        raise ValueError(f"the test `{odd}` is a class, is async, takes arguments or has a decorator, so that pytest "
                         "alone would call it")
    return "\n".join([text, *(f"{part.name}()" for part in plain)])


def _checks(part: ast.AST, kinds: Any = ast.Assert | ast.Raise | ast.Call) -> bool:
    """Return whether a part of a program asserts, raises or calls as soon as it runs."""
    if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        return False
    return isinstance(part, kinds) or any(_checks(each, kinds) for each in ast.iter_child_nodes(part))


def _case(case: Any) -> _Streams | _Call | None:
    """Return a test by its streams, or by a call as APPS, TACO and LiveCodeBench have them; None if it is none."""
    if not isinstance(case, dict) or not {"input", "output"} <= case.keys():
        return None
    given, wanted, more = case["input"], case["output"], case.get("metadata")
    name = case.get("fn_name") or (more.get("func_name") if isinstance(more, dict) else None)
    if name and isinstance(given, str | list):
        return _call(str(name), given, wanted)
    streams = case.get("testtype", "stdin") == "stdin" and case.get("type") != "function_call"
    texts = ["\n".join(text) if _are_texts(text) else text for text in (given, wanted)]
    return _Streams(*texts) if not name and streams and all(isinstance(text, str) for text in texts) else None


def _call(name: str, given: str | list[Any], wanted: Any) -> _Call:
    """Return a call. A text has the JSON of an argument in each line, and the result is JSON, too. Many results of APPS
    are a list of the one that is meant, and its harness takes both; where each test has such a list, what is in it is
    right in all of them, too."""
    if isinstance(given, str):
        try:
            wanted = json.loads(wanted) if isinstance(wanted, str) else wanted
            return _Call(name, [json.loads(line) for line in given.strip().split("\n") if line.strip()], [wanted])
        except json.JSONDecodeError as error:
            raise ValueError(f"the test {given[:100]!r} of `{name}` is not JSON in each line: {error}") from None
    if len(given) == 1 and isinstance(given[0], dict) and all(re.fullmatch("-?[0-9]+", key) for key in given[0]):
        given = [{int(key): value for key, value in given[0].items()}]  # of which JSON has made texts
    return _Call(name, given, [wanted, *wanted] if isinstance(wanted, list) and len(wanted) == 1 else [wanted])


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(each, str) for each in value)


def _is_line(printed: str, wanted: str) -> bool:
    pairs = [*zip(printed.split(), wanted.split())]
    return printed == wanted or (len(pairs) == len(printed.split()) == len(wanted.split()) and any(
        _DECIMAL.fullmatch(value) for _, value in pairs) and all(one == value or _is_near(one, value)
                                                                for one, value in pairs))


def _is_near(printed: str, wanted: str) -> bool:
    """Return whether a printed number is a wanted decimal, but for rounding if that has a fraction."""
    if not _DECIMAL.fullmatch(wanted) or not _NUMBER.fullmatch(printed):
        return False
    exact, value = Decimal(wanted), float(wanted)
    rounded = math.isclose(float(printed), value, rel_tol=1e-12, abs_tol=1e-6 * min(1, abs(value)))
    return Decimal(printed) == exact or (rounded and exact != exact.to_integral_value())


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
