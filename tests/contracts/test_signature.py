"""Contracts read from source, and from live functions where the source does not show them."""

from __future__ import annotations

import importlib.machinery
import sys
import textwrap

import pytest

from distflow.contracts.decorators import load_module
from distflow.contracts.forms import Contract, Read
from distflow.contracts.functions import imported, load_function, of_module
from distflow.contracts.modules import module_file
from distflow.contracts.settings import REQUIRED, Setting
from distflow.errors import InvalidInput


@pytest.fixture
def module(tmp_path, monkeypatch, request):
    """Write a module; returns its name, which no other test has."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> str:
        name = f"module_of_{request.node.originalname}_{len(list(tmp_path.iterdir()))}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        return name

    return write


def only(module: str) -> Contract:
    (contract,) = of_module(module)
    return contract


FULL = '''
    from __future__ import annotations
    from distflow import node

    @node(writes=("a", "{role}_b"), type="MODEL_INFERENCE", repeats="copies", default_for="critic",
          requires={"kl": "extra"}, keep_together="group", belongs_to={"kl": ("word", "y")})
    def full(engine, prompts: Ragged, extra: Ragged | None = None, *, copies: int,
             kl: Annotated[float, Field(ge=0)] = 1e-3, word: Literal["x", "y"] = "x") -> tuple[Tensor, list[str]]:
        """One line.

        More lines.
        """
'''


def test_all_that_a_signature_says(module):
    contract = only(module(FULL))
    assert contract.name == "full"
    assert contract.reads == (Read("prompts", "Ragged"), Read("extra", "Ragged | None", optional=True))
    assert contract.settings == {"copies": Setting("copies", "int", REQUIRED, {"ge": 1}),
                                 "kl": Setting("kl", "float", "0.001", {"ge": 0}),
                                 "word": Setting("word", "Literal['x', 'y']", "'x'")}
    assert contract.returns == ("Tensor", "list[str]")
    assert contract.summary == "One line."
    marks = contract.marks
    assert marks.writes == ("a", "{role}_b")
    assert (marks.type, marks.repeats, marks.keep_together) == ("MODEL_INFERENCE", "copies", "group")
    assert (marks.default_for, marks.requires) == (("critic",), {"kl": "extra"})
    assert marks.belongs_to == {"kl": ("word", "y")}
    assert contract.key.endswith(":full")


def test_only_model_functions_get_an_engine(module):
    assert only(module("import distflow\n@distflow.node(writes='x')\ndef f(first, second): ...\n")).reads == (
        Read("first"), Read("second"))
    assert only(module("from distflow import node\n@node(type='MODEL_TRAIN')\ndef f(engine, rows): ...\n")).reads == (
        Read("rows"),)


def test_source_is_read_and_not_run(module):
    name = module("""
        from distflow import node
        raise SystemExit("this module must not be imported by validation")

        @node(writes="rewards")
        def f(completions: list[str]): ...
    """)
    assert only(name).name == "f"
    assert name not in sys.modules


def test_a_function_registered_when_its_module_is_imported(module):
    name = module('''
        from typing import Annotated

        import torch
        from pydantic import Field
        from distflow import Ragged, node

        def make(setting):
            def made(prompts: Ragged, extra: torch.Tensor | None = None, *,
                     by: Annotated[float, Field(gt=0)] | None = setting,
                     kind: Annotated[str, Field(pattern="^[ab]", max_length=3)] = "a", odd=object()) -> Ragged:
                """Made."""
                return prompts
            made.__name__ = "made_by_hand"
            return node(writes="made")(made)

        anything = make(0.5)
    ''')
    assert of_module(name) == ()
    contract = imported(name, "made_by_hand")
    assert contract is not None
    assert [(read.name, read.optional) for read in contract.reads] == [("prompts", False), ("extra", True)]
    assert contract.reads[0].form.endswith("Ragged")
    assert contract.settings["by"] == Setting("by", "float | None", "0.5", {"gt": 0})
    assert contract.settings["kind"].limits == {"pattern": "^[ab]", "max_length": 3}
    assert [contract.settings["kind"].errors(value) == [] for value in ("abc", "c", "abcd")] == [True, False, False]
    assert contract.settings["odd"].default == "..."
    assert contract.marks.writes == ("made",)
    assert contract.where.line > 0
    assert load_function(contract.key).__doc__ == "Made."
    assert imported(name, "nothing") is None


def test_of_module_evaluates_constants_of_the_module(module):
    contract = only(module("""
        import typing as t
        from pydantic import Field as F
        from distflow import node

        MOST = 9
        WRITTEN = ("x", "y")
        Share: t.TypeAlias = t.Annotated[float, F(gt=0, le=MOST)]

        @node(writes=WRITTEN)
        def f(a, *, share: Share = MOST / 2, many: list["Share"] | None = None): ...
    """))
    assert contract.marks.writes == ("x", "y")
    assert contract.settings == {"share": Setting("share", "float", "4.5", {"gt": 0, "le": 9}),
                                 "many": Setting("many", "list[float] | None", "None")}


@pytest.mark.parametrize(("line", "error"), [("raise RuntimeError('no licence')", "RuntimeError: no licence"),
                                             ("sys.exit(3)", "SystemExit: 3"), ("import nothing_here", "Module"),
                                             ("json.loads('{')", "JSONDecodeError")])
def test_load_function_says_where_an_import_fails(module, line, error):
    name = module(f"import json, sys\n\ndef f():\n    {line}\n\nf()\n")
    with pytest.raises(InvalidInput, match=rf"{name}\.py:4: module `{name}` fails when it is imported: {error}"):
        load_function(f"{name}:f")


def test_load_module_ends_an_import_that_goes_on(module):
    name = module("import itertools\n\nfor _ in itertools.count():\n    pass\n")
    with pytest.raises(InvalidInput, match=rf"{name}\.py:[34]: module `{name}` fails when it is imported: Timeout"):
        load_module(name, limit=0.2)


def test_modules_in_folders_without_running_their_packages(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "outer_package").mkdir()
    (tmp_path / "outer_package/__init__.py").write_text("raise SystemExit\n")
    (tmp_path / "outer_package/inner.py").write_text("from distflow import node\n@node(writes='x')\ndef f(a): ...\n")
    assert only("outer_package.inner").key == "outer_package.inner:f"
    with pytest.raises(InvalidInput, match="cannot be found"):
        of_module("outer_package.other")


def test_a_module_is_found_by_whatever_would_import_it(tmp_path, monkeypatch):
    """An editable installation puts a finder of its own beside the path."""
    (tmp_path / "elsewhere/functions").mkdir(parents=True)
    for name in ("elsewhere/__init__.py", "elsewhere/functions/__init__.py", "elsewhere/functions/rollout.py"):
        (tmp_path / name).write_text("raise AssertionError('imported')\n")

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return importlib.machinery.PathFinder.find_spec(name, [str(tmp_path)]) if name == "elsewhere" else None

    assert module_file("elsewhere.functions.rollout") is None
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert module_file("elsewhere.functions.rollout") == tmp_path / "elsewhere/functions/rollout.py"
    assert module_file("elsewhere.nothing") is None
    assert module_file("__main__.nothing") is None


@pytest.mark.parametrize(("imports", "decorator"), [
    ("from distflow import node as made_of", "@made_of(writes='x')"), ("import distflow as df", "@df.node(writes='x')"),
    ("from distflow.contracts.decorators import node", "@node(writes='x')")])
def test_a_decorator_may_have_another_name(module, imports, decorator):
    assert only(module(f"{imports}\n{decorator}\ndef f(a): ...\n")).name == "f"


def test_a_decorator_of_another_package_is_not_ours(module):
    assert of_module(module("from graphs import node\nimport graphs as g\n@node(writes='x')\ndef f(a): ...\n"
                            "@g.node(writes='x')\ndef h(a): ...\n")) == ()


def test_settings_that_cannot_be_read_are_said_with_their_lines(module):
    name = module("""
        from distflow import node

        @node(writes="x")
        def f(a, *,
              fine: Annotated[float, Field(ge=0)] = 1.0,
              computed: Annotated[float, Field(ge=LIMIT)] = 1.0,
              beside: Annotated[float, Field(gt=0)] = 0.0): ...
    """)
    with pytest.raises(InvalidInput) as caught:
        of_module(name)
    first, second = caught.value.mistakes
    assert (first.where.line, second.where.line) == (7, 8)
    assert first.what.startswith("setting `computed` of `f` has `Field(ge=LIMIT)` in its annotation, and only plain")
    assert "share: Annotated[float, Field(gt=0, le=1)] = 0.5" in first.hint
    assert second.what == "setting `beside` of `f` has a default that must be above 0, not 0.0"
