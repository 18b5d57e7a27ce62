"""What each shipped algorithm makes of the embedded task: held-out accuracy before and after, over seeds.

For each seed a weak start is made (supervised fine-tuning on a hasty teacher's answers), and every algorithm goes on
from it with the same model, problems and number of steps: `dags/runs/embedded.yaml`, and what CASES says.
Run by hand:  python -m benchmarks.algorithms --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.ratio import Spread, conclude
from benchmarks.runs import ROOT, run_once

BATCH, MEASURE = 32, "validation/heldout"


@dataclass(frozen=True)
class Case:
    """A shipped DAG, and what it needs beyond the common run. The teacher is what `grpo` made with the same seed."""

    dag: str
    settings: tuple[str, ...] = ()
    run_file: str = "embedded.yaml"


CASES = [
    Case("grpo"), Case("dr_grpo", ("nodes.update.with.fixed_length=24",)),
    Case("dapo", ("nodes.rollout.with.group_size=8", "nodes.overlong.with.max_length=24")),
    Case("gspo"), Case("cispo", ("nodes.rollout.with.group_size=8",)), Case("rloo"),
    Case("reinforce_pp", ("nodes.rollout.with.group_size=8",)), Case("remax", ("nodes.rollout.with.group_size=8",)),
    Case("pf_ppo"), Case("ppo", ("roles.critic.learning_rate=1e-3",)),
    Case("dpo", ("nodes.update.with.beta=0.5",), "embedded_dpo.yaml"), Case("online_dpo"),
    Case("distill", ("roles.teacher.model=grpo",)), Case("solver_reviser"),
]


def launch(folder: Path, name: str, dag: str, run_file: str, settings: list[str]) -> dict[int, float]:
    """Run a DAG on one rank; return the held-out accuracy by step."""
    run_once(folder, name, Path(f"{dag}.yaml"), run_file, 1, ("checkpoint.every=0", *settings))
    lines = [json.loads(text) for text in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return {values["step"]: values[MEASURE] for values in lines if MEASURE in values}


def study(case: Case, seed: int, steps: int, folder: Path, every: int) -> dict[int, float]:
    """Held-out accuracy of one algorithm, before it and each so many steps."""
    settings = [setting.replace("=grpo", f"={folder / f'grpo-{seed}/model'}") for setting in case.settings]
    return launch(folder, f"{case.dag}-{seed}", case.dag, case.run_file, [
        f"seed={seed}", f"steps={steps}", f"validation.every={every}", f"data.batch={BATCH}", *settings,
        f"roles.actor.model={folder / f'weak-{seed}/model'}"])


def lines_of(dag: str) -> int:
    """Lines of a DAG that are no comment."""
    text = (ROOT / "dags" / f"{dag}.yaml").read_text().splitlines()
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", nargs="+", choices=[case.dag for case in CASES], help="these algorithms")
    parser.add_argument("--at-once", type=int, default=2, help="runs beside each other, one core each")
    parser.add_argument("--quick", action="store_true", help="one seed, grpo alone, five steps")
    parser.add_argument("--curves", metavar="FILE", help="write the accuracy after each tenth of the steps there, for "
                        "docs/algorithms/, which has benchmarks/results/algorithms.json")
    parser.add_argument("--output", help="folder for the runs; weak starts and teachers that lie there are used again; "
                        "default: one that is removed")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps, options.only = [0], 5, ["grpo"]
    chosen = [case for case in CASES if not options.only or case.dag in options.only]
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(options.at_once) as pool:
        folder = Path(options.output or place).absolute()
        missing = [seed for seed in options.seeds if not (folder / f"weak-{seed}").exists()]
        list(pool.map(lambda seed: launch(folder, f"weak-{seed}", "sft", "embedded_sft.yaml", [
            f"seed={seed}", *["steps=20"] * options.quick]), missing))
        first = [case for case in chosen if "=grpo" not in str(case.settings)]
        found, curves = {}, {}
        every = max(options.steps // 10, 1) if options.curves else options.steps
        for cases in (first, [case for case in chosen if case not in first]):  # a teacher must have been trained
            jobs = [(case, seed) for case in cases for seed in options.seeds]
            results = pool.map(lambda job: study(*job, options.steps, folder, every), jobs)
            for (case, seed), curve in zip(jobs, results):
                curves.setdefault(case.dag, {})[str(seed)] = curve
                before, after = found[case.dag, seed] = curve[0], curve[options.steps]
                print(f"{case.dag} seed {seed}: {before:.3f} → {after:.3f}", file=sys.stderr, flush=True)
    if options.curves:
        Path(options.curves).write_text(json.dumps(curves, indent=1) + "\n")
    report(chosen, options, found)


def report(chosen: list[Case], options: argparse.Namespace, found: dict[tuple[str, int], tuple[float, float]]) -> None:
    print(f"| algorithm | lines | {' | '.join(f'seed {seed}' for seed in options.seeds)} |")
    print("|---|---|" + "---|" * len(options.seeds))
    for case in chosen:
        cells = [f"{before:.3f} → {after:.3f}" for before, after in (found[case.dag, seed] for seed in options.seeds)]
        print(f"| `{case.dag}` | {lines_of(case.dag)} | {' | '.join(cells)} |")
    gains = {case.dag: [after - before for before, after in (found[case.dag, seed] for seed in options.seeds)]
             for case in chosen}
    least = min(gains, key=lambda dag: median(gains[dag]))
    conclude(f"gain in held-out accuracy of the algorithm that gains least ({least}) in {options.steps} steps",
             Spread.of(gains[least]), 0.05, unit="accuracy", holds=min(gains[least]) >= 0.05)


if __name__ == "__main__":
    main()
