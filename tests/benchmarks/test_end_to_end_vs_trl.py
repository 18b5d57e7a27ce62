import json

import pytest
import yaml

from benchmarks.end_to_end_vs_trl import Curve, difference, drawn, peer_config, without_reference
from distflow.config.load import load
from distflow.config.shipped import SHIPPED
from distflow.config.yaml_source import read
from planners import plan


@pytest.fixture
def spec(tmp_path):
    dag = tmp_path / "grpo.yaml"
    dag.write_text(yaml.safe_dump(without_reference(read(SHIPPED / "grpo.yaml", "grpo.yaml").data)))
    return load(str(dag), "embedded.yaml", ["steps=3", "seed=4", "validation=null"])


def test_the_shipped_dag_plans_without_its_reference(spec):
    chain = [task.node for task in plan(spec, 2).tasks]
    assert chain == ["rollout", "reward", "advantage", "update"]
    assert spec.dag.nodes["update"].settings["kl"] == 0


def test_the_peer_gets_distflows_settings(spec):
    config, actor = peer_config(spec), spec.run.roles["actor"]
    assert (config["max_steps"], config["seed"], config["num_generations"]) == (3, 4, 8)
    assert config["learning_rate"] == actor.learning_rate
    assert config["max_completion_length"] == actor.generation.max_new_tokens
    json.dumps(config)


def test_a_setting_that_the_peer_would_not_get_is_refused(spec):
    spec.dag.nodes["update"].settings["dual_clip"] = 3.0
    with pytest.raises(SystemExit, match="dual_clip"):
        peer_config(spec)


def test_the_peers_prompts_are_those_of_every_step_in_order(spec):
    records = drawn(spec)
    assert len(records) == 3 * spec.run.data.batch
    assert records == drawn(spec)
    assert len({record["question"] for record in records}) > spec.run.data.batch
    assert set(records[0]) == {"question", "answer"}


@pytest.mark.parametrize(("gaps", "mean", "half"), [
    ([0.1, 0.3], 0.2, None),
    ([0.0, 0.1, 0.2], 0.1, 4.303 * 0.1 / 3**0.5),
    ([-0.1, 0.1] * 12, 0.0, 2.0 * (0.24 / 23) ** 0.5 / 24**0.5),
])
def test_difference_of_curves(gaps, mean, half):
    pairs = [{"distflow": Curve([1], [1], [0.5 + gap]), "trl": Curve([1], [1], [0.5])} for gap in gaps]
    found, interval = difference(pairs)
    assert found == pytest.approx(mean)
    assert interval == (None if half is None else pytest.approx(half))
