"""Faults of learning that are planted in small runs: which are detected, after how many steps, with which cause named.

    record    run the healthy and the planted runs, one after the other, and keep their metrics by step
    long      run healthy runs of 100 steps of all shipped algorithms; their metrics are kept in runs/ alone
    judge     ask the detectors about each recorded run, as a live run would, and print what they found
    curves    print the metric that shows each fault, for its page

A planted run is healthy up to its step `FIRST`, unless the fault is one of the start. Run by hand, some of them or all:
python -m benchmarks.learning_faults record [NAME …];  python -m benchmarks.learning_faults judge
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks.ratio import Spread, conclude
from benchmarks.runs import ROOT
from distflow.telemetry.learning import faults_of, main_fault
from distflow.telemetry.run_reader import RunReader

RESULTS = ROOT / "benchmarks/results/learning_faults.json"
LONG_RESULTS, TOOL_MODEL = ROOT / "runs/learning_faults_long.json", ROOT / "runs/learning_faults_tools"
STEPS, FIRST, BATCH, ROWS, HELD_OUT = 32, 13, 8, 64, 80
DENSE = {"near_miss:near_miss": {"weight": 1.0, "reach": 20}, "format": {"weight": 0.2, "pattern": ".*#### -?[0-9]+"}}
PLACE = {"first": FIRST, "rows": ROWS}
COMMON = (f"data.batch={BATCH}", "roles.actor.warmup_steps=4", "checkpoint.every=0", "report=false",
          "validation.every=6", "robust.snapshots=false", "preflight=false", "log=[]",
          "roles.actor.schedule=constant", "roles.actor.learning_rate=1e-4")
LEFT_OUT = ("seconds", "tokens", "data/", "samples_total", "memory", "snapshot", "wall", "all_tokens", "weights",
            "staleness/t", "filter/", "waiting", "checkpoint", "reward/retried", "reward/seconds", "mfu")


@dataclass(frozen=True)
class Run:
    """One run. first: the step since when it is wrong, 0 for a healthy one. causes: detectors that name the fault
    rightly. named: a word that what is said of it must have, too. settings: of the run file and the DAG. records: how
    the training records differ. after: nodes after which `nodes` come, and before the update."""

    name: str
    dag: str
    first: int = 0
    causes: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    reward: Any = None
    nodes: Mapping[str, Any] = field(default_factory=dict)
    records: str = ""
    after: tuple[str, ...] = ()
    steps: int = STEPS
    model: str = ""
    named: str = ""

    def __hash__(self) -> int:
        return hash(self.name)


def _spoiled(fault: str) -> dict[str, Any]:
    return {"spoiled": {"role": "actor", "type": "COMPUTE", "function": "planted_faults:spoil",
                        "dependencies": ["advantage"], "with": {"fault": fault, **PLACE}}}


def _pay(name: str, weight: float = 1.0, **more: Any) -> dict[str, Any]:
    return {f"planted_faults:{name}": {"weight": weight, **PLACE, **more}}


def planted(task: str) -> Iterator[Run]:
    """Yield the runs of a task with a fault each."""
    dense = task == "near_miss"
    base = DENSE if dense else {"math": 1.0}
    own = {"dense": True} if dense else {}

    def run(fault: str, causes: str, *settings: str, first: int = FIRST, dag: str = task, **more: Any) -> Run:
        more = {"reward": DENSE} | more if dag == "near_miss" else more
        return Run(f"{task}/{fault}", dag, first, tuple(causes.split()), settings, **more)

    yield run("reward_constant", "no_signal", reward=_pay("constant", **own))
    yield run("parser_failure", "answers_not_found", reward=_pay("unparsed"))
    yield run("reward_noise", "reward_noise", reward=_pay("noise", **own))
    yield run("reward_sign", "reward_changed held_out_falls", reward=_pay("opposite", **own))
    yield run("entropy_collapse", "entropy_collapse advantage_sign", nodes=_spoiled("all_good"))
    yield run("entropy_explosion", "entropy_explosion", "nodes.update.with.entropy=0.3", first=1)
    yield run("truncation", "truncation", "roles.actor.generation.max_new_tokens=8", first=1)
    yield run("repetition", "repetition length_hacking reward_hacking", reward={**base, **_pay("repeats", 0.5)})
    yield run("rate_too_high", "learning_rate kl_runs_off entropy_collapse entropy_explosion",
              "roles.actor.learning_rate=1e-2", first=1)
    yield run("rate_too_low", "policy_stuck", "roles.actor.learning_rate=1e-9", first=1)
    yield run("too_many_updates", "ratio_clipped learning_rate", "nodes.update.with.epochs=8",
              "roles.actor.learning_rate=2e-3", first=1)
    yield run("gradient_spike", "loss_spike", nodes=_spoiled("spike"))
    yield run("advantage_sign", "advantage_sign", nodes=_spoiled("sign"))
    yield run("advantage_shuffled", "advantage_sign", nodes=_spoiled("shuffled"))
    yield run("advantage_scale", "advantage_scale", nodes=_spoiled("scale"))
    yield run("reward_failures", "reward_failures", reward=_pay("raises", **own))
    yield run("length_hacking", "length_hacking reward_changed", reward=_pay("longer", **own))
    yield run("format_hacking", "reward_hacking", reward={**base, **_pay("formed", 2.0)})
    yield run("judge_hacked", "reward_hacking", reward={**base, **_pay("judged", 3.0)})
    yield run("wrong_answers", "no_signal held_out_falls", "roles.actor.learning_rate=1e-3",
              records="wrong", first=1)
    yield run("duplicated_prompts", "duplicated_prompts", records="few", first=1)
    yield run("leaking_prompts", "leaking_prompts", records="leak", first=1)
    yield run("mismatch", "mismatch", nodes={"drifted": {
        "role": "actor", "type": "COMPUTE", "function": "planted_faults:drift", "dependencies": ["rollout"],
        "with": PLACE}})
    yield run("kl_runs_off", "kl_runs_off learning_rate", "nodes.update.with.kl=1e-9", "roles.actor.learning_rate=2e-3",
              first=1, dag="grpo")
    yield run("no_signal", "no_signal duplicated_samples", "roles.actor.generation.temperature=0.1", first=1,
              named="temperature=1")
    yield run("value_head", "value_head", "roles.critic.learning_rate=0.3", first=1, dag="ppo")
    yield run("reference_moves", "reference_moves", "roles.reference.follow={every: 12, mix: 1.0}", dag="grpo")


def _node(kind: str, fault: str, *after: str, first: int = FIRST, **more: Any) -> dict[str, Any]:
    """Return a node of `planted_faults` that goes wrong after other nodes."""
    return {"planted": {"role": "actor", "type": "COMPUTE", "function": f"planted_faults:{kind}",
                        "dependencies": list(after), "with": {"fault": fault, **PLACE, "first": first}, **more}}


def reported() -> Iterator[Run]:
    """Yield runs with a fault each that users of other frameworks have reported, beside those of `planted`."""
    def run(fault: str, causes: str, *settings: str, first: int = FIRST, dag: str = "grpo", **more: Any) -> Run:
        return Run(f"reported/{fault}", dag, first, tuple(causes.split()), settings, **more)

    training: dict[str, Any] = {"type": "MODEL_TRAIN"}
    yield run("one_layer", "gradient_of_one_layer", nodes=_node("spoil_model", "one_layer", "reward", **training))
    yield run("dropout", "mismatch", nodes=_node("spoil_model", "dropout", "reward", **training))
    yield run("off_by_one", "mismatch", nodes=_node("spoil_logprobs", "off_by_one", "rollout"))
    yield run("other_temperature", "mismatch", nodes=_node("spoil_logprobs", "temperature", "rollout"))
    yield run("end_masked", "end_untrained", nodes=_node("spoil_mask", "end", "rollout"))
    yield run("padding_trained", "unsampled_trained", nodes=_node("spoil_responses", "padding", "reward"),
              after=("reference",))
    yield run("copies_in_group", "duplicated_samples", nodes=_node("spoil_responses", "copies", "rollout"),
              after=("reward", "reference"))
    yield run("batch_baseline", "advantage_baseline", nodes=_spoiled("batch_baseline"))
    yield run("kl_sign", "kl_runs_off learning_rate", nodes=_node("seek_distance", "", "advantage", "reference"))
    yield run("rewards_shuffled", "reward_noise", nodes=_node("shuffle", "", "reward"), after=("advantage",))
    yield run("noisy_verdicts", "reward_noise", reward=_pay("flipped"))
    yield run("reward_scale", "reward_changed advantage_scale", reward=_pay("scaled"))
    yield run("short_pays", "length_hacking reward_changed reward_hacking", reward=_pay("shorter"))
    yield run("endless_warmup", "policy_stuck", "roles.actor.warmup_steps=10000000", first=1)
    yield run("weight_decay", "weight_decay", "roles.actor.weight_decay=100", "roles.actor.learning_rate=3e-4", first=1)
    yield run("data_repeats", "data_repeats duplicated_prompts", records="eight", first=1)
    yield run("other_template", "no_signal answers_not_found", records="template", first=1)
    of_reference: dict[str, Any] = {each: {"rollout_logprobs": "reference_logprobs"} for each in ("reads", "writes")}
    yield run("reference_off_by_one", "reference_differs", first=1,
              nodes=_node("spoil_logprobs", "off_by_one", "reference", first=1, **of_reference))
    yield run("tight_upper_clip", "ratio_clipped", "nodes.update.with.clip_high=0.0001", "nodes.update.with.epochs=4",
              first=1)
    yield run("critic_frozen", "policy_stuck value_head", "roles.critic.learning_rate=1e-12", first=1, dag="ppo")
    tools = {"dag": "grpo_tools", "model": "tools", "first": 1}
    faster = "roles.actor.learning_rate=3e-4"
    yield run("tools_fail", "tool_errors", faster, nodes={"environment": "Failing"}, **tools)
    yield run("errors_pay", "tool_errors", faster, nodes={"environment": "PaysErrors"}, **tools)
    yield run("calls_cost", "tools_avoided", faster, nodes={"environment": "CostlyCalls"}, **tools)
    yield run("tool_output_trained", "unsampled_trained", nodes=_node("spoil_mask", "all", "rollout"), **tools)


def unforeseen() -> Iterator[Run]:
    """Yield runs with a fault each that the rules were not made with. Their causes must be told in words, too."""
    def run(fault: str, causes: str, named: str, *settings: str, first: int = 1, dag: str = "grpo", **more: Any) -> Run:
        return Run(f"unforeseen/{fault}", dag, first, tuple(causes.split()), settings, named=named, **more)

    sampling = "roles.actor.generation."
    spoil: dict[str, Any] = {"type": "MODEL_TRAIN"}
    yield run("prompt_scored", "no_signal", "completion", reward={"planted_faults:prompt_scored": 1.0})
    yield run("verdicts_remembered", "no_signal reward_noise", "kept", first=FIRST, reward=_pay("remembered"))
    yield run("stop_before_answer", "answers_not_found no_signal", "generation.stop=[]", f'{sampling}stop=["####"]')
    yield run("one_prompt", "duplicated_prompts", "", records="one")
    yield run("narrow_top_p", "no_signal duplicated_samples", "top_p=1", f"{sampling}top_p=0.05")
    yield run("warmup_beyond_end", "policy_stuck", "warmup_steps", "roles.actor.warmup_steps=4000")
    yield run("all_frozen", "policy_stuck", "frozen", nodes=_node("spoil_model", "frozen", "reward", first=1, **spoil))
    yield run("paid_in_thousands", "advantage_scale", "", dag="dr_grpo", reward={"planted_faults:thousand": 1.0})
    yield run("held_by_kl", "policy_stuck", "with.kl=", "nodes.update.with.kl=100")
    yield run("optimizer_forgets", "", "", first=FIRST, nodes=_node("spoil_model", "forgets", "reward", **spoil))
    yield run("answers_of_next", "no_signal held_out_falls", "reference answers", records="shifted")
    yield run("end_twice", "unsampled_trained mismatch", "`responses`", first=FIRST,
              nodes=_node("spoil_responses", "end_twice", "reward"), after=("reference",))
    yield run("reference_is_policy", "reference_moves", "follow", "roles.reference.follow={every: 1, mix: 1.0}")
    yield run("tiny_gradient_bound", "policy_stuck", "max_grad_norm=", "roles.actor.max_grad_norm=1e-12")
    yield run("one_source_reversed", "held_out_falls", "pays for the wrong", reward={"planted_faults:one_source": 1.0})
    yield run("instructions_lost", "no_signal answers_not_found truncation", "another form", records="bare")
    yield run("paid_late", "reward_noise advantage_sign", "other rows", nodes=_node("pay_late", "", "reward"),
              first=FIRST, after=("advantage",))
    yield run("negative_weight", "held_out_falls no_signal", "sign", reward={"math": -1.0})


def later() -> Iterator[Run]:
    """Yield runs whose faults were chosen when the rules for those of `unforeseen` stood."""
    def run(fault: str, causes: str, named: str, *settings: str, first: int = 1, dag: str = "grpo", **more: Any) -> Run:
        return Run(f"later/{fault}", dag, first, tuple(causes.split()), settings, named=named, **more)

    yield run("only_the_likeliest", "no_signal duplicated_samples", "min_p=0", "roles.actor.generation.min_p=0.95")
    yield run("too_hot", "no_signal truncation", "temperature", "roles.actor.generation.temperature=3.0")
    yield run("half_wrong", "held_out_falls no_signal", "answers", "roles.actor.learning_rate=3e-4", records="half")
    yield run("text_compared", "no_signal", "does not find", reward={"planted_faults:text_compared": 1.0})
    yield run("length_outweighs", "reward_hacking held_out_falls reward_changed", "",
              reward={"math": 1.0, "length": {"weight": 5.0, "target": 3}})
    yield run("nothing_trained", "policy_stuck", "depend", nodes=_node("spoil_mask", "none", "rollout", first=1))
    yield run("all_layers_frozen", "policy_stuck", "freeze", 'roles.actor.freeze=["*"]')
    yield run("no_memory_of_gradients", "learning_rate entropy_explosion kl_runs_off", "rate",
              "roles.actor.betas=[0.0, 0.0]", "roles.actor.learning_rate=1e-3")
    yield run("verdict_reversed_late", "reward_changed held_out_falls", "reward", first=FIRST, dag="rloo",
              reward=_pay("opposite"))


SHIPPED = ("grpo", "ppo", "dapo", "rloo", "gspo", "dr_grpo", "cispo", "reinforce_pp", "remax", "pf_ppo", "online_dpo",
           "dpo", "sft", "solver_reviser", "grpo_tools", "distill", "gkd", "reward_model", "near_miss")
OWN_RUN_FILE = ("dpo", "sft", "distill", "gkd", "reward_model")
MORE = {"dr_grpo": ("nodes.update.with.fixed_length=24",), "dapo": ("nodes.overlong.with.max_length=24",),
        "ppo": ("roles.critic.learning_rate=1e-3",), "distill": ("roles.actor.learning_rate=1e-3",),
        "gkd": ("roles.actor.learning_rate=1e-3",), "sft": ("roles.actor.learning_rate=1e-3",),
        "dpo": ("roles.actor.learning_rate=3e-5",)}


def long() -> Iterator[Run]:
    """Yield healthy runs of 100 steps, with group sizes as shipped, three seeds of each algorithm."""
    for seed in (1, 2, 3, 4):
        for dag in SHIPPED:
            yield Run(f"long/{dag}-{seed}", dag, steps=100, reward=DENSE if dag == "near_miss" else None,
                      settings=(*MORE.get(dag, ()), f"seed={seed}", "validation.every=25"),
                      model="tools" * (dag == "grpo_tools"))


def healthy() -> Iterator[Run]:
    """Yield a run of each shipped algorithm, and more of two tasks."""
    size = "nodes.rollout.with.group_size=8"
    more = MORE | {"dapo": (size, *MORE["dapo"]), "cispo": (size,), "reinforce_pp": (size,), "remax": (size,),
                   "dpo": ("nodes.update.with.beta=0.5",), "sft": ()}
    for dag in ("grpo", "near_miss", "ppo", "dapo", "rloo", "gspo", "dr_grpo", "cispo", "reinforce_pp", "remax",
                "pf_ppo", "online_dpo", "dpo", "sft", "solver_reviser"):
        yield Run(f"healthy/{dag}", dag, settings=more.get(dag, ()), reward=DENSE if dag == "near_miss" else None)
    for seed in (1, 2):
        for dag in ("grpo", "near_miss", "ppo", "dapo", "rloo"):
            yield Run(f"healthy/{dag}-{seed}", dag, settings=(*more.get(dag, ()), f"seed={seed}"),
                      reward=DENSE if dag == "near_miss" else None)


def everything() -> list[Run]:
    return [*healthy(), *planted("grpo"), *planted("near_miss"), *reported(), *unforeseen(), *later()]


def write_inputs(run: Run, folder: Path) -> tuple[str, str]:
    """Write the DAG and the training records of a run; return the DAG's file and the records'."""
    shipped = {"near_miss": ROOT / "examples/near_miss/near_miss.yaml"}
    dag = yaml.safe_load(shipped.get(run.dag, ROOT / f"dags/{run.dag}.yaml").read_text())
    dag["imports"] = [*dag.get("imports", ()), "planted_faults"]
    if run.reward is not None:
        dag["nodes"]["reward"].setdefault("with", {})["reward"] = run.reward
    nodes = dict(run.nodes)
    if environment := nodes.pop("environment", None):
        dag["nodes"]["rollout"]["with"]["environment"] = f"planted_faults:{environment}"
    dag["nodes"] |= nodes
    for later in (*run.after, "update") if "planted" in nodes else ():
        dag["nodes"][later]["dependencies"].append("planted")
    if "spoiled" in run.nodes:
        dag["nodes"]["update"]["dependencies"] = ["spoiled" if name == "advantage" else name
                                                  for name in dag["nodes"]["update"]["dependencies"]]
    if "drifted" in run.nodes:
        dag["nodes"]["update"]["dependencies"].append("drifted")
    for module in (ROOT / "benchmarks/planted_faults.py", ROOT / "examples/near_miss/near_miss.py"):
        shutil.copy(module, folder)
    file = folder / f"{run.dag}.yaml"
    file.write_text(yaml.safe_dump(dag))
    held_out = (ROOT / "dags/data/arithmetic/heldout.jsonl").read_text().splitlines(keepends=True)
    (folder / "heldout.jsonl").write_text("".join(held_out[:HELD_OUT]))
    return str(file), _write_records(run.records, folder)


def _write_records(kind: str, folder: Path) -> str:
    if not kind:
        return ""
    rows = [json.loads(line) for line in (ROOT / "dags/data/arithmetic/train.jsonl").read_text().splitlines()]
    if kind in ("few", "eight"):
        rows = [row for _ in range(200) for row in rows[:3]] if kind == "few" else rows[:8]
    if kind == "one":
        rows = rows[:1] * 600
    if kind == "shifted":
        for row, answer in zip(rows, [row["answer"] for row in (*rows[1:], rows[0])]):
            row["answer"] = answer
    for row in rows:
        head, _, last = row["answer"].rpartition("####")
        if kind == "leak":
            row["question"] = f"{row['question']} {row['answer']}"[-100:]
        if kind == "bare":
            row["question"] = " ".join(word for word in row["question"].split() if word.isdigit())
        if kind == "template":
            row["question"] = f"### Human: {row['question']}\n### Assistant:"[-100:]
        if kind == "wrong" or kind == "half" and len(head) % 2:
            row["answer"] = f"{head}#### {int(last) % 10 + 1}"
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "train.jsonl")


def record(names: Sequence[str], runs: Sequence[Run], results: Path = RESULTS) -> None:
    """Run what is not recorded yet, or what `names` begin with, each in a fork of this process."""
    known: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    wanted = [run for name in names or [""] for run in runs if run.name.startswith(name)]
    wanted = [run for run in dict.fromkeys(wanted) if run.name in names or run.name not in known]
    _preload()
    if any(run.model for run in wanted) and not TOOL_MODEL.exists():
        _train_tool_model()
    for run in wanted:
        began = time.time()
        with tempfile.TemporaryDirectory() as scratch:
            code = _in_fork(run, Path(scratch))
            done = Path(scratch) / "runs/it"
            if (done / "metrics.jsonl").exists():
                known[run.name] = _series(run, done)
                _write_results(known, results)
            print(f"{run.name}: status {code}, {time.time() - began:.0f} s", flush=True)


def _train_tool_model() -> None:
    """Train the shipped small model to call a calculator, which it does not."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Run("tools", "sft", steps=100, settings=("roles.actor.model=arithmetic_sft", "data.batch=32",
                                                       "roles.actor.learning_rate=1e-3",
                                                       "data.train=arithmetic/tool_demonstrations.jsonl"))
        _in_fork(run, Path(scratch))
        shutil.copytree(Path(scratch) / "runs/it/model", TOOL_MODEL)


def _preload() -> None:
    """Import what every run needs once, and say to launch.py what torchrun would."""
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
                   "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    import workers.functions.updates
    import workers.loop
    import workers.worker  # noqa: F401


def _in_fork(run: Run, scratch: Path) -> int:
    dag, data = write_inputs(run, scratch)
    settings = [f"steps={run.steps}", *COMMON, f"validation.data.heldout={scratch}/heldout.jsonl",
                f"output={scratch}/runs", *run.settings, *([f"data.train={data}"] if data else ())]
    if run.dag == "reward_model":
        settings = [each.replace(".actor.", ".reward.") for each in settings if not each.startswith("validation.")]
    if run.model:
        settings.append(f"roles.actor.model={TOOL_MODEL}")
    if run.dag in OWN_RUN_FILE:
        settings += ["--run-file", f"embedded_{run.dag}.yaml"]
    line = ["--in-process", "--dag", dag, "--name", "it"]
    for setting in settings:
        line += [setting] if setting.startswith("--run") or setting.startswith("embedded_") else ["--set", setting]
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
        errors = os.dup(2)
        output = os.open(scratch / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = ["launch.py", *line]
        from distflow.launch import main

        code = main(line)
    finally:
        if code:
            os.write(errors, (scratch / "output").read_bytes()[-1500:])
        os._exit(code)


def _series(run: Run, folder: Path) -> dict[str, Any]:
    """Return the metrics of a run by name, each a value a step or null, and its settings."""
    reader = RunReader(folder)
    steps = [line for line in reader.steps() if line["step"]]
    names = sorted({name for line in steps for name in line if not name.startswith(LEFT_OUT)} - {"step"})
    settings = {key: value for key, value in reader.settings().items()
                if key.startswith(("nodes.", "roles.")) and "/" not in value}
    return {"first": run.first, "settings": settings, "steps": len(steps),
            "series": {name: [line.get(name) if name == "response/fingerprint" else _short(line.get(name))
                              for line in steps] for name in names}}


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _write_results(known: dict[str, Any], results: Path) -> None:
    lines = [f"{json.dumps(name)}: {json.dumps(run, separators=(',', ':'))}" for name, run in known.items()]
    results.parent.mkdir(exist_ok=True)
    results.write_text("{" + ",\n".join(lines) + "}\n")


def _lines(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the metrics of each step of a recorded run, as metrics.jsonl has them."""
    return [{name: values[at] for name, values in run["series"].items() if values[at] is not None} | {"step": at + 1}
            for at in range(run["steps"])]


def judge() -> None:
    """Print what the detectors say of each recorded run, and how good that is."""
    recorded: dict[str, Any] = json.loads(RESULTS.read_text())
    planned = {run.name: run for run in everything()}
    late, detected, named, steps, false = list[int](), list[str](), list[str](), 0, list[str]()
    began = time.process_time()
    for name, run in recorded.items():
        found, first = faults_of(_lines(run), run["settings"]), run["first"]
        steps += run["steps"]
        early = [fault for fault in found if fault.step < first or not first]
        since = [fault for fault in found if fault not in early]
        main = main_fault(since)
        false += [name] if early else []
        if first and main:
            detected.append(name)
            late.append(since[0].step - first)
            told = f"{main.evidence.what} {main.evidence.cause} {main.evidence.remedy}"
            named += [name] if main.detector in planned[name].causes and planned[name].named in told else []
        verdict = "false alert" if early else "right" if name in named else "other cause" if since else \
            "missed" if first else "clean"
        said = ", ".join(f"{fault.detector} at {fault.step}" for fault in found)
        print(f"{name:28} {verdict:12} {said or 'nothing'}")
    faulty = sum(bool(run["first"]) for run in recorded.values())
    print(f"# {faulty} planted: {len(detected)} detected, {len(named)} with the cause named rightly; "
          f"{median(late) if late else 0:g} steps until detected (median); {len(false)} false alerts in "
          f"{len(recorded) - faulty} healthy runs and {faulty} healthy beginnings; "
          f"{1e3 * (time.process_time() - began) / steps:.2f} ms a step")
    shares = [sum(name.startswith(task) for name in detected) /
              max(sum(bool(run["first"]) for name, run in recorded.items() if name.startswith(task)), 1)
              for task in ("grpo/", "near_miss/")]
    conclude("planted faults of learning that are detected", Spread(len(detected) / faulty, min(shares), max(shares)),
             0.9, unit="share", holds=not false)


def curves() -> None:
    """Print the curves of the planted runs as a table, for docs/learning_faults.md."""
    shown = range(3, STEPS, 4)
    print(f"| fault | metric | {' | '.join(f'step {at + 1}' for at in shown)} | detected | by |")
    print(f"|---|---|{'---|' * len(shown)}---|---|")
    for name, run in json.loads(RESULTS.read_text()).items():
        main = main_fault(faults_of(_lines(run), run["settings"]))
        if run["first"] and main and name.startswith(("grpo/", "reported/")):
            values = run["series"].get(main.evidence.metric, [])
            cells = " | ".join("–" if values[at] is None else f"{values[at]:.2g}" for at in shown)
            kind, metric = name.partition("/")[2], main.evidence.metric
            print(f"| {kind} | `{metric}` | {cells} | {main.step} | `{main.detector}` |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "long", "judge", "curves"])
    parser.add_argument("names", nargs="*", help="of runs, or how they begin; default: those that are not recorded")
    options = parser.parse_args()
    if options.what in ("record", "long"):
        record(options.names, *((everything(), RESULTS) if options.what == "record" else ([*long()], LONG_RESULTS)))
    else:
        judge() if options.what == "judge" else curves()


if __name__ == "__main__":
    main()
