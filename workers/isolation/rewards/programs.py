"""The reward `code`: does a program pass its tests? It runs in a sandbox, see `workers.isolation.sandbox.runner`."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from distflow import reward
from workers.isolation.sandbox.runner import Outcome, run_python

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_HARNESS = """\
import sys
_program, _tests, _word = {program!r}, {tests!r}, sys.stdin.readline()
_names = {{"__name__": "__main__"}}
try:
    exec(compile(_program, "program.py", "exec"), _names)
except SystemExit:
    pass
exec(compile(_tests, "tests.py", "exec"), _names)
sys.__stdout__.write("\\n" + _word)
"""
"""The word comes by standard input, so that a program that ends early, or prints much, has not passed by that."""


_LEAST = 32
"""MiB of addresses without which no interpreter starts."""


@dataclass(frozen=True)
class _Sandbox:
    seconds: float
    memory_mib: int
    network: Literal["deny", "allow"]
    files: Literal["deny", "allow"]

    def run(self, source: str, stdin: str) -> Outcome:
        return run_python(source, stdin, seconds=self.seconds, memory_mib=self.memory_mib, network=self.network,
                          files=self.files)


def _wrong(seconds: float = 10.0, memory_mib: int = 512, **_: object) -> str:
    return "" if seconds > 0 and memory_mib >= _LEAST else \
        f"needs `seconds` above 0 and `memory_mib` of at least {_LEAST}: no program could pass"


@reward(timeout=120.0, check=_wrong)
def code(completion: str, tests: str, *, seconds: float = 10.0, memory_mib: int = 512, partial: bool = False,
         network: Literal["deny", "allow"] = "deny", files: Literal["deny", "allow"] = "deny") -> float:
    """1.0 if the program of the completion passes all its tests, else 0.0; with `partial`, the share that it passes.

    The program is what stands in the completion's last block of Python (``` fences), else the whole completion.
    `tests` is a column of the data. It holds either Python that raises if something is wrong, as
    `assert add(1, 2) == 3`, run after the program with its names, and counted as one test; or JSON, a list of
    {"input": text, "output": text}, for a program that reads and writes its standard streams: space at the ends of
    lines and of the text does not count. A program that does not compile, raises, takes too long or wants too much
    has not passed.

    A program that is out to cheat can find Python tests in its own process; it never sees the outputs of JSON tests.

    Args:
        seconds: for each run of the program.
        memory_mib: of addresses, for each process.
        network: `allow` leaves programs the network.
        files: `allow` runs them even where the kernel cannot keep them from reading and changing this user's files.

    Raises:
        EngineError: programs cannot be isolated here. It ends the run.
        ValueError: there are no tests, or they are JSON of another form. The sample is left out.
        OSError: one sandbox could not be made or ended. The sample is tried again, then left out.
    """
    sandbox, program = _Sandbox(seconds, memory_mib, network, files), program_of(completion)
    passed = total = 0
    for right in _run_tests(program, tests, sandbox):
        passed, total = passed + right, total + 1
        if not (right or partial):
            return 0.0
    return passed / total


def program_of(completion: str) -> str:
    """The last block of Python in a text; the text itself if there is none."""
    blocks = _BLOCK.findall(completion)
    return blocks[-1] if blocks else completion


def _run_tests(program: str, tests: str, sandbox: _Sandbox) -> Iterator[bool]:
    cases = _cases(tests)
    if cases is None:
        word = secrets.token_hex(16)
        outcome = sandbox.run(_HARNESS.format(program=program, tests=tests), f"{word}\n")
        yield outcome.ok and outcome.stdout.splitlines()[-1:] == [word]
        return
    for case in cases:
        outcome = sandbox.run(program, case["input"])
        yield outcome.ok and _lines(outcome.stdout) == _lines(case["output"])


def _cases(tests: str) -> list[dict[str, str]] | None:
    """The inputs and outputs; None if the tests are Python.

    Raises:
        ValueError: they are JSON of another form, or none.
    """
    if not tests.strip():
        raise ValueError("there are no tests: whatever runs would pass")
    try:
        found: Any = json.loads(tests)
    except json.JSONDecodeError:
        return None
    if not (isinstance(found, list) and found and all(map(_is_case, found))):
        raise ValueError(f"tests in JSON must be a list of {{\"input\": text, \"output\": text}}, not {tests[:100]!r}")
    return found


def _is_case(case: Any) -> bool:
    return isinstance(case, dict) and all(isinstance(case.get(name), str) for name in ("input", "output"))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
