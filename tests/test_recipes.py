"""The recipes: their run files plan, their data is the same for everybody, their figures are those on record."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from harness import ROOT, model_folder

from benchmarks.recipes import GRPO_SETTINGS, RESULTS, rows_of
from distflow.config.load import load
from planners import plan

RECIPES = ROOT / "examples/recipes"
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
         "vocab_size": 300, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128}
DAGS = {("calculator", "grpo_run"): "calculator/calculator.yaml", ("openenv", "grpo_run"): "openenv/openenv.yaml",
        ("calculator", "evaluate_run"): "calculator/evaluate_calculator.yaml",
        ("openenv", "evaluate_run"): "openenv/evaluate_openenv.yaml"}
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
        model_folder(folder / role["model"], LLAMA)
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
def tasks(tmp_path_factory):
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
    for recipe in ("chain_sum", "spell_backward", "reverse_words", "needle", "calculator", "openenv"):
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


def test_the_figures_of_the_recipes_are_those_on_record():
    found = json.loads(RESULTS.read_text())
    for recipe, seeds in found.items():
        page = (RECIPES / recipe / "README.md").read_text()
        assert [row for row in rows_of(seeds) if row not in page] == []
