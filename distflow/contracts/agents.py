"""Commands of agents that a DAG names: `agent: python solve.py {questions}`. Each row starts its own.

A command is split into words as a shell does, and each `{column}` in a word becomes that column's text: no shell reads
it. `python` is the interpreter of the run. Checked are the words, the program, and a Python file that it is to run.
"""

from __future__ import annotations

import shlex
import shutil
import string
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from distflow.config.spec import Spec
from distflow.contracts.forms import Contract, Read
from distflow.contracts.functions import named_settings
from distflow.contracts.templates import fields, readable_fields
from distflow.errors import Diagnostic

ANNOTATION = "Agent"  # annotation of a setting that holds a command; its function gets the columns beside its own
_CODE = ("-c", "-e", "-lc")  # options of shells and interpreters before code
_INTERPRETERS = ("python", "bash", "sh", "dash", "zsh", "perl", "ruby", "node")
_TOKENS = ("prompts", "targets", "group", "row")  # columns of the dataset that are no text


def agent_words(command: str) -> list[str]:
    """Return the words of a command, columns still in braces. Raises ValueError if it cannot be split, or has none."""
    words = shlex.split(command)
    if not words:
        raise ValueError("it is empty")
    if _names_column(words[0]):
        raise ValueError("its program is a column")
    return [sys.executable if words[0] == "python" else words[0], *words[1:]]


def filled_words(command: str, columns: Mapping[str, str]) -> list[str]:
    """Return the words of a row's command."""
    program, *words = agent_words(command)
    return [program, *(word.format(**columns) for word in words)]


def check_agents(spec: Spec) -> list[Diagnostic]:
    return [Diagnostic(f"node `{node}`: `{name}` {what}", spec.dag_source.location(("nodes", node, "with", name)), hint)
            for node, name, command in _agents(spec) for what, hint in _wrong(command)]


def with_agent_columns(spec: Spec, node: str, contract: Contract) -> Contract:
    """Return the contract of a node's function with the columns that its agent's command names too."""
    return contract.reading(Read(name, "list[str]") for owner, _, command in _agents(spec) if owner == node
                            for name in readable_fields(command))


def agent_nodes(spec: Spec) -> set[str]:
    """Return the nodes that start agents."""
    return {node for node, _, _ in _agents(spec)}


def _wrong(command: str) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a command, and what to write instead."""
    try:
        program, *words = agent_words(command)
        named = fields(command)
    except ValueError as error:
        what = "it names no column, so that all rows would be alike" if "names no column" in str(error) else str(error)
        yield f"cannot be read: {what}", ("As in  agent: python solve.py {questions}   Columns stand in braces; a "
                                          "brace of the command itself is written twice:  {{ }}")
        return
    if found := [name for name in named if name in _TOKENS]:
        yield f"names the column `{found[0]}`, which is no text", "The question's text is  {questions}"
    if shutil.which(program) is None:
        yield (f"starts `{program}`, which is no program of the PATH and no file that can be executed here",
               f"For a Python file:  agent: python {program} …")
    if code := next((word for option, word in zip(words, words[1:]) if option in _CODE and _names_column(word)), None):
        yield (f"puts the text of a column into code: `{code[:80]}`", "Whoever wrote the data would decide what runs. "
                                                                      "Give it as an argument of a program of its own")
    if words and _names_column(words[0]) and Path(program).name.startswith(_INTERPRETERS):
        yield (f"has a column as the first argument of `{program}`, which may read a text that begins with `-` as an "
               "option", "Name the argument, as  --question={questions}   or write  --  before it")
    if program == sys.executable and words and words[0].endswith(".py") and "{" not in words[0] \
            and not Path(words[0]).is_file():
        yield (f"runs `{words[0]}`, which is not a file",
               f"It was looked for in {Path.cwd()}, where the run is started: paths are relative to that folder.")


def _names_column(word: str) -> bool:
    return any(name is not None for _, name, _, _ in string.Formatter().parse(word))


def _agents(spec: Spec) -> list[tuple[str, str, str]]:
    return [each for each in named_settings(spec.dag, spec.functions, ANNOTATION) if isinstance(each[2], str)]
