"""`distflow demo`: a tiny model learns arithmetic by GRPO, on request after a supervised start of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distflow.cli.common import Verb
from distflow.cli.launcher import torchrun
from distflow.telemetry.run_folder import choose
from distflow.telemetry.run_reader import RunReader

_WIDTH, _SHOWN = 40, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200, help="steps of GRPO")
    parser.add_argument("--sft", action="store_true",
                        help="train the start too, from random weights, instead of taking the one that is shipped")
    parser.add_argument("--output", default="runs", help="folder of the runs")


def main(options: argparse.Namespace) -> int:
    common = ["--set", f"seed={options.seed}", "--set", f"output={options.output}"]
    if options.sft:
        start = choose(options.output, "demo-sft", None)
        print("SFT: a tiny model with random weights imitates a hasty teacher, who is often wrong.", flush=True)
        code = torchrun(options.ranks, ["--dag", "sft.yaml", "--run-file", "embedded_sft.yaml", "--name", start.name,
                                        *common])
        if code:
            return code
        common += ["--set", f"roles.actor.model={start / 'model'}"]
    folder = choose(options.output, "demo-grpo", None)
    print("GRPO: a tiny model that imitates a hasty teacher gets better at arithmetic, by rewards for its own answers.",
          flush=True)
    code = torchrun(options.ranks, ["--dag", "grpo.yaml", "--run-file", "embedded.yaml", "--name", folder.name,
                                    "--set", f"steps={options.steps}", *common])
    if not code:
        print("\n".join([*_curve(folder), *_answers(folder), *_further(folder)]))
    return code


def _curve(folder: Path) -> Iterator[str]:
    summary = RunReader(folder).summary
    yield f"\nheld-out accuracy of {folder}"
    for each in summary["accuracy"]["heldout"]:
        yield f"  step {each['step']:4d}  {each['accuracy']:.3f}  {'█' * round(_WIDTH * each['accuracy'])}"
    yield (f"\n{summary['accuracy_before']:.3f} → {summary['accuracy_after']:.3f} in {summary['steps']} steps of GRPO, "
           f"{summary['tokens_per_second']:,.0f} sampled tokens a second on {summary['ranks']} ranks")


def _answers(folder: Path) -> Iterator[str]:
    by_step: dict[int, dict[int, dict[str, Any]]] = {}
    for line in RunReader(folder).rows("validation"):
        by_step.setdefault(line["step"], {})[line["row"]] = line
    before, after = by_step[min(by_step)], by_step[max(by_step)]
    yield "\nthe first held-out questions, and the model's answers before and after GRPO"
    for row in sorted(before)[:_SHOWN]:
        yield f"\n  {before[row]['questions']}"
        for when, each in (("before", before[row]), ("after", after[row])):
            verdict = "right" if each["rewards"] == 1 else "wrong"
            yield f"    {when:<6}  {verdict}  {' '.join(each['completions'].split())}"


def _further(folder: Path) -> Iterator[str]:
    distflow, tensorboard = _command("distflow"), _command("tensorboard")
    yield "\nwhere to look next"
    for line, what in ((f"{tensorboard} --logdir {folder.parent}", "curves and samples; docs/metrics.md explains them"),
                       (f"less {folder / 'samples.jsonl'}", "what was sampled, its rewards and advantages"),
                       (f"{distflow} evaluate {folder} --samples 8", "pass@8 with a confidence interval"),
                       (f"{distflow} plan grpo --ranks 2", "what each rank did, and what moved between them"),
                       ("less README.md", "your own model, data, reward and algorithm")):
        yield f"  {line}\n      {what}"


def _command(name: str) -> str:
    """Return how to call a command from here: the one beside this program, else its name alone."""
    beside = Path(sys.argv[0]).with_name(name)
    return str(beside) if beside.exists() else name


VERBS = {"demo": Verb("watch a tiny model learn arithmetic, on two CPU cores", add_arguments, main)}
