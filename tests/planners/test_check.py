"""Which heads models' folders can give, what they weigh, and which roles must be ready to sample."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import model_folder
from planning import refused

from distflow.config.load import load
from distflow.config.sizes import Shape, shape_of
from distflow.errors import InvalidInput
from planners import plan

CONFIG = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 10, "num_attention_heads": 2,
          "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 16, "tie_word_embeddings": True}
LANGUAGE, CLASSIFIER, CRITIC = "Qwen3ForCausalLM", "Qwen3ForSequenceClassification", "LlamaForTokenClassification"
VALUES = {"role": "critic", "type": "MODEL_INFERENCE", "function": "values", "dependencies": ["sample"],
          "reads": {"responses": "samples"}}
SAMPLE = {"role": "actor", "type": "MODEL_INFERENCE", "function": "sample"}


@pytest.fixture
def folder(tmp_path):
    """`folder(architecture, labels)`: a model folder as far as planning looks at it."""

    def make(architecture: str, labels: int | None = 1, **more) -> str:
        names = {} if labels is None else {"id2label": {str(number): f"L{number}" for number in range(labels)}}
        config = {**CONFIG, "architectures": [architecture], **names, **more}
        return str(model_folder(tmp_path / f"{architecture}{labels}", config))

    return make


def planned(plan_of: Callable, model: str, critic: dict):
    roles = {"actor": {"model": {"architecture": "qwen3"}}, "critic": {"model": model}}
    return plan_of({"sample": SAMPLE, "values": VALUES}, {"critic": critic}, roles=roles)


@pytest.mark.parametrize("architecture", [CLASSIFIER, CRITIC])
def test_a_frozen_head_comes_from_its_folder(plan_of, folder, architecture):
    assert planned(plan_of, folder(architecture), {"head": "value"}).tasks


@pytest.mark.parametrize(("architecture", "labels", "says"), [
    (LANGUAGE, 1, "role `critic` is not trained, and its model has no value head: it would give 0 for everything"),
    (CLASSIFIER, 3, "role `critic` gives one number for each token, and the classifier in its folder 3"),
    (CLASSIFIER, None, "and the classifier in its folder 2"),  # Hugging Face's default
])
def test_a_folder_that_cannot_give_the_head_is_refused(plan_of, folder, architecture, labels, says):
    with refused(says, mistakes=1):
        planned(plan_of, folder(architecture, labels), {"head": "value"})


def test_a_classifier_has_no_vocabulary(plan_of, folder):
    with pytest.raises(InvalidInput, match="role `actor` needs a model with a vocabulary, and its folder holds a"):
        plan_of({}, roles={"actor": {"model": folder(CLASSIFIER)}})


def test_a_value_head_weighs_what_it_is(plan_of, folder):
    untied = {"tie_word_embeddings": False}
    shape = shape_of({**CONFIG, **untied})
    assert shape.with_value_head().parameters == shape_of(CONFIG).parameters + 8
    assert shape_of(CONFIG).with_value_head().parameters == shape_of(CONFIG).parameters + 8
    made = planned(plan_of, folder(CLASSIFIER, **untied), {"head": "value"})
    found = {item.name: item.bytes for item in made.memory}
    assert found["critic: weights"] == -(-(shape_of(CONFIG).parameters + 8) * 4 // 2)
    norms, attention, forward = 2 * 8 * (4 + 2 * 4), 4 * (3 * 8 + 2 * 4), 4 * 4 * 16
    assert found["critic: activations"] == 16384 * (norms + attention + forward + 12 * 1)


def test_the_shape_of_a_value_model_is_that_of_the_model_itself():
    from workers.engines.embedded import build_model
    from workers.engines.value import with_value_head

    model = build_model(270, 0, architecture="llama", layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32)
    shape = shape_of(model.config.to_dict())
    assert isinstance(shape, Shape)
    assert shape.with_value_head().parameters == sum(weight.numel() for weight in with_value_head(model).parameters())


def test_only_roles_that_sample_get_a_rollout():
    """Pairs from the data repeat rows without sampling any."""
    made = plan(load("dpo"), 2)
    assert not any(task.samples for task in made.tasks)
    assert not any("rollout" in item.name for item in made.memory)
    assert [task.node for task in plan(load("ppo"), 2).tasks if task.samples] == ["rollout"]
