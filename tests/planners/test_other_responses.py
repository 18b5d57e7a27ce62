"""A node of a later turn must not take the columns of an earlier turn's responses for those of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from harness import ROOT
from planning import refused

from distflow.config.load import load
from distflow.errors import InvalidInput
from distflow.plan import Plan
from planners import plan


def planned(folder: Path, change) -> Plan:
    """The plan of `solver_reviser` with its nodes changed. The reviser waits for `old`, the solver's policy."""
    dag = yaml.safe_load((ROOT / "dags/solver_reviser.yaml").read_text())
    dag["nodes"]["old"] = {"role": "actor", "type": "MODEL_INFERENCE", "function": "logprobs",
                           "dependencies": ["solve"]}
    dag["nodes"]["ask"]["dependencies"] = ["solved", "old"]
    dag["nodes"]["train_solver"]["dependencies"].append("old")
    change(dag["nodes"])
    (folder / "turns.yaml").write_text(yaml.safe_dump(dag, sort_keys=False))
    return plan(load(str(folder / "turns.yaml"), "embedded"), 2)


def test_an_optional_column_of_other_responses_is_not_there(tmp_path):
    """`actor_logprobs` are the solver's: as the reviser's old policy they would be wrong."""
    tasks = planned(tmp_path, lambda nodes: None).tasks
    read = {task.node: {column.name for column in task.reads} for task in tasks}
    assert "actor_logprobs" in read["train_solver"]
    assert "actor_logprobs" not in read["train_reviser"]


def test_entropies_of_other_responses_are_not_taken(tmp_path):
    def change(nodes):
        nodes["entropies"] = {"role": "actor", "type": "MODEL_INFERENCE", "function": "entropies",
                              "dependencies": ["solve"]}
        for train in ("train_solver", "train_reviser"):
            nodes[train]["dependencies"].append("entropies")
            nodes[train]["with"] = {**nodes[train].get("with", {}), "entropy_quantile": 0.8}

    with refused("node `train_reviser`: setting `entropy_quantile` needs column `actor_entropies`", mistakes=1):
        planned(tmp_path, change)


def test_a_reward_that_also_reads_tokens_must_read_those_of_its_text(tmp_path):
    reward = {"reward": {"math": 1.0, "length": {"cap": 20}}}
    with refused("node `revised` reads column `revised_texts` of node `revise` and column `responses` of node "
                 "`solve`, which are not of the same responses",
                 "Instead:  revised: {…, reads: {responses: revisions}}", mistakes=1):
        planned(tmp_path, lambda nodes: nodes["revised"].update({"with": reward}))
    reads = {"completions": "revised_texts", "responses": "revisions"}
    assert planned(tmp_path, lambda nodes: nodes["revised"].update({"with": reward, "reads": reads})).tasks


def test_a_term_that_would_need_the_columns_of_other_responses_is_refused(tmp_path):
    def change(nodes):
        nodes["old"] |= {"writes": {"actor_logprobs": "reference_logprobs"}}
        nodes["train_reviser"]["with"] = {"kl": 0.1}

    with pytest.raises(InvalidInput, match="node `train_reviser`: setting `kl` needs column"):
        planned(tmp_path, change)
