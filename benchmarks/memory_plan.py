"""The memory plan against the memory that runs really take: bytes planned over bytes measured, for eight settings.

A run of a 19M-parameter model on one rank, on the CPU, with rows that fill its micro-batches; measured is the peak of
its worker, the largest process (VmHWM, which the kernel keeps). The same run with a model of next to nothing is
subtracted on both sides, so that Python, torch and the run's own buffers, which the plan does not count, do not blur
it. glibc is told to give freed memory back at once: the plan counts tensors, and what
an allocator keeps beside them is another matter (with its usual thresholds a step that recomputes took 38% more).

On a CPU offloading and swapping move nothing out of the memory that is measured: there the plan without them counts.
Run by hand:  python -m benchmarks.memory_plan
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contender import kilobytes
from benchmarks.ratio import Spread, conclude, options, parsed
from benchmarks.runs import ROOT, environment, run_command
from distflow.config.load import load
from distflow.telemetry.processes import descendants
from planners import plan as make_plan
from planners.memory import needed

GOAL = 0.15
MIB = 1 << 20
MODEL = "{architecture: qwen3, layers: 6, hidden: 512, heads: 8, kv_heads: 4, head_dim: 64}"
TINY = "{architecture: qwen3, layers: 1, hidden: 32, heads: 1, kv_heads: 1, head_dim: 32}"
COMMON = ("ranks=1", "steps=2", "validation=null", "checkpoint={every: 0}", "report=false", "data.batch=16",
          "data.max_prompt_tokens=96", "data.max_target_tokens=288", "roles.actor.micro_batch_tokens=2688")
GRPO = ("data.batch=8", "roles.actor.generation={max_new_tokens: 192, batch_rows: 64}")
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "1048576"}


@dataclass(frozen=True)
class Case:
    """Settings of a run. `counted`: further ones of its plan."""

    name: str
    settings: tuple[str, ...]
    dag: str = "sft.yaml"
    long_tailed: bool = False
    counted: tuple[str, ...] = ()


NONE = "robust.snapshots=false"
CASES = [Case("plain", (NONE,)),
         Case("recompute", (NONE, "roles.actor.recompute=true")),
         Case("long-tailed rows", (NONE, "data.batch=96", "roles.actor.micro_batch_tokens=5120"), long_tailed=True),
         Case("half the micro-batch", (NONE, "roles.actor.micro_batch_tokens=1344")),
         Case("LoRA", (NONE, "roles.actor.lora={rank: 16}")),
         Case("offload", (NONE, "roles.actor.offload=true"), counted=("roles.actor.offload=false",)),
         Case("snapshots", ("robust.snapshots=true", "steps=3")),  # there are two from the second step on
         Case("swap", (NONE, *GRPO, "roles.actor.swap=true"), "grpo.yaml",
              counted=("roles.actor.swap=false",))]


def write_rows(file: Path, long_tailed: bool) -> None:
    """Write 96 questions with answers of 166 tokens; or, long-tailed, one of eight so long, the others of 37."""
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    with file.open("w") as out:
        for index in range(96):
            count = 150 if not long_tailed or index % 8 == 0 else 20
            answer = " ".join(words[(index * 7 + place * place) % 10] for place in range(count))
            out.write(json.dumps({"question": " ".join(words) + f" {index}?", "answer": answer}) + "\n")


def peak_of(command: list[str]) -> int:
    """Run the command; return the peak of the largest of its processes, in bytes.

    Raises:
        SystemExit: it failed; shows its last lines.
    """
    with subprocess.Popen(command, cwd=ROOT, env=environment(**AT_ONCE), text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT) as process:
        said: list[str] = []
        assert process.stdout is not None
        reader = threading.Thread(target=said.extend, args=(process.stdout,))
        reader.start()
        peak = 0
        while process.poll() is None:
            peak = max([peak, *(1024 * kilobytes(each, "VmHWM") for each in descendants(process.pid))])
            time.sleep(0.1)  # the processor is the run's
        reader.join()
    if process.returncode:
        raise SystemExit(f"{''.join(said)[-4000:]}\nthis command failed: {' '.join(command)}")
    return peak


def run(scratch: Path, case: Case, model: str) -> tuple[int, int]:
    """Return the bytes that the planner counts for a run, in host memory too, and the run's peak."""
    data = scratch / f"rows-{case.long_tailed}.jsonl"
    write_rows(data, case.long_tailed)
    settings = [f"output={scratch}", f"roles.actor.model={model}", f"data.train={data}", *COMMON,
                *case.settings]
    plan = make_plan(load(case.dag, "embedded_sft.yaml", [*settings, *case.counted]), 1)
    name = f"{case.name.replace(' ', '-')}-{model == TINY}"
    peak = peak_of(run_command(case.dag, "embedded_sft.yaml", name, 1, settings))
    return needed(plan.memory) + sum(item.bytes for item in plan.host_memory), peak


def main(arguments: list[str] | None = None) -> None:
    given = parsed(options(__doc__, repeats=None), arguments)
    found = []
    with tempfile.TemporaryDirectory(prefix="memory-plan-") as folder:
        for case in CASES[:1] if given.quick else CASES:
            (more, most), (less, least) = (run(Path(folder), case, model) for model in (MODEL, TINY))
            ratio = (more - less) / (most - least)
            found.append(ratio)
            print(f"{case.name:22}planned {(more - less) / MIB:6.0f} MiB, measured {(most - least) / MIB:6.0f} MiB: "
                  f"{ratio:.2f}", flush=True)
    off = [abs(ratio - 1) for ratio in found]
    print(f"planned over measured: {Spread.of(found)}")
    conclude("memory plan against the peak of whole runs, the setting that is furthest off",
             Spread(max(off), min(off), max(off)), GOAL, unit="share", at_least=False)


if __name__ == "__main__":
    main()
