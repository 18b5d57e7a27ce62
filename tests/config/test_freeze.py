"""Patterns of parameters that stay as they are: which they name, and what is wrong with them, with its line."""

from __future__ import annotations

import pytest

from distflow.config.freeze import frozen_names, parameter_sizes
from distflow.config.load import load, load_for_planning
from distflow.config.run import Model
from distflow.errors import InvalidInput
from planners import plan

NAMES = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.10.mlp.up_proj.weight",
         "model.layers.0.self_attn.q_proj.bias", "model.norm.weight"]


@pytest.mark.parametrize(("pattern", "indices"), [
    ("model.embed_tokens.*", [0]), ("embed_tokens.weight", [0]), ("layers.0.*", [1, 3]), ("model.layers.1*", [2]),
    ("*.mlp.*", [1, 2]), ("mlp.*", [1, 2]), ("*.bias", [3]), ("tokens.*", []), ("*", [0, 1, 2, 3, 4])])
def test_a_pattern_begins_at_any_part_of_a_name(pattern, indices):
    assert frozen_names([pattern], NAMES) == [NAMES[index] for index in indices]


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama", "qwen3_vl", "qwen3_moe"])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_the_parameters_of_tiny_architectures_are_known_before_they_are_built(architecture, head):
    from workers.engines.embedded import build_model
    from workers.engines.value import with_value_head

    if (architecture, head) == ("qwen3_vl", "value"):
        pytest.skip("its classifier is another class, with other names")
    dag = "ppo.yaml" if head == "value" else "grpo.yaml"
    text = f"{{architecture: {architecture}, layers: 2, hidden: 64, heads: 2, kv_heads: 1}}"
    spec = load_for_planning(dag, None, [f"roles.actor.model={text}"])
    model = Model(architecture=architecture, layers=2, hidden=64, heads=2, kv_heads=1)
    sizes = {**model.model_dump(exclude={"path", "experts", "experts_per_token"}), "mixture": model.mixture}
    built = build_model(512, 0, **sizes)
    built = with_value_head(built) if head == "value" else built
    known = parameter_sizes(spec, "critic" if head == "value" else "actor")
    assert known == {name: parameter.numel() for name, parameter in built.named_parameters()}


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


def test_a_line_of_a_run_file_is_shown(tmp_path):
    (tmp_path / "run.yaml").write_text("steps: 1\nroles:\n  actor:\n    model: {architecture: qwen3}\n    freeze:\n"
                                       "      - norm.weight\n      - lm_heads.*\n"
                                       "data: {train: arithmetic/train.jsonl}\n")
    with pytest.raises(InvalidInput, match=r"run\.yaml:7: role `actor`: `freeze` names `lm_heads\.\*`"):
        plan(load("grpo.yaml", str(tmp_path / "run.yaml")), 1)


def test_a_copy_with_the_settings_of_another_freezes_the_same_if_it_is_trained():
    spec = load("ppo.yaml", None, ["roles.actor.freeze=model.layers.0.*"])
    assert spec.frozen["actor"] == spec.frozen["critic"] > 0
    assert "reference" not in spec.frozen


def test_memory_counts_gradients_and_state_of_what_is_trained():
    before, after = ({item.name: item.bytes for item in plan(load("grpo.yaml", None, changes), 2).memory}
                     for changes in ([], ["roles.actor.freeze=[embed_tokens.*, layers.0.*]"]))
    spec = load("grpo.yaml", None, ["roles.actor.freeze=[embed_tokens.*, layers.0.*]"])
    sizes = parameter_sizes(spec, "actor")
    frozen, every = spec.frozen["actor"], sum(sizes.values())
    assert frozen == sum(size for name, size in sizes.items() if "embed" in name or ".0." in name)
    assert before["actor: training state"] == pytest.approx(every * 16 / 2, rel=1e-3)
    assert after["actor: training state"] == pytest.approx((every - frozen) * 16 / 2, rel=1e-3)
    assert after["actor: frozen weights"] == pytest.approx(frozen * 4 / 2, rel=1e-3)
    assert before["actor: weights while computing"] - after["actor: weights while computing"] == frozen * 4
    kept = {item.name: item.bytes for item in plan(spec, 2).host_memory}
    assert kept["actor: snapshots, each rank"] == pytest.approx(2 * (every - frozen) * 12 / 2, rel=1e-3)
