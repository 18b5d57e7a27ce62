"""`distflow demo`: a tiny model gets a weak start by supervised fine-tuning and then learns arithmetic by GRPO."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from distflow.cli.common import torchrun
from distflow.observe.folder import choose

HELP = "watch a tiny model learn arithmetic, on two CPU cores"
_WIDTH = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", default="runs", help="folder of the two runs")


def main(options: argparse.Namespace) -> int:
    common = ["--set", f"seed={options.seed}", "--set", f"output={options.output}"]
    start = choose(options.output, "demo-sft", None)
    code = torchrun(options.ranks, ["--dag", "sft.yaml", "--run-file", "embedded_sft.yaml", "--name", start.name,
                                    *common])
    if code:
        return code
    folder = choose(options.output, "demo-grpo", None)
    code = torchrun(options.ranks, ["--dag", "grpo.yaml", "--run-file", "embedded.yaml", "--name", folder.name,
                                    "--set", f"roles.actor.model={start / 'model'}", *common])
    if not code:
        print("\n".join(_curve(folder)))
    return code


def _curve(folder: Path) -> Iterator[str]:
    """Held-out accuracy over the steps, as bars."""
    summary = json.loads((folder / "summary.json").read_text())
    yield f"\nheld-out accuracy of {folder}"
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        if "validation/heldout" in values:
            accuracy = values["validation/heldout"]
            yield f"  step {values['step']:4d}  {accuracy:.3f}  {'█' * round(_WIDTH * accuracy)}"
    yield (f"\n{summary['accuracy_before']:.3f} → {summary['accuracy_after']:.3f} in {summary['steps']} steps of GRPO, "
           f"{summary['tokens_per_second']:,.0f} sampled tokens a second on {summary['ranks']} ranks")
