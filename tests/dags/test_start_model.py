"""The model that the default runs start from, and what the first command of a user makes of it."""

import pytest
from harness import ROOT, command, environment, metrics_of

from distflow.config.load import load
from distflow.config.shipped import SHIPPED, START_MODEL

FOLDER = SHIPPED / "models" / START_MODEL


def test_start_model_has_the_tokenizer_and_the_sizes_of_a_tiny_architecture():
    """So that a role with random weights can learn from it."""
    from workers.engines.loading import load_model

    (shipped, tokens), (tiny, others) = (load_model(spec, spec.run.roles["actor"].model) for spec in (
        load("grpo"), load("grpo", None, ["roles.actor.model={architecture: qwen3}"])))
    assert tokens.get_vocab() == others.get_vocab()
    assert tokens.chat_template == others.chat_template
    assert tokens.encode("Ada has 12 pens.") == others.encode("Ada has 12 pens.")
    assert {name: each.shape for name, each in shipped.named_parameters()} == \
        {name: each.shape for name, each in tiny.named_parameters()}
    assert FOLDER.joinpath("model.safetensors").stat().st_size < 2_000_000


def test_start_model_says_where_it_comes_from():
    card = (FOLDER / "README.md").read_text()
    for word in ("make start-model", "seed 0", "demonstrations.jsonl", "held-out", "license: apache-2.0"):
        assert word in card
    assert f"{START_MODEL}/*" in (ROOT / "setup.cfg").read_text()


@pytest.mark.parametrize("dag", ["grpo", "ppo", "dpo", "solver_reviser", "evaluate"])
def test_default_runs_start_from_it(dag):
    assert load(dag).run.roles["actor"].model.path == START_MODEL


def test_first_command_of_a_user_learns(tmp_path, ready):
    """`torchrun distflow/launch.py --dag grpo.yaml`, its first 60 steps on two ranks."""
    line = command(2, "--dag", "grpo.yaml", "--name", "first", "--set", "steps=60", "--set", "validation=null")
    done = ready.run(0, line[1:], tmp_path, environment(), timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    rewards = [values["reward/mean"] for _, values in sorted(metrics_of(tmp_path / "runs/first").items())]
    assert len(rewards) == 60
    assert sum(rewards[-10:]) / 10 >= 0.45, rewards
    assert '"dtype": "float32"' in (tmp_path / "runs/first/model/config.json").read_text(), "of the trainer's weights"
