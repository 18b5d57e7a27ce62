"""An algorithm of one's own from one command, and completion by a real shell."""

import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, environment

from distflow.cli import main
from distflow.config.load import load
from distflow.config.shipped import SHIPPED

ENVIRONMENT = {**environment(), "PYTHONPATH": str(ROOT)}


def test_a_new_algorithm_is_valid_and_its_test_passes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "setup.cfg").write_text("[tool:pytest]\naddopts = --import-mode=importlib\n")  # as in a clone
    assert main(["new", "grpo", "my_algo"]) == 0
    assert "pytest" in capsys.readouterr().out
    folder = tmp_path / "my_algo"
    assert {file.name for file in folder.iterdir()} == {"my_algo.yaml", "run.yaml", "my_algo.py", "test_my_algo.py",
                                                         "pytest.ini", "train.jsonl", "heldout.jsonl"}
    monkeypatch.chdir(folder)
    run = load("my_algo.yaml", "run.yaml", []).run
    assert (run.validation.reward, run.validation.every, run.checkpoint.every) == ("my_algo_reward", 10, 10)
    assert {*run.data.train, *run.validation.data.values()} == {"train.jsonl", "heldout.jsonl"}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=folder, env=ENVIRONMENT,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    schema, = (Path(line.partition("$schema=")[2]) for line in (folder / "run.yaml").read_text().splitlines()
               if "$schema=" in line)
    assert schema.is_file()


def test_a_new_environment_is_valid_and_its_test_passes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "grpo_tools", "turn"]) == 0  # whose class must not be `Turn`
    assert "validation: null\n# Validation asks for single answers, without the environment" in \
        Path("turn/run.yaml").read_text()
    assert "The environment, with its tool and what it pays, is in turn.py" in capsys.readouterr().out
    assert {file.name for file in Path("turn").iterdir()} == {"turn.yaml", "run.yaml", "turn.py", "test_turn.py",
                                                               "pytest.ini", "train.jsonl"}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=tmp_path / "turn",
                          env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_a_new_environment_trains(tmp_path, monkeypatch, ready):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "grpo_tools", "my_tools"]) == 0
    line = ("run", "my_tools.yaml", "--run", "run.yaml", "--set", "steps=2", "--set", "data.batch=4")
    done = ready.run(0, ("-m", "distflow", *line), tmp_path / "my_tools", ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"environment/reward"' in (tmp_path / "my_tools/runs/my_tools-1/metrics.jsonl").read_text()


def test_a_new_algorithm_trains_is_validated_and_can_be_resumed(tmp_path, monkeypatch, ready):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "grpo", "my_algo"]) == 0
    small = [part for text in ("steps=10", "data.batch=4") for part in ("--set", text)]
    for line in (("run", "my_algo.yaml", "--run", "run.yaml", *small),
                 ("resume", "runs/my_algo-1", "--set", "steps=11")):
        done = ready.run(0, ("-m", "distflow", *line), tmp_path / "my_algo", ENVIRONMENT)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "step 11/11" in done.stdout
    assert "step 10/11" not in done.stdout
    folder = tmp_path / "my_algo/runs/my_algo-1"
    text = (folder / "metrics.jsonl").read_text()
    assert '"my_algo/answered"' in text
    assert text.count('"validation/heldout"') == 3
    assert "The mean reward of held-out problems (heldout) went from" in (folder / "report.html").read_text()


@pytest.mark.parametrize(("arguments", "said"), [
    (("grpo", "My Algo"), "distflow new grpo my_algo"), (("grpo", "math"), "distflow new grpo my_math"),
    (("grpo", "json"), "another Python module `json`, which this algorithm's would hide. Use another name:  "
     "distflow new grpo my_json"), (("grpo", "code/numpy"), "distflow new grpo code/my_numpy"),
    (("grpo", "torch"), "my_torch"), (("grpo", "distflow"), "my_distflow"), (("grpo", "Json"), "my_json"),
    (("grpo", "class"), "my_class"), (("grpo", "."), "`.` cannot name an algorithm"),
    (("grpo", "."), "distflow new grpo my_algo"), (("grpo", ".."), "distflow new grpo my_algo"),
    (("grpo", "???"), "distflow new grpo my_algo"), (("grpo", "taken/???"), "distflow new grpo taken/my_algo"),
    (("grpo", "9 lives"), "distflow new grpo my_9_lives"), (("grpo", "größe"), "distflow new grpo gr_e"),
    (("grpo", "file/mine"), "file/mine cannot be made: Not a directory. Choose another folder, as this one:  distflow "
     "new grpo mine"), (("grpoo", "mine"), "grpo"), (("sft", "mine"), "has no place for a reward"),
    (("grpo", "taken"), "taken exists")])
def test_mistakes_are_told_and_nothing_is_made(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").write_text("")
    assert main(["new", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert {each.name for each in tmp_path.rglob("*")} == {"taken", "file"}


def test_a_new_algorithm_may_be_made_in_another_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "grpo", "code/mine"]) == 0
    said = capsys.readouterr().out
    assert "  cd code/mine\n" in said
    assert "imports: [mine]" in (tmp_path / "code/mine/mine.yaml").read_text()
    assert main(["new", "grpo", "code/My Algo"]) == 2
    assert "distflow new grpo code/my_algo" in capsys.readouterr().err


def test_every_algorithm_with_a_reward_can_be_a_beginning(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    begun = [file.stem for file in sorted(SHIPPED.glob("*.yaml")) if "function: score," in file.read_text()
             and file.stem != "evaluate" and main(["new", file.stem, f"my_{file.stem}"]) == 0]
    assert len(begun) > 8
    for name in begun:
        assert main(["validate", f"my_{name}/my_{name}.yaml", "--run", f"my_{name}/run.yaml"]) == 0, name
    capsys.readouterr()
