"""Annotations as types and as text, evaluated without running the module that has them."""

import ast

import pytest

from distflow.contracts.annotations import Names, Unknown, evaluated, names_of, text_of, type_of
from distflow.contracts.forms import plain_form


@pytest.mark.parametrize(("annotation", "form"), [
    ("torch.Tensor", "Tensor"), ("Tensor | None", "Tensor"), ("Optional[distflow.Ragged]", "Ragged"),
    ("'Ragged'", "Ragged"), ("None | list[str]", "list[str]"), ("Sequence[str]", "list[str]"),
    ("List['str']", "list[str]"), ("Tensor | Ragged", "Tensor | Ragged"),
    ("Union[Tensor, Ragged, None]", "Tensor | Ragged"), ("np.ndarray", "ndarray"),
])
def test_text_of_forms_in_all_spellings(annotation, form):
    assert plain_form(text_of(type_of(annotation, Names({})))) == form


@pytest.mark.parametrize(("text", "value"), [("LIMIT", 3), ("LIMIT + 1", 4), ("math.inf", float("inf")), ("m", None)])
def test_evaluated_names_of_the_module_and_of_light_ones(text, value):
    body = ast.parse("LIMIT: int = 3\nm = None").body
    assert evaluated(ast.parse(text, mode="eval").body, names_of(body, {"math": "math"})) == value


@pytest.mark.parametrize("text", [
    "open('x', 'w')", "__import__('os').remove('x')", "[*folder]", "{**settings}", "[x for x in items]", "LIMIT * 2",
    "folder.path[0]()", "LOOP", "Own", "undefined", "1 / 0"])
def test_evaluated_stands_for_itself_if_it_is_not_known(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").write_text("kept")
    body = ast.parse("LOOP = LOOP\nclass Own: ...").body
    found = evaluated(ast.parse(text, mode="eval").body, names_of(body, {"folder": "os.path", "items": "own.items"}))
    assert isinstance(found, Unknown)
    assert (tmp_path / "x").read_text() == "kept"
