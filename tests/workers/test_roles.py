"""Loading a role's model and tokenizer."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from engines.families import build
from safetensors.torch import load_file, save_file
from training import role_of
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
)

from distflow.config.run import Data, Lora, Model, RoleRun
from distflow.errors import InvalidInput
from workers.engines.chat import imitated_tokens
from workers.engines.embedded import build_tokenizer
from workers.engines.role_engines import RoleEngines, load_model
from workers.engines.value import ValueModel


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


def load(folder, head="lm"):
    run = SimpleNamespace(data=Data(train=""))
    return load_model(SimpleNamespace(folder=folder, run=run), Model(path=str(folder)), head)


def role_from(source, lora=None) -> RoleEngines:
    return role_of(*load(source), RoleRun(lora=lora, learning_rate=1e-3), source, samples=False)


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


@pytest.mark.parametrize("kind", [Qwen3ForSequenceClassification, Qwen3ForTokenClassification])
def test_a_folder_with_a_head_gives_it_and_one_without_gives_zeros(tmp_path, model, kind):
    """Sequence classifiers are the usual reward models; classifiers of tokens, whose head has a bias, are critics."""
    tokenizer = build_tokenizer(["one"])
    for name in ("language", "valued"):
        tokenizer.save_pretrained(tmp_path / name)
    model.save_pretrained(tmp_path / "language")
    assert not load(tmp_path / "language", "value")[0].score.weight.any()
    model.config.num_labels = 1
    valued = kind(model.config).float()
    torch.nn.init.normal_(valued.score.weight)
    if valued.score.bias is not None:
        torch.nn.init.constant_(valued.score.bias, 0.25)
    valued.save_pretrained(tmp_path / "valued")
    loaded, _ = load(tmp_path / "valued", "value")
    assert type(loaded) is kind
    for (name, weight), given in zip(valued.named_parameters(), loaded.parameters()):
        assert torch.equal(weight, given), name
    tokens = torch.tensor([[7, 8, 9]])
    inputs = (tokens[:, :1], torch.tensor([1]), torch.tensor([0]), tokens[:, 1:], torch.tensor([2]))
    states = loaded.eval().base_model(tokens).last_hidden_state[0]
    values, scores = ValueModel(loaded)(*inputs)
    assert torch.allclose(torch.cat([values, scores]), loaded.score(states).squeeze(-1), atol=1e-5)


def test_no_end_is_proposed_where_none_is_named(folder):
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    with pytest.raises(InvalidInput, match='Add to it:  "eos_token": "TOKEN"   with the token that ends an answer'):
        load(folder)


def family_folder(folder, family, tensors=(), **settings):
    """A folder of a tiny model with further tensors and other settings."""
    build(family).save_pretrained(folder)
    build_tokenizer(["one"]).save_pretrained(folder)
    save_file(load_file(folder / "model.safetensors") | dict(tensors), folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder


SCALES = {"model.layers.1.mlp.up_proj.weight_scale_inv": torch.ones(1, 1), "lm_head.weight_scale_inv": torch.ones(1)}
MASKS = {f"transformer.h.{layer}.attn.{name}": torch.ones(1, 1, 8, 8) for layer in (0, 1)
         for name in ("bias", "masked_bias")}
UNUSED = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8), "v_head.summary.weight": torch.ones(1, 64),
          "model.layers.2.eh_proj.weight": torch.ones(64, 128)}


@pytest.mark.parametrize(("family", "tensors", "settings", "odd"), [
    ("qwen2", {}, {"model_type": "llama"}, "a LlamaForCausalLM does not compute: model.*k_proj.bias"),
    ("qwen3", {}, {"model_type": "llama"}, "compute: model.layers.0.self_attn.k_norm.weight"),
    ("llama", SCALES, {}, "compute: lm_head.weight_scale_inv, model.layers.1.mlp.up_proj.weight_scale_inv"),
    ("llama", UNUSED, {}, ""), ("gpt2", MASKS, {}, "")])
def test_weights_that_a_layer_does_not_read_are_refused(tmp_path, family, tensors, settings, odd):
    """The model was trained with them; transformers leaves them out with a warning."""
    folder = family_folder(tmp_path, family, tensors, **settings)
    if odd:
        with pytest.raises(InvalidInput, match=odd):
            load(folder)
    else:
        load(folder)


@pytest.mark.parametrize(("settings", "says"), [
    ({"num_hidden_layers": 3}, "is no whole LlamaForCausalLM: .* 9 of its weights: model.layers.2"),
    ({"rope_parameters": {"rope_type": "unheard-of"}}, "transformers cannot read .* \\(KeyError: 'unheard-of'\\)")])
def test_a_folder_that_is_no_model_of_its_configuration_is_refused(tmp_path, settings, says):
    with pytest.raises(InvalidInput, match=says):
        load(family_folder(tmp_path, "llama", **settings))


def test_weights_with_a_prefix_are_refused_with_it(tmp_path):
    """As saved from within `torch.compile`."""
    folder = family_folder(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    save_file({f"_orig_mod.{name}": each for name, each in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(InvalidInput, match=r"It has `_orig_mod.lm_head.weight`: take `_orig_mod\.` out of all names"):
        load(folder)


def test_an_end_that_is_no_number_is_refused(alone, tmp_path):
    folder = family_folder(tmp_path, "llama")
    (folder / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    with pytest.raises(InvalidInput, match='generation_config.json: `eos_token_id` holds "</s>", which is no number'):
        role_from(folder)


def test_an_answer_with_an_end_that_the_models_folder_names_gets_no_second_one(alone, tmp_path, model):
    tokenizer = build_tokenizer(["one"])
    end = tokenizer.convert_tokens_to_ids("!")
    tokenizer.chat_template = tokenizer.chat_template.replace(tokenizer.eos_token, "")  # it ends no answer
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, end]}))
    role = role_from(tmp_path)
    assert role.known_ends == [2, end]
    for text, tokens in (("7!", tokenizer.encode("7!")), ("7", [*tokenizer.encode("7"), 2])):
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
        assert imitated_tokens(role.tokenizer, talk, known_ends=role.known_ends).target[-2:] == tokens


def test_save_pretrained_copies_tokenizer_files_that_transformers_does_not_write(alone, tmp_path, model):
    source, saved = tmp_path / "source", tmp_path / "model"
    model.save_pretrained(source)
    build_tokenizer(["one"]).save_pretrained(source)
    config = json.loads((source / "tokenizer_config.json").read_text())
    (source / "chat_template.jinja").unlink()
    config |= {"chat_template": "{{ messages[0]['content'] }} \ud83d"}  # half an emoji
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    role_from(source).save_pretrained(saved)
    assert load(saved)[1].chat_template == config["chat_template"]


@pytest.mark.parametrize(("config", "generation"), [
    ({}, '{"do_sample": false, "temperature": 0.6, "top_p": 0.9}\r\n'), ({}, '{"early_stopping": true}'),
    ({}, '{"eos_token_id": [2, 4], "own": {"kept": 1}}'), ({}, '{"pad_token_id": -1}'), ({"temperature": 0.6}, None),
    ({"own": {"kept": [1]}, "torch_dtype": "float16"}, None)])
@pytest.mark.parametrize("lora", [None, Lora(rank=2)])
def test_save_pretrained_writes_a_generation_config_that_transformers_refuses(alone, tmp_path, model, config,
                                                                              generation, lora):
    source, saved = tmp_path / "source", tmp_path / "run/model"
    model.save_pretrained(source)
    build_tokenizer(["one"]).save_pretrained(source)
    written = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(written | config))
    (source / "generation_config.json").unlink()
    if generation:
        (source / "generation_config.json").write_bytes(generation.encode())
    role = role_from(source, lora)
    (saved / "older").mkdir(parents=True)
    role.save_pretrained(saved)
    if generation:
        assert (saved / "generation_config.json").read_bytes() == generation.encode()
    else:
        before, after = (GenerationConfig.from_pretrained(source, config_file_name="config.json"),
                         GenerationConfig.from_pretrained(saved))
        assert (after.temperature, after.do_sample) == (before.temperature, before.do_sample)
    own = json.loads((saved / "config.json").read_text())
    assert own.get("own") == config.get("own")
    assert AutoModelForCausalLM.from_pretrained(saved).config.vocab_size == model.config.vocab_size
    assert load(saved)[1].eos_token_id == 2
    assert not (saved / "older").exists()
    assert sorted(path.name for path in saved.parent.iterdir()) == ["adapter", "model"][lora is None:]
