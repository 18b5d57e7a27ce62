"""Chat templates in the files of models, before anything is loaded: options that they do not know, records that they
refuse."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.config.run import Data
from distflow.config.shipped import find
from distflow.errors import Diagnostic

if TYPE_CHECKING:
    from distflow.config.load import Spec

_EMBEDDED_TEMPLATE = "(roles and contents alone)"
_REFUSES = "raise_exception"
"""Function by which a template refuses messages; one without it is not rendered."""

_SEVERAL = "[{'"
"""Beginning of a list of templates by their names, of which transformers takes one by the use that is made of it."""


def check_chat_options(spec: Spec) -> list[Diagnostic]:
    """Return a mistake for each option that no chat template knows of a role whose tokenizer may encode the prompts."""
    templates, mistakes = dict(_templates(spec)), []
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


def refusals(spec: Spec, asked: Mapping[int, tuple[list[dict[str, Any]], Any]]) -> Iterator[tuple[int, str, str]]:
    """Yield what templates refuse of the (messages, tools) of some records: the record, the role whose template it is,
    and the template's reason."""
    refusing = {role: template for role, template in _templates(spec)
                if template and _REFUSES in template and not template.startswith(_SEVERAL)}
    renders = {role: _renderer(template, spec.run.data.for_template) for role, template in refusing.items()}
    if renders:
        for record, (messages, tools) in asked.items():
            for role, refused in renders.items():
                if reason := refused(messages, tools):
                    yield record, role, reason


def _renderer(template: str, options: dict[str, Any]) -> Callable[[list[dict[str, Any]], Any], str]:
    """Return a function that says why a template refuses messages, "" if it does not. transformers renders by the same
    environment; what fails in another way than by `raise_exception` is left to it."""
    from jinja2 import TemplateError  # only templates that may refuse something pay for its import
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    refused: list[str] = []

    def refuse(reason: str) -> None:
        refused.append(reason)
        raise TemplateError(reason)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=["jinja2.ext.loopcontrols"])
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


def _templates(spec: Spec) -> Iterator[tuple[str, str | None]]:
    """Yield the roles whose tokenizer may encode the prompts, with their templates."""
    trained = {node.role for node in spec.dag.nodes.values()
               if node.type == "MODEL_TRAIN" and node.role in spec.dag.roles and spec.dag.roles[node.role].head == "lm"}
    for role in trained or spec.dag.roles:
        yield role, _chat_template(spec, role)


def _chat_template(spec: Spec, role: str) -> str | None:
    """Return the template in the files of the role's model, "" if it has none; None if that cannot be known."""
    model = spec.model_of(role)
    if model is None:
        return None
    if model.path is None:
        return _EMBEDDED_TEMPLATE
    folder = find(model.path, "models", spec.folder)
    return None if folder is None else _read_template(folder)


def _read_template(folder: Path) -> str | None:
    try:
        if (folder / "chat_template.jinja").is_file():
            return (folder / "chat_template.jinja").read_text(encoding="utf-8")
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        return str(config.get("chat_template") or "")
    except (OSError, ValueError, AttributeError):
        return None
