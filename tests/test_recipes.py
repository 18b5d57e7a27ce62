"""The recipes: their run files plan, their data is the same for everybody, their figures are those on record."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from harness import ROOT

from benchmarks.recipes import GRPO_SETTINGS, RESULTS, Study, drawn, rows_of
from distflow.config.load import load
from planners import plan

RECIPES = ROOT / "examples/recipes"
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
         "vocab_size": 300, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128}
DAGS = {("calculator", "grpo_run"): "calculator/calculator.yaml", ("openenv", "grpo_run"): "openenv/openenv.yaml",
        ("calculator", "evaluate_run"): "calculator/evaluate_calculator.yaml"}
"""Recipe and run file → its own DAG; the others have that of their name."""
RECORD = {"question": "4 - 1 =", "answer": "3", "seed": "1", "messages": [{"role": "user", "content": "4 - 1 ="},
                                                                         {"role": "assistant", "content": "3"}]}


def with_what_it_names(run_file: Path, folder: Path) -> list[str]:
    """Make the models and the data that a run file names, below a folder; return the settings of what is elsewhere."""
    run = yaml.safe_load(run_file.read_text())
    named = {"data.train": run["data"]["train"]} | {
        f"validation.data.{name}": path for name, path in run.get("validation", {"data": {}})["data"].items()}
    (folder / "some.jsonl").write_text(json.dumps(RECORD) + "\n")
    for path in (path for path in named.values() if not path.startswith("hf://")):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(json.dumps(RECORD) + "\n")
    for role in run["roles"].values():
        model = folder / role["model"]
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(LLAMA))
        for name in ("model.safetensors", "tokenizer.json"):
            (model / name).touch()
    return [f"{key}=some.jsonl" for key, path in named.items() if path.startswith("hf://")]


@pytest.mark.parametrize("run_file", sorted(RECIPES.glob("*/*_run.yaml")),
                         ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_recipes_run_file_plans(run_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe, name = run_file.parent.name, run_file.stem
    if recipe == "openenv":
        pytest.importorskip("websockets")
    dag = str(RECIPES / DAGS[recipe, name]) if (recipe, name) in DAGS else name.removesuffix("_run")
    settings = with_what_it_names(run_file, tmp_path)
    settings += GRPO_SETTINGS.get(recipe, ()) if dag == "grpo" else ()
    assert plan(load(dag, str(run_file), overrides=settings), 1).ranks == 1


def test_the_calculator_answers_sums_and_pays_for_the_result(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES / "calculator"))
    from chain_calculator import ChainCalculator

    game = ChainCalculator("-3")
    assert game.step("4 - 13 + 5 + 1 =").observation == "-3"
    assert game.step("-4 + 1 =").observation == "-3"
    assert [(turn.done, turn.reward) for turn in map(game.step, ("#### -3", "#### 3", "-3", "4 - =", "4 * 2 ="))] == \
        [(True, 1.0)] + [(True, 0.0)] * 4


def test_the_word_itself_is_paid_and_no_anagram(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES / "spell_backward"))
    from exact_answer import exact

    assert [exact(said, "cba") for said in ("cba", " cba\n", "abc", "CBA", "It is cba")] == [1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.fixture(scope="session")
def tasks(tmp_path_factory) -> Path:
    """A Python that has reasoning-gym."""
    folder = tmp_path_factory.mktemp("tasks")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    line = next(line for line in (RECIPES / "get_model.sh").read_text().splitlines() if "reasoning-gym==" in line)
    done = subprocess.run([str(folder / "bin/python"), "-m", "pip", "install", "--quiet", line.split()[-1]],
                          capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"reasoning-gym cannot be had: {done.stderr[-300:]}")
    return folder / "bin/python"


@pytest.mark.run
def test_a_recipes_data_is_the_same_each_time_and_holds_out_what_it_says(tasks, tmp_path):
    for recipe in ("chain_sum", "spell_backward", "reverse_words", "calculator", "openenv"):
        made = []
        for folder in (tmp_path / f"{recipe}-1", tmp_path / f"{recipe}-2"):
            subprocess.run([str(tasks), str(RECIPES / recipe / "make_data.py"), str(folder)], check=True)
            made.append({path.name: path.read_bytes() for path in folder.iterdir()})
        assert made[0] == made[1]
        train, held_out = ([json.loads(line)["question"].casefold() for line in made[0][f"{name}.jsonl"].splitlines()]
                           for name in ("train", "heldout"))
        assert len(held_out) == 200
        assert len(train) > 3000
        assert not set(train) & set(held_out), recipe


def test_a_stage_of_a_study_begins_where_the_one_before_has_ended():
    study = Study("spell_backward", 3)
    words = " ".join(study.command("grpo"))
    assert "spell_backward-sft-3/model" in words
    assert "nodes.reward.with.reward=exact_answer:letters" in words
    assert "seed=1003" in " ".join(study.command("control"))


def test_the_figures_of_the_recipes_are_those_on_record():
    found = json.loads(RESULTS.read_text())
    for recipe, seeds in found.items():
        page = (RECIPES / recipe / "README.md").read_text()
        assert [row for row in rows_of(seeds) if row not in page] == []


def test_three_seeds_have_a_mean_with_its_interval():
    seeds = {str(seed): {"grpo": {"steps": 10, "rows": 80, "tokens": 900, "minutes": 2.0, "curve": [
        [0, 0.2, 0.1, 0.3], [10, after, after, after]]}} for seed, after in enumerate((0.6, 0.7, 0.8))}
    assert list(rows_of(seeds))[-1] == "| mean of 3 | GRPO | 10 | 0.200 | 0.700 ± 0.248 | 80 | 900 | 2.0 |"
    assert len(list(rows_of({seed: seeds[seed] for seed in "01"}))) == 2


def test_a_conversing_recipe_evaluates_sampled_and_likeliest_answers():
    study = Study("calculator", 3)
    assert {"evaluate-base", "greedy-base", "greedy-grpo"} < set(study.stages)
    assert "roles.actor.generation.temperature=0.0" in study.command("greedy-grpo")
    assert study.folder("greedy-base") == Study("calculator", 0).folder("greedy-base")


def test_a_curve_has_a_point_for_each_validation():
    curve = [[0, 0.1, 0.05, 0.2], [10, 0.4, 0.3, 0.5]]
    picture = ElementTree.fromstring(drawn("a task", {"0": {"sft": {"steps": 10, "curve": curve},
                                                            "grpo": {"steps": 10, "curve": curve}}}))
    assert len(picture.findall("{http://www.w3.org/2000/svg}circle")) == 4
