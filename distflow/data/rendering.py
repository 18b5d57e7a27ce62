"""Renders the first records by the chat templates of models before anything is loaded, in a process of its own, which
the kernel bounds: a template may refuse a record, loop for ever or fill the memory."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from distflow.config.spec import Spec
from distflow.config.templates import encoding_roles, template_of
from distflow.data.dataset import Records, RequiredFields
from distflow.data.problems import messages_of, template_variables, tools_of
from distflow.errors import Diagnostic, InvalidInput, Location
from distflow.telemetry.processes import spawn

_RENDERED = 64
"""Records that are rendered."""
_SECONDS, _MIB = 3, 512
"""Processor time and memory that a template may take for a record."""
_STOPPED = 2
"""Exit status where a template refuses a record, or fills the memory."""
_Asked = tuple[int, list[dict[str, Any]], dict[str, Any]]
"""A record's number, its messages, and the variables of the template, `tools` among them."""


class _RefusedRecord(NamedTuple):
    """Record that the chat template of a role, in `file`, refuses. `reason`: the template's own; "" where it takes more
    than `_SECONDS` or `_MIB`."""

    record: int
    role: str
    reason: str
    file: Path


def check_rendering(spec: Spec, records: Records, fields: RequiredFields) -> None:
    """Refuse records that the chat template of a model refuses. Raises InvalidInput."""
    data, rows = spec.run.data, range(min(len(records), _RENDERED))
    first = {row: record for row, record in zip(rows, records.get(rows))
             if not (fields.missing(record) or fields.empty(record))}
    asked = {row: messages_of(record, data) for row, record in first.items()}
    variables = {row: {"tools": tools_of(record, data), **template_variables(record, data)}
                 for row, record in first.items()}
    refusal = _first_refusal(spec, [(row, asked[row], variables[row]) for row in asked])
    if refusal is None:
        return
    where, template = records.location(refusal.record), f"the chat template of role `{refusal.role}`"
    if not refusal.reason:
        what = f"{template} takes more than {_SECONDS} s or {_MIB} MiB for the messages of {where}: it may not end"
        raise InvalidInput(Diagnostic(what, Location(str(refusal.file)), "Look at its loops, or give the role a model "
                                      "with another template."))
    hint = "Take out of the records what it refuses."
    if data.system_prompt is not None and asked[refusal.record][0].get("content") == data.system_prompt:
        suffix = json.dumps(f" {data.system_prompt}", ensure_ascii=False)
        where = spec.run_source.location(("data", "system_prompt"))
        hint = f"Take it out, and ask for the same behind each question:  data: {{prompt_suffix: {suffix}}}"
    raise InvalidInput(Diagnostic(f"{template} refuses these messages: {refusal.reason}", where,
                                  f"{hint}\nOr give the role a model whose template takes them."))


def _first_refusal(spec: Spec, asked: Sequence[_Asked]) -> _RefusedRecord | None:
    """Return the first of some records that a chat template refuses, or does not render within its bounds."""
    for role in encoding_roles(spec):
        text, file = template_of(spec, role)
        if text and file and asked and (found := _tried(text, asked)):
            return _RefusedRecord(found[0], role, found[1], file)
    return None


def _tried(template: str, asked: Sequence[_Asked]) -> tuple[int, str] | None:
    """Return the first refused record with the reason, by a process of its own, which the kernel ends."""
    readable, writable = os.pipe()

    def render_all() -> int:
        _limit(resource.RLIMIT_DATA, psutil.Process().memory_info().data + _MIB * 2**20)
        with os.fdopen(writable, "w", encoding="utf-8", errors="replace") as said:
            try:
                _limit(resource.RLIMIT_CPU, _seconds_from_now())
                refused = _renderer(template)
                for record, messages, variables in asked:
                    print(record, file=said, flush=True)
                    _limit(resource.RLIMIT_CPU, _seconds_from_now())
                    if reason := refused(messages, variables):
                        print(" ".join(reason.split()), end="", file=said)
                        return _STOPPED
            except MemoryError:
                return _STOPPED
        return 0

    child = spawn(render_all, limits={resource.RLIMIT_CORE: 0})
    os.close(writable)
    with os.fdopen(readable, encoding="utf-8") as said:
        records, _, reason = said.read().rpartition("\n")
    stops = child.wait() not in (0, 1)  # 1: it fails otherwise, as it will where transformers renders it
    return (int(records.rpartition("\n")[2] or asked[0][0]), reason) if stops else None


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _seconds_from_now() -> int:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return math.ceil(used.ru_utime + used.ru_stime) + _SECONDS


def _renderer(template: str) -> Callable[[list[dict[str, Any]], dict[str, Any]], str]:
    """Return a function that says why a template refuses messages, "" if it does not. transformers renders by the same
    environment; what fails in another way than by `raise_exception` is left to it."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    refused: list[str] = []

    def refuse(reason: str) -> None:
        refused.append(reason)
        raise TemplateError(reason)

    class GenerationTag(Extension):
        """Tag around what the assistant says, by which transformers can tell it from the rest."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=["jinja2.ext.loopcontrols", GenerationTag])
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda _: ""
    try:
        compiled = environment.from_string(template)
    except (TemplateError, RecursionError):
        return lambda *_: ""

    def reason_of(messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        refused.clear()
        prompts = messages[-1]["role"] != "assistant"
        with contextlib.suppress(TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
                                 RecursionError):
            compiled.render(messages=messages, add_generation_prompt=prompts, bos_token="", eos_token="",
                            **variables)
        return refused[0] if refused else ""

    return reason_of
