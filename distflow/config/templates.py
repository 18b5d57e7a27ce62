"""Chat templates in the files of models, before anything is loaded: options that they do not know, records that they
refuse or that they render for ever."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from distflow.config.run import Data
from distflow.config.shipped import find
from distflow.errors import Diagnostic
from distflow.telemetry.processes import spawn

if TYPE_CHECKING:
    from distflow.config.load import Spec

_EMBEDDED_TEMPLATE = "(roles and contents alone)"
SECONDS, MIB = 3, 512
"""Processor time and memory that a template may take for a record."""

Asked = tuple[int, list[dict[str, Any]], Any]
"""A record's number, messages and tools."""


class Refusal(NamedTuple):
    """Record that the chat template of a role, in `file`, refuses. `reason`: the template's own; "" where it takes more
    than `SECONDS` or `MIB`."""

    record: int
    role: str
    reason: str
    file: Path


def check_chat_options(spec: Spec) -> list[Diagnostic]:
    """Return a mistake for each option that no chat template knows of a role whose tokenizer may encode the prompts."""
    templates, mistakes = {role: _template_of(spec, role)[0] for role in _encoding_roles(spec)}, []
    for option, path in template_options(spec.run.data).items():
        lacks = [lack_of(option, template) if template is not None else "" for template in templates.values()]
        if lacks and all(lacks):
            role = next(iter(templates))
            what = f"`{'.'.join(path)}` would change nothing: the chat template of role `{role}` {lacks[0]}"
            mistakes.append(Diagnostic(what, spec.run_source.location(path),
                                       "Take it out, or give the role a model whose template has it."))
    return mistakes


def template_options(data: Data) -> dict[str, tuple[str, ...]]:
    """Return the options that the chat template is to know, each with its path in the run file."""
    own = {name: ("data", name) for name in ("enable_thinking", "tools") if getattr(data, name) is not None}
    return {**own, **{name: ("data", "chat_template_kwargs", name) for name in data.chat_template_kwargs}}


def lack_of(option: str, template: str) -> str:
    """Return what a chat template lacks for an option; "" if nothing."""
    if option in template:
        return ""
    return f"does not know `{option}`" if template else "is missing"


def first_refusal(spec: Spec, asked: Sequence[Asked]) -> Refusal | None:
    """Return the first of some records that a chat template refuses, or does not render within its bounds."""
    for role in _encoding_roles(spec):
        text, file = _template_of(spec, role)
        if text and file and asked and (found := _tried(text, asked, spec.run.data.for_template)):
            return Refusal(found[0], role, found[1], file)
    return None


def _tried(template: str, asked: Sequence[Asked], options: dict[str, Any]) -> tuple[int, str] | None:
    """Return the first refused record with the reason, by a process of its own, which the kernel ends."""
    readable, writable = os.pipe()

    def render_all() -> int:
        _limit(resource.RLIMIT_DATA, psutil.Process().memory_info().data + MIB * 2**20)
        with os.fdopen(writable, "w", encoding="utf-8", errors="replace") as said:
            try:
                _limit(resource.RLIMIT_CPU, _seconds_from_now())
                refused = _renderer(template, options)
                for record, messages, tools in asked:
                    print(record, file=said, flush=True)
                    _limit(resource.RLIMIT_CPU, _seconds_from_now())
                    if reason := refused(messages, tools):
                        print(" ".join(reason.split()), end="", file=said)
                        return 1
            except MemoryError:
                return 1
        return 0

    child = spawn(render_all, limits={resource.RLIMIT_CORE: 0})
    os.close(writable)
    with os.fdopen(readable, encoding="utf-8") as said:
        records, _, reason = said.read().rpartition("\n")
    return (int(records.rpartition("\n")[2] or asked[0][0]), reason) if child.wait() else None


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _seconds_from_now() -> int:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return math.ceil(used.ru_utime + used.ru_stime) + SECONDS


def _renderer(template: str, options: dict[str, Any]) -> Callable[[list[dict[str, Any]], Any], str]:
    """Return a function that says why a template refuses messages, "" if it does not. transformers renders by the same
    environment; what fails in another way than by `raise_exception` is left to it."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    refused: list[str] = []

    def refuse(reason: str) -> None:
        refused.append(reason)
        raise TemplateError(reason)

    class Generation(Extension):
        """Tag around what the assistant says, by which transformers can tell it from the rest."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=["jinja2.ext.loopcontrols", Generation])
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda _: ""
    try:
        compiled = environment.from_string(template)
    except TemplateError:
        return lambda *_: ""

    def reason_of(messages: list[dict[str, Any]], tools: Any) -> str:
        refused.clear()
        prompts = messages[-1]["role"] != "assistant"
        with contextlib.suppress(TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
                                 RecursionError):
            compiled.render(messages=messages, tools=tools, add_generation_prompt=prompts, bos_token="", eos_token="",
                            **options)
        return refused[0] if refused else ""

    return reason_of


def _encoding_roles(spec: Spec) -> Iterable[str]:
    """Return the roles whose tokenizer may encode the prompts."""
    trained = {node.role for node in spec.dag.nodes.values()
               if node.type == "MODEL_TRAIN" and node.role in spec.dag.roles and spec.dag.roles[node.role].head == "lm"}
    return trained or spec.dag.roles


def _template_of(spec: Spec, role: str) -> tuple[str | None, Path | None]:
    """Return the chat template of a role's model and its file; "" if it has none, None if that cannot be known."""
    model = spec.model_of(role)
    if model is None:
        return None, None
    if model.path is None:
        return _EMBEDDED_TEMPLATE, None
    folder = find(model.path, "models", spec.folder)
    own, config = (folder / "chat_template.jinja", folder / "tokenizer_config.json") if folder else (None, None)
    try:
        if own and own.is_file():
            return own.read_text(encoding="utf-8"), own
        written = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config else None
    except (OSError, ValueError, AttributeError):
        return None, None
    if isinstance(written, list):  # by their names
        named = {str(each.get("name")): each.get("template") for each in written if isinstance(each, dict)}
        written = spec.run.data.tools and named.get("tool_use") or named.get("default")
    return str(written or "") if config else None, config
