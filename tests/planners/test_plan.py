"""The plan as a whole: its digest, its chains, its price."""

from __future__ import annotations

import json
import time

import pytest
from planning import DIAMOND, LEARN, RUN, node

from distflow.config.load import load
from distflow.plan import Plan
from planners import plan

JUDGE = node("judge", "sample")


def test_equal_inputs_give_equal_digests(plan_of):
    first, second = plan_of(DIAMOND), plan_of(DIAMOND)
    assert first == second
    assert first.digest == second.digest
    assert json.loads(first.to_json())["digest"] == first.digest


CHANGES = {
    "another node": ({**DIAMOND, "judge": JUDGE}, {}),
    "a dependency": ({**DIAMOND, "learn": {**LEARN, "dependencies": ["join"]}}, {}),
    "a setting": ({**DIAMOND, "sample": node("sample", **{"with": {"copies": 3}})}, {}),
    "a name": ({**DIAMOND, "left": node("left", "sample", writes={"left": "l"}),
                "join": node("join", "left", "right", reads={"left": "l"})}, {}),
    "ranks": (DIAMOND, {"ranks": 3}),
    "a layout": (DIAMOND, {"layouts": {"left": {"dp": 1}}}),
    "the batch": (DIAMOND, {"data": {"train": "data.jsonl", "batch": 11}}),
    "the seed": (DIAMOND, {"seed": 1}),
    "steps": (DIAMOND, {"steps": 2}),
    "a learning rate": (DIAMOND, {"roles": {"actor": {"model": {"architecture": "qwen3"}, "learning_rate": 1e-5}}}),
    "a model": (DIAMOND, {"roles": {"actor": {"model": {"architecture": "qwen3", "layers": 4}}}}),
    "a model of other make": (DIAMOND, {"roles": {"actor": {"model": {"architecture": "qwen2"}}}}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_digest_differs_when_anything_differs(plan_of, change):
    nodes, more = CHANGES[change]
    assert plan_of(nodes, **more).digest != plan_of(DIAMOND).digest


def test_digest_does_not_say_where_files_lie(plan_of, tmp_path):
    data = {"train": str(tmp_path / "data.jsonl"), "batch": 10, "max_prompt_tokens": 30, "max_target_tokens": 20}
    assert plan_of(DIAMOND, data=data, output="elsewhere").digest == plan_of(DIAMOND).digest


def hundred(layers: int = 20) -> tuple[dict, dict]:
    """A DAG of 100 nodes in five columns, over five roles, each node behind two others."""
    roles = {f"role{index}": {"copy_of": "actor"} for index in range(1, 5)}
    nodes = {"sample": node("sample"), "learn": {**LEARN, "dependencies": ["judge_18_4"]}}
    for layer in range(layers):
        for column in range(5):
            before = [f"judge_{layer - 1}_{column}", f"judge_{layer - 1}_{(column + 1) % 5}"] if layer else ["sample"]
            name, role = f"judge_{layer}_{column}", f"role{column}" if column else "actor"
            nodes[name] = node("judge", *before, role=role, writes={f"{role}_scores": name})
    del nodes["judge_19_3"], nodes["judge_19_4"]
    return nodes, roles


def test_a_hundred_nodes_on_a_thousand_ranks(spec_of):
    nodes, roles = hundred()
    began = time.process_time()
    made = plan(spec_of(nodes, roles), 1024)
    chains = [made.chain(rank) for rank in range(1024)]
    assert time.process_time() - began < 30
    assert len(made.tasks) == len(nodes) == 100
    assert made.tasks[0].layout.dp == 1024
    assert len({id(chain) for chain in chains}) == 1, "what is alike for all ranks is there once"


def test_ranks_outside_a_layout_still_have_its_task_for_the_rows_they_send(plan_of):
    made = plan_of(DIAMOND, ranks=4, layouts={"join": {"dp": 1}})
    (join,) = [task for task in made.chain(3) if task.node == "join"]
    assert (join.layout.share(0), join.layout.share(3)) == (0, None)


@pytest.mark.parametrize("rank", [-1, 2])
def test_there_are_no_chains_for_other_ranks(plan_of, rank):
    made: Plan = plan_of(DIAMOND)
    with pytest.raises(ValueError, match=f"rank {rank} of a plan for 2 ranks"):
        made.chain(rank)


def test_a_model_without_training_is_warned_about(plan_of):
    first, second = plan_of(DIAMOND, data={**RUN["data"], "max_prompt_tokens": 1000}).notes
    assert first.startswith("role `actor` starts from random weights")
    assert second.startswith("role `actor` may generate up to 1,256 tokens")
    assert second.endswith("but its model was made for 1,024")


def test_what_an_environment_begins_with_counts(tmp_path, monkeypatch):
    (tmp_path / "mazes.py").write_text("from distflow import environment\n\n@environment\nclass Maze:\n"
                                       "    def start(self): ...\n    def step(self, text): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    short, long = (next(note for note in plan(load("grpo_tools", None, [
        "data.max_prompt_tokens=300", "roles.actor.generation.max_new_tokens=20", "nodes.rollout.with.max_tokens=700",
        f"nodes.rollout.with.environment={kind}"]), 2).notes if "may generate" in note)
        for kind in ("Calculator", "mazes:Maze"))
    assert "up to 320 tokens (data.max_prompt_tokens + generation.max_new_tokens)" in short
    assert "up to 1,020 tokens" in long
    assert "+ max_tokens, by which `start` may lengthen a prompt)" in long


def test_a_reference_that_changes_nothing_is_noted():
    spec = load("grpo", None, ["nodes.update.with.kl=0"])
    note = "node `update` reads `reference_logprobs`, which changes nothing: its setting `kl` is 0"
    assert note in plan(spec, 2).notes
    assert not any("changes nothing" in note for note in plan(load("grpo"), 2).notes)
