"""GRPO end to end: completion tokens per second of distflow and of TRL's GRPOTrainer, and their reward curves.

Both train the same model folder on the same prompts in the same order, with two processes under torchrun, one thread
each, on the CPU, in float32 (`--device cuda`: one process, in bfloat16 over float32 weights): 32 prompts an update, 8
samples a prompt at temperature 1, one optimizer step an update, token-mean loss, group-normalised advantages, AdamW.
Both call distflow's `math` reward, the same source file. The two take turns; repeat `i` uses seed `i` on both sides.

Choices, each of them the cheaper one for TRL where it matters:
- No KL term (TRL's default, `beta=0`): TRL keeps no reference model then, and distflow runs `grpo.yaml` without its
  reference node. Both compute the policy's log-probabilities and entropies once, in the training pass.
- One micro-batch an update (`per_device_train_batch_size` 128), no gradient checkpointing, no logging, saving or
  progress bar in TRL; distflow keeps its own: metrics, samples and TensorBoard events of every update, and timed.
- `ddp_find_unused_parameters=False` and `dataloader_pin_memory=False`, which are not TRL's defaults and faster here.
- Prompts are rendered by the chat template before TRL starts; TRL would do it for every completion of every update.
- Plain `generate` with its dynamic cache. Of TRL's accelerators of generation, vLLM wants a GPU, and transformers'
  continuous batching took 1.7 times as long per update on two CPU cores (and all memory, unless it is told a size).
- distflow leaves rows out of the backward pass whose advantages are all zero (a group of equal rewards): without a KL
  term they have no gradient. TRL computes them. This is part of what is measured; `--all-rows` adds a third side, which
  is distflow with an entropy term of 1e-9, so that it computes all of them, and the entropies' gradients too.
- TRL's warm-up is made to start above zero, as distflow's does, so that both have the same rate in every update.

Time runs from the end of one update to the end of another, as the parent process reads of them, over the updates after
the first `--skip`. Tokens are those of the completions up to and including their end.

The curves agree if zero lies in the 95% interval (Student's t over the seeds, two standard errors if there are many) of
the difference in mean reward over the last third of the updates; three repeats are the least that says anything.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.peer_environment import peer_python
from benchmarks.ratio import add_size, conclude, interleaved, interval_of, options, parsed, ratios
from benchmarks.runs import ROOT, environment, torchrun, with_set
from distflow.config.load import load
from distflow.config.shipped import SHIPPED
from distflow.config.spec import Spec
from distflow.config.yaml_source import read
from distflow.data.dataloader import Dataloader
from distflow.data.dataset import open_records

GOAL = 2.0
DISTFLOW, ALL_ROWS = "distflow", "all rows"
_STEP = re.compile(r"\bstep (\d+)/\d+\b")


@dataclass(frozen=True)
class Curve:
    """One training run, update by update: when it ended, its completion tokens, its mean reward."""

    ends: list[float]
    tokens: list[float]
    rewards: list[float]

    def tokens_per_second(self, skip: int) -> float:
        """Over the updates after the first `skip`."""
        return sum(self.tokens[skip:]) / (self.ends[-1] - self.ends[skip - 1])

    def seconds_per_update(self, skip: int) -> float:
        return (self.ends[-1] - self.ends[skip - 1]) / (len(self.ends) - skip)


class Contest:
    """The two sides; what they share is read from distflow's own DAG and run file."""

    def __init__(self, given: Namespace, scratch: Path):
        self.given, self.scratch, self.ranks = given, scratch, 1 if given.device == "cuda" else 2
        self.dag = scratch / "grpo.yaml"
        self.dag.write_text(yaml.safe_dump(without_reference(read(SHIPPED / "grpo.yaml", "grpo.yaml").data)))
        self.peer = given.peer_python or peer_python(".venv-trl", "trl.txt")
        self.model = given.start_model.resolve() if given.start_model else self._start_model()

    def distflow(self, seed: int, side: str = DISTFLOW, settings: Sequence[str] = ()) -> Curve:
        overrides = with_set((*self._overrides(seed), *settings))
        name = f"grpo-{seed}-{len(settings)}"
        ends = timed(self.ranks, sys.executable, "distflow/launch.py", "--dag", str(self.dag), "--run-file",
                     self.given.run_file, "--name", name, *overrides)
        steps = [json.loads(line) for line in (self.scratch / name / "metrics.jsonl").read_text().splitlines()]
        return self._run_and_time(side, seed, Curve(ends, [step["tokens"] for step in steps],
                                                          [step["reward/mean"] for step in steps]))

    def all_rows(self, seed: int) -> Curve:
        return self.distflow(seed, ALL_ROWS, ["nodes.update.with.entropy=1e-9"])

    def trl(self, seed: int) -> Curve:
        spec = load(str(self.dag), self.given.run_file, self._overrides(seed))
        output = self.scratch / f"trl-{seed}"
        output.mkdir()
        records = output / "records.jsonl"
        records.write_text("".join(json.dumps(record) + "\n" for record in drawn(spec)))
        config = output / "config.json"
        config.write_text(json.dumps(peer_config(spec) | {
            "device": self.given.device, "model": str(self.model), "records": str(records), "output": str(output)}))
        ends = timed(self.ranks, self.peer, "benchmarks/peers/trl_grpo.py", str(config))
        ranks = [json.loads((output / f"rank-{rank}.json").read_text()) for rank in range(self.ranks)]
        tokens = [sum(part["tokens"] for part in parts) for parts in zip(*ranks)]
        rewards = [sum(part["reward"] for part in parts) / sum(part["rows"] for part in parts) for parts in zip(*ranks)]
        return self._run_and_time("TRL", seed, Curve(ends, tokens, rewards))

    def _run_and_time(self, side: str, seed: int, curve: Curve) -> Curve:
        if not len(curve.ends) == len(curve.tokens) == len(curve.rewards) == self.given.updates:
            raise SystemExit(f"{side} reported {len(curve.ends)} ends, {len(curve.tokens)} token counts and "
                             f"{len(curve.rewards)} rewards of {self.given.updates} updates")
        skip = self.given.skip
        speed = f"{curve.tokens_per_second(skip):8.0f} tokens/s {1000 * curve.seconds_per_update(skip):6.0f} ms/update"
        reward = f"reward {statistics.mean(curve.rewards[:skip]):.3f} → {last_third(curve):.3f}"
        print(f"seed {seed}  {side:9}{speed}  {reward}", flush=True)
        return curve

    def _overrides(self, seed: int) -> list[str]:
        dtype = "bfloat16" if self.given.device == "cuda" else "float32"
        return [f"seed={seed}", f"steps={self.given.updates}", f"ranks={self.ranks}", f"output={self.scratch}",
                f"roles.actor.model={self.model}", "roles.actor.schedule=constant", f"roles.actor.dtype={dtype}",
                "checkpoint.every=0", "validation=null", *self.given.settings]

    def _start_model(self) -> Path:
        """Make a model by distflow's supervised fine-tuning of a random one; return its folder."""
        print(f"training the start model: sft.yaml with {self.given.sft_run_file}", flush=True)
        quick = ("steps=2",) if self.given.quick else ()
        timed(self.ranks, sys.executable, "distflow/launch.py", "--dag", "sft.yaml", "--run-file",
              self.given.sft_run_file, "--name", "sft", *with_set((
                  f"output={self.scratch}", f"ranks={self.ranks}", "checkpoint.every=0", "validation=null", *quick)))
        return self.scratch / "sft" / "model"


def without_reference(dag: dict[str, Any]) -> dict[str, Any]:
    """Return the DAG without its reference role, the nodes of that role, and the KL term."""
    gone = {name for name, node in dag["nodes"].items() if node["role"] == "reference"}
    nodes = {name: dict(node) for name, node in dag["nodes"].items() if name not in gone}
    for node in nodes.values():
        if "dependencies" in node:
            node["dependencies"] = [other for other in node["dependencies"] if other not in gone]
        if "kl" in node.get("with", {}):
            node["with"] = node["with"] | {"kl": 0.0}
    roles = {name: role for name, role in dag["roles"].items() if name != "reference"}
    return dag | {"roles": roles, "nodes": nodes}


def drawn(spec: Spec) -> list[dict[str, str]]:
    """Return the questions and answers that distflow trains on, in its order."""
    fields = {"question": spec.run.data.question, "answer": spec.run.data.answer}

    def columns(records: list[dict[str, Any]]) -> dict[str, list[str]]:
        return {name: [record[field] for record in records] for name, field in fields.items()}

    records = open_records(spec.data_path(*spec.run.data.train))
    loader = Dataloader(records, columns, spec.run.data.batch, spec.run.seed, share=0)
    steps = [loader.next() for _ in range(spec.run.steps)]
    return [dict(zip(fields, row)) for step in steps for row in zip(*map(step.__getitem__, fields))]


def peer_config(spec: Spec) -> dict[str, Any]:
    """distflow's settings by TRL's names."""
    actor, nodes = spec.run.roles["actor"], spec.dag.nodes
    update = nodes["update"].settings
    if set(update) - {"clip", "kl"}:
        raise SystemExit(f"grpo.yaml's update has settings that this benchmark does not hand to TRL: {sorted(update)}")
    return {"seed": spec.run.seed, "max_steps": spec.run.steps, "prompts": spec.run.data.batch,
            "num_generations": nodes["rollout"].settings["group_size"], "temperature": actor.generation.temperature,
            "max_completion_length": actor.generation.max_new_tokens, "learning_rate": actor.learning_rate,
            "warmup_steps": actor.warmup_steps, "weight_decay": actor.weight_decay, "adam_beta1": actor.betas[0],
            "adam_beta2": actor.betas[1], "max_grad_norm": actor.max_grad_norm, "epsilon": update.get("clip", 0.2),
            "reward": nodes["reward"].settings.get("reward", "math"), "system_prompt": spec.run.data.system_prompt,
            "extra": {}}


def timed(ranks: int, python: str | Path, *script: str) -> list[float]:
    """Run a script under torchrun with so many processes and return when it reported the end of each step.

    Raises:
        SystemExit: it failed; shows its last lines.
    """
    command = torchrun(ranks, *script, python=python)
    ends: dict[int, float] = {}
    tail: deque[str] = deque(maxlen=100)
    with subprocess.Popen(command, cwd=ROOT, env=environment(PYTHONUNBUFFERED="1"), text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT) as process:
        for line in process.stdout:
            found = _STEP.search(line)
            if found:
                ends.setdefault(int(found[1]), time.perf_counter())
            tail.append(line)
    if process.returncode:
        raise SystemExit(f"{''.join(tail)}\nthis command failed: {' '.join(command)}")
    return list(ends.values())


def last_third(curve: Curve) -> float:
    return statistics.mean(curve.rewards[-max(1, len(curve.rewards) // 3):])


def difference(pairs: Sequence[dict[str, Curve]]) -> tuple[float, float | None]:
    """distflow's reward minus TRL's over the last third: mean over seeds, half its 95% interval (None: too few)."""
    return interval_of([last_third(pair["distflow"]) - last_third(pair["trl"]) for pair in pairs])


def show_curves(pairs: Sequence[dict[str, Curve]]) -> None:
    """Mean reward over the seeds, at about ten updates."""
    updates = len(pairs[0]["trl"].rewards)
    shown = sorted({max(1, round(updates * part / 10)) for part in range(1, 11)})
    print("update   " + "".join(f"{update:7}" for update in shown))
    for side in pairs[0]:
        means = [statistics.mean(pair[side].rewards[update - 1] for pair in pairs) for update in shown]
        print(f"{side:9}" + "".join(f"{mean:7.3f}" for mean in means))


def conclude_from(pairs: Sequence[dict[str, Curve]], skip: int) -> None:
    """Print the curves, whether they agree, and the ratios."""
    show_curves(pairs)
    gap, half = difference(pairs)
    agree = half is None or abs(gap) <= half
    verdict = "too few seeds to judge" if half is None else f"± {half:.3f}: {'the same' if agree else 'NOT the same'}"
    print(f"reward over the last third, distflow minus TRL: {gap:+.3f} {verdict}")
    updates = ratios(pairs, "distflow", "trl", lambda curve: 1 / curve.seconds_per_update(skip))
    print(f"updates per second, distflow over TRL: {updates}")
    if ALL_ROWS in pairs[0]:
        same_rows = ratios(pairs, ALL_ROWS, "trl", lambda curve: curve.tokens_per_second(skip))
        print(f"completion tokens per second, distflow with all rows over TRL: {same_rows}")
    speed = ratios(pairs, "distflow", "trl", lambda curve: curve.tokens_per_second(skip))
    conclude("GRPO end to end, completion tokens per second, distflow over TRL 1.16", speed, GOAL, holds=agree)


def main() -> None:
    parser = options(__doc__)
    add_size(parser, "updates", 60, 6, "of each run")
    add_size(parser, "skip", 5, 2, "first updates, which are not timed")
    parser.add_argument("--peer-python", type=Path, help="with TRL; default: that of .venv-trl, made if missing")
    parser.add_argument("--start-model", type=Path, help="a model folder; default: distflow trains one first")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--set", action="append", dest="settings", default=[], help="of distflow; TRL gets them, too")
    parser.add_argument("--run-file", default="embedded.yaml", help="distflow's run file, whose settings TRL gets too")
    parser.add_argument("--all-rows", action="store_true", help="a third side: distflow that computes every row, too")
    parser.add_argument("--sft-run-file", default="embedded_sft.yaml", help="for the start model")
    given = parsed(parser)
    if given.updates <= given.skip:
        parser.error(f"--updates {given.updates} leaves nothing to time after the first {given.skip}")
    if given.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory(prefix="end-to-end-vs-trl-") as scratch:
        contest = Contest(given, Path(scratch))
        sides = {"trl": contest.trl, DISTFLOW: contest.distflow}
        pairs = interleaved(sides | ({ALL_ROWS: contest.all_rows} if given.all_rows else {}), given.repeats)
    conclude_from(pairs, given.skip)


if __name__ == "__main__":
    main()
