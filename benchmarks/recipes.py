"""What each recipe of `examples/recipes` makes of its task: held-out accuracy before, after SFT, after GRPO from there,
and after as many more steps of SFT instead.

    python -m benchmarks.recipes chain_sum --seeds 0 1

writes results/recipes.json, a table beside it, and the curve of the recipe. Runs that have ended are read and not
repeated; one that was interrupted is resumed. `--collect` starts none, and reads those that have ended.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.charts import Axes, picture, text
from benchmarks.ratio import interval_of
from benchmarks.runs import ROOT, environment, with_set
from distflow.telemetry.accuracy import interval
from distflow.telemetry.run_reader import RunReader

RUNS, RESULTS = ROOT / "runs/recipes", ROOT / "benchmarks/results/recipes.json"
STAGES = {"sft": ("#6e7781", "SFT"), "grpo": ("#1f6feb", "GRPO"), "control": ("#d97706", "more SFT instead")}
OTHER_ORDER = 1000
"""Added to the seed of the SFT that continues, so that it does not begin with the problems that it has seen."""
GRPO_SETTINGS = {"chain_sum": (), "spell_backward": ("nodes.reward.with.reward=exact_answer:letters",),
                 "reverse_words": ("nodes.reward.with.reward=examples.recipes.spell_backward.exact_answer:exact",),
                 "needle": ("nodes.reward.with.reward=examples.recipes.spell_backward.exact_answer:exact",),
                 "calculator": (), "openenv": ()}
"""Recipe → what its GRPO has beside its run file."""
BASE, MODEL = "base", RUNS / "SmolLM2-135M-Instruct"
EVALUATIONS = {"evaluate": "curve", "greedy": "likeliest"}
"""Kind of evaluation → what its shares are called in the results: of sampled conversations, of the likeliest ones."""
CONVERSING = {"calculator", "openenv"}
"""Recipes with DAGs of their own for GRPO and for evaluation, since validation asks for single turns."""
STARTS = {"openenv": "needle"}
"""Recipe without SFT of its own → the one whose SFT it begins with. The server of openenv is started by hand."""


@dataclass(frozen=True)
class Study:
    """The three runs of a recipe with one seed."""

    recipe: str
    seed: int

    def folder(self, stage: str) -> Path:
        recipe = STARTS.get(self.recipe, self.recipe) if stage == "sft" else self.recipe
        return RUNS / f"{recipe}-{stage}-{0 if stage.endswith(BASE) else self.seed}"

    def model(self, stage: str) -> Path:
        """Return the model that a stage leaves, or that of all seeds before any."""
        return MODEL if stage == BASE else self.folder(stage) / "model"

    @property
    def trained(self) -> tuple[str, ...]:
        """Stages that train a model of this recipe, in their order."""
        return ("grpo",) if self.recipe in STARTS else tuple(STAGES)

    @property
    def stages(self) -> tuple[str, ...]:
        """Stages that are started, in their order."""
        if self.recipe not in CONVERSING:
            return self.trained
        models = ("sft" if self.recipe in STARTS else BASE, *self.trained)
        return tuple(stage for model in models
                     for stage in (*[model] * (model in self.trained), *(f"{kind}-{model}" for kind in EVALUATIONS)))

    def command(self, stage: str) -> list[str]:
        """Return the words behind `distflow` that start a stage, or resume it."""
        folder, start = self.folder(stage), f"roles.actor.model={self.model('sft')}"
        if (folder / "checkpoints").is_dir():
            return ["resume", str(folder)]
        steps, kind = RunReader(self.folder("grpo")).summary.get("steps"), stage.partition("-")[0]
        often = [] if self.recipe in CONVERSING else ["validation.every=10"]
        run, settings = {
            "sft": ("sft", [f"seed={self.seed}"]),
            "grpo": ("grpo", [f"seed={self.seed}", start, *GRPO_SETTINGS[self.recipe]]),
            "control": ("sft", [f"seed={self.seed + OTHER_ORDER}", start, f"steps={steps}", *often]),
            "evaluate": ("evaluate", [f"roles.actor.model={self.model(stage.rpartition('-')[2])}"]),
            "greedy": ("evaluate", [f"roles.actor.model={self.model(stage.rpartition('-')[2])}",
                                    "roles.actor.generation.temperature=0.0"]),
        }[kind]
        own = {"grpo": f"{self.recipe}.yaml", "evaluate": f"evaluate_{self.recipe}.yaml"}
        dag = f"examples/recipes/{self.recipe}/{own[run]}" if self.recipe in CONVERSING and run in own else run
        return ["run", dag, "--run", f"examples/recipes/{self.recipe}/{run}_run.yaml", "--name", folder.name,
                *with_set(settings)]

    def launch(self, stage: str) -> None:
        """Run a stage to its end, unless it has ended. Raises CalledProcessError: it has failed, and said why."""
        if RunReader(self.folder(stage)).state != "has finished":
            subprocess.run([sys.executable, "-m", "distflow.cli", *self.command(stage)], cwd=ROOT, check=True,
                           env=environment(PYTHONPATH=str(ROOT),
                                           OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1")))

    def results(self) -> dict[str, Any]:
        """Return what the stages that have ended have come to, by stage."""
        readers = {stage: RunReader(self.folder(stage)) for stage in self.stages}
        ended = {stage for stage, reader in readers.items() if reader.state == "has finished"}
        found = {stage: outcome(readers[stage]) for stage in self.trained if stage in ended
                 and (self.recipe not in CONVERSING or f"evaluate-{stage}" in ended)}
        for kind, curve in EVALUATIONS.items() if self.recipe in CONVERSING else ():
            shares = {stage: evaluated(readers[f"{kind}-{stage}"]) for stage in (BASE, *STAGES)
                      if f"{kind}-{stage}" in ended}
            for stage, done in ((stage, done) for stage, done in found.items() if stage in shares):
                start = shares.get(BASE if stage == "sft" else "sft")
                done[curve] = [*([[0, *start]] if start else []), [done["steps"], *shares[stage]]]
        return found


def outcome(run: RunReader) -> dict[str, Any]:
    """Return the curve of a run, as [step, accuracy, low, high], and what it took."""
    names = ("validation/heldout", "validation_low/heldout", "validation_high/heldout")
    steps, timed = run.steps(), run.timed_steps()
    curve = [[values["step"], *(round(values[name], 4) for name in names)] for values in steps if names[0] in values]
    return {"steps": run.summary["steps"], "curve": curve, "tokens": int(sum(values["tokens"] for values in timed)),
            "rows": int(sum(values["samples"] for values in timed)),
            "minutes": round(run.summary["wall_seconds"] / 60, 1),
            "minutes_in_steps": round(run.summary["seconds_in_steps"] / 60, 1)}


def evaluated(run: RunReader) -> list[float]:
    """Return pass@1 of an evaluation, and its interval."""
    values = run.steps()[-1]
    share, problems = values["evaluation/pass@1"], int(values["evaluation/pass@1/problems"])
    return [round(value, 4) for value in (share, *interval(share, share, problems))]


def rows_of(seeds: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the rows of a recipe's table, as its page has them: a stage a row, and the means of three seeds or more."""
    for seed, stages in seeds.items():
        for stage, done in stages.items():
            yield _row(seed, STAGES[stage][1], done, *_ends(done["curve"]))
            if "likeliest" in done:
                yield _row(seed, f"{STAGES[stage][1]}, likeliest", done, *_ends(done["likeliest"]))
    for stage, curve in ((stage, curve) for stage in STAGES for curve in ("curve", "likeliest")):
        runs = [stages[stage] for stages in seeds.values() if curve in stages.get(stage, ())]
        if len(runs) > 2:
            befores, afters = zip(*((done[curve][0][1], done[curve][-1][1]) for done in runs))
            mean, half = interval_of(afters)
            usual = {name: round(statistics.mean(done[name] for done in runs), 1) for name in ("steps", "minutes")}
            usual |= {name: round(statistics.mean(done[name] for done in runs)) for name in ("rows", "tokens")}
            before = "–" if runs[0][curve][0][0] else f"{statistics.mean(befores):.3f}"
            words = f"{STAGES[stage][1]}{', likeliest' * (curve == 'likeliest')}"
            yield _row(f"mean of {len(runs)}", words, usual, before, f"{mean:.3f} ± {half:.3f}")


def _ends(curve: list[list[float]]) -> tuple[str, str]:
    (first, value, *_), (_, after, low, high) = curve[0], curve[-1]
    return "–" if first else f"{value:.3f}", f"{after:.3f} ({low:.3f} to {high:.3f})"


def _row(seed: str, words: str, done: dict[str, Any], before: str, after: str) -> str:
    return (f"| {seed} | {words} | {done['steps']:g} | {before} | {after} | {done['rows']:,} | {done['tokens']:,} | "
            f"{done['minutes']} |")


HEAD = ("| seed | stage | steps | before | after (95% interval) | rows | trained tokens | minutes |",
        "|---|---|---|---|---|---|---|---|")


def drawn(title: str, seeds: dict[str, dict[str, Any]]) -> str:
    """Return an SVG of the curves of all seeds, GRPO and more SFT beginning where SFT ends, with their intervals."""
    first = max(stages["sft"]["steps"] if "sft" in stages else 0 for stages in seeds.values())
    last = first + max(done["steps"] for stages in seeds.values() for name, done in stages.items() if name != "sft")
    axes, bold = Axes(44, 30, 584, 234, last), 'font-weight="bold"'
    parts = [text(44, 18, title, more=bold), text(44, 296, "training steps"),
             *axes.grid(sorted({0, first, last}), (0, 0.2, 0.4, 0.6, 0.8, 1))]
    for number, (stage, (colour, words)) in enumerate(STAGES.items()):
        parts.append(text(244 + 110 * number, 18, f"— {words}", more=f'fill="{colour}" {bold}'))
        for done in (stages[stage] for stages in seeds.values() if stage in stages):
            begin = 0 if stage == "sft" else first
            points = [(begin + step, *values) for step, *values in done["curve"]]
            parts += [axes.curve((point[:2] for point in points), colour), *axes.dots(points, colour)]
    return picture(640, 300, parts)


def write(found: dict[str, dict[str, dict[str, Any]]], only: Iterable[str]) -> None:
    """Write the results, the table beside them, and the curves of the recipes `only`."""
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    table = [line for recipe, seeds in found.items() for line in (f"{recipe}\n", *HEAD, *rows_of(seeds), "")]
    RESULTS.with_suffix(".txt").write_text("\n".join(table))
    for recipe in only:
        if any(stages.keys() - {"sft"} for stages in found[recipe].values()):
            title = f"{recipe}: held-out accuracy"
            (ROOT / f"docs/pictures/recipe_{recipe}.svg").write_text(drawn(title, found[recipe]))
    print("\n".join(table))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", choices=sorted(GRPO_SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--collect", action="store_true", help="start nothing, and read the runs that have ended")
    options = parser.parse_args()
    found = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for study in (Study(recipe, seed) for recipe in options.recipes for seed in options.seeds):
        for stage in () if options.collect else study.stages:
            study.launch(stage)
        if results := study.results():
            found.setdefault(study.recipe, {})[str(study.seed)] = results
    write(found, options.recipes)


if __name__ == "__main__":
    main()
