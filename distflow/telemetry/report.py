"""Writes a report of one or several runs: one HTML file that needs no network and no server.

    read_run       what a run's folder holds, whether the run goes on, has ended or was killed
    write_report   report.html: what came of the run in plain sentences, figures, curves, time, failures, samples, the
                   DAG and the configuration

The page's data is JSON in the file itself, drawn by `report.html` with plotly, which is in the file too (compressed).
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
from collections.abc import Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from distflow.telemetry import timeline
from distflow.telemetry.ettr import account
from distflow.telemetry.files import write_atomically
from distflow.telemetry.learning import actions_of, faults_of
from distflow.telemetry.run_reader import RunReader, Tail, numbers
from distflow.telemetry.screen import printable
from distflow.telemetry.timeline import Span

_SAMPLE_CHARACTERS = 1_500_000  # of samples that one report holds; steps between the first and the last are left out
_POINTS = 2_000  # most steps of a curve
_WINDOWS = 60  # of a run, for its sliding ETTR
_COMPARED = 3  # problems with their first and last answers
_WARM = 2  # first steps that are no ordinary ones
_RANKS, _SPANS = 32, 2_000  # of a step whose activities are drawn

Run = dict[str, Any]


def read_run(folder: Path, characters: int = _SAMPLE_CHARACTERS) -> Run:
    """Return all that the page shows of a run. `characters`: most of its samples. Raises InvalidInput: it is none."""
    reader = RunReader.of(folder, "distflow report runs/grpo-1")
    steps, events, plan, answers = reader.steps(), reader.rows("events"), reader.plan, reader.rows("validation")
    kinds = _shown_steps(steps)
    samples = [*_with_turns(reader.rows("samples"), folder), *answers]
    spans, failures = timeline.read(folder, kinds.keys(), _RANKS).spans, _failures(events)
    return {"name": folder.name, "path": str(folder), "verdict": _verdict(steps, failures, reader),
            "metrics": _columns(steps), "summary": reader.summary,
            "plan": {name: plan.get(name) for name in ("name", "mode", "ranks", "notes")},
            **_graph(plan, steps), "samples": _thinned(samples, characters),
            "samples_total": len(samples), "failures": failures, "ettr": _ettr(events),
            "faults": _faults(reader, steps),
            "settings": reader.settings(), "answers": _compared(answers), "best": _best_reward(reader.dag, samples),
            "steps": _timed_steps(kinds, spans)}


def _faults(reader: RunReader, steps: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Return what the detectors of learning say of a run, for its curves."""
    settings = reader.settings()
    return [{"detector": fault.detector, "step": fault.step, "what": fault.sentence, **fault.facts}
            for fault in faults_of(steps, settings, actions_of(settings), reader.doubts())]


def write_report(folders: Sequence[Path], file: Path) -> int:
    """Write the report and return its size in bytes. Raises InvalidInput: one of the folders is no run's."""
    from plotly.offline import get_plotlyjs  # 5 MB: only a report needs it

    characters = _SAMPLE_CHARACTERS // len(folders)
    runs = [read_run(folder, characters) for folder in folders]
    page = (resources.files("distflow.telemetry") / "report.html").read_text(encoding="utf-8")
    plotly = base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
    data = json.dumps(_shown(runs), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    parts = {"TITLE": html.escape(", ".join(run["name"] for run in runs)), "PLOTLY": plotly, "DATA": data}
    head, *rest = page.split("@@")  # TEXT @@NAME@@ TEXT @@NAME@@ TEXT
    text = head + "".join(parts[name] + after for name, after in zip(rest[::2], rest[1::2]))
    write_atomically(file, text)
    return file.stat().st_size


def _shown(value: Any) -> Any:
    """Return a value as a page can show it: its texts `printable`, and None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _shown(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(each) for each in value]
    return printable(value) if isinstance(value, str) else _number(value)


def _verdict(steps: list[dict[str, float]], failures: Sequence[Any], reader: RunReader) -> dict[str, str]:
    """Return what came of a run in plain sentences, and whether that is `good`, `bad` or `open`."""
    done, state = [values for values in steps if "seconds" in values], reader.state
    if not done:
        return {"kind": "open", "headline": "Not known yet", "text": f"No step is done; the run {state}."}
    count, wanted = int(done[-1]["step"]), reader.settings().get("steps")
    took = f"in {count:,} step{'s' * (count > 1)}{_and_time(done[-1].get('wall_seconds'))}"
    kind, headline, learned = _change(steps, took)
    broken = f"{len(failures)} failure{'s' * (len(failures) > 1)}"
    if not failures:
        faults = "Nothing has failed."
    else:
        faults = f"It has had {broken}." if state == "is not running" else f"It has survived {broken}."
    ended = "" if reader.summary else f" It {state}, after {count:,} of {wanted} steps."
    return {"kind": kind, "headline": headline, "text": f"{learned}{ended} {faults}"}


def _change(steps: list[dict[str, float]], took: str) -> tuple[str, str, str]:
    """Return whether answers to the first set of held-out problems have become better: by more than the confidence
    intervals of their means. As a kind, a headline and a sentence."""
    name = next((name for values in steps for name in values if name.startswith("validation/")), "")
    found = [values for values in steps if name in values]
    if len(found) < 2:
        rewards = [values["reward/mean"] for values in steps if "reward/mean" in values]
        went = f" The reward in training went from {rewards[0]:.3f} to {rewards[-1]:.3f} {took}." if rewards else ""
        return "open", "Not known whether it has learned", f"The run has no two validations.{went}"
    before, after, best = found[0], found[-1], max(found, key=lambda values: values[name])
    kind, says = ("good", "It has learned") if _is_above(after, before, name) else \
        ("bad", "It has become worse") if _is_above(before, after, name) else ("open", "It has not clearly changed")
    peak = f"; the best was {_with_interval(best, name)} after step {int(best['step']):,}" if \
        _is_above(best, after, name) else ""
    return kind, says, (f"The mean reward of held-out problems ({name.partition('/')[2]}) went from "
                        f"{_with_interval(before, name)} to {_with_interval(after, name)} {took}{peak}.")


def _bounds(values: dict[str, float], name: str) -> tuple[float | None, ...]:
    return tuple(values.get(name.replace("validation/", f"validation_{end}/", 1)) for end in ("low", "high"))


def _is_above(values: dict[str, float], others: dict[str, float], name: str) -> bool:
    low, high = _bounds(values, name)[0], _bounds(others, name)[1]
    return low is not None and high is not None and low > high


def _with_interval(values: dict[str, float], name: str) -> str:
    low, high = _bounds(values, name)
    within = "" if low is None or high is None else f" (95% interval {low:.3f} to {high:.3f})"
    return f"{values[name]:.3f}{within}"


def _and_time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    unit, size = next((each for each in (("h", 3600), ("min", 60)) if seconds >= 1.5 * each[1]), ("s", 1))
    return f" and {seconds / size:.3g} {unit}"


def _compared(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many problems have a better, a worse and an equal last answer than the first, by its reward, and some
    `pairs` of these answers: those that have improved most, and one that has become worse."""
    rows = [row for row in answers if "completions" in row]
    first, last = (choose((row.get("step", 0) for row in rows), default=0) for choose in (min, max))
    before, after = ({(str(row.get("set")), str(row.get("row"))): row for row in rows if row.get("step", 0) == step}
                     for step in (first, last))
    both = [{"question": row.get("questions"), "answer": row.get("answers"), "steps": [first, last],
             "texts": [before[key]["completions"], row["completions"]],
             "rewards": [numbers(each).get("rewards") for each in (before[key], row)],
             "gain": numbers(row).get("rewards", 0.0) - numbers(before[key]).get("rewards", 0.0)}
            for key, row in after.items() if key in before and first < last]
    both.sort(key=lambda pair: -pair["gain"])
    worse = [pair for pair in both if pair["gain"] < 0]
    pairs = both[:_COMPARED] if not worse else [*both[:_COMPARED - 1], worse[-1]]
    better = sum(pair["gain"] > 0 for pair in both)
    return {"pairs": pairs, "better": better, "worse": len(worse), "equal": len(both) - better - len(worse)}


def _with_turns(samples: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Return the samples, conversations with their turns, each of a role and a text."""
    turns: dict[tuple[str, str], list[list[str]]] = {}
    for file in sorted((folder / "trajectories").glob("*.jsonl")):
        for line in Tail(file).new():
            said = turns.setdefault((str(line.get("step")), str(line.get("row"))), [])
            said += [[role, line[key]] for role, key in (("assistant", "text"), ("environment", "observation"))
                     if isinstance(line.get(key), str)]
    return [row | ({"conversation": found} if (found := turns.get((str(row.get("step")), str(row.get("row"))))) else {})
            for row in samples]


def _best_reward(dag: dict[str, Any], samples: list[dict[str, Any]]) -> float:
    """Return the most that an answer can earn: 1 from each reward of the recipe, times its weight, and nothing from a
    penalty; more if a sample has earned more."""
    parts = [numbers(_mapping(row.get("reward_parts"))) for row in samples]
    penalties = {"length", *(name for found in parts for name, value in found.items() if value < 0)}
    nodes = [node for node in _mapping(dag.get("nodes")).values() if isinstance(node, dict)]
    recipes = [_mapping(node.get("with")).get("reward") for node in nodes if node.get("function") == "score"]
    earned = [value for row in samples for name, value in numbers(row).items()
              if name in ("rewards", "environment_rewards")]
    most = [1.0 if recipe is None else _most_of(recipe, penalties) for recipe in recipes]
    return max([*(most or [1.0]), *earned])


def _most_of(recipe: Any, penalties: set[str]) -> float:
    """Return the most that a recipe of rewards pays (its forms: `distflow.contracts.rewards`)."""
    if isinstance(recipe, dict) and isinstance(recipe.get("rewards"), dict):
        return max((_most_of(branch, penalties) for branch in recipe["rewards"].values()), default=1.0)
    terms = recipe if isinstance(recipe, dict) else dict.fromkeys(recipe if isinstance(recipe, list) else [recipe], 1.0)
    weights = {str(name).rpartition(":")[2]: value.get("weight", 1.0) if isinstance(value, dict) else value
               for name, value in terms.items()}
    return sum(max(0.0, weight) for name, weight in weights.items()
               if name not in penalties and isinstance(weight, int | float))


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _shown_steps(steps: list[dict[str, float]]) -> dict[int, str]:
    """Return the number and the kind of an ordinary step, the slowest one and the last one."""
    timed = [values for values in steps if "seconds" in values]
    timed = timed[_WARM:] or timed
    order = sorted(timed, key=lambda line: line["seconds"])
    kinds = {"the last step": timed[-1], "the slowest step": order[-1], "an ordinary step": order[len(order) // 2]} \
        if timed else {}
    return {int(line["step"]): kind for kind, line in kinds.items()}


def _timed_steps(kinds: dict[int, str], spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return what ranks did in some steps; the start of a span counts from the step's."""
    found = []
    for number, kind in kinds.items():
        shown = [span for span in spans if span.track in (timeline.MAIN, timeline.WEIGHTS) and span.step == number]
        zero = min((span.start for span in shown), default=0.0)
        found.append({"step": number, "kind": kind, "spans": [
            [span.rank, span.role, span.track, span.label, span.facts.get("phase", span.track),
             round(span.start - zero, 4), round(span.seconds, 4)] for span in shown][:_SPANS]})
    return [step for step in reversed(found) if step["spans"]]


def _columns(steps: list[dict[str, float]]) -> dict[str, list[list[float]]]:
    """Return each metric's steps and values, of a long run every n-th step and the last."""
    found: dict[str, list[list[float]]] = {}
    for values in steps:
        for name in values.keys() - {"step"}:
            x, y = found.setdefault(name, [[], []])
            x.append(values["step"])
            y.append(values[name])
    for name, columns in found.items():
        every = -(-len(columns[0]) // _POINTS)
        if every > 1:
            found[name] = [column[:-1:every] + column[-1:] for column in columns]
    return found


def _thinned(samples: list[dict[str, Any]], characters: int) -> list[dict[str, Any]]:
    """Return the samples of as many steps as there is room for, the first and the last step among them."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for row in samples:
        steps.setdefault(row.get("step", 0), []).append(row)
    order = sorted(steps)
    sizes = {step: len(json.dumps(steps[step], ensure_ascii=False)) for step in order}
    every = 1
    while every < len(order) and sum(sizes[step] for step in _every(order, every)) > characters:
        every += 1
    return [row for step in _every(order, every) for row in steps[step]]


def _every(order: list[int], every: int) -> list[int]:
    return sorted({*order[::every], *order[-1:]})


def _graph(plan: dict[str, Any], steps: list[dict[str, float]]) -> dict[str, list[dict[str, Any]]]:
    """Return the nodes and edges of a plan; none of a file that is no plan."""
    try:
        return {"nodes": _nodes(plan), "edges": _edges(plan, steps)}
    except (TypeError, LookupError, AttributeError):
        return {"nodes": [], "edges": []}


def _nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the nodes with their depth, counted from the nodes that read nothing but the dataset."""
    depth: dict[str, int] = {}
    for task in plan.get("tasks", []):
        depth[task["node"]] = 1 + max((depth.get(read["producer"], -1) for read in task["reads"]), default=-1)
    return [{"id": task["node"], "role": task["role"], "type": task["type"], "function": task["function"],
             "depth": depth[task["node"]]} for task in plan.get("tasks", [])]


def _edges(plan: dict[str, Any], steps: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Return the edges with the bytes of rows in a step: as the plan expects them, and as they were on the mean."""
    found = []
    for task, transfer in ((each, transfer) for each in plan.get("tasks", []) for transfer in each["transfers"]):
        name = f"data/bytes/{transfer['producer']}/{task['node']}"
        moved = [values[name] for values in steps if name in values]
        found.append({"from": transfer["producer"], "to": task["node"], "kind": transfer["kind"],
                      "columns": transfer["columns"], "bytes": transfer["bytes_per_step"],
                      "moved": sum(moved) / len(moved) if moved else None})
    return [edge for edge in found if edge["from"] != "source"]


def _failures(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: _number(value) for name, value in vars(recovery).items()} for recovery in account(events).recoveries]


def _ettr(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the effective share of the run's time, whole and in windows; their `ends` count in seconds."""
    costs = account(events)
    window = costs.total / _WINDOWS
    if window <= 0:
        return {}
    ends = [window * number for number in range(_WINDOWS + 1)]
    return {"whole": _number(costs.ettr), "ends": ends[1:],
            "values": [_number(costs.ettr_between(*each)) for each in pairwise(ends)]}


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
