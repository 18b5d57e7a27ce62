"""Chat templates in the files of models, before anything is loaded, and options that they do not know."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from distflow.config.model_code import read_json, settings_in
from distflow.config.run import Data
from distflow.config.shipped import find
from distflow.config.spec import Spec
from distflow.errors import Diagnostic

_RANDOM = re.compile(r"\|\s*random\b")
_OF_PROCESSORS = ("chat_template.json", "processor_config.json")
_EMBEDDED_TEMPLATE = "(roles and contents alone)"


def check_chat_options(spec: Spec) -> list[Diagnostic]:
    """Return the mistakes in chat templates of the roles whose tokenizers may encode the prompts: what draws at random,
    and each option that none knows."""
    templates = {role: template_of(spec, role)[0] for role in encoding_roles(spec)}
    mistakes: list[Diagnostic] = []
    mistakes += [Diagnostic(f"the chat template of role `{role}` draws at random (`| random`), and writes each "
                            "conversation otherwise each time", spec.run_source.location(("roles", role, "model")),
                            "Take  | random  out of it: name one of its texts, or put several into the data.")
                 for role, template in templates.items() if _RANDOM.search(template or "")]
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
    own = {"tools": ("data", "tools")} if data.tools is not None else {}
    return {**own, **{name: ("data", "chat_template_kwargs", name) for name in data.chat_template_kwargs}}


def lack_of(option: str, template: str) -> str:
    """Return what a chat template lacks for an option; "" if nothing."""
    if option in template:
        return ""
    return f"does not know `{option}`" if template else "is missing"


def encoding_roles(spec: Spec) -> Iterable[str]:
    """Return the roles whose tokenizer may encode the prompts."""
    trained = {node.role for node in spec.dag.nodes.values()
               if node.type == "MODEL_TRAIN" and node.role in spec.dag.roles and spec.dag.roles[node.role].head == "lm"}
    return trained or spec.dag.roles


def template_of(spec: Spec, role: str) -> tuple[str | None, Path | None]:
    """Return the chat template of a role's model and its file; "" if it has none, None if that cannot be known."""
    model = spec.model_of(role)
    if model is None:
        return None, None
    if model.path is None:
        return _EMBEDDED_TEMPLATE, None
    folder = find(model.path, "models", spec.folder)
    config = folder / "tokenizer_config.json" if folder else None
    names = ["additional_chat_templates/tool_use.jinja"] * bool(spec.run.data.tools) + ["chat_template.jinja"]
    try:
        if own := next((folder / name for name in names if (folder / name).is_file()), None) if folder else None:
            return own.read_text(encoding="utf-8"), own
        written = read_json(config).get("chat_template") if config else None
    except (OSError, ValueError, AttributeError):
        return None, None
    if folder and not written and (others := of_processor(folder)):
        return others
    if isinstance(written, list):  # by their names
        named = {str(each.get("name")): each.get("template") for each in written if isinstance(each, dict)}
        written = spec.run.data.tools and named.get("tool_use") or named.get("default")
    return str(written or "") if config else None, config


def of_processor(folder: Path) -> tuple[str, Path] | None:
    """Return the chat template of a model's processor and its file, which transformers does not give to the tokenizer;
    None if it has none."""
    found = ((settings_in(folder / name).get("chat_template"), folder / name) for name in _OF_PROCESSORS)
    return next(((text, file) for text, file in found if isinstance(text, str) and text), None)
