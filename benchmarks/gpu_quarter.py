"""A quarter of an hour on one GPU: a real model learns, TRL beside it, and what other projects publish figures for.

Parts run in the order of their worth, each in processes with a limit in seconds. What fails or takes too long is said,
and the next part begins. Where `--minutes` are too few for all, parts are cut in the order of `CUT`, and named.
    recipe      SFT of 100 steps and GRPO of 150 steps with 64 prompts × 16 answers: curve, tokens/s, minutes, preflight
    trl         TRL beside it: the same model, data, reward and rows (`end_to_end_vs_trl.py`); its wheel on PYTHONPATH
    prime-rl    training steps of Qwen3-0.6B's shape on rows of 8,192 to 65,536 tokens (`as_published.py`)
    nano-vllm   decoding of 256 requests of Qwen2.5-0.5B's and Qwen3-0.6B's shape
    vllm        GRPO of a whole 0.5B sampled by vLLM, which sleeps while it trains, and the same sampled by `hf`
    lora        a training step of Qwen3-4B's shape with adapters of rank 16 on rows of 16,384 tokens
    families    models with sinks, caps, windows and experts, in bfloat16, against plain transformers in float32
`make gpu` has the other parts, in 24 minutes:
    tests       those that need a GPU
    runs        a few steps with each setting, mode and engine; a kill, a resume
    whole       GRPO of a whole 0.5B, and of a whole 7B with adapters
    figures     throughput, MFU, memory and reshard time (`gpu.py`)
Run by hand:  python -m benchmarks.gpu_quarter --model FOLDER --tasks FOLDER
`--model` is SmolLM2-135M-Instruct, `--tasks` has the recipe's train.jsonl and heldout.jsonl in a folder of its name;
the defaults are those that examples/recipes makes. Without a GPU:  --device cpu --quick  shows that every part runs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.gpu import RESULTS, Report, device_options, has_device
from benchmarks.gpu_session import (
    QUICK,
    SHORT_RUNS,
    WHOLE_RUNS,
    Run,
    Session,
    figures_of,
    is_installed,
    say_versions,
    setting,
)
from benchmarks.ratio import options, parsed
from benchmarks.recipes import GRPO_SETTINGS, MODEL, RUNS
from benchmarks.runs import run_command, with_set
from distflow.telemetry.run_reader import RunReader

PUBLISHED = {"recipe": 240, "trl": 120, "prime-rl": 110, "nano-vllm": 110, "vllm": 150, "lora": 50, "families": 60}
BUDGET = PUBLISHED | {"tests": 120, "runs": 720, "whole": 300, "figures": 300}
"""Part → seconds, in the order in which they run."""
CUT = ("families", "lora", "vllm", "nano-vllm", "prime-rl", "trl", "tests", "whole", "figures", "runs")
"""What is left out first."""
MINUTES, PATIENCE = 14.0, 10.0
"""PATIENCE: how many times the budget a part may take in a dry run on a CPU."""
FAMILIES = ("gpt_oss", "gemma2", "gemma3_text", "mistral", "qwen3", "qwen3_moe")
VLLM = Run("vllm", (*WHOLE_RUNS["0.5B"].settings, *setting("rollout=vllm"), *setting("swap=true"),
                    *setting("generation.memory_share=0.5")), shape="0.5B", needs="vllm", seconds=BUDGET["vllm"] * 0.6)


def fitting(names: Sequence[str], minutes: float) -> list[str]:
    """Return the parts that `minutes` are enough for; parts are cut in the order of `CUT`."""
    kept = list(names)
    for name in CUT:
        if sum(BUDGET[each] for each in kept) <= 60 * minutes:
            break
        kept = [each for each in kept if each != name]
    return kept


def curve_of(folder: Path) -> Iterator[str]:
    """Yield accuracies and mean rewards of a run by its steps, its minutes, and the seconds of its preflight."""
    reader = RunReader(folder)
    steps = reader.steps()
    for name in ("validation/heldout", "reward/mean", "loss"):
        points = [(int(values["step"]), values[name]) for values in steps if name in values]
        every = max(1, len(points) // 12)
        if points:
            yield f"{name} by steps: {', '.join(f'{step} {value:.3f}' for step, value in points[::every])}"
    yield f"{reader.summary['wall_seconds'] / 60:.1f} minutes, {reader.summary['seconds_in_steps'] / 60:.1f} in steps"
    for event in reader.rows("events"):
        if event["event"] == "preflight":
            yield f"preflight took {sum(event['seconds'].values()):.2f} s: {event['seconds']}"


class Quarter:
    """The parts, each a method or a command."""

    def __init__(self, session: Session, given: argparse.Namespace):
        self.session, self.given, self.device = session, given, given.device
        self.start = given.model
        self.parts: dict[str, Callable[[], object]] = {
            "recipe": self.recipe, "trl": self.trl, "vllm": self.vllm, "runs": self.short_runs,
            "tests": self.tests, "whole": self.whole, "figures": self.figures,
            "prime-rl": lambda: self.module("prime-rl", "gpu", "--as", "prime-rl", *self.shapes("Qwen3-0.6B")),
            "lora": lambda: self.module("lora", "gpu", "--as", "prime-rl", *self.shapes("Qwen3-4B")),
            "nano-vllm": lambda: self.module("nano-vllm", "gpu", "--as", "nano-vllm",
                                             *self.shapes("0.5B", "Qwen3-0.6B")),
            "families": lambda: self.module(
                "families", "families", *(FAMILIES[:2] if given.quick else FAMILIES), "--results",
                str(session.work / "families.json"), "--dtype", "bfloat16" if self.device == "cuda" else "float32")}

    def shapes(self, *names: str) -> list[str]:
        return ["--repeats", "1", "--shape", *(["tiny"] if self.given.quick else names)]

    def module(self, name: str, module: str, *words: str) -> bool:
        """Run a benchmark as a part; its lines are results."""
        return self.session.part(name, self.limit(BUDGET[name]), [
            sys.executable, "-m", f"benchmarks.{module}", *words, "--device", self.device], keep=True)

    def limit(self, seconds: float) -> float:
        return seconds if self.device == "cuda" else seconds * PATIENCE

    def recipe(self) -> None:
        """SFT, and GRPO from there; TRL begins there, too."""
        held_out, quick = self.given.tasks / self.given.recipe / "heldout.jsonl", self.given.quick
        if quick:
            few, held_out = held_out.read_text().splitlines(keepends=True)[:4], self.session.work / "heldout.jsonl"
            held_out.write_text("".join(few))
        common = [f"validation.data.heldout={held_out}", f"validation.every={1 if quick else 25}", "checkpoint.every=0",
                  f"data.batch={2 if quick else 64}", f"roles.actor.micro_batch_tokens={512 if quick else 16384}",
                  f"roles.actor.generation.batch_rows={8 if quick else 1024}"]
        grpo = [*GRPO_SETTINGS[self.given.recipe], f"nodes.rollout.with.group_size={2 if quick else 16}"]
        if self.run("sft", 0.25, [*common, f"steps={1 if quick else 100}", f"roles.actor.model={self.given.model}"]):
            self.start = self.session.work / "sft/model"
            self.run("grpo", 0.75, [*common, *grpo, f"steps={2 if quick else 150}", f"roles.actor.model={self.start}"])

    def run(self, dag: str, part: float, settings: list[str]) -> bool:
        """Run a stage of the recipe for at most this part of its seconds; report what it came to."""
        name, recipe = f"recipe {dag}", self.given.recipe
        given = [f"output={self.session.work}", f"data.train={self.given.tasks / recipe / 'train.jsonl'}", *settings]
        passed = self.session.part(name, self.limit(BUDGET["recipe"] * part), run_command(
            dag, f"examples/recipes/{recipe}/{dag}_run.yaml", dag, 1, given))
        folder = self.session.work / dag
        for line in (*figures_of(folder), *curve_of(folder)) if passed else ():
            self.session.report.say(f"{name}: {line}")
        return passed

    def trl(self) -> None:
        if not (self.given.peer_python or is_installed("trl")):
            self.session.outcomes["trl"] = "no trl here"
            return
        sizes = ["data.batch=2", "nodes.rollout.with.group_size=2"] if self.given.quick else [
            "data.batch=64", "nodes.rollout.with.group_size=16", "roles.actor.micro_batch_tokens=16384",
            "roles.actor.generation.batch_rows=1024"]
        settings = [*GRPO_SETTINGS[self.given.recipe], *sizes,
                    f"data.train={self.given.tasks / self.given.recipe / 'train.jsonl'}"]
        self.module("trl", "end_to_end_vs_trl", "--repeats", "1" if self.given.quick else "2", "--updates",
                    "2" if self.given.quick else "8", "--skip", "1" if self.given.quick else "3", "--all-rows",
                    "--run-file", f"examples/recipes/{self.given.recipe}/grpo_run.yaml", "--start-model",
                    str(self.start), "--peer-python", str(self.given.peer_python or sys.executable),
                    *with_set(settings))

    def vllm(self) -> None:
        """Two runs that differ in the engine that samples. On a CPU the tiny model's."""
        if not is_installed("vllm"):
            self.session.outcomes["vllm"] = "no vllm here"
            return
        if self.device == "cuda":
            self.session.run(VLLM)
            self.session.run(WHOLE_RUNS["0.5B"])
        else:
            self.session.run(Run("vllm", setting("rollout=vllm"), large=False, seconds=self.limit(BUDGET["vllm"])))


    def tests(self) -> None:
        if self.device == "cuda":
            marked = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-q"]
            self.session.part("tests", 280, marked, keep=True)

    def short_runs(self) -> None:
        """Those that resume another one come last."""
        for run in sorted(SHORT_RUNS, key=lambda run: bool(run.resumes)):
            if (run.name in QUICK or not self.given.quick) and (not run.needs or is_installed(run.needs)):
                self.session.run(run)

    def whole(self) -> None:
        for run in WHOLE_RUNS.values() if self.device == "cuda" else ():
            self.session.run(run)

    def figures(self) -> None:
        for shape in ("0.5B", "7B") if self.device == "cuda" else ("tiny",):
            self.session.part(f"figures {shape}", 480, [
                sys.executable, "-m", "benchmarks.gpu", "--device", self.device, "--repeats", "2", "--output",
                str(self.session.work / "figures.txt"), "--shape", shape], keep=True)


def quarter(given: argparse.Namespace, work: Path) -> None:
    """Run the parts; the last line has the share of those that passed."""
    report = Report(given.output)
    say_versions(report, given.device)
    chosen = fitting(given.only, given.minutes)
    session = Session(report, given.device, given.minutes * (1 if given.device == "cuda" else PATIENCE), work)
    session.outcomes |= {name: "cut, for want of time" for name in given.only if name not in chosen}
    parts = Quarter(session, given).parts
    for name in chosen:
        parts[name]()
    session.conclude()


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__, repeats=None)
    device_options(parser)
    parser.add_argument("--only", nargs="+", choices=BUDGET, default=list(PUBLISHED), help="parts; default those "
                        "that others publish")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for all of it; default {MINUTES:g}")
    parser.add_argument("--recipe", choices=("spell_backward", "chain_sum", "reverse_words"), default="spell_backward")
    parser.add_argument("--model", type=Path, default=MODEL, help="a model folder")
    parser.add_argument("--tasks", type=Path, default=RUNS, help="a folder that has one for each recipe")
    parser.add_argument("--peer-python", type=Path, help="with TRL; default: this one, if it has it")
    given = parsed(parser, arguments)
    if not has_device(given, RESULTS.with_name("gpu_quarter.txt")):
        return
    with tempfile.TemporaryDirectory(prefix="gpu-quarter-") as folder:
        quarter(given, Path(folder))


if __name__ == "__main__":
    main()
