"""What the README and the pages in docs/ say is tried as it stands there."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from harness import ROOT, metrics_of, model_folder

import distflow
from distflow.cli import MODULES, main
from distflow.config.load import load
from distflow.contracts import decorators
from distflow.contracts.functions import built_in
from distflow.recovery import detectors, hooks
from planners import plan

PAGES = {str(path.relative_to(ROOT)): path.read_text()
         for path in (*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "AGENTS")),
                      *sorted((ROOT / "docs").glob("*.md")))}
TEXT = "\n".join(PAGES.values())
FOLDERS = ("benchmarks", "dags", "deploy", "distflow", "docs", "examples", "planners", "tests", "workers")


def block(language: str, containing: str) -> str:
    return next(body for body in re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL) if containing in body)


def test_the_custom_function_runs_and_is_short(launch, workspace):
    source = block("python", "def rloo_advantage")
    assert len(source.strip().splitlines()) < 15
    (workspace / "my_rloo.py").write_text(source)
    line = block("yaml", "my_rloo:rloo_advantage").rstrip("\n")
    dag = re.sub(r"  advantage: .*", line, (workspace / "grpo.yaml").read_text())
    assert line in dag
    (workspace / "mine.yaml").write_text(dag)
    launch(1, "--dag", "mine.yaml", "--run-file", "tiny.yaml", "--name", "mine", "--set", "steps=2")
    metrics = metrics_of(workspace / "runs/mine")
    assert metrics[1]["grad_norm"] > 0


@pytest.mark.parametrize(("name", "path", "ranks"), [
    ("my_run.yaml", "path/to/Qwen3-0.6B", 8), ("one_gpu.yaml", "path/to/Qwen3-0.6B", 1),
    ("eight_gpus.yaml", "path/to/Qwen3-8B", 8)])
def test_the_run_files_are_right_but_for_their_paths(workspace, name, path, ranks):
    model = model_folder(workspace / "model", {
        "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 300, "num_attention_heads": 2,
        "intermediate_size": 128})
    text = block("yaml", f"# {name}").replace(path, str(model)).replace("rollout: vllm", "rollout: hf")
    text = text.replace("layouts: {rollout: {tp: 2}}\n", "")  # of vLLM, which is installed in few places
    text = re.sub(r"path/to/\S+?\.jsonl", str(workspace / "train.jsonl"), text)
    (workspace / name).write_text(text)
    assert plan(load("grpo", str(workspace / name)), ranks).ranks == ranks


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_is_named_is_there(page):
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./]*)`", PAGES[page])
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    links = re.findall(r"\]\((?!http)([^)#]+)\)", PAGES[page])
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


COMMANDS = sorted({line.strip() for page in PAGES.values() for block in re.findall(r"```\w*\n(.*?)```", page, re.DOTALL)
                   for line in re.sub(r"\\\n *", "", block).splitlines() if line.startswith("distflow ")})


def test_pages_show_every_verb():
    assert [verb for verb in MODULES if f"distflow {verb}" not in TEXT] == []


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_is_one(line, monkeypatch):
    """Its words are parsed as the command line parses them; what it does has tests of its own."""
    parse = argparse.ArgumentParser.parse_known_args

    def parsed(parser, words=None, namespace=None):
        options, left = parse(parser, words, namespace)
        options.main = lambda _: 0
        return options, left

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parsed)
    assert main(shlex.split(line, comments=True)[1:]) == 0


@pytest.mark.parametrize("title", ["How a batch goes", "How a weight goes"])
def test_the_paths_of_the_design_are_walked(title):
    """Each file is imported by one above it, or is loaded by name."""
    section = re.split(r"^## ", PAGES["docs/design.md"].partition(f"## {title}")[2], flags=re.MULTILINE)[0]
    for walk in re.split(r"^1\. ", section, flags=re.MULTILINE)[1:]:
        steps = re.findall(r"^(?:\d+\. )?`([\w/]+)\.py`( \(by name\))?:", walk, re.MULTILINE)
        assert len(steps) >= 5
        for number, (file, by_name) in enumerate(steps[1:], 1):
            above = [(ROOT / f"{name}.py").read_text() for name, _ in steps[:number]]
            parent, _, name = file.replace("/", ".").rpartition(".")
            imported = rf"from {parent}\.{name} import|from {parent} import [\w, ]*\b{name}\b"
            assert by_name or any(re.search(imported, text) for text in above), file


def test_the_table_of_algorithms_counts_their_lines():
    rows = re.findall(r"^\| \[`(\w+)`\][^|]* \| (\d+) \|", TEXT, re.MULTILINE)
    counted = {dag: sum(bool(line.strip()) and not line.lstrip().startswith("#")
                        for line in (ROOT / f"dags/{dag}.yaml").read_text().splitlines()) for dag, _ in rows}
    assert {dag: int(lines) for dag, lines in rows} == counted
    assert len(rows) >= 15


@pytest.fixture
def run_block(monkeypatch):
    """Execute a Python block with the public names; what it registers goes afterwards. Returns its names."""
    monkeypatch.setattr(decorators, "REWARDS", {})  # another test may have loaded an example of the same name
    monkeypatch.setattr(detectors, "STEP_DETECTORS", dict(detectors.STEP_DETECTORS))
    monkeypatch.setattr(hooks, "HOOKS", {when: list(each) for when, each in hooks.HOOKS.items()})

    def run(containing: str) -> dict:
        names = {name: getattr(distflow, name) for name in distflow._HOMES} | {"re": re}
        exec(block("python", containing), names)
        return names

    return run


def test_the_loss_is_that_of_the_example_and_its_line_is_right(run_block, workspace, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples/soft_clip"))
    mine, example = run_block("def soft_clip")["soft_clip"], importlib.import_module("soft_clip").soft_clip
    given = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(mine(*given), example(*given))
    text = (ROOT / "examples/soft_clip/soft_clip.yaml").read_text().partition("  update:")[0]
    (workspace / "mine.yaml").write_text(text + block("yaml", "soft_clip:soft_clip"))
    made = plan(load(str(workspace / "mine.yaml"), str(workspace / "tiny.yaml")), 1)
    assert made.tasks[-1].settings["loss_settings"] == {"sharpness": 5.0}


def test_the_reward_pays_for_what_is_near(run_block):
    reward = run_block("def near_miss")["near_miss"]
    said = {"12": 1.0, "it is 10": 0.8, "#### 25": 0.0, "none": 0.0}
    assert {text: reward(text, "7 + 5 = 12 #### 12") for text in said} == said


def test_the_hook_is_called_and_the_detector_warns(run_block, capsys):
    names = run_block("def long_answers")
    failure = hooks.Failure(1, "lost its mind", "training", 3)
    hooks.call("on_failure", "trainer", hooks.HookContext("trainer", 1, 0, failure))
    assert capsys.readouterr().out == "rank 1 failed in step 3: lost its mind\n"
    steps = [detectors.StepReport(number, {"response/length": length}) for number, length in ((1, 900.0), (2, 1100.0))]
    assert detectors.STEP_DETECTORS["long_answers"] is names["long_answers"]
    assert names["long_answers"](steps[:1]) is None
    assert names["long_answers"](steps, restart=True).restart


def test_every_benchmark_that_is_named_has_recorded_results():
    named = set(re.findall(r"benchmarks/(\w+)\.py", TEXT))
    assert {"end_to_end_vs_trl", "modes"} <= named
    assert [name for name in sorted(named) if not (ROOT / f"benchmarks/results/{name}.txt").is_file()] == []


@pytest.mark.parametrize("page", ["README.md", "docs/failures.md", "docs/mixed_hardware.md", "docs/engines.md",
                                  "docs/limits.md"])
def test_what_is_said_of_gpus_says_what_was_tried(page):
    assert re.search(r"GPU", PAGES[page])
    assert re.search(r"run on (a GPU|GPUs)|On a GPU one kill|One H100|(have|has) not run", PAGES[page])


def test_the_readme_is_a_page_and_a_half():
    assert len(PAGES["README.md"].splitlines()) <= 130


def test_the_tutorials_reward_is_what_a_new_algorithm_begins_with(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "grpo", "my_algo"]) == 0
    capsys.readouterr()
    function = block("python", "def my_algo_reward").partition("@reward")[2]
    assert (tmp_path / "my_algo/my_algo.py").read_text().endswith(f"@reward{function}")


RUN_FILE = {"roles", "data", "validation", "checkpoint", "groups", "layouts"}
NODES = {"rollout": ("generate",), "reward": ("score",), "advantage": ("group_advantage", "gae"),
         "critic": ("value_update",), "update": ("policy_update", "preference_update", "reward_update")}


def keys_of(cell: str) -> list[str]:
    """Return the dotted keys of a cell, without values; `.NAME` has the beginning of the key before it."""
    keys: list[str] = []
    for word in re.findall(r"`(\.?[a-z_]+(?:\.[a-z_]+)*)(?::[^`]*)?`", cell):
        if word.startswith("."):
            keys.append(keys[-1].rpartition(".")[0] + word)
        elif "." in word:
            keys.append(word)
    return keys


def ours_in_the_tables() -> set[str]:
    cells = re.findall(r"^\| [^|]+ \| ([^|]+) \|", PAGES["docs/coming_from.md"], re.MULTILINE)
    return {key for cell in cells for key in keys_of(cell)} - {"distflow.source_weight"}


def test_the_keys_that_others_settings_become_are_ours():
    schemas = {kind: importlib.import_module("distflow.cli.json_schema").schema(kind) for kind in ("run", "dag")}
    keys = {key for key in ours_in_the_tables() if ".with." not in key}
    assert len(keys) > 15
    assert {key.partition(".")[0] for key in keys} <= RUN_FILE
    for key in keys:
        part = schema = schemas["dag" if re.match(r"roles\.\w+\.follow", key) else "run"]
        for word in re.sub(r"^(roles|layouts)\.[a-z]+", r"\1.NAME", key).split("."):
            while "properties" not in part and word != "NAME":
                part = part.get("anyOf", [part])[-1 if "$ref" not in part.get("anyOf", [{}])[0] else 0]
                part = schema["$defs"][part["$ref"].rsplit("/", 1)[1]] if "$ref" in part else part
            part = part["additionalProperties"] if word == "NAME" else part["properties"][word]
            part = schema["$defs"][part["$ref"].rsplit("/", 1)[1]] if "$ref" in part else part


def test_the_nodes_that_others_settings_become_are_ours():
    functions, page = built_in(), PAGES["docs/coming_from.md"].partition("## TRL")[2]
    given = [key.split(".with.") for key in ours_in_the_tables() if ".with." in key]
    assert len(given) > 15
    for node, setting in given:
        assert any(setting in functions[name].settings for name in NODES[node]), f"{node}.with.{setting}"
    pattern = r"nodes? `(\w+)`(?: \(role actor\))?(?:,? ?(?:then|and)? `(\w+)`)?(?: and `(\w+)`)?"
    named = {name for names in re.findall(pattern, page) for name in names if name}
    assert len(named) > 8
    assert named <= functions.keys()


def test_the_grpo_config_becomes_the_run_file_beside_it(workspace, monkeypatch, capsys):
    """Run the Python code of the page, with a GRPOConfig that has what is given alone."""
    monkeypatch.chdir(workspace)
    (workspace / "train.jsonl").write_text(200 * '{"prompt": "1 + 1?", "answer": "2"}\n')
    source = block("python", "GRPOConfig(")
    config = type("GRPOConfig", (dict,), {"to_dict": lambda self: dict(self)})
    exec(source, {"yaml": yaml, "Path": Path, "GRPOConfig": config})
    assert main(["convert", "theirs.yaml", "--out", "made"]) == 0
    assert "not_converted" not in capsys.readouterr().out
    shown, made = block("yaml", "# run.yaml of"), (workspace / "made/run.yaml").read_text()
    assert yaml.safe_load(shown.replace("1e-6", "1.0e-6")) == yaml.safe_load(made)
    command = re.findall(r"^distflow run grpo --run run\.yaml(?:.*\\\n)*.*", TEXT, re.MULTILINE)[0]
    command = shlex.split(command.replace("\\\n", ""))
    sets = dict(word.removeprefix("nodes.").split("=") for word in command if word.startswith("nodes."))
    with_kl = {"update.with.clip": "0.2", "rollout.with.group_size": "8", **sets}
    nodes = yaml.safe_load((workspace / "made/theirs.yaml").read_text())["nodes"]
    assert {f"{node}.with.{key}": value for node, content in nodes.items()
            for key, value in content.get("with", {}).items()} == {
                key: yaml.safe_load(value) for key, value in with_kl.items()}
    (workspace / "run.yaml").write_text(shown)
    model = ["--set", 'roles.actor.model={"architecture": "qwen3"}']
    assert main(["validate", "grpo", *command[3:], *model]) == 0
    assert main(["validate", "made/theirs.yaml", "--run", "made/run.yaml", *model]) == 0
