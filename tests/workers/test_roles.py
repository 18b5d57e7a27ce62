"""Loading a role's model and tokenizer."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from transformers import GenerationConfig

from distflow.schema.errors import InvalidInput
from distflow.schema.run import Model
from workers.engines.embedded import build_tokenizer
from workers.roles import load_model


@pytest.fixture
def folder(tmp_path, model):
    """A model folder whose tokenizer names no end."""
    model.save_pretrained(tmp_path)
    build_tokenizer(["one"]).save_pretrained(tmp_path)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (tmp_path / name).exists():
            said = json.loads((tmp_path / name).read_text())
            said.pop("eos_token", None)
            (tmp_path / name).write_text(json.dumps(said))
    return tmp_path


def load(folder):
    return load_model(SimpleNamespace(folder=folder), Model(path=str(folder)))


@pytest.mark.parametrize("end", [2, [2, 4]])
def test_a_tokenizer_without_an_end_is_refused_and_the_models_own_proposed(folder, end):
    GenerationConfig(eos_token_id=end).save_pretrained(folder)
    with pytest.raises(InvalidInput) as error:
        load(folder)
    assert str(error.value) == (
        f"{folder}/tokenizer_config.json: the tokenizer has no end-of-sequence token, so that no answer could end or "
        'learn to.\nAdd to it:  "eos_token": "<eos>"   (the model\'s configuration names it)')
    said = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**said, "eos_token": "<eos>"}))
    assert load(folder)[1].eos_token_id == 2


def test_no_end_is_proposed_where_none_is_named(folder):
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    with pytest.raises(InvalidInput, match='Add to it:  "eos_token": "TOKEN"   with the token that ends an answer'):
        load(folder)
