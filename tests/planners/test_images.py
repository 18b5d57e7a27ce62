"""Images in a plan: who must read them, what they weigh, and what the model that sees weighs."""

import pytest

from distflow.config.load import load
from distflow.config.run import Model
from distflow.config.sizes import shape_of, shape_of_embedded
from distflow.errors import InvalidInput
from distflow.plan import SOURCE
from planners import plan

VISION = "embedded_vision.yaml"


def test_images_move_with_the_prompts_that_show_them():
    """32 rows of 48 tokens: 8 bytes each as a prompt, 16 × 16 pixels of 3 bytes each as an image."""
    tasks = {task.node: task for task in plan(load("grpo.yaml", VISION, ["layouts.reference.dp=1"]), 2).tasks}
    reads = {node: [column.name for column in task.reads if column.producer == SOURCE] for node, task in tasks.items()}
    assert all("images" in reads[node] for node in ("rollout", "reference", "update"))
    (edge,) = (each for each in tasks["reference"].transfers if each.producer == SOURCE)
    assert edge.columns == ("prompts", "images")
    assert edge.bytes_per_step == 32 * 48 * (8 + 16 * 16 * 3)
    blind = plan(load("grpo.yaml"), 2).tasks
    assert not any(column.name == "images" for task in blind for column in task.reads)


@pytest.mark.parametrize(("dag", "change", "says"), [
    ("dpo.yaml", "data.columns=[chosen, rejected]", "reads prompts without the images that `data.images` gives"),
    ("grpo.yaml", "data.columns=[images]", "`data.columns` names `images`, but every dataset gives a column of that"),
    ("grpo.yaml", "roles.reference={model: {architecture: qwen3}}", "the model of role `reference` takes none"),
])
def test_what_cannot_be_shown_is_refused(dag, change, says):
    with pytest.raises(InvalidInput, match=says):
        plan(load(dag, VISION, [change]), 2)


def test_a_model_that_sees_is_weighed():
    """What the estimate leaves out (biases, norms and places of the part that sees) is little."""
    from workers.engines.embedded import build_model

    made = build_model(512, 0, architecture="qwen3_vl", layers=2)
    counted, estimated = shape_of(made.config.to_dict()), shape_of_embedded(Model(architecture="qwen3_vl", layers=2))
    assert counted.parameters == estimated.parameters
    assert counted.token_pixels == estimated.token_pixels == 256
    assert counted.parameters == pytest.approx(sum(weight.numel() for weight in made.parameters()), rel=0.02)
    assert (counted.layers, counted.kv_width, counted.positions) == (2, 64, 256)
