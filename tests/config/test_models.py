"""Adapters in the run file: mistakes are found, and parameters counted, before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distflow.config.load import load, load_for_planning
from distflow.config.models import base_of, matched
from distflow.config.run import Model
from distflow.config.sizes import VOCABULARY, embedded_config
from distflow.config.spec import Spec
from distflow.data.checks import check_data
from distflow.errors import InvalidInput
from planners import plan

ROOT = Path(__file__).resolve().parents[2]
RUN = """
steps: 1
roles:
  actor:
    model: {architecture: qwen3, layers: 2, hidden: 64, heads: 2, kv_heads: 1}
    lora: LORA
data: {train: arithmetic/train.jsonl}
"""


def spec_of(tmp_path: Path, lora: str) -> Spec:
    (tmp_path / "run.yaml").write_text(RUN.replace("LORA", lora))
    return load("grpo.yaml", str(tmp_path / "run.yaml"))


@pytest.mark.parametrize(("lora", "says"), [
    ("{rank: 0}", "`roles.actor.lora.rank` must be greater than 0, not 0"),
    ("{alpha: -1}", "`roles.actor.lora.alpha` must be greater than 0"),
    ("{ranks: 4}", "Did you mean `rank`? Known: rank, alpha, targets."),
    ("{targets: []}", "`roles.actor.lora.targets` must have at least 1 item"),
    ("{targets: [q_proj, v_prj]}", "no linear layer of its model is called `v_prj`"),
    ("{targets: v_prj}", "Did you mean `v_proj`? Layers: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, "
     "v_proj, all-linear."),
    ("16", "`roles.actor.lora` must be a mapping, not 16"),
])
def test_what_cannot_be_meant_is_said(tmp_path, lora, says):
    with pytest.raises(InvalidInput) as caught:
        plan(spec_of(tmp_path, lora), 2)
    assert says in str(caught.value)
    assert len(caught.value.mistakes) == 1


def test_a_frozen_role_has_no_adapters(tmp_path):
    (tmp_path / "run.yaml").write_text(RUN.replace("LORA", "{rank: 4}"))
    with pytest.raises(InvalidInput, match="role `reference` has `lora`, but DAG `grpo` does not train it"):
        plan(load("grpo.yaml", str(tmp_path / "run.yaml"), ["roles.reference.lora={rank: 4}"]), 2)


@pytest.mark.parametrize(("lora", "counted"), [
    ("{rank: 4, targets: [q_proj, v_proj]}", 2 * 4 * (64 + 64 + 64 + 32)),
    ("{rank: 2, targets: mlp.up_proj}", 2 * 2 * (64 + 192)),
    ("{rank: 3}", 2 * 3 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 192))),
])
def test_parameters_are_counted_by_hand(tmp_path, lora, counted):
    assert spec_of(tmp_path, lora).adapters == {"actor": counted}


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_vl", "qwen3_moe"])
def test_a_tiny_model_has_the_parts_that_are_built(architecture):
    from transformers import AutoConfig

    from workers.engines.description import shapes_of
    from workers.engines.embedded import build_model

    sizes = Model(architecture=architecture, layers=2, hidden=64, heads=2, kv_heads=1)
    model = build_model(VOCABULARY, 0, architecture=architecture, layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32,
                        mixture=sizes.mixture)
    described = next(shapes_of(AutoConfig.for_model(**embedded_config(sizes))))
    assert described.weights == {name: weight.numel() for name, weight in model.named_parameters()}
    assert described.linears == {name: module.in_features + module.out_features
                                 for name, module in model.named_modules()
                                 if name != "lm_head" and hasattr(module, "in_features")}
    assert len(matched(["layers.1.self_attn.q_proj"], described.linears)) == 1


@pytest.mark.parametrize(("more", "owner"), [
    ("", "actor"), ("{micro_batch_tokens: 99}", "actor"), ("{model: {architecture: qwen3}}", None)])
def test_a_reference_without_a_model_of_its_own_shares_the_base(tmp_path, more, owner):
    run = "  reference: " + more if more else ""
    (tmp_path / "run.yaml").write_text(RUN.replace("LORA", "{rank: 4}").replace("data:", f"{run}\ndata:"))
    spec = load("grpo.yaml", str(tmp_path / "run.yaml"))
    assert base_of(spec, "reference") == owner
    assert base_of(spec, "actor") is None
    said = [note for note in plan(spec, 1).notes if "what the run file says of `reference` changes nothing" in note]
    assert bool(said) == bool(more and owner)


TEMPLATE = "{% for tool in tools %}{{ tool }}{% endfor %}"


@pytest.mark.parametrize(("files", "options", "says"), [
    ({"chat_template.jinja": TEMPLATE}, ["tools=tools"], ""),
    ({"chat_template.jinja": TEMPLATE}, ["chat_template_kwargs={enable_thinking: false}"],
     "does not know `enable_thinking`"),
    ({"tokenizer_config.json": {"chat_template": TEMPLATE}}, ["tools=tools"], ""),
    ({"tokenizer_config.json": {"chat_template": [{"name": "default", "template": TEMPLATE}]}}, ["tools=tools"], ""),
    ({"tokenizer_config.json": {"chat_template": TEMPLATE}, "chat_template.jinja": "none"}, ["tools=tools"],
     "does not know `tools`"),
    ({"tokenizer_config.json": {"chat_template": "none"}, "additional_chat_templates/tool_use.jinja": TEMPLATE},
     ["tools=tools"], ""),
    ({"tokenizer_config.json": {}}, ["tools=tools"], "is missing"),
    ({"tokenizer_config.json": {}, "chat_template.json": {"chat_template": TEMPLATE}}, ["tools=tools"], ""),
    ({"tokenizer_config.json": {}, "processor_config.json": {"chat_template": TEMPLATE}},
     ["chat_template_kwargs={effort: low}"], "does not know `effort`"),
    ({"chat_template.jinja": "{{ effort }}"}, ["chat_template_kwargs={effort: low}"], ""),
    ({"chat_template.jinja": "{{ effort }}"}, ["chat_template_kwargs={efort: low}"],
     "`data.chat_template_kwargs.efort` would change nothing: the chat template of role `actor` does not know `efort`"),
    ({"tokenizer_config.json": {}}, [], ""),
    ({}, ["tools=tools"], ""),
    (None, ["tools=tools"], "does not know `tools`"),
    ({"chat_template.jinja": "{{ ['Hi', 'Hello'] |random }}"}, [], "the chat template of role `actor` draws at random"),
    ({"chat_template.jinja": "{{ random }} || randomly"}, [], ""),
])
def test_options_that_the_chat_template_ignores_are_found_in_the_files(tmp_path, files, options, says):
    settings = [f"data.{option}" for option in options]
    if files is not None:
        (tmp_path / "model").mkdir()
        for name, content in files.items():
            (tmp_path / "model" / name).parent.mkdir(exist_ok=True)
            (tmp_path / "model" / name).write_text(content if isinstance(content, str) else json.dumps(content))
        settings.append(f"roles.actor.model={tmp_path / 'model'}")
    spec = load_for_planning("grpo.yaml", None, settings)
    found = [str(mistake) for mistake in spec.mistakes if "chat template" in str(mistake)]
    assert [says in found[0]] == [True] if says else found == []


REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"


@pytest.mark.parametrize(("template", "options", "says"), [
    (REFUSES, ["system_prompt=Be brief."], "refuses these messages: no system role.\nTake it out, and ask for the same "
     "behind each question:  data: {prompt_suffix: \" Be brief.\"}"),
    (REFUSES, [], ""), ("{{ messages[0].role }}", ["system_prompt=Be brief."], ""),
    (REFUSES.replace("system'", "user'"), [], "refuses these messages: no system role.\n\n    1 |  "),
    (f"{{% generation %}}{REFUSES}{{% endgeneration %}}", ["system_prompt=Be brief."], "no system role"),
    (REFUSES + "{{ broken", ["system_prompt=Be brief."], ""),
    (f"{{{{ {'(' * 5000}1{')' * 5000} }}}}", [], ""), ("{{ 1 // 0 }}{# raise_exception #}", [], "")])
def test_what_a_chat_template_refuses_is_known_before_the_start(tmp_path, template, options, says):
    (tmp_path / "chat_template.jinja").write_text(template)
    settings = [f"roles.actor.model={tmp_path}", *(f"data.{option}" for option in options)]
    spec = load_for_planning("grpo.yaml", None, settings)
    try:
        check_data(spec)
        found = ""
    except InvalidInput as error:
        found = str(error)
    assert says in found if says else not found


@pytest.mark.parametrize("template", [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "{{ 'a' * 10 ** 10 }}",
    "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}"])
def test_chat_templates_that_do_not_end_are_refused_in_bounded_time_and_memory(tmp_path, template):
    (tmp_path / "chat_template.jinja").write_text(template)
    spec = load_for_planning("grpo.yaml", None, [f"roles.actor.model={tmp_path}"])
    with pytest.raises(InvalidInput, match="chat_template.jinja: the chat template of role `actor` takes more than "
                       "3 s or 512 MiB for the messages of .*: it may not end"):
        check_data(spec)


@pytest.mark.parametrize(("added", "rows", "says"), [
    ({"<end>": 2}, 3, ""), ({"<image_soft_token>": 3}, 3, ""), ({"<end>": 2}, 300, ""),
    ({"<end>": 2, "<more>": 3}, 3, "has 1 tokens beyond the 3 rows of the model's embedding, such as '<more>'")])
@pytest.mark.parametrize("within", [lambda rows: {"vocab_size": rows},
                                    lambda rows: {"text_config": {"vocab_size": rows}}])
def test_tokens_without_a_row_of_the_embedding_are_refused(tmp_path, added, rows, says, within):
    model = tokenizer(tmp_path / "model", {"a": 0, "b": 1}, added)
    (tmp_path / "model" / "config.json").write_text(json.dumps(within(rows)))
    spec = load_for_planning("grpo.yaml", None, [f"roles.actor.model={model}"])
    found = [str(mistake) for mistake in spec.mistakes if "embedding" in str(mistake)]
    assert (len(found) == 1 and says in found[0]) if says else not found


@pytest.mark.parametrize(("file", "rows", "refused"), [
    ({"pad_token": "[PAD]"}, 2, True), ({"pad_token": {"content": "[PAD]"}}, 2, True),
    ({"eos_token": "</eos>"}, 3, False),
    ({"unk_token": "<unk>", "response_token": "###"}, 2, False),
    ({"pad_token": "b", "add_bos_token": True}, 2, False), ({"pad_token": None, "boi_token": "<image>"}, 2, False)])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_special_tokens_without_a_row_of_the_embedding_are_refused(tmp_path, file, rows, refused, name):
    """Transformers adds `[PAD]` of older fine-tunes to the vocabulary: the first row that was padded ended the run."""
    model = tokenizer(tmp_path / "model", {"a": 0, "b": 1}, {})
    (tmp_path / "model" / "config.json").write_text(json.dumps({"vocab_size": rows}))
    (tmp_path / "model" / name).write_text(json.dumps(file))
    spec = load_for_planning("grpo.yaml", None, [f"roles.actor.model={model}"])
    assert any("tokens beyond the" in str(mistake) for mistake in spec.mistakes) == refused


def test_special_tokens_of_a_map_that_transformers_does_not_read_are_none(tmp_path):
    model = tokenizer(tmp_path / "model", {"a": 0, "b": 1}, {})
    for name, content in (("config", {"vocab_size": 2}), ("special_tokens_map", {"pad_token": "[PAD]"}),
                          ("tokenizer_config", {"pad_token": "b", "added_tokens_decoder": {}})):
        (tmp_path / "model" / f"{name}.json").write_text(json.dumps(content))
    spec = load_for_planning("grpo.yaml", None, [f"roles.actor.model={model}"])
    assert not any("tokens beyond the" in str(mistake) for mistake in spec.mistakes)


def tokenizer(folder: Path, words: dict[str, int] | list[list], added: dict[str, int]) -> str:
    folder.mkdir()
    special = [{"id": number, "content": word} for word, number in added.items()]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}, "added_tokens": special}))
    return str(folder)


@pytest.mark.parametrize(("words", "added", "odd"), [
    ({"a": 0, "b": 1}, {"<end>": 2}, ""), ({"b": 1, "a": 0}, {"<end>": 2, "<more>": 3}, ""),
    ([["a", -1.0], ["b", -2.0]], {}, ""), ({"b": 0, "a": 1}, {"<end>": 2}, "'a'"),
    ({"a": 0, "b": 1}, {"<stop>": 2}, "'<end>'")])
def test_a_teacher_with_another_tokenizer_is_refused(tmp_path, words, added, odd):
    folders = {"actor": tokenizer(tmp_path / "one", {"a": 0, "b": 1}, {"<end>": 2}),
               "teacher": tokenizer(tmp_path / "two", words, added)}
    spec = load_for_planning("distill.yaml", None, [f"roles.{role}.model={path}" for role, path in folders.items()])
    found = [str(mistake) for mistake in spec.mistakes if "tokenizers" in str(mistake)]
    assert len(found) == bool(odd)
    assert not odd or "roles `actor` and `teacher` have different tokenizers" in found[0]
    assert not odd or f"(first difference: {odd})" in found[0]


def test_sizes_of_a_tiny_architecture_are_refused_beside_a_folder():
    with pytest.raises(InvalidInput, match="`layers` is a size of a tiny `architecture`"):
        load("grpo", None, ["roles.actor.model={path: arithmetic_sft, layers: 2}"])
