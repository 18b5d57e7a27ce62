"""Stage fusion on and off: samples per second where the step's generation has a long tail.

The task, its slow tools and the ranks are those of modes.py, with a reference: `grpo_tools.yaml` and a node whose
frozen model looks at every answer before the update. Without fusion it does so when the last prompt of the step has
come; with it, of each prompt as it comes. With staleness 0 both sides sample and train the same. That is checked in
runs of their own, in which each row is sampled alone: rows that a rollout samples together, which is a matter of time,
round otherwise, so that two of the measured runs may part after some steps, with fusion or without.

What can be won is the reference's part of a step, where training waits for samples: all but the last part of it is
hidden. So the reference is deeper than the policy: `--layers`. Its part of a step is printed. What is computed in the
tail is computed beside the rollout's own decoding: on processors that others use too, each slows the other, and the
ratio can fall below 1.
Run by hand:  python -m benchmarks.stage_fusion
"""

from __future__ import annotations

import json
import statistics
import tempfile
from argparse import Namespace
from functools import partial
from pathlib import Path

import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.modes import RANKS, Contest, contest_options, run_once, steps_of
from benchmarks.ratio import add_size, conclude, interleaved, parsed, ratios

GOAL = 1.1
MODES = ("async", "semi_sync")
EQUAL = 6
"""Steps of a run that shows that both sides are the same."""


class Trial(Contest):
    """Runs of `modes.Contest` with a reference."""

    def __init__(self, given: Namespace, scratch: Path):
        super().__init__(given, scratch)
        dag = yaml.safe_load(self.dag.read_text())
        dag["roles"]["reference"] = {}
        dag["nodes"]["reference"] = {"role": "reference", "type": "MODEL_INFERENCE", "function": "logprobs",
                                     "dependencies": ["rollout"]}
        dag["nodes"]["update"]["dependencies"].append("reference")
        dag["nodes"]["update"]["with"]["kl"] = 0.001
        self.dag.write_text(yaml.safe_dump(dag))
        self.reference = scratch / "reference"
        config = AutoConfig.from_pretrained(self.model, trust_remote_code=False, num_hidden_layers=given.layers,
                                            layer_types=["full_attention"] * given.layers)
        AutoModelForCausalLM.from_config(config).save_pretrained(self.reference)
        AutoTokenizer.from_pretrained(self.model, trust_remote_code=False).save_pretrained(self.reference)

    def measure(self, mode: str, fuse: bool, seed: int) -> list[dict[str, float]]:
        """Return the metrics of a run's steps but the first."""
        name = f"{mode}-{'fused' if fuse else 'whole'}-{seed}"
        steps = self._steps(name, mode, fuse, seed, self.given.updates)[1:]
        means = [statistics.mean(step.get(key, 0.0) for step in steps) for key in (
            "seconds", "seconds/reference", "seconds/reference/hidden", "waiting/samples")]
        print(f"seed {seed}, {name}: a step takes {means[0]:.2f} s, the reference {means[1]:.2f} s of that, "
              f"{means[2]:.2f} s while others sample; waiting {means[3]:.2f} s", flush=True)
        return steps

    def are_equal(self, mode: str) -> bool:
        """Return whether both sides sample the same where each row is sampled alone, and have the same losses to
        1e-5."""
        whole, fused = (self._steps(f"{mode}-equal-{fuse}", mode, fuse, 0, EQUAL, "data.batch=8",
                                    "roles.actor.generation.batch_rows=1") for fuse in (False, True))
        same = all(one["response/fingerprint"] == other["response/fingerprint"]
                   and abs(one.get("loss", 0.0) - other.get("loss", 0.0)) <= 1e-5 for one, other in zip(whole, fused))
        print(f"{mode}: both sides are {'the same' if same else 'NOT the same'} in {len(fused)} steps", flush=True)
        return same

    def _steps(self, name: str, mode: str, fuse: bool, seed: int, updates: int, *more: str) -> list[dict[str, float]]:
        folder = run_once(self.scratch, name, self.dag, "embedded.yaml", RANKS, (
            "checkpoint.every=0", f"mode={mode}", "groups.rollout=1", f"staleness={self.given.staleness}",
            f"fuse={str(fuse).lower()}", f"roles.reference.model={self.reference}", *self.settings(seed, updates),
            *more))
        if fuse and not json.loads((folder / "plan.json").read_text())["early"]:
            raise SystemExit("the planner fuses no node of this DAG, so that there is nothing to measure")
        return steps_of(folder)


def main(arguments: list[str] | None = None) -> None:
    parser = contest_options(__doc__, (12, 4), 0.3, repeats=3)
    add_size(parser, "layers", 48, 3, "of the reference; the policy has 3")
    parser.add_argument("--staleness", type=int, default=0)
    given = parsed(parser, arguments)
    with tempfile.TemporaryDirectory(prefix="fusion-") as scratch:
        trial = Trial(given, Path(scratch))
        for mode in MODES[: 1 if given.quick else None]:
            same = given.quick or given.staleness > 0 or trial.are_equal(mode)
            pairs = interleaved({side: partial(trial.measure, mode, side == "fused") for side in ("whole", "fused")},
                                given.repeats)
            speed = ratios(pairs, "fused", "whole", lambda steps: len(steps) / sum(step["seconds"] for step in steps))
            conclude(f"steps per second with stage fusion over without, mode {mode}, staleness {given.staleness}",
                     speed, GOAL, holds=same)


if __name__ == "__main__":
    main()
