"""Parts of `gpu_quarter.py`: each is a process with a time limit, and some are runs of a few steps.

What fails or takes too long is said, and the next part begins; what there is no time for is named at the end. Of each
run: seconds of a step, tokens per second, the difference of trainer's and rollout's log-probabilities, the peak of GPU
memory beside what the plan said, seconds of a snapshot, and after a kill those until the next step is done. Nothing is
promised here: the last line has the share of parts that passed, and no goal.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu import Report, description
from benchmarks.ratio import Spread, summary
from benchmarks.runs import ROOT, environment, torchrun, with_set
from distflow.data.row_copies import COPIES
from distflow.plan import MemoryItem
from distflow.telemetry.ettr import account, read
from distflow.telemetry.run_reader import RunReader
from planners.memory import GIB, needed

LIBRARIES = ("torch", "transformers", "triton", "vllm", "peft", "liger-kernel", "kernels", "flash-attn")
LEAST, GRACE = 15.0, 40.0  # seconds without which no part begins; that one has to end by itself
PASSED, QUICK = "passed", ("plain", "resume", "kill")
MODEL = ("roles.actor.model={architecture: qwen2, layers: %d, hidden: 896, heads: 14, kv_heads: 2}")
FILLED = ("roles.actor.generation.max_new_tokens=128", "roles.actor.dtype=bfloat16",
          "roles.actor.micro_batch_tokens=2048")  # so that micro-batches are as full as the plan counts them
COMMON = ("steps=3", "data.batch=8", "checkpoint.every=2", "validation=null", "report=false",
          "nodes.reward.with.reward={length: {target: 100}}")  # by which samples of random weights differ


@dataclass(frozen=True)
class Run:
    """A run of a few steps. `large`: with a model of 0.1 billion parameters where there is a GPU. `shape`: with a model
    folder of this shape; it has the machine to itself. `needs`: a module without which it is left out."""

    name: str
    settings: tuple[str, ...] = ()
    dag: str = "grpo.yaml"
    ranks: int = 1
    large: bool = True
    shape: str = ""
    resumes: str = ""
    needs: str = ""
    seconds: float = 90.0


def setting(line: str) -> tuple[str, ...]:
    return (f"roles.actor.{line}",)


SHORT_RUNS = [Run("plain"),
              Run("float32", setting("dtype=float32")),
              Run("swap", setting("swap=true")),
              Run("recompute", setting("recompute=true")),
              Run("offload", setting("offload=true")),
              Run("lora", setting("lora={rank: 8}")),
              Run("ppo", dag="ppo.yaml", large=False),
              Run("resume", resumes="plain"),
              Run("freeze", setting("freeze=['*.layers.0.*', '*.layers.1.*']")),
              Run("megatron", setting("engine=megatron"), needs="megatron.core"),
              Run("share", ("mode=async", "groups.rollout=1"), ranks=2, large=False),
              Run("inference", ("mode=async", "groups={rollout: 1, inference: {reference: 1}}"),
                  ranks=3, large=False),
              Run("partial", ("mode=semi_sync", "groups={rollout: 0}", "staleness=1", "on_stale=drop")),
              Run("kill", ("faults=[{kind: kill, step: 2, phase: training}]",)),
              Run("micro-batches", setting("micro_batch_tokens=256"))]
WHOLE = ("data.batch=32", "roles.actor.micro_batch_tokens=16384", "roles.actor.generation.batch_rows=256")
WHOLE_RUNS = {
    "0.5B": Run("whole 0.5B", (*WHOLE, *setting("generation.max_new_tokens=512")), shape="0.5B", seconds=120.0),
    "7B": Run("whole 7B, lora", (*WHOLE, *setting("generation.max_new_tokens=256"), *setting("lora={rank: 16}")),
              shape="7B", seconds=240.0)}
"""Of models of real size: 32 prompts with 8 answers in each step."""


class Session:
    """Parts, until the time is used up."""

    def __init__(self, report: Report, kind: str, minutes: float, work: Path):
        self.report, self.kind, self.work = report, kind, work
        self.until = time.monotonic() + 60 * minutes
        self.outcomes: dict[str, str] = {}
        searched = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment = environment(PYTHONPATH=searched)
        if kind == "cpu":
            self.environment["CUDA_VISIBLE_DEVICES"] = ""

    def part(self, name: str, limit: float, command: list[str], keep: bool = False) -> bool:
        """Run a command; return whether it ended well. `keep`: its lines are results."""
        limit = min(limit, self.until - time.monotonic())
        if limit < LEAST:
            self.outcomes[name] = "no time left"
            return False
        began, output = time.monotonic(), self.work / f"{name}.txt"
        with output.open("w") as out:
            ending = ended(subprocess.Popen(command, cwd=ROOT, env=self.environment, stdout=out,
                                            stderr=subprocess.STDOUT, start_new_session=True), limit)
        lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
        for line in lines if keep else lines[-60:] if ending != PASSED else ():
            self.report.say(f"{name}: {line}")
        self.outcomes[name] = ending
        self.report.say(f"{name}: {ending} in {time.monotonic() - began:.0f} s")
        return ending == PASSED

    def run(self, run: Run) -> None:
        folder = self.work / (run.resumes or run.name)
        model = (MODEL % 8, *FILLED) if run.large and self.kind == "cuda" else ()
        if run.shape:
            weights = self.work / run.shape
            if not self.part(f"weights of {run.shape}", 120, [
                    sys.executable, "-m", "benchmarks.shapes", run.shape, str(weights), "--device", self.kind]):
                return
            model = (f"roles.actor.model={weights}",)
        given = ["--resume", str(folder), "--set", "steps=5"] if run.resumes else [
            "--dag", run.dag, "--name", run.name,
            *with_set((f"output={self.work}", *COMMON, *model, *run.settings))]
        if self.part(run.name, run.seconds, torchrun(run.ranks, ROOT / "distflow/launch.py", *given)):
            for line in figures_of(folder):
                self.report.say(f"{run.name}: {line}")

    def conclude(self) -> None:
        """Say how each part has ended, and which share of them passed."""
        for name, ending in self.outcomes.items():
            self.report.say(f"# {name}: {ending}")
        share = sum(ending == PASSED for ending in self.outcomes.values()) / max(1, len(self.outcomes))
        self.report.say(json.dumps(summary(f"parts that passed on {description(self.kind)}", Spread.of([share]),
                                           "share", goal=None, met=None)))


def ended(process: subprocess.Popen, limit: float) -> str:
    """Return how a process ended; one that takes longer than `limit` seconds is told to, and then killed."""
    try:
        return f"failed ({status})" if (status := process.wait(limit)) else PASSED
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun passes it on
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return f"stopped after {limit:.0f} s"


def figures_of(folder: Path) -> Iterator[str]:
    """Yield what a run's metrics, plan and events say, a line each."""
    reader = RunReader(folder)
    steps, plan = reader.timed_steps(), reader.plan
    timed = sorted(steps, key=lambda step: step["seconds"])
    usual = timed[len(timed) // 2]
    nodes = sorted(name for name in usual if name.startswith("seconds/") and name.count("/") == 1)
    said = {name: usual[name] for name in ("seconds", *nodes, "tokens_per_second", "mfu", "snapshot/seconds",
                                           "mismatch/logprob_mean") if name in usual}
    most = {name: max(values) for name in ("mismatch/logprob_max", "memory/gpu_allocated_gib", "grad_norm")
            if (values := of(steps, name))}
    yield (f"{len(steps)} steps, the run's first done {steps[0].get('wall_seconds', math.nan):.4g} s after it began; "
           f"of that with the median seconds: {listed(said)}; most {listed(most)}")
    plan = next((group["plan"] for group in plan.get("groups", ()) if group["name"] == "trainer"), plan)
    planned = needed([MemoryItem(**item) for item in plan.get("memory", ())]) / GIB
    if planned and "memory/gpu_allocated_gib" in most:
        yield (f"peak of GPU memory planned {planned:.3g} GiB, allocated {most['memory/gpu_allocated_gib']:.3g} GiB: "
               f"{planned / most['memory/gpu_allocated_gib']:.2f}")
    for each in account(read(folder)).recoveries:
        yield (f"{each.group} rank {each.rank}, step {each.step}: detected in {each.detect:.2f} s, "
               f"started in {each.start:.2f}, connected in {each.connect:.2f}, loaded in {each.load:.2f}, next step "
               f"done in {each.first:.2f} s")


def listed(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())


def of(steps: list[dict[str, float]], name: str) -> list[float]:
    return [step[name] for step in steps if name in step]


def is_installed(module: str) -> bool:
    """Return whether a module and the packages that it is in are installed."""
    parent = module.rpartition(".")[0]
    return (not parent or is_installed(parent)) and importlib.util.find_spec(module) is not None


def say_versions(report: Report, kind: str) -> None:
    report.say(f"# python -m benchmarks.gpu_quarter: {description(kind)}")
    found = []
    for name in LIBRARIES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    report.say(f"# Python {sys.version.partition(' ')[0]}, {', '.join(found)}")
    report.say(f"# {COPIES}")
