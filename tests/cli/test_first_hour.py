"""What a new user types in the first hour, and what is answered."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, model_folder

from distflow.cli import main, runs
from distflow.config.loggers import lack_of
from distflow.errors import InvalidInput

REWARD = "from distflow import reward\n\n@reward\ndef mine(completion: str) -> float:\n    return 1.0\n"
LOSS = "from distflow import loss\n\n@loss\ndef plain(logprobs, advantages):\n    return -logprobs * advantages\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_an_override_with_a_blank_after_its_sign_is_shown_whole(capsys):
    assert main(["validate", "grpo", "--set", "steps=", "3"]) == 2
    assert "Instead:  --set steps=3" in capsys.readouterr().err


def test_deep_and_long_overrides_are_a_sentence(capsys):
    for override in (f"{'.'.join(3000 * ['a'])}=1", f"roles.actor.model={3000 * '['}", f"steps={5000 * '9'}"):
        assert main(["validate", "grpo", "--set", override]) == 2
        assert len(capsys.readouterr().err) < 600


@pytest.mark.parametrize("ranks", ["65537", "1000000000000"])
def test_more_ranks_than_can_be_planned_are_refused(ranks, capsys):
    assert main(["plan", "grpo", "--ranks", ranks]) == 2
    assert "are more than a run may have" in capsys.readouterr().err


@pytest.mark.parametrize(("profile", "code"), [("10:12", 2), ("20:21", 2), ("3:5", 0)])
def test_a_profile_of_steps_that_are_not_run_is_refused(profile, code, capsys):
    assert main(["validate", "grpo", "--set", "steps=5", "--profile", profile]) == code
    assert ("and the run has 5" in capsys.readouterr().err) is bool(code)


def test_a_loss_of_an_imported_module_needs_no_module(folder, capsys):
    (folder / "mine_losses.py").write_text(LOSS)
    dag = ["validate", "grpo", "--set", "nodes.update.with={loss: plain}"]
    assert main([*dag, "--set", "imports=[mine_losses]"]) == 0
    assert main(dag) == 2
    assert "Instead:  loss: mine_losses:plain" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["nodes.reward.with.reward=statistics:mine"], ["nodes.reward.with.reward=mine"],
                                     ["nodes.reward.with.reward=mine", "imports=[statistics]"]])
def test_a_file_with_the_name_of_a_module_of_python_is_told(options, folder, capsys):
    (folder / "statistics.py").write_text(REWARD)
    assert main(["validate", "grpo", *(word for option in options for word in ("--set", option))]) == 2
    assert "statistics.py is never imported, since Python's own module `statistics` is found first" in \
        capsys.readouterr().err


@pytest.mark.parametrize(("path", "code"), [("", 0), (".", 2)])
def test_files_that_hide_modules_of_python_cost_nothing_unless_they_come_first(path, code, folder):
    (folder / "random.py").write_text("raise SystemExit('not the one of Python')\n")
    done = subprocess.run([sys.executable, "-m", "distflow", "nodes"], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, str(ROOT)]))})
    assert done.returncode == code, done.stderr
    assert ("random.py: Python or a package has a module of this name" in done.stderr) is bool(code)


@pytest.mark.parametrize(("target", "said"), [
    ("file", "file is not a folder"), ("file/below", "is not a folder"), ("run/model", "that the run itself writes"),
    ("run/best", "that the run itself writes"), ("full", "full/model exists, and would be written over"),
    ("roles", "roles/model-critic exists"), ("run", ""), ("run/final", ""), ("new/folder", ""), ("others", "")])
def test_a_folder_to_export_to_is_looked_at_before_the_start(target, said, folder):
    (folder / "file").touch()
    (folder / "full/model").mkdir(parents=True)
    for name in ("run/model", "roles/model-critic", "others/models/qwen",
                 "others/model-old", "others/model.partial"):
        (folder / name).mkdir(parents=True)
    names = ["model", "model-actor", "model-critic"]
    if said:
        with pytest.raises(InvalidInput, match=said):
            runs._check_export_folder(Path(target), Path("run"), names)
    else:
        runs._check_export_folder(Path(target), Path("run"), names)


def test_weights_and_biases_without_a_key_is_told_before_the_start(folder, monkeypatch, capsys):
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(folder / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(folder / "config"))
    assert main(["validate", "grpo", "--set", "log=[wandb]"]) == 2
    assert "`wandb` has no key to send with" in capsys.readouterr().err
    assert main(["validate", "grpo", "--set", "log=[{wandb: {mode: offline}}]"]) == 0
    assert main(["plan", "grpo", "--set", "log=[wandb]"]) == 0, "a plan may be for another machine"
    (folder / "netrc").write_text("machine api.wandb.ai login user password key\n")
    assert lack_of("wandb", {}) == ("", "")
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert lack_of("wandb", {})[0]


def test_weights_and_biases_is_set_up_by_its_own_files_too(folder, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(folder / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(folder / "config"))
    (folder / "netrc").write_text("machine wandb.example.org:8443 login user password key\n")
    assert lack_of("wandb", {})[0]
    (folder / "config").mkdir()
    (folder / "config/settings").write_text("[default]\nbase_url = https://wandb.example.org:8443\n")
    assert lack_of("wandb", {}) == ("", "")
    (folder / "netrc").unlink()
    assert lack_of("wandb", {})[0]
    (folder / "wandb").mkdir()
    (folder / "wandb/settings").write_text("[default]\nmode = offline\n")  # as `wandb offline` writes it
    assert lack_of("wandb", {}) == ("", "")
    assert lack_of("wandb", {"mode": "online"})[0]


@pytest.mark.skipif(not shutil.which("python3.10") or subprocess.run(["python3.10", "-V"], check=False).returncode != 0,
                    reason="there is no Python 3.10 here")
def test_an_old_python_is_refused_before_anything_is_downloaded(folder):
    done = subprocess.run(["make", "-C", str(ROOT), "-s", "install", "PYTHON=python3.10", f"VENV={folder / 'venv'}"],
                          capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "distflow needs Python 3.11 or newer, and python3.10 is 3.10" in done.stderr
    assert not (folder / "venv").exists()


@pytest.mark.parametrize(("visible", "counted", "other", "width"), [
    ("", "CPUs, where `dtype: auto` is float32. On GPUs it is ", "bfloat16", 4),
    ("0", "GPUs, where `dtype: auto` is bfloat16. On CPUs it is ", "float32", 2)])
def test_a_plan_says_for_what_device_it_counts(folder, capsys, monkeypatch, visible, counted, other, width):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    model_folder(folder / "model", {
        "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 300, "head_dim": 32,
        "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 128, "dtype": "bfloat16"})
    plan = ["plan", "grpo", "--set", "roles.actor.model=model"]
    assert main(plan) == 0
    out = capsys.readouterr().out
    assert f"actor: counted for {counted}{other}, counted by  --set roles.actor.dtype={other}" in out
    assert re.search(rf"actor: rollout weights .* × {width} B", out)
    assert main([*plan, "--set", "roles.actor.dtype=float32"]) == 0
    assert "counted for" not in capsys.readouterr().out
