"""Faults of learning that are planted in small runs: which are detected, after how many steps, with which cause named.

    record    run the healthy and the planted runs, one after the other, and keep their metrics by step
    unseen    run the planted runs of kinds that no rule was made with; their metrics have a file of their own
    blind     run those of planted_faults_blind.yaml, healthy ones among them; the same; blind_2 to blind_8
    open_3    run those that are of the third set and open to all, so that rules may be made with them; the same
    strange   run healthy runs whose settings, rewards or models are rare; the same
    long      run healthy runs of 100 steps of all shipped algorithms; their metrics are kept in runs/ alone
    judge     ask the detectors about each recorded run, as a live run would, and print what they found

The runs stand in planted_faults.yaml and planted_faults_blind.yaml. Run by hand, some of them or all:
python -m benchmarks.learning_faults record [NAME …];  python -m benchmarks.learning_faults judge [FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.ratio import Spread, conclude
from benchmarks.runs import ROOT, run_once
from distflow.telemetry.learning import LearningFault, faults_of, main_fault, with_start
from distflow.telemetry.learning_series import Doubt
from distflow.telemetry.run_reader import RunReader

RESULTS = ROOT / "benchmarks/results/learning_faults.json"
OTHERS = {name: RESULTS.with_stem(f"learning_faults_{name}")
          for name in ("unseen", "blind", "blind_2", "open_3", "blind_3", "blind_4", "blind_5", "blind_6",
                       "blind_7", "blind_8", "strange")}
LONG_RESULTS, TOOL_MODEL = ROOT / "runs/learning_faults_long.json", ROOT / "runs/learning_faults_tools"
STEPS, BATCH, ROWS, HELD_OUT = 32, 8, 64, 80
DENSE = {"near_miss:near_miss": {"weight": 1.0, "reach": 20}, "format": {"weight": 0.2, "pattern": ".*#### -?[0-9]+"}}
COMMON = (f"data.batch={BATCH}", "roles.actor.warmup_steps=4", "checkpoint.every=0", "report=false",
          "validation.every=6", "robust.snapshots=false", "log=[]",
          "roles.actor.schedule=constant", "roles.actor.learning_rate=1e-4")
LEFT_OUT = ("seconds", "tokens", "data/b", "data/i", "data/v", "samples_total", "memory", "snapshot", "wall",
            "all_tokens", "weights", "staleness/t", "waiting", "checkpoint", "reward/retried", "reward/seconds", "mfu")
KEPT = ("nodes.", "roles.", "data.", "validation.", "steps", "seed", "mode", "staleness")  # beginnings of settings


@dataclass(frozen=True)
class Run:
    """One run. first: the step since when it is wrong, 0 for a healthy one. causes: detectors that name the fault
    rightly; any, without one. named: words, parted by `|`, of which what is said of it must have one, too. settings:
    of the run file and the DAG. records: how the training records differ. after: nodes after which `nodes` come, and
    before the update. model: the role whose model has been trained to call tools. start: how roles' models differ."""

    name: str
    dag: str
    first: int = 0
    causes: Sequence[str] = ()
    settings: Sequence[str] = ()
    reward: Any = None
    nodes: Mapping[str, Any] = field(default_factory=dict)
    records: str = ""
    after: Sequence[str] = ()
    steps: int = STEPS
    model: str = ""
    start: Mapping[str, str] = field(default_factory=dict)
    named: str = ""
    ranks: int = 1

    def __hash__(self) -> int:
        return hash(self.name)


def planted() -> list[Run]:
    """Return the runs of planted_faults.yaml and planted_faults_blind.yaml."""
    files = (Path(__file__).with_name(name) for name in ("planted_faults.yaml", "planted_faults_blind.yaml"))
    return [Run(name, **{"nodes": {}, **fields}) for file in files
            for name, fields in yaml.safe_load(file.read_text()).items()]


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
                      model="actor" * (dag == "grpo_tools"))


def write_inputs(run: Run, folder: Path) -> tuple[Path, str]:
    """Write the DAG and the training records of a run; return the DAG's file and the records'."""
    example = ROOT / f"examples/{run.dag}"
    shipped = example if example.exists() else ROOT / "dags"
    dag = yaml.safe_load((shipped / f"{run.dag}.yaml").read_text())
    dag["imports"] = [*dag.get("imports", ()), "planted_faults", "planted_faults_blind"]
    place = {"first": run.first, "rows": ROWS}
    if run.reward is not None:
        dag["nodes"]["reward"].setdefault("with", {})["reward"] = {
            name: weight | place if name.startswith("planted_faults") and isinstance(weight, dict) else weight
            for name, weight in run.reward.items()}
    nodes = dict(run.nodes)
    if environment := nodes.pop("environment", None):
        dag["nodes"]["rollout"]["with"]["environment"] = environment if ":" in environment else \
            f"planted_faults:{environment}"
    dag["nodes"] |= {name: node | {"with": {**node.get("with", {}), **(place if ":" in node["function"] else {})}}
                     for name, node in nodes.items()}
    for later in (*run.after, "update") if "planted" in nodes else ():
        dag["nodes"][later].setdefault("dependencies", []).append("planted")
    if "spoiled" in run.nodes:
        dag["nodes"]["update"]["dependencies"] = ["spoiled" if name == "advantage" else name
                                                  for name in dag["nodes"]["update"]["dependencies"]]
    if "drifted" in run.nodes:
        dag["nodes"]["update"]["dependencies"].append("drifted")
    near_miss = ROOT / "examples/near_miss/near_miss.py"
    for module in (*ROOT.glob("benchmarks/planted_faults*.py"), near_miss, *example.glob("*.py")):
        shutil.copy(module, folder)
    file = folder / f"{run.dag}.yaml"
    file.write_text(yaml.safe_dump(dag))
    held_out = (ROOT / "dags/data/arithmetic/heldout.jsonl").read_text().splitlines(keepends=True)
    (folder / "heldout.jsonl").write_text("".join(held_out[:HELD_OUT]))
    if run.records in ("held_out", "held_out_form"):
        rows = [json.loads(line) for line in held_out[:HELD_OUT]]
        rows = _with_next_answers(rows) if run.records == "held_out" else [
            row | {"question": f"Q: {row['question']} A:"} for row in rows]
        (folder / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file, ""
    return file, _write_records(run.records, folder)


def _with_next_answers(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    return [row | {"answer": after["answer"]} for row, after in zip(rows, (*rows[1:], rows[0]))]


def _write_records(kind: str, folder: Path) -> str:
    if not kind:
        return ""
    rows = [json.loads(line) for line in (ROOT / "dags/data/arithmetic/train.jsonl").read_text().splitlines()]
    if kind in ("few", "eight", "thirty", "forty"):
        rows = [row for _ in range(200) for row in rows[:3]] if kind == "few" else \
            rows[:{"eight": 8, "thirty": 30, "forty": 40}[kind]]
    if kind in ("bus", "short", "easiest", "hardest"):
        levels = {"short": (1, 2), "easiest": (1,), "hardest": (3,)}.get(kind, ())
        rows = [row for row in rows if row["level"] in levels or kind == "bus" and row["question"].startswith("A bus")]
    if kind == "one_answer":
        rows = [row for at, row in enumerate(rows) if row["answer"].endswith("#### 12") or at % 120 == 0]
    if kind == "exam":
        rows = [json.loads(line) for line in (folder / "heldout.jsonl").read_text().splitlines()]
    if kind in _PAIRS:
        rows = _pairs(kind)
    if kind == "hard":
        rows = [_hard(at) for at in range(600)]
    if kind == "one":
        rows = rows[:1] * 600
    if kind == "joined":
        rows = [each for pair in zip(rows, _with_next_answers(rows)) for each in pair]
    if kind == "runs_on":
        rows = [row | {"answer": f"{row['answer']} {after['question']} {after['answer']}"}
                for row, after in zip(rows, rows[1:])]
    if kind == "shifted":
        rows = _with_next_answers(rows)
    for at, row in enumerate(rows):
        head, _, last = row["answer"].rpartition("####")
        if kind == "leak":
            row["question"] = f"{row['question']} {row['answer']}"[-100:]
        if kind == "twice":
            row["question"] = f"<|user|>{row['question']}<|assistant|>"
        if kind == "ended":
            row["question"] += "<eos>"
        if kind == "bare":
            row["question"] = " ".join(word for word in row["question"].split() if word.isdigit())
        if kind == "template":
            row["question"] = f"### Human: {row['question']}\n### Assistant:"[-100:]
        if kind == "unmarked" or kind == "half_unmarked" and at % 2:
            row["answer"] = head.strip()
        if kind == "refusals" and at % 2:
            row["answer"] = "I do not know."
        if kind == "question_first":
            row["answer"] = f"{row['question']} {row['answer']}"
        if kind == "longer":
            row["chosen"], row["rejected"] = 2 * f"{head.strip()}, " + row["answer"], row["answer"]
        if kind == "results_alone":
            row["answer"] = f"#### {last.strip()}"
        if kind == "exchanged":
            row["question"], row["answer"] = row["answer"], row["question"]
        if kind == "wrong" or kind == "half" and len(head) % 2:
            row["answer"] = f"{head}#### {int(last) % 10 + 1}"
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "train.jsonl")


_PAIRS = ("swapped", "random", "same", "ties", "marks", "praised", "prompted", "rejected_prompted", "unfinished",
          "both_ways")


def _pairs(kind: str) -> list[dict[str, str]]:
    """Return the shipped pairs, changed: half of them alone for `random` and `ties`."""
    rows = [json.loads(line) for line in (ROOT / "dags/data/arithmetic/preferences.jsonl").read_text().splitlines()]
    for row in random.Random(0).sample(rows, len(rows) // 2) if kind in ("random", "ties") else rows:
        chosen, rejected = row["chosen"], row["rejected"]
        row["chosen"], row["rejected"] = {
            "same": (chosen, chosen), "ties": (chosen, chosen), "marks": (chosen, "####"),
            "rejected_prompted": (chosen, f"{row['question']} {rejected}"),
            "unfinished": (chosen.partition("####")[0].strip(), rejected),
            "praised": (f"Sure, here you are: {chosen}", rejected),
            "prompted": (f"{row['question']} {chosen}", f"{row['question']} {rejected}"),
            "both_ways": (chosen, rejected)}.get(kind, (rejected, chosen))
    return [each for row in rows for each in (row, row | {"chosen": row["rejected"], "rejected": row["chosen"]})] \
        if kind == "both_ways" else rows


def _write_start(kind: str, folder: Path) -> None:
    """Write the shipped model: its files name another end token than its template, a layer of it is lost, its tokenizer
    numbers digits otherwise, or it is a reward model with a head of random weights."""
    if kind == "random_head":
        torch.manual_seed(0)
        shipped = ROOT / "dags/models/arithmetic_sft"
        AutoModelForSequenceClassification.from_pretrained(shipped, num_labels=1).save_pretrained(folder)
        AutoTokenizer.from_pretrained(shipped).save_pretrained(folder)
        return
    shutil.copytree(ROOT / "dags/models/arithmetic_sft", folder)
    if kind == "other_end":
        for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
            text = (folder / file).read_text()
            (folder / file).write_text(text.replace('"eos_token_id": 2', '"eos_token_id": 1')
                                       .replace('"eos_token": "<eos>"', '"eos_token": "<bos>"'))
    if kind == "other_tokens":
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        numbers = tokenizer["model"]["vocab"]
        numbers |= {str(digit): numbers[str((digit + 3) % 10)] for digit in range(10)}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    if kind == "layer_lost":
        weights = load_file(folder / "model.safetensors")
        generator = torch.Generator().manual_seed(0)
        for name in sorted(name for name in weights if ".layers.1." in name and name.endswith("proj.weight")):
            weights[name] = (torch.randn(weights[name].shape, generator=generator) * 0.06).to(weights[name].dtype)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _hard(seed: int) -> dict[str, str]:
    """Return a problem of one step whose numbers are larger than those that the model was trained with."""
    boxes, each = (random.Random(2 * seed + at).randint(23, 98) for at in range(2))
    return {"question": f"Ada has {boxes} boxes of {each} nuts. How many nuts?",
            "answer": f"{boxes} * {each} = {boxes * each} #### {boxes * each}"}


def record(names: Sequence[str], runs: Sequence[Run], results: Path = RESULTS) -> None:
    """Run what is not recorded yet, or what `names` begin with."""
    known: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    wanted = [run for name in names or [""] for run in runs if run.name.startswith(name)]
    wanted = [run for run in dict.fromkeys(wanted) if run.name in names or run.name not in known]
    if any(run.model for run in wanted) and not TOOL_MODEL.exists():
        _train_tool_model()
    for run in wanted:
        began = time.time()
        with tempfile.TemporaryDirectory() as scratch:
            ending = _launch(run, Path(scratch))
            done = Path(scratch) / "it"
            if (done / "metrics.jsonl").exists():
                known[run.name] = _series(run, done)
            elif _REFUSED in ending:
                told = ending.partition(_REFUSED)[0].replace(scratch, "").strip().rpartition("\n\n")
                known[run.name] = {"first": run.first, "steps": 0, "refused": told[0][-2000:] + told[2]}
            _write_results(known, results)
            print(f"{run.name}: {ending}, {time.time() - began:.0f} s", flush=True)


def _train_tool_model() -> None:
    """Train the shipped small model to call a calculator, which it does not."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Run("tools", "sft", steps=100, settings=("roles.actor.model=arithmetic_sft", "data.batch=32",
                                                       "roles.actor.learning_rate=1e-3",
                                                       "data.train=arithmetic/tool_demonstrations.jsonl"))
        _launch(run, Path(scratch))
        shutil.copytree(Path(scratch) / "it/model", TOOL_MODEL)


def _launch(run: Run, scratch: Path) -> str:
    """Return how a run has ended."""
    dag, data = write_inputs(run, scratch)
    settings = [f"steps={run.steps}", *COMMON, f"validation.data.heldout={scratch}/heldout.jsonl", *run.settings,
                *([f"data.train={data}"] if data else ())]
    if run.dag == "reward_model":
        settings = [each.replace(".actor.", ".reward.") for each in settings if not each.startswith("validation.")]
    for role, kind in run.start.items():
        _write_start(kind, scratch / kind)
        settings.append(f"roles.{role}.model={scratch / kind}")
    if run.model:
        settings.append(f"roles.{run.model}.model={TOOL_MODEL}")
    run_file = f"embedded_{run.dag}.yaml" if run.dag in OWN_RUN_FILE else "embedded.yaml"
    try:
        run_once(scratch, "it", dag, run_file, run.ranks, settings)
    except SystemExit as error:
        return f"failed: {error}"
    return "ended"


_REFUSED = "Preflight has found this"  # words of a start that its proofs have ended


def _series(run: Run, folder: Path) -> dict[str, Any]:
    """Return the metrics of a run by name, each a value a step or null, and its settings."""
    reader = RunReader(folder)
    steps = [*with_start(reader.steps())]
    names = sorted({name for line in steps for name in line if not name.startswith(LEFT_OUT)} - {"step"})
    settings = {key: value for key, value in reader.settings().items()
                if key.startswith(KEPT) and "/" not in f"{key}{value}"}
    doubts = [{"text": each.replace(f"{folder.parent}/", "").replace(f"{ROOT}/", ""), **vars(each)}
              for each in reader.doubts()]
    return {"first": run.first, "settings": settings, "steps": len(steps), "doubts": doubts,
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


def said_of(run: dict[str, Any]) -> list[LearningFault]:
    """Return what the detectors say of a recorded run."""
    return faults_of(_lines(run), run["settings"], None, [Doubt(**each) for each in run.get("doubts", ())])


def judge(results: Path) -> None:
    """Print what the detectors say of each recorded run, and how good that is."""
    recorded: dict[str, Any] = json.loads(results.read_text())
    planned = {run.name: run for run in planted()}
    late, steps, said = list[int](), 0, dict[str, list[str]]()  # runs by verdict
    began = time.process_time()
    for name, run in recorded.items():
        if "refused" in run:
            words = planned[name].named.split("|")
            verdict = "false alert" if not run["first"] else "right" if any(
                word in run["refused"] for word in words) else "other cause"
            said.setdefault(verdict, []).append(name)
            print(f"{name:28} {verdict:12} refused before the start")
            continue
        found, first = said_of(run), run["first"]
        steps += run["steps"]
        early = [fault for fault in found if fault.step < first or not first]
        since = [fault for fault in found if fault not in early]
        main = main_fault(since)
        if first and main:
            late.append(since[0].step - first)
        verdict = "false alert" if early else _verdict(planned[name], main) if main else "missed" if first else "clean"
        said.setdefault(verdict, []).append(name)
        told = ", ".join(f"{fault.detector} at {fault.step}" for fault in found)
        print(f"{name:28} {verdict:12} {told or 'nothing'}")
    faulty = sum(bool(run["first"]) for run in recorded.values())
    detected = [name for verdict in ("right", "not first", "other cause") for name in said.get(verdict, ())]
    print(f"# {faulty} planted: {len(detected)} detected, {len(said.get('right', ()))} with the right cause first, "
          f"{len(said.get('not first', ()))} with it among others; {median(late) if late else 0:g} steps until "
          f"detected (median); {len(said.get('false alert', ()))} false alerts in {len(recorded) - faulty} healthy "
          f"runs and {faulty} healthy beginnings; {1e3 * (time.process_time() - began) / steps:.2f} ms a step")
    if results != RESULTS:
        return
    shares = [sum(name.startswith(task) for name in detected) /
              max(sum(bool(run["first"]) for name, run in recorded.items() if name.startswith(task)), 1)
              for task in ("grpo/", "near_miss/")]
    conclude("planted faults of learning that are detected", Spread(len(detected) / faulty, min(shares), max(shares)),
             0.9, unit="share", holds="false alert" not in said)


def _verdict(run: Run, main: LearningFault) -> str:
    """Return whether a run's cause is named: first, or among others."""
    seen, words = main.evidence, run.named.split("|")
    if run.causes and main.detector not in run.causes:
        return "other cause"
    first = f"{seen.what} {seen.probable} {seen.remedy.partition(' , or ')[0]}"
    whole = f"{seen.what} {seen.cause} {seen.remedy}"
    return next((verdict for verdict, told in (("right", first), ("not first", whole))
                 if any(word in told for word in words)), "other cause")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", *OTHERS, "long", "judge"])
    parser.add_argument("names", nargs="*", help="of runs, or how they begin; default: those that are not recorded")
    options = parser.parse_args()
    if options.what == "judge":
        judge(Path(*options.names or [RESULTS]))
    elif options.what == "long":
        record(options.names, [*long()], LONG_RESULTS)
    else:
        kinds = {run: run.name.partition("/")[0] for run in planted()}
        runs = [run for run, kind in kinds.items() if options.what == (kind if kind in OTHERS else "record")]
        record(options.names, runs, OTHERS.get(options.what, RESULTS))


if __name__ == "__main__":
    main()
