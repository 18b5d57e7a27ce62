"""One DAG in each mode: samples per second of `async` and `semi_sync` against `sync`, where tools have a long tail.

`grpo_tools.yaml` on the embedded task, from one start model for all, 2 ranks in every mode, one thread each, on the
CPU: in sync both sample and both train; in async one samples and one trains, with weights pulled between them; in
semi_sync one samples, and one does both, or (alone) both do both. The modes take turns; repeat `i` uses seed `i`. Each
run makes equally many updates, each of 32 prompts with 8 conversations.

The tool is a calculator that answers after a while (see slow_tools.py): lognormally distributed, median 0.1 s, sigma
1.2, so that one call of a hundred takes 1.6 s. A conversation has one to four turns. The seconds depend on what was
said only, so that no mode has luckier tools than another. To wait for a tool costs no processor. How much asynchrony
brings depends on how long the tail is against what is computed; here a step of sync waits for tools for a good half of
its time (it is printed), and without any latency async brings nothing on two cores that are always busy. Responses have
their natural lengths, 5 to 50 tokens: no length is made up.

What is timed are the steps between the first ones and the last ones: at the beginning samples are made ahead, and at
the end none are, so that neither lasts as long as a step usually does. There is no validation meanwhile. Held-out
accuracy is measured afterwards, in conversations with the same calculator at temperature 0 and without latency; `async`
and `sync` agree if zero lies in the 95% interval (Student's t over the seeds) of the difference. Beside that, no token
may be older than the staleness that was asked for.

TRL 1.16 cannot run beside this on a CPU: the trainer's side of its vLLM server refuses a device other than CUDA
(`VLLMClient.init_communicator` raises NotImplementedError), and its `AsyncGRPOTrainer` hands weights over by vLLM's
NCCL engine alone; what it exchanges on the way, adapters as files, needs no NCCL, but is another training.
Run by hand:  python -m benchmarks.modes
"""

from __future__ import annotations

import statistics
import tempfile
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import yaml

from benchmarks.ratio import add_size, conclude, interleaved, interval_of, options, parsed, ratios
from benchmarks.runs import ROOT, run_once, steps_of
from distflow.config.run import Run

RANKS, GROUP = 2, 8
GOALS = {"async": 1.5, "semi_sync": 1.5}
AHEAD = {"semi_sync": 1, "semi_sync, unordered": 1, "semi_sync, alone": 1, "semi_sync, alone, unordered": 1,
         "async, 3 ahead": 3, "async, unordered": 1, "async": 1}
"""Staleness by side. Unordered: on_stale: drop. Alone: no rank only samples, both train."""


@dataclass(frozen=True)
class Course:
    """What a run has left: its metrics, step by step, and how good the model is afterwards."""

    steps: list[dict[str, Any]]
    rows: int
    """Samples of a step."""
    accuracy: float

    def samples_per_second(self, skip: int) -> float:
        """Over all steps but the first and the last ones."""
        timed = self.steps[skip:-skip]
        return self.rows * len(timed) / sum(step["seconds"] for step in timed)

    def ages(self) -> dict[int, float]:
        """Return how many tokens were so many versions old when they were trained on."""
        found: Counter[int] = Counter()
        for step in self.steps:
            found.update({int(name.rpartition("/")[2]): value for name, value in step.items()
                          if name.startswith("staleness/tokens/")})
        return dict(sorted(found.items()))


class Contest:
    """Runs of all modes from one start model."""

    def __init__(self, given: Namespace, scratch: Path):
        self.given, self.scratch = given, scratch
        self.dag, self.exam = scratch / "slow.yaml", scratch / "exam.yaml"
        tools = yaml.safe_load((ROOT / "dags/grpo_tools.yaml").read_text())
        talk = tools["nodes"]["rollout"]["with"]
        talk |= {"environment": "benchmarks.slow_tools:SlowCalculator", "group_size": GROUP, "step_seconds": 120.0,
                 "environment_settings": {"median": given.median, "sigma": given.sigma}}
        self.dag.write_text(yaml.safe_dump(tools))
        quiz = {"role": "actor", "type": "MODEL_INFERENCE", "function": "converse",
                "with": {**{name: talk[name] for name in ("max_turns", "max_tokens")}, "environment": "Calculator"}}
        self.exam.write_text(yaml.safe_dump({"name": "exam", "roles": {"actor": {}}, "nodes": {"rollout": quiz}}))
        self.model = given.start_model.resolve() if given.start_model else self._start_model()

    def run(self, side: str, seed: int) -> Course:
        mode, given = side.partition(",")[0], self.given
        apart = () if mode == "sync" else (
            f"groups.rollout={int('alone' not in side)}", f"staleness={AHEAD[side]}",
            f"on_stale={'drop' if 'unordered' in side else 'wait'}")
        name = f"{side.replace(', ', '-').replace(' ', '-')}-{seed}"
        folder = run_once(self.scratch, name, self.dag, "embedded.yaml", RANKS, (
            "checkpoint.every=0", f"mode={mode}", *apart, *self.settings(seed, given.updates)))
        course = Course(steps_of(folder), given.prompts * GROUP, self._accuracy(folder))
        waits = course.steps[len(course.steps) // 2].get("environment/idle_seconds")
        idle = "" if waits is None else f", of a step's {course.steps[len(course.steps) // 2]['seconds']:.2f} s the " \
                                        f"busiest rank waits {waits:.2f} s for tools"
        print(f"seed {seed}, {side}: {course.samples_per_second(given.skip):.1f} samples/s, accuracy "
              f"{course.accuracy:.3f}, tokens by staleness {course.ages()}{idle}", flush=True)
        return course

    def settings(self, seed: int, updates: int) -> tuple[str, ...]:
        """Return the settings of every run."""
        return (f"seed={seed}", f"steps={updates}", f"data.batch={self.given.prompts}",
                f"roles.actor.model={self.model}", "roles.actor.generation.batch_rows=2048", "validation=null")

    def _accuracy(self, folder: Path) -> float:
        done = run_once(self.scratch, f"exam-{folder.name}", self.exam, "embedded_evaluate.yaml", 1,
                        (f"roles.actor.model={folder / 'model'}", "roles.actor.generation.batch_rows=256"))
        return steps_of(done)[0]["environment/reward"]

    def _start_model(self) -> Path:
        """Train a weak start model: it has seen few conversations with a calculator. Return its folder."""
        made = run_once(self.scratch, "start", ROOT / "dags/sft.yaml", "embedded_sft.yaml", RANKS, (
            "data.train=arithmetic/tool_demonstrations.jsonl", "data.batch=48", "validation=null",
            f"steps={30 if self.given.quick else 120}"))
        return made / "model"


def judge(courses: Sequence[dict[str, Course]], side: str, skip: int) -> bool:
    """Print how one side fared against sync, and its last line."""
    gap, half = interval_of([pair[side].accuracy - pair["sync"].accuracy for pair in courses])
    agree = half is None or abs(gap) <= half
    print(f"held-out accuracy, {side} minus sync: {gap:+.3f} " + (
        "(too few seeds to judge)" if half is None else f"± {half:.3f}: {'the same' if agree else 'NOT the same'}"))
    oldest = max(step.get("staleness/max", 0.0) for pair in courses for step in pair[side].steps)
    bounded = oldest <= AHEAD[side]
    print(f"oldest token of {side}: {oldest:.0f} versions, {'within' if bounded else 'BEYOND'} {AHEAD[side]}")
    speed = ratios(courses, side, "sync", lambda course: course.samples_per_second(skip))
    return conclude(f"samples per second of {side} (staleness {AHEAD[side]}) over sync, long-tailed tools", speed,
                    GOALS[side.partition(",")[0]], holds=agree and bounded)


def contest_options(description: str, updates: tuple[int, int], median: float, repeats: int = 7) -> ArgumentParser:
    """Return the flags of benchmarks that make runs as `Contest` does. `updates`: usually, and with `--quick`."""
    parser = options(description, repeats)
    add_size(parser, "updates", *updates, "of each run")
    add_size(parser, "prompts", 32, 8, "of an update")
    parser.add_argument("--median", type=float, default=median, help="seconds of a call of a tool")
    parser.add_argument("--sigma", type=float, default=1.2, help="of the logarithm of a call's seconds")
    parser.add_argument("--start-model", type=Path, help="a model folder; default: it is trained first")
    return parser


def main(arguments: list[str] | None = None) -> None:
    parser = contest_options(__doc__, (40, 4), 0.1)
    parser.add_argument("--sides", nargs="*", choices=AHEAD, help="what is compared with sync; default: all")
    add_size(parser, "skip", 5, 1, "first and last updates that are not timed")
    given = parsed(parser, arguments)
    if given.updates <= 2 * given.skip:
        parser.error(f"--updates {given.updates} leaves nothing to time between {given.skip} first and last ones")
    modes = get_args(Run.model_fields["mode"].annotation)
    sides = [side for side in given.sides or AHEAD if side.partition(",")[0] in modes]
    sides = sides[-1:] if given.quick else sides
    with tempfile.TemporaryDirectory(prefix="modes-") as scratch:
        contest = Contest(given, Path(scratch))
        courses = interleaved({side: partial(contest.run, side) for side in ("sync", *sides)}, given.repeats)
    print("held-out accuracy: " + ", ".join(
        f"{side} {statistics.mean(pair[side].accuracy for pair in courses):.3f}" for side in courses[0]))
    for side in sides:
        judge(courses, side, given.skip)


if __name__ == "__main__":
    main()
