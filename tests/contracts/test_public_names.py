"""The names of `import distflow` mean the same to Python, which loads them lazily, and to editors and type checkers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import distflow
from distflow.contracts import decorators
from distflow.recovery import detectors

SOURCE = Path(distflow.__file__)


def test_what_editors_see_is_what_is_loaded() -> None:
    (block,) = [item for item in ast.parse(SOURCE.read_text()).body if isinstance(item, ast.If)]
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    seen = {alias.name: item.module for item in block.body for alias in item.names}
    assert seen == distflow._HOMES
    assert sorted([*seen, "__version__"]) == distflow.__all__
    assert SOURCE.with_name("py.typed").is_file()


@pytest.mark.parametrize("name", distflow.__all__)
def test_each_name_is_there(name: str) -> None:
    assert getattr(distflow, name).__doc__


def test_a_decorated_definition_is_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((decorators, "NODES"), (decorators, "REWARDS"), (decorators, "ENVIRONMENTS"),
                         (detectors, "DETECTORS")):
        monkeypatch.setattr(module, name, {})

    def function(logprobs): ...

    class Kind: ...

    decorated = [distflow.loss(function), distflow.reward(function), distflow.reward(timeout=1.0)(function),
                 distflow.node(writes="x")(function), distflow.detector(function)]
    assert all(each is function for each in decorated)
    assert distflow.environment(Kind) is distflow.environment(safe=True)(Kind) is Kind
