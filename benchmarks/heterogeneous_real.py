"""Real runs on unlike ranks: the planned shares against equal ones, end to end, and beside them what was predicted.

Two ranks on two cores, of which the second is slowed to a half or a quarter of the first: the kernel gives the processes
of each rank a quota of processor time (control groups; see slowed.py), so whatever they compute takes so much longer.
`grpo.yaml` on the embedded task, mode sync. The flow is a user's: a short run with equal shares, `distflow plan --from`
it with a cluster file that says which rank is slowed, and runs that obey the plan. Planned and equal runs take turns.

Of a run all steps but the first ones count: seconds of a step are those of the slowest rank, everything in it. With
equal shares a step of ranks 1:2 takes 1.5 times as long as it could, one of ranks 1:4 2.5 times, if all that it does
could be divided. The links between the ranks are not slowed.
Run by hand, on a machine that does nothing else:  python -m benchmarks.heterogeneous_real
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import yaml

from benchmarks.modes import steps_of
from benchmarks.ratio import Spread, conclude, interleaved, options, parsed, ratios
from benchmarks.slowed import slowed

ROOT = Path(__file__).resolve().parents[1]
GOALS = {2: 1.4, 4: 1.8}
NEAR = 0.15
"""How far a prediction may be from what was measured."""
_WARM = 2
"""Steps of a run that do not count."""


class Contest:
    """Runs on a rank and one that is `times` slower."""

    def __init__(self, given: Namespace, scratch: Path, times: int):
        self.given, self.scratch, self.times = given, scratch, times
        self.cluster, self.plan = scratch / f"cluster-{times}.yaml", scratch / f"plan-{times}.yaml"
        self.cluster.write_text(yaml.safe_dump(cluster(times)))
        model = f"{{architecture: qwen3, layers: {given.layers}, hidden: {given.hidden}, heads: 4, kv_heads: 2}}"
        self.settings = ["--set", "validation=null", "--set", "checkpoint.every=0", "--set", f"output={scratch}",
                         "--set", f"roles.actor.model={model}", "--set", f"data.batch={given.prompts}",
                         "--set", f"roles.actor.generation.max_new_tokens={given.tokens}"]

    def prepare(self) -> None:
        """A short run with equal shares, and the plan from it."""
        self._launch("first", self.given.steps, [])
        command = ["plan", "grpo", "--cluster", str(self.cluster), *self.settings,
                   "--solver", "hybrid", "--runnable", "--out", str(self.plan)]
        print(_said([sys.executable, "-m", "distflow.cli", *command]))

    def seconds(self, side: str, repeat: int) -> float:
        """Of a step, the median of a run."""
        obey = ["--cluster", str(self.cluster), "--plan", str(self.plan)] if side == "planned" else []
        found = self._launch(f"{side}-{repeat}", self.given.steps, obey)
        print(f"1:{self.times}, repeat {repeat}, {side}: {found:.3f} s a step", flush=True)
        return found

    def _launch(self, name: str, steps: int, more: Sequence[str]) -> float:
        with slowed([1.0, 1.0 / self.times]) as join:
            torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python", *join]
            run = [sys.executable, "distflow/launch.py", "--dag", "grpo", "--name", f"{name}-{self.times}",
                   "--set", f"steps={steps}", *self.settings, *more]
            _said([sys.executable, "-m", *torchrun, *run])
        return median(step["seconds"] for step in steps_of(self.scratch / f"{name}-{self.times}")[_WARM:])


def cluster(times: int) -> dict:
    """Two machines of one core; what it does in a second is found out from the first run."""
    devices = {name: {"tflops": {"float32": 0.05 * speed}, "memory_gib": 4, "memory_gb_s": 10 * speed}
               for name, speed in (("core", 1.0), ("slowed_core", 1.0 / times))}
    machines = {name: {"device": device, "devices": 1} for name, device in zip(("fast", "slow"), devices)}
    return {"name": f"1:{times}", "devices": devices, "machines": machines,
            "links": {"zone": {"gb_s": 2.0, "latency_us": 100.0}}}


def _said(command: Sequence[str]) -> str:
    """What a command prints.

    Raises:
        SystemExit: it failed; shows its last lines.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{done.stdout[-2000:]}{done.stderr[-6000:]}\nthis command failed: {' '.join(command)}")
    return done.stdout


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, help="of each run; default 10, with --quick 4")
    parser.add_argument("--prompts", type=int, default=16, help="of a step, with 8 samples each")
    parser.add_argument("--tokens", type=int, default=32, help="of a response, at most")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    given = parsed(parser, arguments)
    given.steps = given.steps or (4 if given.quick else 10)
    with tempfile.TemporaryDirectory(prefix="heterogeneous-") as scratch:
        for times in GOALS:
            contest = Contest(given, Path(scratch), times)
            contest.prepare()
            pairs = interleaved({side: partial(contest.seconds, side) for side in ("equal", "planned")}, given.repeats)
            speed = ratios(pairs, "equal", "planned", lambda seconds: seconds)
            conclude(f"a step on ranks of speed 1:{times}, equal shares over planned ones", speed, GOALS[times])


if __name__ == "__main__":
    main()
