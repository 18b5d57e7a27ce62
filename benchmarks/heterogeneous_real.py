"""Real runs on unlike ranks: planned shares against equal ones, end to end, and what was predicted.

Two machines of one core, of which the second is slowed to a half or a quarter of the first: the kernel gives the
processes of each rank a quota of processor time (control groups; see slowed.py), so whatever they compute takes so much
longer. Machines are network namespaces whose links are shaped to a rate (machines.py), so what ranks exchange takes the
time that it takes on a network; each has a torchrun of its own. `grpo.yaml` on the embedded task, mode sync. The flow
is a user's: short runs with equal shares, `distflow plan --from` them with a cluster file that says which rank is
slowed, and runs that obey the plan. Both take turns. The cost model knows the two short runs, of
two batch sizes, and no planned one.

Of a run all steps but the first ones count: seconds of a step are those of the slowest rank, everything in it. With
equal shares a step of ranks 1:2 takes 1.5 times as long as it could, one of ranks 1:4 2.5 times, if all that it does
could be divided.
Run by hand, on a machine that does nothing else:  python -m benchmarks.heterogeneous_real
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import yaml

from benchmarks.machines import address, machines, within
from benchmarks.ratio import Spread, conclude, interleaved, options, parsed, ratios
from benchmarks.runs import ROOT, environment, steps_of, with_set
from benchmarks.slowed import Slowed, ranks
from distflow.cli.calibration import calibration
from distflow.config.load import load
from planners.heterogeneous.layouts import CostedProblem

GOALS = {2: 1.4, 4: 1.8}
NEAR = 0.15
"""How far a prediction may be from what was measured."""
_WARM = 2
"""Steps of a run that do not count."""
_LOOK = 0.05
_PORT = 29400
"""On the first machine, where nothing else listens."""


class Contest:
    """Runs on a rank and one that is `times` slower."""

    def __init__(self, given: Namespace, scratch: Path, names: Sequence[str], times: int):
        self.given, self.scratch, self.names, self.times = given, scratch, names, times
        self.cluster, self.plan = scratch / f"cluster-{times}.yaml", scratch / f"plan-{times}.yaml"
        self.used = 2  # ranks of the plan
        self.cluster.write_text(yaml.safe_dump(cluster(times, given.megabit)))
        model = f"{{architecture: qwen3, layers: {given.layers}, hidden: {given.hidden}, heads: 4, kv_heads: 2}}"
        self.settings = ["validation=null", "checkpoint.every=0", f"output={scratch}", f"roles.actor.model={model}",
                         f"data.batch={given.prompts}", f"roles.actor.generation.max_new_tokens={given.tokens}"]

    def prepare(self) -> dict[str, float]:
        """Make short runs with equal shares and the plan from them; return the seconds of a step that are predicted by
        side. Equal shares are those of the runs: the best plan that has them may leave the slow rank out."""
        for name, prompts in (("half", self.given.prompts // 2), ("whole", self.given.prompts)):
            self._launch(name, ["--set", f"data.batch={prompts}"])
        runs = [str(self.scratch / f"{name}-{self.times}") for name in ("half", "whole")]
        planned = subprocess.run([sys.executable, "-m", "distflow.cli", "plan", "grpo", "--cluster", str(self.cluster),
                                  *with_set(self.settings), "--from", *runs, "--out", str(self.plan)], cwd=ROOT,
                                 check=True, stdout=subprocess.PIPE, text=True).stdout
        best = re.search(r"an iteration: ([\d.]+) s", planned)
        assert best, planned
        spec = load("grpo", None, self.settings, str(self.cluster))
        known, plan = calibration(spec, runs), yaml.safe_load(self.plan.read_text())
        equal = known.runs[-1].placement(CostedProblem(known.problem))
        self.used = plan["ranks"]
        rows = ", ".join(f"{name} {layout['rows']}" for name, layout in plan["layouts"].items())
        print(f"1:{self.times}, planned rows: {rows}", flush=True)
        return {"equal": equal.seconds + known.rest, "planned": float(best[1])}

    def seconds(self, side: str, repeat: int) -> float:
        """Of a step, the median of a run."""
        planned = side == "planned"
        more = ["--run-file", str(self.plan)] if planned else []
        found = self._launch(f"{side}-{repeat}", more, self.used if planned else 2)
        print(f"1:{self.times}, repeat {repeat}, {side}: {found:.3f} s a step", flush=True)
        return found

    def _launch(self, name: str, more: Sequence[str], used: int = 2) -> float:
        """Ranks are slowed as soon as the first step is done: to start costs as much as several steps. A plan may have
        `used` the fast rank alone."""
        folder = self.scratch / f"{name}-{self.times}"
        with ranks(2) as slowed:
            run = [*slowed.join, sys.executable, "distflow/launch.py", "--dag", "grpo", "--name", folder.name,
                   *with_set([*self.settings, f"steps={self.given.steps}"]), *more]
            self._said([within(name, *_torchrun(number, used), *run) for number, name in enumerate(self.names[:used])],
                       lambda: _begin(slowed, folder, self.times))
        return median(step["seconds"] for step in steps_of(folder)[_WARM:])

    def _said(self, commands: Sequence[Sequence[str]], meanwhile: Callable[[], bool] = lambda: True) -> None:
        """Run these beside each other, and ask `meanwhile` until it is true.

        Raises:
            SystemExit: one failed; shows their last lines.
        """
        with open(self.scratch / "log", "w+") as log:
            started = [subprocess.Popen(each, cwd=ROOT, stdout=log, stderr=log, env=environment(PYTHONPATH=str(ROOT)))
                       for each in commands]
            try:
                done = False
                while None in (codes := [process.poll() for process in started]) and not any(codes):
                    done = done or meanwhile()
                    time.sleep(_LOOK)
                failed = [process.args for process in started if process.poll()]
            finally:
                for process in started:
                    process.terminate()  # torchrun ends its ranks; nothing to do for one that has ended
                    process.wait()
            if failed:
                log.seek(0)
                raise SystemExit(f"{log.read()[-6000:]}\nthis command failed: {' '.join(failed[0])}")


def _torchrun(number: int, machines: int) -> list[str]:
    """Of the machine with this number; the first one holds the store."""
    return [sys.executable, "-m", "torch.distributed.run", f"--nnodes={machines}", f"--node-rank={number}",
            "--nproc-per-node=1", f"--master-addr={address(0)}", f"--master-port={_PORT}", "--no-python"]


def _begin(slowed: Slowed, folder: Path, times: int) -> bool:
    """Slow the second rank once the run has done a step."""
    metrics = folder / "metrics.jsonl"
    begun = metrics.is_file() and "\n" in metrics.read_text()  # its first line is whole, and there is no validation
    if begun:
        slowed.begin([1.0, 1.0 / times])
    return begun


def cluster(times: int, megabit: float) -> dict:
    """Two machines of one core, linked at so many Mbit/s; what a core does in a second is found out from the runs."""
    devices = {name: {"tflops": {"float32": 0.05 * speed}, "memory_gib": 4, "memory_gb_s": 10 * speed}
               for name, speed in (("core", 1.0), ("slowed_core", 1.0 / times))}
    machines = {name: {"device": device, "devices": 1} for name, device in zip(("fast", "slow"), devices)}
    return {"name": f"1:{times}", "devices": devices, "machines": machines,
            "links": {"zone": {"gb_s": megabit / 8000, "latency_us": 100.0}}}


def near(times: int, pairs: Sequence[dict[str, float]], predicted: dict[str, float]) -> None:
    """Print what was predicted beside what was measured, and the last line of the worst deviation."""
    found = {side: Spread.of([pair[side] for pair in pairs]) for side in predicted}
    found["ratio"] = ratios(pairs, "equal", "planned", lambda seconds: seconds)
    predicted = predicted | {"ratio": predicted["equal"] / predicted["planned"]}
    away = {side: predicted[side] / spread.median - 1 for side, spread in found.items()}
    for side, spread in found.items():
        print(f"1:{times}, {side}: measured {spread}, predicted by the cost model {predicted[side]:.3g} "
              f"({away[side]:+.1%})")
    worst = max(map(abs, away.values()))
    conclude(f"ranks of speed 1:{times}, how far the cost model's prediction is from the measurement",
             Spread(worst, min(map(abs, away.values())), worst), NEAR, unit="share", at_least=False)


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=5, help="of each run")
    parser.add_argument("--prompts", type=int, default=24, help="of a step, with 8 samples each")
    parser.add_argument("--tokens", type=int, default=16, help="of a response, at most")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--times", type=int, choices=list(GOALS), help="only with ranks so many times slower")
    parser.add_argument("--megabit", type=float, default=1000.0, help="rate of each machine's link, in Mbit/s")
    given = parsed(parser, arguments)
    given.hidden = 128 if given.quick else given.hidden
    with tempfile.TemporaryDirectory(prefix="heterogeneous-") as scratch, machines(2, given.megabit) as names:
        for times in [given.times] if given.times else list(GOALS)[: 1 if given.quick else None]:
            contest = Contest(given, Path(scratch), names, times)
            predicted = contest.prepare()
            pairs = interleaved({side: partial(contest.seconds, side) for side in ("equal", "planned")},
                                given.repeats)
            speed = ratios(pairs, "equal", "planned", lambda seconds: seconds)
            conclude(f"a step on ranks of speed 1:{times}, equal shares over planned ones", speed, GOALS[times])
            near(times, pairs, predicted)


if __name__ == "__main__":
    main()
