"""Every command of the pages, called in a folder that is not the repository's."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from harness import model_folder
from test_pages import COMMANDS, block

from distflow.cli import main, runs
from distflow.config.shipped import SHIPPED

ELSEWHERE = {
    "demo": "tests/test_demo.py", "probe": "tests/test_probe.py", "watch": "tests/telemetry",
    "why": "tests/telemetry", "report": "tests/telemetry",
    "faults": "tests/test_running_jobs.py", "inject": "tests/test_running_jobs.py", "scale": "tests/recovery",
    "set": "tests/test_set.py", "export": "tests/test_evaluate.py", "evaluate": "tests/test_evaluate.py",
    "resume": "tests/test_resume.py",
    "run sft --run examples/recipes": "tests/test_recipes.py",
    "run grpo --run examples/recipes": "tests/test_recipes.py",
    "run grpo.yaml --run placed.yaml": "tests/test_placed_runs.py",
    "plan grpo.yaml --cluster machines.yaml --place": "tests/test_placed_runs.py",
    "validate grpo --run my_run.yaml --prove": "tests/workers/preflight",
    "validate sft --run my_sft.yaml --prove": "tests/workers/preflight",
    "plan --from": "tests/test_calibration.py", "plan --fit --from": "tests/cli/test_fit.py"}
"""Commands that need a run, a server or minutes, and the tests that call them."""
MODEL = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 300,
         "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128}
VERL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=train.jsonl " \
       "data.train_batch_size=64 actor_rollout_ref.rollout.n=5 actor_rollout_ref.model.path=path/to/model\n"


def write_records(file: Path, **record: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps({name: f'{text} ({number})' for name, text in record.items()})}\n"
                            for number in range(600)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A new user's folder, with the files that the pages name."""
    place = tmp_path_factory.mktemp("user")
    for name in ("path/to/model", "path/to/Qwen3-0.6B", "path/to/Qwen3-8B", "runs/demo-sft-1/model", "runs/warm/model"):
        model_folder(place / name, MODEL)
    for name in ("my_run", "my_sft", "one_gpu", "eight_gpus"):
        text = block("yaml", f"# {name}.yaml").replace("rollout: vllm", "rollout: hf")  # vLLM is in few places
        (place / f"{name}.yaml").write_text(text.replace("layouts: {rollout: {tp: 2}}\n", ""))
    (place / "run.yaml").write_text(block("yaml", "# run.yaml of"))
    for name in ("train", "path/to/gsm8k", "path/to/math", "heldout"):
        write_records(place / f"{name}.jsonl", question="1 + 1?", prompt="1 + 1?", answer="2", example="2")
    said = [{"role": role, "content": text} for role, text in (("user", "1 + 1?"), ("assistant", "2"))]
    (place / "path/to/chats.jsonl").write_text(f"{json.dumps({'messages': said})}\n" * 600)
    for name in ("path/to/gsm8k_test", "path/to/math_test"):
        write_records(place / f"{name}.jsonl", question="2 + 1?", answer="3")
    shutil.copy(place / "my_run.yaml", place / "sft_run.yaml")
    for name in ("machines", "my_machine"):
        shutil.copy(SHIPPED / "clusters/h200.yaml", place / f"{name}.yaml")
    for name in ("my_dag", "my"):
        shutil.copy(SHIPPED / "grpo.yaml", place / f"{name}.yaml")
    (place / "my_reward.py").write_text(block("python", "def close_number"))
    (place / "run_qwen2.5_7b_grpo.sh").write_text(VERL)
    (place / "grpo_config.yaml").write_text("model_name_or_path: m\nnum_generations: 8\ndataset_name: train.jsonl\n")
    return place


def called_here(line: str) -> bool:
    return not any(line.startswith(f"distflow {each}") for each in ELSEWHERE)


@pytest.mark.parametrize("line", filter(called_here, COMMANDS))
def test_every_command_does_what_it_says(line, folder, tmp_path, monkeypatch, capsys):
    """`run` goes as far as the start of torchrun."""
    place = tmp_path / "user"
    shutil.copytree(folder, place)
    monkeypatch.chdir(place)
    monkeypatch.setattr(runs, "torchrun", lambda *_, **__: 0)
    line = line.replace(", tools: tools", "")  # as its comment says
    words = shlex.split(line.partition(" > ")[0], comments=True)[1:]
    if any(word.startswith(("my_algo.yaml", "talk.yaml")) for word in words):
        assert main(["new", "grpo", "my_algo"]) == 0
        monkeypatch.chdir(place / "my_algo")
        (place / "my_algo/oracle.py").write_text(block("python", "class Oracle"))
        (place / "my_algo/talk.yaml").write_text(
            (SHIPPED / "grpo_tools.yaml").read_text().replace("name: grpo_tools", "name: talk\nimports: [oracle]")
            .replace("Calculator", "Oracle"))
    if "run_qwen2_5_7b_grpo/run.yaml" in words:
        assert main(["convert", "run_qwen2.5_7b_grpo.sh"]) == 0
    if "--place" in words:
        words += ["--seconds", "0.1"]
    if "warm" in words:
        shutil.rmtree("runs/warm")  # which this command makes
    capsys.readouterr()
    code = main(words)
    assert code == 0, capsys.readouterr().err
