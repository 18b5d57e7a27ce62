"""The names of `import distflow` mean the same to Python, which loads them lazily, and to editors and type checkers."""

import ast
from pathlib import Path

import pytest

import distflow

SOURCE = Path(distflow.__file__)


def test_what_editors_see_is_what_is_loaded():
    (block,) = [item for item in ast.parse(SOURCE.read_text()).body if isinstance(item, ast.If)]
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    seen = {alias.name: item.module for item in block.body for alias in item.names}
    assert seen == distflow._HOMES
    assert sorted([*seen, "__version__"]) == distflow.__all__
    assert SOURCE.with_name("py.typed").is_file()


@pytest.mark.parametrize("name", distflow.__all__)
def test_each_name_is_there(name):
    assert getattr(distflow, name).__doc__
