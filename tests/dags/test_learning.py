"""Every shipped algorithm moves its own metric in the right direction on the embedded task, in a real run.

All start from the small model that is shipped. The same few problems come in every step, so that a step's metric
differs from the first one's by what was learnt and by little else.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import ROOT, environment, metrics_of
from ready import Ready

PROBLEMS, ENDS = 24, 3
"""How many problems there are; and the steps at each end of a run whose means are compared."""

FEW = """
seed: 0
steps: 12
roles:
  actor:
    model: arithmetic_sft
    learning_rate: 3e-4
    generation: {max_new_tokens: 24}
data: {train: few.jsonl, batch: 24, max_prompt_tokens: 64, max_target_tokens: 64}
checkpoint: {every: 0}
"""


PAIRS = "data.columns=[chosen, rejected]"


@dataclass(frozen=True)
class Case:
    """A DAG, shipped or a path, whose `metric` rises by more than `by`, or falls by more if that is negative. In
    `settings`, TEACHER is the folder of a model that knows the answers."""

    dag: str
    metric: str = "reward/mean"
    by: float = 0.1
    settings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return Path(self.dag).name


CASES = [
    Case("sft", "loss", -0.05),
    Case("grpo"),
    Case("grpo", settings=("roles.actor.lora={rank: 16}", "roles.actor.learning_rate=3e-3")),
    Case("dr_grpo", settings=("nodes.update.with.fixed_length=24", "steps=16")),
    Case("dapo", settings=("nodes.rollout.with.group_size=8",)),
    Case("gspo"),
    Case("cispo"),
    Case("rloo"),
    Case("reinforce_pp", settings=("nodes.rollout.with.group_size=8",)),
    Case("remax", "reward/mean/reward", settings=("nodes.rollout.with.group_size=8", "steps=16")),
    Case("pf_ppo"),
    Case("ppo"),
    Case("online_dpo"),
    Case("dpo", "preference/margin", 0.5, settings=(PAIRS,)),
    Case("reward_model", "preference/margin", 0.2,
         settings=(PAIRS, "roles={reward: {model: arithmetic_sft, learning_rate: 3e-4}}")),
    Case("distill", "distillation/reverse_kl", -0.1, settings=("roles.teacher={model: TEACHER}",)),
    Case("gkd", "distillation/divergence", -0.004,
         settings=("roles.teacher={model: TEACHER}", "roles.second={model: arithmetic_sft}")),
    Case("solver_reviser", "reward/mean/revised", 0.06, settings=("roles.reviser.learning_rate=3e-4",)),
    Case(str(ROOT / "examples/opo/opo")),
]


def run(ready: Ready, folder: Path, *arguments: str) -> None:
    done = ready.run(1, arguments, folder, environment())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


@pytest.fixture(scope="session")
def teacher(ready, tmp_path_factory):
    """The shipped model after it has seen the answers."""
    folder = tmp_path_factory.mktemp("teacher")
    prepare(folder)
    run(ready, folder, "--dag", "sft.yaml", "--run-file", "few.yaml", "--name", "sft")
    return folder / "runs/sft/model"


def prepare(folder: Path) -> None:
    """The few problems (with pairs of answers), and a run file."""
    problems = (ROOT / "dags/data/arithmetic/preferences.jsonl").read_text().splitlines()[:PROBLEMS]
    (folder / "few.jsonl").write_text("\n".join(problems) + "\n")
    (folder / "few.yaml").write_text(FEW)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_learns(case, ready, teacher, tmp_path):
    prepare(tmp_path)
    settings = [setting.replace("TEACHER", str(teacher)) for setting in case.settings]
    run(ready, tmp_path, "--dag", f"{case.dag}.yaml", "--run-file", "few.yaml", "--name", "run",
        *(word for setting in settings for word in ("--set", setting)))
    values = [step[case.metric] for step in metrics_of(tmp_path / "runs/run").values()]
    change = (sum(values[-ENDS:]) - sum(values[:ENDS])) / ENDS
    assert change > case.by if case.by > 0 else change < case.by, values


def test_every_shipped_dag_has_a_case():
    """But for one that trains nothing, and one that test_tools.py has."""
    others = {"evaluate", "grpo_tools"}
    assert {path.stem for path in (ROOT / "dags").glob("*.yaml")} - others == {str(case) for case in CASES} - {"opo"}
