"""Patterns of parameters that stay as they are: which they name, and what is wrong with them, with its line."""

from __future__ import annotations

import pytest

from distflow.config import sizes
from distflow.config.freeze import frozen_names, parameter_sizes
from distflow.config.load import load, load_for_planning
from distflow.errors import InvalidInput
from planners import plan

NAMES = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.10.mlp.up_proj.weight",
         "model.layers.0.self_attn.q_proj.bias", "model.norm.weight"]


@pytest.mark.parametrize(("pattern", "indices"), [
    ("model.embed_tokens.*", [0]), ("embed_tokens.weight", [0]), ("layers.0.*", [1, 3]), ("model.layers.1*", [2]),
    ("*.mlp.*", [1, 2]), ("mlp.*", [1, 2]), ("*.bias", [3]), ("tokens.*", []), ("*", [0, 1, 2, 3, 4])])
def test_a_pattern_begins_at_any_part_of_a_name(pattern, indices):
    assert frozen_names([pattern], NAMES) == [NAMES[index] for index in indices]


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
         "intermediate_size": 64, "vocab_size": 512, "max_position_embeddings": 64, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2}
MIXTURE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
VISION = {"depth": 1, "hidden_size": 32, "embed_dim": 32, "intermediate_size": 32, "num_heads": 2,
          "out_hidden_size": 32, "patch_size": 8, "deepstack_visual_indexes": [0], "num_position_embeddings": 64,
          "fullatt_block_indexes": [0]}


def written(folder, family: str, tied: bool = False):
    """A tiny model of a family in a folder, as transformers loads it from there."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from workers.engines.embedded import build_tokenizer

    sizes = SIZES | (MIXTURE if family.endswith("moe") else {})
    kind, config = AutoModelForCausalLM, {**sizes, "tie_word_embeddings": tied}
    if "_vl" in family:
        kind, config = AutoModelForImageTextToText, {"text_config": sizes, "vision_config": VISION}
    kind.from_config(AutoConfig.for_model(family, **config)).save_pretrained(folder)
    build_tokenizer(["one"]).save_pretrained(folder)
    return kind.from_pretrained(folder)


def of_folder(folder, *patterns: str, dag: str = "grpo.yaml"):
    (folder / "run.yaml").write_text(f"steps: 1\nroles:\n  actor:\n    model: {folder}\n    freeze:\n"
                                     + "".join(f'      - "{each}"\n' for each in patterns)
                                     + "data: {train: arithmetic/train.jsonl}\n")
    return load_for_planning(dag, str(folder / "run.yaml"), [])


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_5_vl", "helium"])
def test_the_parameters_of_a_folder_are_named_as_in_the_loaded_model(tmp_path, family):
    """transformers stacks the experts of files, and puts the language models of Qwen2-VL a level lower."""
    loaded = {name: parameter.numel() for name, parameter in written(tmp_path, family).named_parameters()}
    spec = of_folder(tmp_path, next(reversed(loaded)))
    assert not spec.mistakes
    assert parameter_sizes(spec, "actor") == loaded


@pytest.mark.parametrize(("family", "pattern", "near"), [
    ("qwen3_moe", "experts.0.up_proj.weight", "model.layers.*.mlp.experts.gate_up_proj"),
    ("qwen2_5_vl", "model.layers.0.*", "model.language_model.layers.*.self_attn.*")])
def test_names_of_files_that_loading_changes_are_refused(tmp_path, family, pattern, near):
    written(tmp_path, family)
    (mistake,) = of_folder(tmp_path, "norm.weight", pattern).mistakes
    assert str(mistake).startswith(f"{tmp_path}/run.yaml:7: role `actor`: `freeze` names `{pattern}`")
    assert near in mistake.hint


def test_names_that_are_not_known_before_are_checked_when_the_model_is_loaded(tmp_path, monkeypatch):
    from workers.roles import build_roles

    written(tmp_path, "helium")
    monkeypatch.setattr("distflow.config.sizes._ask", lambda *_: (-1, None))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sizes._answer.cache_clear()
    spec = of_folder(tmp_path, "norm.weight", "model.layers.0.mlps.*")
    assert (spec.mistakes, spec.frozen) == ([], {"actor": 0})
    planned = plan(spec, 1)
    with pytest.raises(InvalidInput) as error:
        build_roles(spec, planned, {"actor"}, {"actor"}, "cpu")
    assert str(error.value).startswith(f"{tmp_path}/run.yaml:7: role `actor`: `freeze` names `model.layers.0.mlps.*`")
    assert "Did you mean `model.layers.*.mlp.*`?" in str(error.value)
    with pytest.raises(InvalidInput, match="names all 21 parameters"):
        build_roles(of_folder(tmp_path, "*"), planned, {"actor"}, {"actor"}, "cpu")
    sizes._answer.cache_clear()


def test_a_copy_says_whose_settings_it_has(tmp_path):
    written(tmp_path, "qwen3")
    (mistake,) = of_folder(tmp_path, "norm.weight", "lm_head.*", dag="ppo.yaml").mistakes
    assert str(mistake).startswith(f"{tmp_path}/run.yaml:7: role `critic`, which has the settings of `actor` since it "
                                   "copies it: `freeze` names `lm_head.*`, and its model has no such parameter")
    assert mistake.hint == "Give it settings of its own:  roles: {critic: {…, freeze: []}}"
    (mistake,) = of_folder(tmp_path, "lm_heads.*", dag="ppo.yaml").mistakes
    assert "role `actor`: `freeze` names `lm_heads.*`" in str(mistake)
    assert "Did you mean `lm_head.weight`?" in mistake.hint


@pytest.mark.parametrize(("changes", "says"), [
    (["roles.actor.freeze=[norm.weight, model.embed_token.*]"],
     ("names `model.embed_token.*`, and its model has no such parameter", "Did you mean `model.embed_tokens.*`?")),
    (["roles.actor.freeze=model.layer.0.mlp.*"], ("Did you mean `model.layers.*.mlp.*`?",)),
    (['roles.actor.freeze="*"'], ("names all 35 parameters",)),
    (["roles.actor.freeze=norm.weight", "roles.actor.lora={rank: 4}"], ("has `freeze` and `lora`",)),
    (["roles.actor.freeze=norm.weight", "roles.actor.engine=megatron"], ("wants `engine: megatron` and `freeze`",)),
    (["roles.reference.freeze=norm.weight"], ("DAG `grpo` does not train it",)),
], ids=["no such", "layer", "all", "lora", "megatron", "frozen"])
def test_what_freezes_nothing_or_all_is_refused_with_its_line(changes, says):
    with pytest.raises(InvalidInput) as caught:
        plan(load("grpo.yaml", None, changes), 2)
    text = str(caught.value)
    assert all(part in text for part in says), text
    assert any(str(mistake).startswith((f"--set {changes[0]}: role", f"--set {changes[-1]}: role"))
               for mistake in caught.value.mistakes), text


def test_a_copy_with_the_settings_of_another_freezes_the_same_if_it_is_trained():
    spec = load("ppo.yaml", None, ["roles.actor.freeze=model.layers.0.*"])
    assert spec.frozen["actor"] == spec.frozen["critic"] > 0
    assert "reference" not in spec.frozen


def test_memory_counts_gradients_and_state_of_what_is_trained():
    before, after = ({item.name: item.bytes for item in plan(load("grpo.yaml", None, changes), 2).memory}
                     for changes in ([], ["roles.actor.freeze=[embed_tokens.*, layers.0.*]"]))
    spec = load("grpo.yaml", None, ["roles.actor.freeze=[embed_tokens.*, layers.0.*]"])
    parts = parameter_sizes(spec, "actor")
    frozen, every = spec.frozen["actor"], sum(parts.values())
    assert frozen == sum(size for name, size in parts.items() if "embed" in name or ".0." in name)
    assert before["actor: training state"] == pytest.approx(every * 16 / 2, rel=1e-3)
    assert after["actor: training state"] == pytest.approx((every - frozen) * 16 / 2, rel=1e-3)
    assert after["actor: frozen weights"] == pytest.approx(frozen * 4 / 2, rel=1e-3)
    assert before["actor: weights while computing"] - after["actor: weights while computing"] == frozen * 4
    kept = {item.name: item.bytes for item in plan(spec, 2).host_memory}
    assert kept["actor: snapshots, each rank"] == pytest.approx(2 * (every - frozen) * 12 / 2, rel=1e-3)
